// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The arm64 guest: doorbells, entries of stage-1 tables (Arm manual, D8.2 and D8.3: VMSAv8-64, one
//! privilege level in use), system registers ([`registers`]) and descriptions of exceptions
//! (`ESR_EL1`, Arm manual D19.2.37).

pub mod registers;

use crate::guest::{
    layout::Abi,
    mailbox::{Crash, Mailbox},
    tables::Format,
};
use granule_types::{guest_mode::GuestMode, units::GuestAddress};

/// Address of the doorbells: no memory is there, so every store exits to the host.
pub const DOORBELL: GuestAddress = GuestAddress(0x8000);

/// A valid entry.
const VALID: u64 = 1 << 0;
/// A table at levels 0 to 2, a page at level 3; a block where clear.
const TABLE_OR_PAGE: u64 = 1 << 1;
/// Attribute 1 of `MAIR_EL1`, which [`registers::initial`] sets: write-back cacheable. Attribute 0
/// is Device-nGnRnE.
const WRITE_BACK: u64 = 1 << 2;
/// Inner shareable.
const INNER_SHAREABLE: u64 = 3 << 8;
/// The access flag, set so that no access takes an access flag fault.
const ACCESSED: u64 = 1 << 10;
/// Execute-never at EL1.
const PRIVILEGED_EXECUTE_NEVER: u64 = 1 << 53;

/// Returns the format of the stage-1 entries of a mode.
pub const fn format(mode: GuestMode) -> Format {
    Format {
        page_shift: mode.page_shift(),
        address_bits: mode.va_bits(),
        // Without FEAT_LPA2, blocks start at level 1 with 4K granules and at level 2 with others.
        first_block_level: if mode.page_shift() == 12 { 1 } else { 2 },
        table: TABLE_OR_PAGE | VALID,
        block: ACCESSED | VALID,
        page: ACCESSED | TABLE_OR_PAGE | VALID,
        normal: WRITE_BACK | INNER_SHAREABLE,
        device: PRIVILEGED_EXECUTE_NEVER,
    }
}

/// Returns the properties of a guest of this mode.
pub const fn abi(mode: GuestMode) -> Abi {
    Abi { mode, format: format(mode), doorbells: Some(DOORBELL) }
}

/// Describes the exception in a mailbox.
pub fn explain(mailbox: &Mailbox) -> Crash {
    Crash {
        // Aborts and misaligned program counters store an address in FAR_EL1.
        has_address: matches!(class(mailbox.syndrome), 0x20 | 0x21 | 0x22 | 0x24 | 0x25),
        detail: describe(mailbox.vector, mailbox.syndrome),
    }
}

/// Returns the exception class, bits 31:26.
const fn class(syndrome: u64) -> u64 {
    (syndrome >> 26) & 0x3f
}

/// Describes an exception by its vector (0 to 15, in the order of the vector table) and syndrome.
fn describe(vector: u64, syndrome: u64) -> String {
    let kind = match vector % 4 {
        0 => "synchronous exception",
        1 => return "unexpected interrupt (IRQ)".to_owned(),
        2 => return "unexpected interrupt (FIQ)".to_owned(),
        _ => return "SError: an asynchronous memory error".to_owned(),
    };
    let what = match class(syndrome) {
        0x00 => "an unknown or trapped instruction",
        0x07 => "a trapped floating-point instruction",
        0x0d => "a branch to an invalid target (BTI)",
        0x0e => "an illegal execution state",
        0x15 => "a supervisor call",
        0x16 => "a hypervisor call",
        0x18 => "a trapped system register or instruction",
        0x20 | 0x21 => return format!("{kind}: instruction abort, {}", fault(syndrome)),
        0x22 => "a misaligned program counter",
        0x24 | 0x25 => {
            let access = if syndrome & (1 << 6) != 0 { "write" } else { "read" };
            return format!("{kind}: data abort by a {access}, {}", fault(syndrome));
        }
        0x26 => "a misaligned stack pointer",
        0x2f => "an SError",
        0x3c => "a breakpoint instruction",
        _ => return format!("{kind} of class {:#x}", class(syndrome)),
    };
    format!("{kind}: {what}")
}

/// Describes the fault status of an abort: bits 5:0, with the level in the lowest two.
fn fault(syndrome: u64) -> String {
    let level = syndrome & 3;
    match syndrome & 0x3f {
        0x00..=0x03 => format!("address size fault at level {level}"),
        0x04..=0x07 => format!("translation fault at level {level}"),
        0x08..=0x0b => format!("access flag fault at level {level}"),
        0x0c..=0x0f => format!("permission fault at level {level}"),
        0x10 => "external abort".to_owned(),
        0x14..=0x17 => format!("external abort on a table walk at level {level}"),
        0x21 => "alignment fault".to_owned(),
        0x30 => "TLB conflict abort".to_owned(),
        status => format!("fault status {status:#x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exceptions_are_described() {
        for (vector, syndrome, has_address, text) in [
            (4, 0x9600_0047, true, "data abort by a write, translation fault at level 3"),
            (4, 0x9600_000e, true, "data abort by a read, permission fault at level 2"),
            (4, 0x8600_000f, true, "instruction abort, permission fault at level 3"),
            (0, 0x3f << 26, false, "synchronous exception of class 0x3f"),
            (7, 0, false, "SError"),
            (4, 0x0200_0000, false, "an unknown or trapped instruction"),
        ] {
            let crash = explain(&Mailbox { vector, syndrome, ..Mailbox::default() });

            assert_eq!(crash.has_address, has_address, "{syndrome:#x}");
            assert!(crash.detail.contains(text), "{}", crash.detail);
        }
    }
}
