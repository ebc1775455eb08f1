// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Marks for whoever watches the instruction stream: the emulator's counting plugin.
//!
//! A mark is one hint instruction with an immediate that stands for nothing else, a no-op on every
//! CPU ([`hint`]). The harness executes it on its own thread at each boundary, while every vCPU
//! stands still, so all that is executed between two marks, on whatever CPU, belongs to the first.
//!
//! | immediate | from here on |
//! |---|---|
//! | `0x60` | outside any phase |
//! | `0x61` + index in [`Phase::ALL`] | that phase (`0x61` create … `0x67` unmap) |
//! | `0x68`, `0x69` | a round of a load like migration's, and its stop; here the vCPUs run on |
//! | `0x70` | a foreign test runs; given by the lab's init |
//! | `0x71`, `0x72` | a guest of `granule run` starts running; its init does |
//!
//! On other architectures marks are nothing at all.

use crate::host::hint;
use crate::phase::Phase;

/// The immediate that says: outside any phase.
pub const OUTSIDE: u8 = 0x60;

/// The immediate of the first phase; the others follow in the order of [`Phase::ALL`].
pub const FIRST_PHASE: u8 = 0x61;

/// The immediate that says: a foreign test runs.
pub const FOREIGN: u8 = 0x70;

/// The immediate that says: a guest starts running.
pub const GUEST: u8 = 0x71;

/// The immediate that says: the guest's init starts running.
pub const GUEST_INIT: u8 = 0x72;

/// The immediate that stands for a phase.
pub const fn immediate(phase: Phase) -> u8 {
    match phase {
        Phase::Whole => FOREIGN,
        // The discriminants count from 0 in the order of `Phase::ALL`, and on; a test holds them to it.
        step => FIRST_PHASE + step as u8,
    }
}

/// Marks the beginning of a phase.
pub fn phase(phase: Phase) {
    match phase {
        Phase::Create => hint::<{ immediate(Phase::Create) }>(),
        Phase::LoggingOn => hint::<{ immediate(Phase::LoggingOn) }>(),
        Phase::Update => hint::<{ immediate(Phase::Update) }>(),
        Phase::LoggingOff => hint::<{ immediate(Phase::LoggingOff) }>(),
        Phase::Rebuild => hint::<{ immediate(Phase::Rebuild) }>(),
        Phase::Exec => hint::<{ immediate(Phase::Exec) }>(),
        Phase::Unmap => hint::<{ immediate(Phase::Unmap) }>(),
        Phase::Round => hint::<{ immediate(Phase::Round) }>(),
        Phase::Stop => hint::<{ immediate(Phase::Stop) }>(),
        Phase::Whole => foreign(),
    }
}

/// Marks the end of a phase.
pub fn outside() {
    hint::<OUTSIDE>();
}

/// Marks the beginning of a foreign test; [`outside`] ends it.
pub fn foreign() {
    hint::<FOREIGN>();
}

/// Marks that a guest starts running.
pub fn guest() {
    hint::<GUEST>();
}

/// Marks that the guest's init starts running.
pub fn guest_init() {
    hint::<GUEST_INIT>();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn immediates_follow_the_order_of_the_phases() {
        let all = Phase::ALL.into_iter().chain([Phase::Round, Phase::Stop]);
        for (offset, phase) in (FIRST_PHASE..).zip(all) {
            assert_eq!(immediate(phase), offset);
        }
    }

    #[test]
    fn no_two_marks_are_the_same() {
        let last = immediate(Phase::Stop);

        assert!(OUTSIDE < FIRST_PHASE && last < FOREIGN);
    }
}
