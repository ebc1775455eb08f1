// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The x86_64 guest: doorbells, page table entries, descriptor tables and exceptions.
//!
//! Page tables have four levels (Intel SDM volume 3, 5.5, and AMD manual volume 2, 5.3). Blocks are
//! 2M, as not every CPU supports 1G. All mappings are in the lower half of the virtual addresses,
//! below bit 47. The descriptor tables are three segments, and a gate for each exception (Intel SDM
//! volume 3, 3.4.5 and 7.14.1).

use crate::guest::{
    mailbox::{GuestException, Mailbox},
    tables::Abi,
};
use granule_types::guest_mode::GuestMode;

/// The first doorbell port. No device handles it, so every `OUT` exits to the host.
pub const DOORBELL: u16 = 0x1000;

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
/// Write-through and cache-disable: strong uncacheable by the reset value of the PAT.
const UNCACHED: u64 = 1 << 3 | 1 << 4;
/// Accessed and dirty flags, set so that no walk writes to the tables.
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
/// Marks a block at a level above the last.
const PAGE_SIZE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;

pub const fn abi(mode: GuestMode) -> Abi {
    Abi {
        mode,
        doorbells: None,
        address_bits: 47,
        first_block_level: 2,
        table: ACCESSED | WRITABLE | PRESENT,
        block: PAGE_SIZE | DIRTY | ACCESSED | WRITABLE | PRESENT,
        page: DIRTY | ACCESSED | WRITABLE | PRESENT,
        normal: 0,
        device: UNCACHED | NO_EXECUTE,
    }
}

/// Selectors of the code and data segments.
pub const CODE: u16 = 1 << 3;
pub const DATA: u16 = 2 << 3;
pub const EXCEPTIONS: u16 = 32;
/// Distance between the entry points of two exceptions in the program.
pub const ENTRY_SIZE: u64 = 16;

/// The segments: null, 64-bit code and data, at privilege level 0.
pub const SEGMENTS: [u64; 3] = [0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];

/// Returns interrupt gates to the entry points at `entries`, two words each, through [`CODE`] and
/// on the current stack.
pub fn gates(entries: u64) -> Vec<u64> {
    (0..u64::from(EXCEPTIONS))
        .flat_map(|number| {
            let at = entries + number * ENTRY_SIZE;
            let low =
                at & 0xffff | u64::from(CODE) << 16 | 0x8e << 40 | ((at >> 16) & 0xffff) << 48;
            [low, at >> 32]
        })
        .collect()
}

const PAGE_FAULT: u64 = 14;

/// Describes the exception in a mailbox (Intel SDM volume 3, 7.15).
pub fn explain(mailbox: &Mailbox) -> GuestException {
    GuestException {
        // Page faults store an address in CR2.
        has_address: mailbox.vector == PAGE_FAULT,
        detail: describe(mailbox.vector, mailbox.syndrome),
    }
}

/// Describes an exception by its number and error code.
fn describe(vector: u64, error: u64) -> String {
    let what = match vector {
        0 => "a division by zero",
        1 | 3 => "a breakpoint",
        2 => "a non-maskable interrupt",
        6 => "an invalid instruction",
        7 => "floating point, which is disabled",
        8 => "a double fault",
        12 => "a stack segment fault",
        13 => return format!("general protection fault, error code {error:#x}"),
        PAGE_FAULT => return format!("page fault {}", page_fault(error)),
        17 => "a misaligned access",
        18 => "a machine check",
        _ => return format!("exception {vector}, error code {error:#x}"),
    };
    what.to_owned()
}

/// Describes the error code of a page fault.
fn page_fault(error: u64) -> String {
    let access = match error {
        _ if error & (1 << 4) != 0 => "by an instruction fetch",
        _ if error & (1 << 1) != 0 => "by a write",
        _ => "by a read",
    };
    let why = match error {
        _ if error & (1 << 3) != 0 => "a reserved bit is set in the guest's tables",
        _ if error & 1 != 0 => "the guest's tables do not permit it",
        _ => "the guest's tables map nothing there",
    };
    format!("{access}: {why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_holds_its_entry_point() {
        let gates = gates(0x0012_3456_789a_bc00);

        assert_eq!(gates.len(), 64);
        let at = (gates[28] & 0xffff) | (gates[28] >> 32 & 0xffff_0000) | gates[29] << 32;
        assert_eq!(at, 0x0012_3456_789a_bc00 + 14 * 16);
        assert_eq!(gates[28] >> 40 & 0xff, 0x8e);
        assert_eq!(gates[28] >> 16 & 0xffff, 8);
    }

    #[test]
    fn exceptions_are_described() {
        for (vector, syndrome, has_address, text) in [
            (14, 0b10, true, "page fault by a write: the guest's tables map nothing there"),
            (
                14,
                0b1_0001,
                true,
                "page fault by an instruction fetch: the guest's tables do not permit it",
            ),
            (13, 0, false, "general protection fault, error code 0x0"),
            (21, 3, false, "exception 21, error code 0x3"),
        ] {
            let crash = explain(&Mailbox { vector, syndrome, ..Mailbox::default() });

            assert_eq!((crash.has_address, crash.detail.as_str()), (has_address, text));
        }
    }
}
