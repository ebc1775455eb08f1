// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Creates a VM. Its guest-physical addresses are as wide as the CPU's, unless KVM reports a smaller
//! width for the second stage.

use std::arch::x86_64::__cpuid;

use granule_types::units::GuestAddress;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use thiserror::Error;

use super::address_width::{self, Amd, WidthError};
use crate::kvm::KvmError;

/// Address of the task segment that Intel CPUs without unrestricted guests need
/// (`KVM_SET_TSS_ADDR`), in the firmware range as in other VMMs.
const TASK_SEGMENT: usize = 0xfffb_d000;

/// The CPUID leaf with the width of a physical address.
const ADDRESS_LEAF: u32 = 0x8000_0008;

/// The CPUID leaf with the number of address bits that memory encryption takes.
const ENCRYPTION_LEAF: u32 = 0x8000_001f;

/// Error returned when a VM cannot have the address width requested.
#[derive(Debug, Error)]
pub enum AddressWidthError {
    /// KVM does not report its CPUID leaves.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The memory does not fit, or the CPU has fewer bits.
    #[error(transparent)]
    Width(#[from] WidthError),
}

/// Returns the VM's address width for memory that ends before `end`: `requested`, or the CPU's.
///
/// # Errors
/// The memory does not fit `requested`, or the CPU has fewer bits.
pub fn choose_ipa_bits(
    kvm: &Kvm,
    end: GuestAddress,
    requested: Option<u8>,
) -> Result<u8, AddressWidthError> {
    Ok(address_width::choose(end, requested, physical_width(&cpuid(kvm)?))?)
}

/// Creates a VM.
///
/// # Errors
/// The kernel's error.
pub fn create_vm(kvm: &Kvm, _ipa_bits: u8) -> Result<VmFd, KvmError> {
    let vm = kvm.create_vm().map_err(|error| KvmError::call("KVM_CREATE_VM", error))?;
    vm.set_tss_address(TASK_SEGMENT).map_err(|error| KvmError::call("KVM_SET_TSS_ADDR", error))?;
    Ok(vm)
}

/// Returns the CPUID leaves that KVM supports.
///
/// # Errors
/// The kernel's error.
pub fn cpuid(kvm: &Kvm) -> Result<CpuId, KvmError> {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(|error| KvmError::call("KVM_GET_SUPPORTED_CPUID", error))
}

/// Returns the width of a guest-physical address in bits.
pub fn physical_width(cpuid: &CpuId) -> u8 {
    let leaf = cpuid.as_slice().iter().find(|entry| entry.function == ADDRESS_LEAF);
    // Without the leaf a CPU has 36 bits (Intel SDM volume 3, 5.1.4).
    leaf.map_or(36, |entry| address_width::width(entry.eax))
}

/// Returns the end of the addresses that memory can have in a VM with these CPUID leaves.
pub fn end_of_memory(cpuid: &CpuId) -> GuestAddress {
    address_width::end(physical_width(cpuid), amd())
}

/// Returns the host's own CPUID data if its CPU is AMD's, or Hygon's by its licence (leaf 0, `EBX`).
///
/// KVM's list of leaves lacks the bits that encryption takes.
fn amd() -> Option<Amd> {
    let makers = [*b"Auth", *b"Hygo"].map(u32::from_le_bytes);
    let last = __cpuid(0x8000_0000).eax;
    let leaf = |leaf| (leaf <= last).then(|| __cpuid(leaf));
    makers.contains(&__cpuid(0).ebx).then(|| Amd {
        signature: __cpuid(1).eax,
        width: leaf(ADDRESS_LEAF).map_or(36, |leaf| leaf.eax.to_le_bytes()[0]),
        encryption: leaf(ENCRYPTION_LEAF).map_or(0, |leaf| leaf.ebx),
    })
}

/// Returns a vCPU's program counter, if KVM returns it.
pub fn program_counter(vcpu: &VcpuFd) -> Option<u64> {
    vcpu.get_regs().ok().map(|registers| registers.rip)
}
