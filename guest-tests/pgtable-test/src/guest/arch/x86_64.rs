// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The x86_64 guest: doorbells, page table entries, descriptor tables and exceptions.
//!
//! Page tables have four levels (Intel SDM volume 3, 5.5, and AMD manual volume 2, 5.3). Blocks are
//! 2M, as not every CPU supports 1G. All mappings are in the lower half of the virtual addresses.
//! The GDT has three segments, and the IDT has a gate for each exception (Intel SDM volume 3, 3.4.5
//! and 7.14.1).

use crate::guest::{
    mailbox::{GuestException, Mailbox},
    tables::GuestArch,
};
use granule_types::guest_mode::GuestMode;

/// Port of the first doorbell. Every `OUT` to it exits to user space.
pub const FIRST_DOORBELL: u16 = 0x1000;

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
/// PWT and PCD: strong uncacheable with the reset value of the PAT.
const UNCACHED: u64 = 1 << 3 | 1 << 4;
/// Accessed and dirty flags, set so that no walk writes to the tables.
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
/// Marks a block at the levels above the last.
const PAGE_SIZE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;

pub const fn guest_arch(mode: GuestMode) -> GuestArch {
    GuestArch {
        mode,
        first_doorbell: None,
        address_bits: 47,
        first_block_level: 2,
        table_attributes: ACCESSED | WRITABLE | PRESENT,
        block_attributes: PAGE_SIZE | DIRTY | ACCESSED | WRITABLE | PRESENT,
        page_attributes: DIRTY | ACCESSED | WRITABLE | PRESENT,
        normal_memory: 0,
        device_memory: UNCACHED | NO_EXECUTE,
    }
}

/// Selectors of the code and data segments.
pub const CODE_SELECTOR: u16 = 1 << 3;
pub const DATA_SELECTOR: u16 = 2 << 3;
pub const EXCEPTION_COUNT: u16 = 32;
/// Distance between the entry points of consecutive exceptions in the program.
pub const EXCEPTION_ENTRY_SIZE: u64 = 16;

/// The GDT: null, 64-bit code and data segment, at privilege level 0.
pub const GDT: [u64; 3] = [0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];

/// Returns the IDT: interrupt gates of two words to the entry points at `entries`.
pub fn interrupt_gates(entries: u64) -> Vec<u64> {
    (0..u64::from(EXCEPTION_COUNT))
        .flat_map(|number| {
            let entry = entries + number * EXCEPTION_ENTRY_SIZE;
            let low = entry & 0xffff
                | u64::from(CODE_SELECTOR) << 16
                | 0x8e << 40
                | ((entry >> 16) & 0xffff) << 48;
            [low, entry >> 32]
        })
        .collect()
}

const PAGE_FAULT: u64 = 14;

/// Describes the exception in a mailbox (Intel SDM volume 3, 7.15).
pub fn explain_exception(mailbox: &Mailbox) -> GuestException {
    GuestException {
        // Only page faults set CR2.
        has_address: mailbox.vector == PAGE_FAULT,
        detail: describe_exception(mailbox.vector, mailbox.syndrome),
    }
}

/// Describes an exception by its number and error code.
fn describe_exception(vector: u64, error: u64) -> String {
    let what = match vector {
        0 => "a division by zero",
        1 | 3 => "a breakpoint",
        2 => "a non-maskable interrupt",
        6 => "an invalid instruction",
        7 => "floating point, which is disabled",
        8 => "a double fault",
        12 => "a stack segment fault",
        13 => return format!("general protection fault, error code {error:#x}"),
        PAGE_FAULT => return format!("page fault {}", describe_page_fault(error)),
        17 => "a misaligned access",
        18 => "a machine check",
        _ => return format!("exception {vector}, error code {error:#x}"),
    };
    what.to_owned()
}

/// Describes the error code of a page fault.
fn describe_page_fault(error: u64) -> String {
    let access = match error {
        _ if error & (1 << 4) != 0 => "by an instruction fetch",
        _ if error & (1 << 1) != 0 => "by a write",
        _ => "by a read",
    };
    let cause = match error {
        _ if error & (1 << 3) != 0 => "a reserved bit is set in the guest's tables",
        _ if error & 1 != 0 => "the guest's tables do not permit the access",
        _ => "the guest's tables do not map the address",
    };
    format!("{access}: {cause}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_holds_its_entry_point() {
        let gates = interrupt_gates(0x0012_3456_789a_bc00);

        assert_eq!(gates.len(), 64);
        let at = (gates[28] & 0xffff) | (gates[28] >> 32 & 0xffff_0000) | gates[29] << 32;
        assert_eq!(at, 0x0012_3456_789a_bc00 + 14 * 16);
        assert_eq!(gates[28] >> 40 & 0xff, 0x8e);
        assert_eq!(gates[28] >> 16 & 0xffff, 8);
    }

    #[test]
    fn exceptions_are_described() {
        for (vector, syndrome, has_address, text) in [
            (14, 0b10, true, "page fault by a write: the guest's tables do not map the address"),
            (
                14,
                0b1_0001,
                true,
                "page fault by an instruction fetch: the guest's tables do not permit the access",
            ),
            (13, 0, false, "general protection fault, error code 0x0"),
            (21, 3, false, "exception 21, error code 0x3"),
        ] {
            let crash = explain_exception(&Mailbox { vector, syndrome, ..Mailbox::default() });

            assert_eq!((crash.has_address, crash.detail.as_str()), (has_address, text));
        }
    }
}
