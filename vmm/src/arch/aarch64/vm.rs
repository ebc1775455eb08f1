// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VM creation: the width of intermediate physical addresses (IPA), and eager page splitting.
//!
//! With 4K pages, stage 2 has two levels up to 34 bits, three up to 43 and four above. Each level
//! adds a memory access to a walk. A VM therefore has the smallest width that covers its memory, at
//! least 32 bits (the minimum of `KVM_CREATE_VM`, `Documentation/virt/kvm/api.rst`). A guest on
//! huge pages has at least the levels that its block size needs: if the start level maps 2M blocks,
//! a 1G page takes 512 entries.
//!
//! With eager page splitting (`KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE`, since Linux 6.5), KVM splits
//! blocks into pages when dirty logging starts or part of the log is cleared, one chunk of tables
//! at a time, instead of at each write fault. The chunk size is a block size of stage 2. KVM
//! accepts it only before the VM has memslots.

use granule_types::units::{Bytes, GuestAddress};
use kvm_bindings::{KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE, KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES};
#[cfg(target_arch = "aarch64")]
use kvm_ioctls::Kvm;
use kvm_ioctls::VmFd;

#[cfg(target_arch = "aarch64")]
pub use super::vcpu::program_counter;
use crate::kvm::{KvmError, ioctls::enable_capability};
#[cfg(target_arch = "aarch64")]
use crate::{arch::HostLimits, arch::aarch64::gic::gic_version};

/// Minimum IPA width that KVM accepts.
const MIN_IPA_WIDTH: u8 = 32;
/// IPA width of kernels without `KVM_CAP_ARM_VM_IPA_SIZE` (before Linux 4.20).
const FIXED_IPA_WIDTH: u8 = 40;

/// Returns the maximum IPA width for a value of `KVM_CAP_ARM_VM_IPA_SIZE`; 0 means a fixed width.
pub fn max_ipa_width(capability: i32) -> u8 {
    match u8::try_from(capability) {
        Ok(bits) if bits >= MIN_IPA_WIDTH => bits,
        _ => FIXED_IPA_WIDTH,
    }
}

/// Returns the IPA width for memory that ends before `end`: the requested one, or the smallest that
/// fits.
pub fn memory_ipa_width(
    end: GuestAddress,
    requested: Option<u8>,
    limit: u8,
) -> Result<u8, KvmError> {
    let end = end.0;
    let needed = (MIN_IPA_WIDTH..64).find(|bits| end.saturating_sub(1) >> bits == 0).unwrap_or(64);
    let bits = requested.unwrap_or(needed);
    if bits < needed {
        return Err(KvmError::Unsupported(format!(
            "--ipa-bits {bits}: guest memory ends at {end:#x} and needs {needed}"
        )));
    }
    if bits > limit {
        return Err(KvmError::Unsupported(format!(
            "{bits} bits of guest-physical address are not available: this host's KVM supports \
             {MIN_IPA_WIDTH} to {limit} (KVM_CAP_ARM_VM_IPA_SIZE); use a smaller --ipa-bits or \
             less memory"
        )));
    }
    Ok(bits)
}

/// Returns the smallest IPA width whose stage-2 tables allow blocks of `page` bytes, with a
/// translation granule of `granule`.
///
/// The number of levels is (bits - 8) / (index bits), because KVM concatenates up to 16 tables at
/// the start level (`stage2_pgtable_levels` in the kernel's `asm/stage2_pgtable.h`).
pub fn min_ipa_width_for_block(page: Bytes, granule: Bytes) -> u8 {
    let offset = granule.0.trailing_zeros();
    let index = offset - 3;
    let levels = page.0.trailing_zeros().saturating_sub(offset) / index + 1;
    u8::try_from(levels * index + 8).map_or(MIN_IPA_WIDTH, |bits| bits.max(MIN_IPA_WIDTH))
}

/// Returns the [`memory_ipa_width`] with the limit of this host's KVM.
#[cfg(target_arch = "aarch64")]
pub fn choose_ipa_width(
    kvm: &Kvm,
    end: GuestAddress,
    requested: Option<u8>,
) -> Result<u8, KvmError> {
    memory_ipa_width(end, requested, max_ipa_width(kvm.get_host_ipa_limit()))
}

/// Creates a VM with an IPA width of `ipa_bits`.
#[cfg(target_arch = "aarch64")]
pub fn create_vm(kvm: &Kvm, ipa_bits: u8) -> Result<VmFd, KvmError> {
    // Without KVM_CAP_ARM_VM_IPA_SIZE every VM has 40 bits, and the type must be 0.
    let vm = if kvm.get_host_ipa_limit() > 0 {
        kvm.create_vm_with_ipa_size(ipa_bits.into())
    } else {
        kvm.create_vm_with_type(0)
    };
    vm.map_err(|error| KvmError::call("KVM_CREATE_VM", error))
}

/// Returns the limits of this host's KVM.
#[cfg(target_arch = "aarch64")]
pub fn host_limits(kvm: &Kvm) -> Result<HostLimits, KvmError> {
    let supported = kvm.check_extension_raw(KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES.into());
    let vm = create_vm(kvm, MIN_IPA_WIDTH)?;
    Ok(HostLimits {
        ipa_bits: max_ipa_width(kvm.get_host_ipa_limit()),
        block_sizes: block_sizes(u64::try_from(supported).unwrap_or(0)),
        gic_version: gic_version(&vm),
    })
}

/// Returns the block sizes in a bitmap of `KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES`.
fn block_sizes(supported: u64) -> Vec<Bytes> {
    let sizes = (0..u64::BITS).map(|bit| 1 << bit);
    sizes.filter(|size| supported & size != 0).map(Bytes).collect()
}

/// Enables eager page splitting in chunks of `chunk`. The VM must have no memslots.
pub fn enable_eager_split(vm: &VmFd, chunk: Bytes) -> Result<(), KvmError> {
    let supported = vm.check_extension_raw(KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES.into());
    check_chunk_size(chunk, u64::try_from(supported).unwrap_or(0))?;
    enable_capability(vm, KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE, chunk.0)
        .map_err(|error| KvmError::call("KVM_ENABLE_CAP (eager split)", error))
}

/// Checks a chunk size against the bitmap of supported block sizes.
fn check_chunk_size(requested: Bytes, supported: u64) -> Result<(), KvmError> {
    if supported == 0 {
        return Err(KvmError::Unsupported(
            "--eager-split: this host's KVM does not support it \
             (KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE needs Linux 6.5): remove the option"
                .to_owned(),
        ));
    }
    if requested.0.is_power_of_two() && supported & requested.0 != 0 {
        return Ok(());
    }
    let sizes: Vec<String> = block_sizes(supported).iter().map(Bytes::to_string).collect();
    Err(KvmError::Unsupported(format!(
        "--eager-split {requested}: not a block size of this host; expected one of {}",
        sizes.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_width_that_fits_is_chosen_unless_another_is_requested() {
        for (end, requested, bits) in [
            (0x10_0000, None, 32),
            (1 << 32, None, 32),
            ((1 << 32) + 1, None, 33),
            (1 << 40, None, 40),
            (0xffff_ffe0_0000, None, 48),
            (1 << 32, Some(44), 44),
        ] {
            let chosen = memory_ipa_width(GuestAddress(end), requested, 48).unwrap();
            assert_eq!(chosen, bits, "{end:#x}");
        }
    }

    #[test]
    fn a_1g_page_needs_a_third_level() {
        let small = Bytes::kib(4);

        assert_eq!(min_ipa_width_for_block(Bytes::gib(1), small), 35);
        assert_eq!(min_ipa_width_for_block(Bytes::mib(2), small), 32);
        assert_eq!(min_ipa_width_for_block(small, small), 32);
        assert_eq!(min_ipa_width_for_block(Bytes::mib(512), Bytes::kib(64)), 34);
    }

    #[test]
    fn widths_above_the_host_limit_or_below_the_memory_are_refused() {
        for (end, requested, limit, why) in [
            (1 << 32, Some(49), 48, "49 bits of guest-physical address are not available"),
            (1 << 41, None, 40, "41 bits of guest-physical address are not available"),
            (1 << 41, Some(40), 48, "ends at 0x20000000000 and needs 41"),
            (0, Some(31), 48, "needs 32"),
        ] {
            let error = memory_ipa_width(GuestAddress(end), requested, limit).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn the_ipa_width_is_40_bits_without_the_capability() {
        assert_eq!(max_ipa_width(0), 40);
        assert_eq!(max_ipa_width(-1), 40);
        assert_eq!(max_ipa_width(48), 48);
    }

    #[test]
    fn the_chunk_must_be_a_block_size_of_the_host() {
        let supported = Bytes::gib(1).0 | Bytes::mib(2).0 | Bytes::kib(4).0;

        let wrong = check_chunk_size(Bytes::mib(4), supported).unwrap_err();
        let none = check_chunk_size(Bytes::mib(3), supported);

        assert!(check_chunk_size(Bytes::mib(2), supported).is_ok());
        assert!(wrong.to_string().ends_with("one of 4K, 2M, 1G"), "{wrong}");
        assert!(none.is_err());
        let unsupported = check_chunk_size(Bytes::mib(2), 0).unwrap_err().to_string();
        assert!(unsupported.contains("needs Linux 6.5"));
    }
}
