// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VM creation, and the range of guest-physical addresses.
//!
//! A VM has the CPU's address width (CPUID leaf `0x8000_0008`), unless KVM reports a smaller
//! guest-physical width. On AMD CPUs, the 12 GiB reserved for HyperTransport cannot hold memory. In
//! family 17h and later, they end at the CPU's highest address; memory encryption reduces the
//! address width (leaf `0x8000_001f`). In earlier families they end at 1T and limit all memory. The
//! kernel's selftests use the same rule (`vm_compute_max_gfn()` in
//! `tools/testing/selftests/kvm/lib/x86_64/processor.c`).

use std::arch::x86_64::__cpuid;

use granule_types::units::GuestAddress;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use crate::{arch::HostLimits, kvm::KvmError};

/// Address of the task segment that Intel CPUs without unrestricted guests need
/// (`KVM_SET_TSS_ADDR`), in the firmware range as in other VMMs.
const TSS_ADDRESS: usize = 0xfffb_d000;
/// CPUID leaf with the width of a physical address.
const ADDRESS_WIDTH_LEAF: u32 = 0x8000_0008;
/// CPUID leaf with the number of address bits that memory encryption reserves.
const MEMORY_ENCRYPTION_LEAF: u32 = 0x8000_001f;
const HYPERTRANSPORT_SIZE: u64 = 12 << 30;

/// Returns the VM's address width for memory that ends before `end`: `requested`, or the CPU's.
pub fn choose_ipa_width(
    kvm: &Kvm,
    end: GuestAddress,
    requested: Option<u8>,
) -> Result<u8, KvmError> {
    memory_ipa_width(end, requested, address_width(&cpuid(kvm)?))
}

fn memory_ipa_width(end: GuestAddress, requested: Option<u8>, limit: u8) -> Result<u8, KvmError> {
    let end = end.0;
    match requested {
        None => Ok(limit),
        Some(requested) if requested <= limit && end <= 1 << requested => Ok(requested),
        Some(requested) => Err(KvmError::Unsupported(format!(
            "--ipa-bits {requested}: memory ends at {end:#x}; this host's CPU has {limit} bits"
        ))),
    }
}

/// Returns the limits of this host's KVM.
pub fn host_limits(kvm: &Kvm) -> Result<HostLimits, KvmError> {
    let ipa_bits = address_width(&cpuid(kvm)?);
    Ok(HostLimits { ipa_bits, block_sizes: Vec::new(), gic_version: None })
}

/// Creates a VM.
pub fn create_vm(kvm: &Kvm, _ipa_bits: u8) -> Result<VmFd, KvmError> {
    let vm = kvm.create_vm().map_err(|error| KvmError::call("KVM_CREATE_VM", error))?;
    vm.set_tss_address(TSS_ADDRESS).map_err(|error| KvmError::call("KVM_SET_TSS_ADDR", error))?;
    Ok(vm)
}

/// Returns the CPUID leaves that KVM supports.
pub fn cpuid(kvm: &Kvm) -> Result<CpuId, KvmError> {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(|error| KvmError::call("KVM_GET_SUPPORTED_CPUID", error))
}

/// Returns the width of a guest-physical address in bits.
pub fn address_width(cpuid: &CpuId) -> u8 {
    let leaf = cpuid.as_slice().iter().find(|entry| entry.function == ADDRESS_WIDTH_LEAF);
    // Without the leaf a CPU has 36 bits (Intel SDM volume 3, 5.1.4).
    leaf.map_or(36, |entry| decode_address_width(entry.eax))
}

/// Returns the exclusive end of guest memory in a VM with these CPUID leaves.
pub fn guest_memory_end(cpuid: &CpuId) -> GuestAddress {
    memory_end(address_width(cpuid), amd_cpuid())
}

/// Returns the CPUID data of an AMD or Hygon host CPU (vendor in leaf 0, `EBX`).
/// `KVM_GET_SUPPORTED_CPUID` omits the address bits that memory encryption reserves.
fn amd_cpuid() -> Option<AmdCpuid> {
    let vendors = [*b"Auth", *b"Hygo"].map(u32::from_le_bytes);
    let last = __cpuid(0x8000_0000).eax;
    let leaf = |leaf| (leaf <= last).then(|| __cpuid(leaf));
    vendors.contains(&__cpuid(0).ebx).then(|| AmdCpuid {
        family: decode_family(__cpuid(1).eax),
        width: leaf(ADDRESS_WIDTH_LEAF).map_or(36, |leaf| leaf.eax & 0xff),
        encryption_bits: leaf(MEMORY_ENCRYPTION_LEAF).map_or(0, |leaf| leaf.ebx >> 6 & 0x3f),
    })
}

/// Returns the program counter of a vCPU, or `None` if it cannot be read.
pub fn program_counter(vcpu: &VcpuFd) -> Option<u64> {
    vcpu.get_regs().ok().map(|registers| registers.rip)
}

/// Returns the address width in `EAX` of leaf `0x8000_0008`: bits 23:16 (guest-physical), or if
/// they are 0, bits 7:0 (CPU).
const fn decode_address_width(eax: u32) -> u8 {
    let [physical, _, guest, _] = eax.to_le_bytes();
    if guest == 0 { physical } else { guest }
}

/// Returns the CPU family in `EAX` of leaf 1: bits 11:8, plus bits 27:20 if bits 11:8 are all set.
const fn decode_family(eax: u32) -> u32 {
    let base = eax >> 8 & 0xf;
    if base == 0xf { base + (eax >> 20 & 0xff) } else { base }
}

/// CPUID data of an AMD host CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct AmdCpuid {
    family: u32,
    /// The CPU's address width.
    width: u32,
    /// Number of address bits that memory encryption reserves.
    encryption_bits: u32,
}

/// Returns the exclusive end of guest memory in a VM with an address width of `width` bits.
fn memory_end(width: u8, amd: Option<AmdCpuid>) -> GuestAddress {
    let end = 1u64 << width;
    GuestAddress(match amd {
        // A smaller width does not reach the HyperTransport range.
        Some(AmdCpuid { family, width: cpu, encryption_bits }) if width >= 40 => {
            let bits = if family < 0x17 { 40 } else { cpu.saturating_sub(encryption_bits) };
            let range_end = 1u64.checked_shl(bits).unwrap_or(u64::MAX);
            end.min(range_end.saturating_sub(HYPERTRANSPORT_SIZE))
        }
        _ => end,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_physical_width_takes_precedence() {
        assert_eq!(decode_address_width(0x0000_302e), 46);
        assert_eq!(decode_address_width(0x0030_3034), 48);
    }

    #[test]
    fn hypertransport_limits_memory_by_family_and_width() {
        // Opteron 8347, Ryzen 1700, EPYC 7763.
        let families = [0x0010_0f23, 0x0080_0f11, 0x00a0_0f11].map(decode_family);
        assert_eq!(families, [0x10, 0x17, 0x19]);
        let amd =
            |family, width, encryption_bits| Some(AmdCpuid { family, width, encryption_bits });
        for (width, cpu, expected) in [
            // Not an AMD CPU.
            (46, None, 1 << 46),
            // Before family 17h the range ends at 1T; a width below 40 bits does not reach it.
            (40, amd(0x10, 40, 0), 0xfd_0000_0000),
            (48, amd(0x10, 48, 0), 0xfd_0000_0000),
            (39, amd(0x10, 39, 0), 1 << 39),
            // Since family 17h, the encryption bits lower the end of the range.
            (48, amd(0x17, 48, 0), (1 << 48) - (12 << 30)),
            (48, amd(0x17, 48, 5), (1 << 43) - (12 << 30)),
            (48, amd(0x19, 52, 0), 1 << 48),
        ] {
            assert_eq!(memory_end(width, cpu), GuestAddress(expected), "{width} {cpu:?}");
        }
    }

    #[test]
    fn a_supported_width_can_be_requested() {
        assert_eq!(memory_ipa_width(GuestAddress(1 << 46), None, 46).unwrap(), 46);
        assert_eq!(memory_ipa_width(GuestAddress(1 << 40), Some(40), 46).unwrap(), 40);
        assert!(memory_ipa_width(GuestAddress(1 << 40), Some(39), 46).is_err());
        assert!(memory_ipa_width(GuestAddress(1 << 40), Some(47), 46).is_err());
    }
}
