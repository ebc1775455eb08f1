// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Initial registers of a vCPU: long mode, paging enabled, privilege level 0 (Intel SDM volume 3, 2.5
//! and 11.8.5).

use crate::{
    guest::arch::x86_64::descriptors::{CODE, DATA, EXCEPTIONS, SEGMENTS},
    guest::{layout::Layout, program::entry},
};
use kvm_bindings::{kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};

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
    kvm_segment {
        base,
        selector: DATA,
        type_: 0b0011,
        db: 1,
        l: 0,
        ..code()
    }
}

const fn table(base: u64, bytes: u16) -> kvm_dtable {
    kvm_dtable {
        base,
        limit: bytes - 1,
        padding: [0; 3],
    }
}

/// Size of the segment table, which the gate table follows.
const SEGMENTS_SIZE: u16 = 3 * 8;
const _: () = assert!(size_of_val(&SEGMENTS) == SEGMENTS_SIZE as usize);
/// Size of the gate table.
const GATES_SIZE: u16 = EXCEPTIONS * 16;

/// Returns the system registers, from their values at reset.
pub fn system(reset: kvm_sregs, layout: &Layout, mailbox: u64) -> kvm_sregs {
    let extra = layout.virtual_of(layout.extra());
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
pub fn general(layout: &Layout, mailbox: u64) -> kvm_regs {
    kvm_regs {
        rip: layout.virtual_of(layout.program()) + entry(),
        rsp: mailbox + PAGE,
        rflags: RFLAGS,
        ..kvm_regs::default()
    }
}
