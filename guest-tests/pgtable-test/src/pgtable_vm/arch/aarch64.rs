// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest mode, vCPU registers and exits of an arm64 machine on KVM.

use std::collections::BTreeMap;

use granule_types::{guest_mode::GuestMode, host::aarch64::stage2_features, units::GuestAddress};
use granule_vmm::{
    arch::aarch64::{
        vcpu::{self as registers, system_register_id},
        vm::max_ipa_width,
    },
    kvm::KvmError,
};
use kvm_bindings::kvm_vcpu_init;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use super::super::context;
pub use crate::guest::arch::aarch64::{explain_exception, guest_arch};
use crate::{
    guest::{
        arch::aarch64::{self, FIRST_DOORBELL, MAIR, check_granule, sctlr, tcr},
        entry_offset,
        layout::{LOW_MEMORY, Layout},
        mailbox::Doorbell,
    },
    machine::MachineError,
};

/// Features that affect the fault path; user space can read them only from a vCPU.
const ID_AA64ISAR0: u64 = system_register_id([3, 0, 0, 6, 0]);
const ID_AA64MMFR2: u64 = system_register_id([3, 0, 0, 7, 2]);
/// Granules and physical address width.
const ID_AA64MMFR0: u64 = system_register_id([3, 0, 0, 7, 0]);
const SCTLR: u64 = system_register_id([3, 0, 1, 0, 0]);
const CPACR: u64 = system_register_id([3, 0, 1, 0, 2]);
const TTBR0: u64 = system_register_id([3, 0, 2, 0, 0]);
const TCR: u64 = system_register_id([3, 0, 2, 0, 2]);
const MAIR_EL1: u64 = system_register_id([3, 0, 10, 2, 0]);
const VBAR: u64 = system_register_id([3, 0, 12, 0, 0]);
const TPIDR: u64 = system_register_id([3, 0, 13, 0, 4]);

/// Returns the requested guest mode, or the host's default, and the end of its physical addresses.
pub fn choose_mode(
    kvm: &Kvm,
    requested: Option<GuestMode>,
) -> Result<(GuestMode, GuestAddress), MachineError> {
    let limit = max_ipa_width(kvm.get_host_ipa_limit());
    let mode =
        aarch64::choose_mode(requested, limit).map_err(context("choosing the guest mode"))?;
    Ok((mode, GuestAddress(1 << mode.pa_bits)))
}

/// Returns no tables, as this architecture has none.
pub const fn descriptor_tables(_layout: &Layout) -> Vec<u64> {
    Vec::new()
}

/// Creates a vCPU that starts at the guest program's entry, with MMU and caches enabled.
pub fn create_vcpu(
    _kvm: &Kvm,
    vm: &VmFd,
    index: usize,
    layout: &Layout,
) -> Result<VcpuFd, MachineError> {
    let mode = layout.mode();
    let fd = create_fd(vm, index).map_err(context("creating a vCPU"))?;
    let setting = "setting a vCPU's registers";
    let mmfr0 = registers::get_register(&fd, ID_AA64MMFR0).map_err(context(setting))?;
    check_granule(mode, mmfr0).map_err(context("choosing the guest mode"))?;
    let program = layout.virtual_address(LOW_MEMORY);
    // SCTLR_EL1 enables the MMU, so it is set last.
    let reset = registers::get_register(&fd, SCTLR).map_err(context(setting))?;
    for (register, value) in [
        (CPACR, 3 << 20), // floating point is not trapped
        (MAIR_EL1, MAIR),
        (TCR, tcr(mode)),
        (TTBR0, layout.tables().root().0),
        (VBAR, program.0),
        (TPIDR, layout.virtual_address(layout.mailbox(index)).0),
        (SCTLR, sctlr(reset)),
    ] {
        registers::set_register(&fd, register, value).map_err(context(setting))?;
    }
    registers::set_pc(&fd, program.0 + entry_offset()).map_err(context(setting))?;
    Ok(fd)
}

fn create_fd(vm: &VmFd, index: usize) -> Result<VcpuFd, KvmError> {
    let fd =
        vm.create_vcpu(index as u64).map_err(|error| KvmError::call("KVM_CREATE_VCPU", error))?;
    let mut target = kvm_vcpu_init::default();
    vm.get_preferred_target(&mut target)
        .map_err(|error| KvmError::call("KVM_ARM_PREFERRED_TARGET", error))?;
    fd.vcpu_init(&target).map_err(|error| KvmError::call("KVM_ARM_VCPU_INIT", error))?;
    Ok(fd)
}

/// Returns the CPU features that affect the fault path.
pub fn cpu_features(fd: &VcpuFd) -> Result<BTreeMap<String, u64>, KvmError> {
    Ok(stage2_features(
        registers::get_register(fd, ID_AA64ISAR0)?,
        registers::get_register(fd, ID_AA64MMFR2)?,
    ))
}

/// First doorbell, as mailboxes hold it: an address.
pub const DOORBELL_IN_MAILBOX: u64 = FIRST_DOORBELL.0;

pub fn doorbell(exit: &VcpuExit<'_>) -> Option<Doorbell> {
    match exit {
        VcpuExit::MmioWrite(address, _) => Doorbell::from_address(FIRST_DOORBELL.0, *address),
        _ => None,
    }
}
