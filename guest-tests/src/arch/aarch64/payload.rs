// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest program, assembled into this one between two symbols and copied from there.

use std::mem::offset_of;

use crate::guest::mailbox::{self, Bell, Mailbox};

std::arch::global_asm!(
    include_str!("../../../payload/aarch64.S"),
    ACCESS = const offset_of!(Mailbox, access),
    COUNT = const offset_of!(Mailbox, count),
    INNER_FIRST = const offset_of!(Mailbox, inner_first),
    INNER_STRIDE = const offset_of!(Mailbox, inner_stride),
    DIFFERS_AT = const offset_of!(Mailbox, differs_at),
    VECTOR = const offset_of!(Mailbox, vector),
    ELR = const offset_of!(Mailbox, pc),
    DOORBELL = const offset_of!(Mailbox, doorbell),
    READ = const mailbox::READ_CODE,
    WRITE = const mailbox::WRITE_CODE,
    WRITE_THEN_READ = const mailbox::WRITE_THEN_READ_CODE,
    PLANT = const mailbox::PLANT_CODE,
    EXECUTE = const mailbox::EXECUTE_CODE,
    VERIFY = const mailbox::VERIFY_CODE,
    PLANT_OFFSET = const mailbox::PLANT_OFFSET,
    DONE_BELL = const Bell::Done.offset(),
    DIFFERS_BELL = const Bell::Differs.offset(),
    FATAL_BELL = const Bell::Fatal.offset(),
);

unsafe extern "C" {
    static granule_guest_start: u8;
    static granule_guest_entry: u8;
    static granule_guest_end: u8;
}

/// The program: copy it to an address aligned to 2 KiB, where its exception vectors then lie.
pub fn program() -> &'static [u8] {
    let start = &raw const granule_guest_start;
    let end = &raw const granule_guest_end;
    let len = end.addr() - start.addr();
    // SAFETY: the two symbols enclose one piece of read-only data, assembled above.
    unsafe { std::slice::from_raw_parts(start, len) }
}

/// From the program's first byte to its first instruction.
pub fn entry() -> u64 {
    let start = &raw const granule_guest_start;
    let entry = &raw const granule_guest_entry;
    (entry.addr() - start.addr()) as u64
}
