// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Phase marks for the emulator's counting plugin.
//!
//! A mark is one `HINT` instruction with an unallocated immediate, a no-op on every CPU. The
//! harness executes it at each phase boundary, while no vCPU runs, so the plugin assigns everything
//! that is executed between two marks, on any CPU, to the first mark's phase.
//!
//! | immediate | begins |
//! |---|---|
//! | `0x60` | no phase |
//! | `0x61` + index in [`Phase::ALL`] | that phase (`0x61` create … `0x67` unmap) |
//! | `0x68`, `0x69` | a migration round, the migration's stop; the vCPUs keep running |
//! | `0x70` | a program without marks, such as the kernel's test; set by the lab's init |
//! | `0x71`, `0x72` | a guest of `granule run`; that guest's init |
//!
//! Other architectures have no marks.

use crate::host::hint;
use crate::phase::Phase;

/// Immediate of the mark that ends a phase.
pub const OUTSIDE: u8 = 0x60;

/// Immediate of the first phase; the others follow in the order of [`Phase::ALL`].
pub const FIRST_PHASE: u8 = 0x61;

/// Immediate of the start of a program without marks.
pub const FOREIGN: u8 = 0x70;

/// Immediate of the start of a guest.
pub const GUEST: u8 = 0x71;

/// Immediate of the start of a guest's init.
pub const GUEST_INIT: u8 = 0x72;

/// Returns the immediate of a phase.
pub const fn immediate(phase: Phase) -> u8 {
    match phase {
        Phase::Whole => FOREIGN,
        // Discriminants follow the order of `Phase::ALL`, then Round and Stop; see the test.
        phase => FIRST_PHASE + phase as u8,
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

/// Marks the start of a program without marks; [`outside`] ends it.
pub fn foreign() {
    hint::<FOREIGN>();
}

/// Marks the start of a guest.
pub fn guest() {
    hint::<GUEST>();
}

/// Marks the start of a guest's init.
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
    fn phase_marks_do_not_overlap_the_others() {
        let last = immediate(Phase::Stop);

        assert!(OUTSIDE < FIRST_PHASE && last < FOREIGN);
    }
}
