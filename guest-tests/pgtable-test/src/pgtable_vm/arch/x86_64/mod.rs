// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An x86_64 machine on KVM: guest mode, vCPU registers, exits.

mod registers;

use std::collections::BTreeMap;

use granule_types::{guest_mode::GuestMode, units::GuestAddress};
use granule_vmm::{
    arch::x86_64::vm::{cpuid, end_of_memory, physical_width},
    kvm::KvmError,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use super::super::error::{Crash, doing};
pub use crate::guest::arch::x86_64::abi;
use crate::{
    guest::arch::x86_64::{
        DOORBELL,
        descriptors::{self, SEGMENTS},
        exception,
    },
    guest::{
        layout::Layout,
        mailbox::{Doorbell, Mailbox},
    },
    machine::MachineError,
};

/// Returns the only guest mode of this architecture, and the end of its physical addresses.
///
/// # Errors
/// Another mode is configured.
pub fn choose_mode(
    kvm: &Kvm,
    asked: Option<GuestMode>,
) -> Result<(GuestMode, GuestAddress), MachineError> {
    let choosing = "choosing the guest mode";
    let only = GuestMode::PXXV48_4K;
    if let Some(asked) = asked.filter(|asked| *asked != only) {
        let text = format!(
            "x86_64 does not support guest mode {}; omit -m, or use {} ({})",
            asked.name(),
            only.id(),
            only.name()
        );
        return Err(MachineError::new(choosing, text));
    }
    let cpuid = cpuid(kvm).map_err(doing(choosing))?;
    Ok((
        only.with_pa_bits(physical_width(&cpuid)),
        end_of_memory(&cpuid),
    ))
}

/// Returns the descriptor tables.
pub fn extra(layout: &Layout) -> Vec<u64> {
    let entries = layout.virtual_of(layout.program());
    let gates = descriptors::gates(entries);
    SEGMENTS.into_iter().chain(gates).collect()
}

/// Creates a vCPU that starts at the guest's program in long mode.
///
/// # Errors
/// KVM refuses.
pub fn make_vcpu(
    kvm: &Kvm,
    vm: &VmFd,
    index: usize,
    layout: &Layout,
) -> Result<VcpuFd, MachineError> {
    let fd = vm
        .create_vcpu(index as u64)
        .map_err(|error| KvmError::call("KVM_CREATE_VCPU", error))
        .map_err(doing("creating a vCPU"))?;
    set_up(kvm, &fd, index, layout).map_err(doing("setting a vCPU's registers"))?;
    Ok(fd)
}

fn set_up(kvm: &Kvm, fd: &VcpuFd, index: usize, layout: &Layout) -> Result<(), KvmError> {
    let call = |doing| move |error| KvmError::call(doing, error);
    let mailbox = layout.virtual_of(layout.mailbox(index));
    fd.set_cpuid2(&cpuid(kvm)?)
        .map_err(call("KVM_SET_CPUID2"))?;
    let reset = fd.get_sregs().map_err(call("KVM_GET_SREGS"))?;
    fd.set_sregs(&registers::system(reset, layout, mailbox))
        .map_err(call("KVM_SET_SREGS"))?;
    fd.set_regs(&registers::general(layout, mailbox))
        .map_err(call("KVM_SET_REGS"))
}

/// Returns no features: none of this architecture affects results.
///
/// # Errors
/// Never.
pub const fn features(_fd: &VcpuFd) -> Result<BTreeMap<String, u64>, KvmError> {
    Ok(BTreeMap::new())
}

/// The first doorbell port, in a mailbox.
pub const DOORBELL_IN_MAILBOX: u64 = DOORBELL as u64;

/// Returns the doorbell of an exit.
pub fn doorbell(exit: &VcpuExit<'_>) -> Option<Doorbell> {
    match exit {
        VcpuExit::IoOut(port, _) => Doorbell::at(DOORBELL.into(), (*port).into()),
        _ => None,
    }
}

/// Describes the exception in a mailbox.
pub fn explain(mailbox: &Mailbox) -> Crash {
    Crash {
        has_address: exception::has_address(mailbox.vector),
        detail: exception::describe(mailbox.vector, mailbox.syndrome),
    }
}
