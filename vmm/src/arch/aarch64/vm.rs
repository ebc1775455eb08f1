// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Creates a VM with the smallest IPA width that holds its memory.

use granule_types::units::GuestAddress;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

pub use super::ipa::IpaError as AddressWidthError;
use super::{ipa, registers};
use crate::kvm::KvmError;

/// Returns the VM's IPA width for memory that ends before `end`: `requested`, or the smallest that fits.
///
/// # Errors
/// The memory does not fit `requested`, or the host's KVM has fewer bits.
pub fn choose_ipa_bits(
    kvm: &Kvm,
    end: GuestAddress,
    requested: Option<u8>,
) -> Result<u8, AddressWidthError> {
    ipa::choose(end, requested, ipa::limit(kvm.get_host_ipa_limit()))
}

/// Creates a VM with `ipa_bits` of guest-physical address.
///
/// # Errors
/// The kernel's error.
pub fn create_vm(kvm: &Kvm, ipa_bits: u8) -> Result<VmFd, KvmError> {
    // Without KVM_CAP_ARM_VM_IPA_SIZE every VM has 40 bits, and the type must be 0.
    let vm = if kvm.get_host_ipa_limit() > 0 {
        kvm.create_vm_with_ipa_size(ipa_bits.into())
    } else {
        kvm.create_vm_with_type(0)
    };
    vm.map_err(|error| KvmError::call("KVM_CREATE_VM", error))
}

/// Returns a vCPU's program counter, if KVM returns it.
pub fn program_counter(vcpu: &VcpuFd) -> Option<u64> {
    registers::get_pc(vcpu).ok()
}
