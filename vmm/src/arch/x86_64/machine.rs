// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An x86_64 machine: its address width, its vCPUs, and what its exits mean.

use std::{arch::x86_64::__cpuid, collections::BTreeMap};

use granule_guest_tests::{
    arch::x86_64::{
        DOORBELL,
        descriptors::{self, SEGMENTS},
        exception,
    },
    guest::{
        layout::Layout,
        mailbox::{Bell, Mailbox},
    },
    guest_mode::GuestMode,
    machine::MachineError,
    units::GuestAddress,
};
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use super::{
    addresses::{self, Amd},
    registers,
};
use crate::{
    kvm::KvmError,
    machine::{Crash, doing},
};

pub use granule_guest_tests::arch::x86_64::abi;

/// Where CPUs that cannot run real mode as a guest keep a task segment for it: where firmware
/// would be, as everybody has it.
const TASK_SEGMENT: usize = 0xfffb_d000;

/// The leaf with the width of a physical address.
const ADDRESS_LEAF: u32 = 0x8000_0008;

/// The leaf with what memory encryption takes of it.
const ENCRYPTION_LEAF: u32 = 0x8000_001f;

/// The guest mode, the one there is, and the end of its physical addresses.
///
/// # Errors
/// Another mode was asked for.
pub fn choose_mode(
    kvm: &Kvm,
    asked: Option<GuestMode>,
) -> Result<(GuestMode, GuestAddress), MachineError> {
    let choosing = "choosing the guest mode";
    let only = GuestMode::PXXV48_4K;
    if let Some(asked) = asked.filter(|asked| *asked != only) {
        let text = format!(
            "guest mode {} is none of this architecture's: leave it out, or use {} ({})",
            asked.name(),
            only.id(),
            only.name()
        );
        return Err(MachineError::new(choosing, text));
    }
    let cpuid = cpuid(kvm).map_err(doing(choosing))?;
    let end = addresses::end(width(&cpuid), amd());
    Ok((only.with_pa_bits(width(&cpuid)), end))
}

/// The width of the VM's addresses for memory that ends before `end`.
///
/// # Errors
/// The memory does not fit what was asked for, or the CPU has fewer bits.
pub fn choose_ipa_bits(kvm: &Kvm, end: u64, asked: Option<u8>) -> Result<u8, MachineError> {
    let placing = "placing guest memory";
    let cpuid = cpuid(kvm).map_err(doing(placing))?;
    addresses::choose(end, asked, width(&cpuid)).map_err(doing(placing))
}

fn cpuid(kvm: &Kvm) -> Result<CpuId, KvmError> {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(|error| KvmError::call("KVM_GET_SUPPORTED_CPUID", error))
}

fn width(cpuid: &CpuId) -> u8 {
    let leaf = cpuid
        .as_slice()
        .iter()
        .find(|entry| entry.function == ADDRESS_LEAF);
    // Without the leaf a CPU has 36 bits (Intel SDM volume 3, 5.1.4).
    leaf.map_or(36, |entry| addresses::width(entry.eax))
}

/// What the CPU says of itself, if it is AMD's, or Hygon's by its licence (leaf 0, `EBX`).
///
/// KVM's own list of leaves leaves out what encryption takes.
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

/// A VM.
///
/// # Errors
/// The kernel refuses.
pub fn make_vm(kvm: &Kvm, _ipa_bits: u8) -> Result<VmFd, KvmError> {
    let vm = kvm
        .create_vm()
        .map_err(|error| KvmError::call("KVM_CREATE_VM", error))?;
    vm.set_tss_address(TASK_SEGMENT)
        .map_err(|error| KvmError::call("KVM_SET_TSS_ADDR", error))?;
    Ok(vm)
}

/// The descriptor tables.
pub fn extra(layout: &Layout) -> Vec<u64> {
    let entries = layout.virtual_of(layout.program());
    let gates = descriptors::gates(entries);
    SEGMENTS.into_iter().chain(gates).collect()
}

/// A vCPU that will begin with the guest's program in long mode.
///
/// # Errors
/// The kernel refuses.
pub fn make_vcpu(
    kvm: &Kvm,
    vm: &VmFd,
    index: usize,
    layout: &Layout,
) -> Result<VcpuFd, MachineError> {
    let fd = vm
        .create_vcpu(index as u64)
        .map_err(|error| KvmError::call("KVM_CREATE_VCPU", error))
        .map_err(doing("making a vCPU"))?;
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

/// No feature of these CPUs decides what the fault path costs.
///
/// # Errors
/// Never.
pub const fn features(_fd: &VcpuFd) -> Result<BTreeMap<String, u64>, KvmError> {
    Ok(BTreeMap::new())
}

/// The program counter.
pub fn pc(fd: &VcpuFd) -> Option<u64> {
    fd.get_regs().ok().map(|registers| registers.rip)
}

/// What a mailbox says for its bells.
pub const DOORBELL_IN_MAILBOX: u64 = DOORBELL as u64;

/// The bell that an exit stands for.
pub fn bell(exit: &VcpuExit<'_>) -> Option<Bell> {
    match exit {
        VcpuExit::IoOut(port, _) => Bell::at(DOORBELL.into(), (*port).into()),
        _ => None,
    }
}

/// What the exception in a mailbox means.
pub fn explain(mailbox: &Mailbox) -> Crash {
    Crash {
        has_address: exception::has_address(mailbox.vector),
        detail: exception::describe(mailbox.vector, mailbox.syndrome),
    }
}
