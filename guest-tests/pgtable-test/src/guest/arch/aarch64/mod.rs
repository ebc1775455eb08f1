// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The arm64 guest: doorbells, stage-1 entries ([`stage1`]), system registers ([`registers`]) and
//! descriptions of exceptions (`ESR_EL1`, Arm manual D19.2.37).

pub mod registers;
pub mod stage1;

use std::sync::Arc;

use crate::guest::{
    layout::Abi,
    mailbox::{Crash, Mailbox},
};
use granule_types::{guest_mode::GuestMode, units::GuestAddress};

/// Address of the doorbells: no memory is there, so every store exits to the host.
pub const DOORBELL: GuestAddress = GuestAddress(0x8000);

/// Returns the properties of a guest of this mode.
pub fn abi(mode: GuestMode) -> Abi {
    Abi {
        mode,
        format: Arc::new(stage1::Stage1 { page_shift: mode.page_shift(), va_bits: mode.va_bits() }),
        doorbells: Some(DOORBELL),
    }
}

/// Describes the exception in a mailbox.
pub fn explain(mailbox: &Mailbox) -> Crash {
    Crash {
        has_address: has_address(mailbox.syndrome),
        detail: describe(mailbox.vector, mailbox.syndrome),
    }
}

/// Returns the exception class, bits 31:26.
const fn class(syndrome: u64) -> u64 {
    (syndrome >> 26) & 0x3f
}

/// Returns whether `FAR_EL1` holds an address: after aborts and misaligned program counters.
const fn has_address(syndrome: u64) -> bool {
    matches!(class(syndrome), 0x20 | 0x21 | 0x22 | 0x24 | 0x25)
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
    fn a_data_abort_is_described_by_access_fault_and_level() {
        assert_eq!(
            describe(4, 0x9600_0047),
            "synchronous exception: data abort by a write, translation fault at level 3"
        );
        assert_eq!(
            describe(4, 0x9600_000e),
            "synchronous exception: data abort by a read, permission fault at level 2"
        );
    }

    #[test]
    fn an_instruction_abort_is_described() {
        assert_eq!(
            describe(4, 0x8600_000f),
            "synchronous exception: instruction abort, permission fault at level 3"
        );
    }

    #[test]
    fn an_unknown_class_is_described_by_number() {
        assert_eq!(describe(0, 0x3f << 26), "synchronous exception of class 0x3f");
        assert!(describe(7, 0).contains("SError"));
    }

    #[test]
    fn only_aborts_have_an_address() {
        assert!(has_address(0x9600_0047));
        assert!(has_address(0x8600_000f));
        assert!(!has_address(0x0200_0000));
    }
}
