// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest mode, vCPU registers and exits of an x86_64 machine on KVM. vCPUs start in long mode at
//! privilege level 0 (Intel SDM volume 3, 2.5 and 11.8.5).

use std::collections::BTreeMap;

use granule_types::{guest_mode::GuestMode, units::GuestAddress};
use granule_vmm::{
    arch::x86_64::vm::{address_width, cpuid, guest_memory_end},
    kvm::KvmError,
};
use kvm_bindings::{kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use super::super::context;
pub use crate::guest::arch::x86_64::{explain_exception, guest_arch};
use crate::{
    guest::arch::x86_64::{
        CODE_SELECTOR, DATA_SELECTOR, EXCEPTION_COUNT, FIRST_DOORBELL, GDT, interrupt_gates,
    },
    guest::{
        entry_offset,
        layout::{DESCRIPTOR_TABLES, LOW_MEMORY, Layout},
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
    let cpuid = cpuid(kvm).map_err(context(choosing))?;
    Ok((GuestMode { pa_bits: address_width(&cpuid), ..only }, guest_memory_end(&cpuid)))
}

pub fn descriptor_tables(layout: &Layout) -> Vec<u64> {
    let GuestVirtAddr(entries) = layout.virtual_address(LOW_MEMORY);
    let gates = interrupt_gates(entries);
    GDT.into_iter().chain(gates).collect()
}

/// Creates a vCPU that starts at the guest program's entry, in long mode.
pub fn create_vcpu(
    kvm: &Kvm,
    vm: &VmFd,
    index: usize,
    layout: &Layout,
) -> Result<VcpuFd, MachineError> {
    let fd = vm
        .create_vcpu(index as u64)
        .map_err(|error| KvmError::call("KVM_CREATE_VCPU", error))
        .map_err(context("creating a vCPU"))?;
    set_registers(kvm, &fd, index, layout).map_err(context("setting a vCPU's registers"))?;
    Ok(fd)
}

fn set_registers(kvm: &Kvm, fd: &VcpuFd, index: usize, layout: &Layout) -> Result<(), KvmError> {
    let call = |operation| move |error| KvmError::call(operation, error);
    let GuestVirtAddr(mailbox) = layout.virtual_address(layout.mailbox(index));
    fd.set_cpuid2(&cpuid(kvm)?).map_err(call("KVM_SET_CPUID2"))?;
    let reset = fd.get_sregs().map_err(call("KVM_GET_SREGS"))?;
    fd.set_sregs(&system_registers(reset, layout, mailbox)).map_err(call("KVM_SET_SREGS"))?;
    fd.set_regs(&general_registers(layout, mailbox)).map_err(call("KVM_SET_REGS"))
}

/// Returns no features, as no feature of this architecture affects results.
pub const fn cpu_features(_fd: &VcpuFd) -> Result<BTreeMap<String, u64>, KvmError> {
    Ok(BTreeMap::new())
}

/// First doorbell, as mailboxes hold it: a port.
pub const DOORBELL_IN_MAILBOX: u64 = FIRST_DOORBELL as u64;

pub fn doorbell(exit: &VcpuExit<'_>) -> Option<Doorbell> {
    match exit {
        VcpuExit::IoOut(port, _) => Doorbell::from_address(FIRST_DOORBELL.into(), (*port).into()),
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
/// Size of a vCPU's page, with the mailbox at its start and the stack at its end.
const MAILBOX_PAGE_SIZE: u64 = 0x1000;

fn code_segment() -> kvm_segment {
    kvm_segment {
        limit: u32::MAX,
        selector: CODE_SELECTOR,
        type_: 0b1011,
        present: 1,
        s: 1,
        l: 1,
        g: 1,
        ..kvm_segment::default()
    }
}

fn data_segment(base: u64) -> kvm_segment {
    kvm_segment { base, selector: DATA_SELECTOR, type_: 0b0011, db: 1, l: 0, ..code_segment() }
}

const fn descriptor_table(base: u64, bytes: u16) -> kvm_dtable {
    kvm_dtable { base, limit: bytes - 1, padding: [0; 3] }
}

/// Size of the GDT, which the IDT follows.
const GDT_SIZE: u16 = 3 * 8;
const _: () = assert!(size_of_val(&GDT) == GDT_SIZE as usize);
const IDT_SIZE: u16 = EXCEPTION_COUNT * 16;

/// Returns the system registers, derived from their values at reset.
fn system_registers(reset: kvm_sregs, layout: &Layout, mailbox: u64) -> kvm_sregs {
    let GuestVirtAddr(tables) = layout.virtual_address(DESCRIPTOR_TABLES);
    kvm_sregs {
        cs: code_segment(),
        ds: data_segment(0),
        es: data_segment(0),
        fs: data_segment(0),
        gs: data_segment(mailbox),
        ss: data_segment(0),
        gdt: descriptor_table(tables, GDT_SIZE),
        idt: descriptor_table(tables + u64::from(GDT_SIZE), IDT_SIZE),
        cr0: CR0,
        cr3: layout.tables().root().0,
        cr4: CR4,
        efer: EFER,
        ..reset
    }
}

fn general_registers(layout: &Layout, mailbox: u64) -> kvm_regs {
    kvm_regs {
        rip: layout.virtual_address(LOW_MEMORY).0 + entry_offset(),
        rsp: mailbox + MAILBOX_PAGE_SIZE,
        rflags: RFLAGS,
        ..kvm_regs::default()
    }
}
