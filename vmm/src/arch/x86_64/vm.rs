// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VM creation, and the range of guest-physical addresses.
//!
//! A VM has the CPU's address width (CPUID leaf `0x8000_0008`), unless KVM reports a smaller
//! guest-physical width. On AMD CPUs, the 12 GiB reserved for HyperTransport cannot hold memory.
//! Since family 17h they are at the end of the CPU's addresses, whose width memory encryption
//! reduces (leaf `0x8000_001f`). In earlier families they end at 1T and limit all memory. The
//! kernel's selftests use the same rule (`vm_compute_max_gfn()` in
//! `tools/testing/selftests/kvm/lib/x86_64/processor.c`).

use std::arch::x86_64::__cpuid;

use granule_types::units::GuestAddress;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use crate::kvm::KvmError;

/// Address of the task segment that Intel CPUs without unrestricted guests need
/// (`KVM_SET_TSS_ADDR`), in the firmware range as in other VMMs.
const TASK_SEGMENT: usize = 0xfffb_d000;

/// The CPUID leaf with the width of a physical address.
const ADDRESS_LEAF: u32 = 0x8000_0008;

/// The CPUID leaf with the number of address bits that memory encryption reserves.
const ENCRYPTION_LEAF: u32 = 0x8000_001f;

/// Size of the HyperTransport range.
const HYPERTRANSPORT_SIZE: u64 = 12 << 30;

/// Returns the VM's address width for memory that ends before `end`: `requested`, or the CPU's.
pub fn choose_ipa_bits(
    kvm: &Kvm,
    end: GuestAddress,
    requested: Option<u8>,
) -> Result<u8, KvmError> {
    choose(end, requested, physical_width(&cpuid(kvm)?))
}

fn choose(end: GuestAddress, requested: Option<u8>, limit: u8) -> Result<u8, KvmError> {
    let end = end.0;
    match requested {
        None => Ok(limit),
        Some(requested) if requested <= limit && end <= 1 << requested => Ok(requested),
        Some(requested) => Err(KvmError::Unsupported(format!(
            "{requested} bits of guest-physical address requested; guest memory ends at {end:#x}, \
             and this host's CPU has {limit} bits"
        ))),
    }
}

/// Creates a VM.
pub fn create_vm(kvm: &Kvm, _ipa_bits: u8) -> Result<VmFd, KvmError> {
    let vm = kvm.create_vm().map_err(|error| KvmError::call("KVM_CREATE_VM", error))?;
    vm.set_tss_address(TASK_SEGMENT).map_err(|error| KvmError::call("KVM_SET_TSS_ADDR", error))?;
    Ok(vm)
}

/// Returns the CPUID leaves that KVM supports.
pub fn cpuid(kvm: &Kvm) -> Result<CpuId, KvmError> {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(|error| KvmError::call("KVM_GET_SUPPORTED_CPUID", error))
}

/// Returns the width of a guest-physical address in bits.
pub fn physical_width(cpuid: &CpuId) -> u8 {
    let leaf = cpuid.as_slice().iter().find(|entry| entry.function == ADDRESS_LEAF);
    // Without the leaf a CPU has 36 bits (Intel SDM volume 3, 5.1.4).
    leaf.map_or(36, |entry| width(entry.eax))
}

/// Returns the exclusive end of guest memory in a VM with these CPUID leaves.
pub fn end_of_memory(cpuid: &CpuId) -> GuestAddress {
    end(physical_width(cpuid), amd())
}

/// Returns the CPUID data of an AMD or Hygon host CPU (vendor in leaf 0, `EBX`).
/// `KVM_GET_SUPPORTED_CPUID` omits the address bits that memory encryption reserves.
fn amd() -> Option<Amd> {
    let vendors = [*b"Auth", *b"Hygo"].map(u32::from_le_bytes);
    let last = __cpuid(0x8000_0000).eax;
    let leaf = |leaf| (leaf <= last).then(|| __cpuid(leaf));
    vendors.contains(&__cpuid(0).ebx).then(|| Amd {
        family: family(__cpuid(1).eax),
        width: leaf(ADDRESS_LEAF).map_or(36, |leaf| leaf.eax & 0xff),
        encryption: leaf(ENCRYPTION_LEAF).map_or(0, |leaf| leaf.ebx >> 6 & 0x3f),
    })
}

/// Returns the program counter of a vCPU, or `None` if it cannot be read.
pub fn program_counter(vcpu: &VcpuFd) -> Option<u64> {
    vcpu.get_regs().ok().map(|registers| registers.rip)
}

/// Returns the address width in `EAX` of leaf `0x8000_0008`: bits 23:16 (guest-physical), or if
/// they are 0, bits 7:0 (CPU).
const fn width(eax: u32) -> u8 {
    let [physical, _, guest, _] = eax.to_le_bytes();
    if guest == 0 { physical } else { guest }
}

/// Returns the CPU family in `EAX` of leaf 1: bits 11:8, plus bits 27:20 if bits 11:8 are all set.
const fn family(eax: u32) -> u32 {
    let base = eax >> 8 & 0xf;
    if base == 0xf { base + (eax >> 20 & 0xff) } else { base }
}

/// CPUID data of an AMD host CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Amd {
    family: u32,
    /// The CPU's address width.
    width: u32,
    /// Number of address bits that memory encryption reserves.
    encryption: u32,
}

/// Returns the exclusive end of guest memory in a VM with an address width of `width` bits.
fn end(width: u8, amd: Option<Amd>) -> GuestAddress {
    let end = 1u64 << width;
    GuestAddress(match amd {
        // A smaller width does not reach the HyperTransport range.
        Some(Amd { family, width: cpu, encryption }) if width >= 40 => {
            let bits = if family < 0x17 { 40 } else { cpu.saturating_sub(encryption) };
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
    fn the_second_stage_width_takes_precedence() {
        assert_eq!(width(0x0000_302e), 46);
        assert_eq!(width(0x0030_3034), 48);
    }

    #[test]
    fn hypertransport_limits_memory_by_family_and_width() {
        // Opteron 8347, Ryzen 1700, EPYC 7763.
        let families = [0x0010_0f23, 0x0080_0f11, 0x00a0_0f11].map(family);
        assert_eq!(families, [0x10, 0x17, 0x19]);
        let amd = |family, width, encryption| Some(Amd { family, width, encryption });
        for (width, cpu, expected) in [
            // Not an AMD CPU.
            (46, None, 1 << 46),
            // Before family 17h the range ends at 1T; a width below 40 bits does not reach it.
            (40, amd(0x10, 40, 0), 0xfd_0000_0000),
            (48, amd(0x10, 48, 0), 0xfd_0000_0000),
            (39, amd(0x10, 39, 0), 1 << 39),
            // Since family 17h the range ends at the CPU's width less the encryption bits.
            (48, amd(0x17, 48, 0), (1 << 48) - (12 << 30)),
            (48, amd(0x17, 48, 5), (1 << 43) - (12 << 30)),
            (48, amd(0x19, 52, 0), 1 << 48),
        ] {
            assert_eq!(end(width, cpu), GuestAddress(expected), "{width} {cpu:?}");
        }
    }

    #[test]
    fn a_supported_width_can_be_requested() {
        assert_eq!(choose(GuestAddress(1 << 46), None, 46).unwrap(), 46);
        assert_eq!(choose(GuestAddress(1 << 40), Some(40), 46).unwrap(), 40);
        assert!(choose(GuestAddress(1 << 40), Some(39), 46).is_err());
        assert!(choose(GuestAddress(1 << 40), Some(47), 46).is_err());
    }
}
