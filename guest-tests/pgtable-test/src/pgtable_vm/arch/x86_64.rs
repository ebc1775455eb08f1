// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An x86_64 machine on KVM: guest mode, exits, and the initial registers of a vCPU: long mode,
//! paging enabled, privilege level 0 (Intel SDM volume 3, 2.5 and 11.8.5).

use std::collections::BTreeMap;

use granule_types::{guest_mode::GuestMode, units::GuestAddress};
use granule_vmm::{
    arch::x86_64::vm::{cpuid, end_of_memory, physical_width},
    kvm::KvmError,
};
use kvm_bindings::{kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use super::super::during;
pub use crate::guest::arch::x86_64::{abi, explain};
use crate::{
    guest::arch::x86_64::{CODE, DATA, DOORBELL, EXCEPTIONS, SEGMENTS, gates},
    guest::{
        entry,
        layout::{ARCH_TABLES, LOW_MEMORY, Layout},
        mailbox::Doorbell,
        tables::GuestVirtAddr,
    },
    machine::MachineError,
};

/// Returns the only guest mode of this architecture, and the end of its physical addresses.
pub fn choose_mode(
    kvm: &Kvm,
    requested: Option<GuestMode>,
) -> Result<(GuestMode, GuestAddress), MachineError> {
    let choosing = "choosing the guest mode";
    let only = GuestMode::PXXV48_4K;
    if let Some(requested) = requested.filter(|requested| *requested != only) {
        let text = format!(
            "x86_64 does not support guest mode {}; omit -m, or use {} ({})",
            requested.name, only.id, only.name
        );
        return Err(MachineError::new(choosing, text));
    }
    let cpuid = cpuid(kvm).map_err(during(choosing))?;
    Ok((GuestMode { pa_bits: physical_width(&cpuid), ..only }, end_of_memory(&cpuid)))
}

pub fn extra(layout: &Layout) -> Vec<u64> {
    let GuestVirtAddr(entries) = layout.virtual_of(LOW_MEMORY);
    let gates = gates(entries);
    SEGMENTS.into_iter().chain(gates).collect()
}

/// Creates a vCPU that starts at the guest's program in long mode.
pub fn make_vcpu(
    kvm: &Kvm,
    vm: &VmFd,
    index: usize,
    layout: &Layout,
) -> Result<VcpuFd, MachineError> {
    let fd = vm
        .create_vcpu(index as u64)
        .map_err(|error| KvmError::call("KVM_CREATE_VCPU", error))
        .map_err(during("creating a vCPU"))?;
    set_up(kvm, &fd, index, layout).map_err(during("setting a vCPU's registers"))?;
    Ok(fd)
}

fn set_up(kvm: &Kvm, fd: &VcpuFd, index: usize, layout: &Layout) -> Result<(), KvmError> {
    let call = |operation| move |error| KvmError::call(operation, error);
    let GuestVirtAddr(mailbox) = layout.virtual_of(layout.mailbox(index));
    fd.set_cpuid2(&cpuid(kvm)?).map_err(call("KVM_SET_CPUID2"))?;
    let reset = fd.get_sregs().map_err(call("KVM_GET_SREGS"))?;
    fd.set_sregs(&system_registers(reset, layout, mailbox)).map_err(call("KVM_SET_SREGS"))?;
    fd.set_regs(&general_registers(layout, mailbox)).map_err(call("KVM_SET_REGS"))
}

/// Returns no features: none of this architecture affects results.
pub const fn features(_fd: &VcpuFd) -> Result<BTreeMap<String, u64>, KvmError> {
    Ok(BTreeMap::new())
}

/// The first doorbell port, in a mailbox.
pub const DOORBELL_IN_MAILBOX: u64 = DOORBELL as u64;

pub fn doorbell(exit: &VcpuExit<'_>) -> Option<Doorbell> {
    match exit {
        VcpuExit::IoOut(port, _) => Doorbell::at(DOORBELL.into(), (*port).into()),
        _ => None,
    }
}

/// CR0: PE, MP, ET, NE, WP, PG.
const CR0: u64 = 1 << 0 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 31;
/// CR4: PAE.
const CR4: u64 = 1 << 5;
/// EFER: LME, LMA, NXE.
const EFER: u64 = 1 << 8 | 1 << 10 | 1 << 11;
/// RFLAGS: bit 1, which is always set.
const RFLAGS: u64 = 1 << 1;
/// Size of a vCPU's page, which holds its mailbox at the start and its stack at the end.
const PAGE: u64 = 0x1000;

const fn code() -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector: CODE,
        type_: 0b1011,
        present: 1,
        dpl: 0,
        db: 0,
        s: 1,
        l: 1,
        g: 1,
        avl: 0,
        unusable: 0,
        padding: 0,
    }
}

const fn data(base: u64) -> kvm_segment {
    kvm_segment { base, selector: DATA, type_: 0b0011, db: 1, l: 0, ..code() }
}

const fn table(base: u64, bytes: u16) -> kvm_dtable {
    kvm_dtable { base, limit: bytes - 1, padding: [0; 3] }
}

/// Size of the segment table, which the gate table follows.
const SEGMENTS_SIZE: u16 = 3 * 8;
const _: () = assert!(size_of_val(&SEGMENTS) == SEGMENTS_SIZE as usize);
const GATES_SIZE: u16 = EXCEPTIONS * 16;

/// Returns the system registers, from their values at reset.
fn system_registers(reset: kvm_sregs, layout: &Layout, mailbox: u64) -> kvm_sregs {
    let GuestVirtAddr(extra) = layout.virtual_of(ARCH_TABLES);
    kvm_sregs {
        cs: code(),
        ds: data(0),
        es: data(0),
        fs: data(0),
        gs: data(mailbox),
        ss: data(0),
        gdt: table(extra, SEGMENTS_SIZE),
        idt: table(extra + u64::from(SEGMENTS_SIZE), GATES_SIZE),
        cr0: CR0,
        cr3: layout.tables().base().0,
        cr4: CR4,
        efer: EFER,
        ..reset
    }
}

/// Returns the general registers: the program's entry and the stack.
fn general_registers(layout: &Layout, mailbox: u64) -> kvm_regs {
    kvm_regs {
        rip: layout.virtual_of(LOW_MEMORY).0 + entry(),
        rsp: mailbox + PAGE,
        rflags: RFLAGS,
        ..kvm_regs::default()
    }
}
