// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An arm64 machine on KVM: guest mode, vCPU registers, exits.

use std::collections::BTreeMap;

use granule_types::{guest_mode::GuestMode, host::aarch64::stage2_features, units::GuestAddress};
use granule_vmm::{
    arch::aarch64::{
        vcpu::{self as registers, system_register},
        vm::bits_limit,
    },
    kvm::KvmError,
};
use kvm_bindings::kvm_vcpu_init;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use super::super::during;
pub use crate::guest::arch::aarch64::{abi, explain};
use crate::{
    guest::{
        arch::aarch64::{self, DOORBELL, MAIR, check_granule, sctlr, tcr},
        entry,
        layout::{LOW_MEMORY, Layout},
        mailbox::Doorbell,
    },
    machine::MachineError,
};

/// Features that affect the fault path. User space can read them from a vCPU only.
const ISAR0: u64 = system_register([3, 0, 0, 6, 0]);
const MMFR2: u64 = system_register([3, 0, 0, 7, 2]);
/// Granules and physical address width.
const MMFR0: u64 = system_register([3, 0, 0, 7, 0]);
const SCTLR: u64 = system_register([3, 0, 1, 0, 0]);
const CPACR: u64 = system_register([3, 0, 1, 0, 2]);
const TTBR0: u64 = system_register([3, 0, 2, 0, 0]);
const TCR: u64 = system_register([3, 0, 2, 0, 2]);
const MAIR_EL1: u64 = system_register([3, 0, 10, 2, 0]);
const VBAR: u64 = system_register([3, 0, 12, 0, 0]);
const TPIDR: u64 = system_register([3, 0, 13, 0, 4]);

/// Returns the configured guest mode or the host's default, and the end of its physical addresses.
pub fn choose_mode(
    kvm: &Kvm,
    requested: Option<GuestMode>,
) -> Result<(GuestMode, GuestAddress), MachineError> {
    let limit = bits_limit(kvm.get_host_ipa_limit());
    let mode = aarch64::choose_mode(requested, limit).map_err(during("choosing the guest mode"))?;
    Ok((mode, GuestAddress(1 << mode.pa_bits)))
}

/// Returns no tables: the exception vectors are part of the program.
pub const fn extra(_layout: &Layout) -> Vec<u64> {
    Vec::new()
}

/// Creates a vCPU that starts at the guest's program, with MMU and caches enabled.
pub fn make_vcpu(
    _kvm: &Kvm,
    vm: &VmFd,
    index: usize,
    layout: &Layout,
) -> Result<VcpuFd, MachineError> {
    let mode = layout.mode();
    let fd = create(vm, index).map_err(during("creating a vCPU"))?;
    let setting = "setting a vCPU's registers";
    let mmfr0 = registers::get(&fd, MMFR0).map_err(during(setting))?;
    check_granule(mode, mmfr0).map_err(during("choosing the guest mode"))?;
    let program = layout.virtual_of(LOW_MEMORY);
    // SCTLR_EL1 enables the MMU, so it is set last.
    let reset = registers::get(&fd, SCTLR).map_err(during(setting))?;
    for (register, value) in [
        (CPACR, 3 << 20), // floating point is not trapped
        (MAIR_EL1, MAIR),
        (TCR, tcr(mode)),
        (TTBR0, layout.tables().base().0),
        (VBAR, program.0),
        (TPIDR, layout.virtual_of(layout.mailbox(index)).0),
        (SCTLR, sctlr(reset)),
    ] {
        registers::set(&fd, register, value).map_err(during(setting))?;
    }
    registers::set_pc(&fd, program.0 + entry()).map_err(during(setting))?;
    Ok(fd)
}

fn create(vm: &VmFd, index: usize) -> Result<VcpuFd, KvmError> {
    let fd =
        vm.create_vcpu(index as u64).map_err(|error| KvmError::call("KVM_CREATE_VCPU", error))?;
    let mut target = kvm_vcpu_init::default();
    vm.get_preferred_target(&mut target)
        .map_err(|error| KvmError::call("KVM_ARM_PREFERRED_TARGET", error))?;
    fd.vcpu_init(&target).map_err(|error| KvmError::call("KVM_ARM_VCPU_INIT", error))?;
    Ok(fd)
}

/// Returns the CPU features that affect the fault path.
pub fn features(fd: &VcpuFd) -> Result<BTreeMap<String, u64>, KvmError> {
    Ok(stage2_features(registers::get(fd, ISAR0)?, registers::get(fd, MMFR2)?))
}

/// Address of the doorbells in a mailbox.
pub const DOORBELL_IN_MAILBOX: u64 = DOORBELL.0;

pub fn doorbell(exit: &VcpuExit<'_>) -> Option<Doorbell> {
    match exit {
        VcpuExit::MmioWrite(address, _) => Doorbell::at(DOORBELL.0, *address),
        _ => None,
    }
}
