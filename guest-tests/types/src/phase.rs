// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The phases of the page-table test, in the order in which an iteration runs them.
//!
//! `create → logging-on → update → logging-off → rebuild → exec → unmap`. The vCPUs work in
//! `create`, `update`, `rebuild` and `exec`; the host works in the others, while no vCPU runs.
//!
//! An iteration of a migration is `create → logging-on → round, round, … → stop → logging-off →
//! unmap`; in a `round` vCPUs and host work at the same time.
//!
//! `rebuild` is the phase that the kernel's test calls adjust (`KVM_ADJUST_MAPPINGS`).

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A timed phase of the test.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// First touch of every backing page: even vCPUs write, odd ones read.
    #[default]
    Create,
    /// Start of dirty logging by the host.
    LoggingOn,
    /// Writes of the vCPUs under dirty logging: KVM splits blocks and makes pages writable.
    Update,
    /// Stop of dirty logging by the host.
    LoggingOff,
    /// Reads of every host page by the vCPUs: KVM coalesces tables into blocks.
    Rebuild,
    /// Execution of an instruction in every backing page: KVM makes mappings executable.
    Exec,
    /// Drop of the backing by the host.
    Unmap,
    /// A migration round: the vCPUs write; the host copies the dirty pages and collects the next
    /// dirty bitmap.
    Round,
    /// The end of a migration: the vCPUs stop; the host collects the last dirty bitmap and copies
    /// its pages.
    Stop,
    /// A whole run of a program without marks, such as the kernel's test. Not part of an iteration,
    /// so not in [`Phase::ALL`].
    #[serde(rename = "whole")]
    WholeRun,
    /// A part of a program that marks itself, with its number in the record (`granule lab
    /// workload`).
    Step,
}

impl Phase {
    /// The phases of an iteration of the page-table test, in order.
    pub const ALL: [Self; 7] = [
        Self::Create,
        Self::LoggingOn,
        Self::Update,
        Self::LoggingOff,
        Self::Rebuild,
        Self::Exec,
        Self::Unmap,
    ];

    /// Every phase, in the order of result tables.
    pub const TABLE_ORDER: [Self; 11] = [
        Self::Create,
        Self::LoggingOn,
        Self::Update,
        Self::Round,
        Self::Stop,
        Self::LoggingOff,
        Self::Rebuild,
        Self::Exec,
        Self::Unmap,
        Self::Step,
        Self::WholeRun,
    ];

    /// Returns the name used in results and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::LoggingOn => "logging-on",
            Self::Update => "update",
            Self::LoggingOff => "logging-off",
            Self::Rebuild => "rebuild",
            Self::Exec => "exec",
            Self::Unmap => "unmap",
            Self::Round => "round",
            Self::Stop => "stop",
            Self::WholeRun => "whole",
            Self::Step => "step",
        }
    }

    /// Returns whether the vCPUs work in this phase.
    pub const fn runs_vcpus(self) -> bool {
        matches!(
            self,
            Self::Create | Self::Update | Self::Rebuild | Self::Exec | Self::Round | Self::Stop
        )
    }

    /// Returns the name of this phase in the lines `KVM_<name>_MAPPINGS` of `kvm_page_table_test`,
    /// or `None` if that test does not have the phase.
    pub const fn kernel_test_name(self) -> Option<&'static str> {
        match self {
            Self::Create => Some("CREATE"),
            Self::Update => Some("UPDATE"),
            Self::Rebuild => Some("ADJUST"),
            _ => None,
        }
    }
}

impl FromStr for Phase {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::TABLE_ORDER.into_iter().find(|phase| phase.name() == text);
        found.ok_or_else(|| {
            format!(
                "unknown phase; expected one of: {}",
                Self::TABLE_ORDER.map(Self::name).join(", ")
            )
        })
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

pub mod mark {
    //! Phase marks for the emulator's counting plugin.
    //!
    //! A mark is one `HINT` instruction with an unallocated immediate, a no-op on every CPU. The
    //! harness executes it at each phase boundary, while no vCPU runs, so the plugin assigns all
    //! code executed between two marks, on any CPU, to the first mark's phase.
    //!
    //! | immediate | begins |
    //! |---|---|
    //! | `0x60` | no phase |
    //! | `0x61` + index in [`Phase::ALL`] | that phase (`0x61` create … `0x67` unmap) |
    //! | `0x68`, `0x69` | a migration round, the migration's stop; the vCPUs keep running |
    //! | `0x6a`, `0x6b` | the collection of the dirty bitmap at the end of a migration round; what follows it |
    //! | `0x70` | a program without marks, such as the kernel's test; set by the lab's init |
    //! | `0x71`, `0x72` | a guest of `granule run`; that guest's init |
    //! | `0x78`…`0x7f` | steps 1 to 8 of a program that marks itself (`granule lab workload`) |
    //!
    //! Other architectures have no marks.

    use super::Phase;

    /// Immediate of the mark that ends a phase.
    pub const PHASE_END: u8 = 0x60;
    /// Immediate of the first phase; the others follow in the order of [`Phase::ALL`].
    pub const FIRST_PHASE: u8 = 0x61;
    /// Immediate of the collection of the dirty bitmap at the end of a migration round.
    pub const COLLECTION: u8 = 0x6a;
    /// Immediate of the end of that collection. The vCPUs keep running, so what follows until the next
    /// mark belongs to the round.
    pub const COLLECTED: u8 = 0x6b;
    /// Immediate of the start of a program without marks.
    pub const UNMARKED_PROGRAM: u8 = 0x70;
    /// Immediate of the start of a guest.
    pub const GUEST: u8 = 0x71;
    /// Immediate of the start of a guest's init.
    pub const GUEST_INIT: u8 = 0x72;

    /// Immediate of step 1 of a program that marks itself.
    pub const FIRST_STEP: u8 = 0x78;
    /// Immediate of the last step.
    pub const LAST_STEP: u8 = 0x7f;

    /// Returns the number of the step that a mark begins, from 1.
    pub fn step_number(mark: u8) -> Option<u32> {
        (FIRST_STEP..=LAST_STEP).contains(&mark).then(|| u32::from(mark - FIRST_STEP) + 1)
    }

    /// Returns the immediate of a phase, and of step 1 for all steps.
    pub const fn immediate(phase: Phase) -> u8 {
        match phase {
            Phase::WholeRun => UNMARKED_PROGRAM,
            Phase::Step => FIRST_STEP,
            // Discriminants follow the order of `Phase::ALL`, then Round and Stop; see the test.
            phase => FIRST_PHASE + phase as u8,
        }
    }

    /// Marks the beginning of a phase.
    pub fn begin_phase(phase: Phase) {
        match phase {
            Phase::Create => execute_hint::<{ immediate(Phase::Create) }>(),
            Phase::LoggingOn => execute_hint::<{ immediate(Phase::LoggingOn) }>(),
            Phase::Update => execute_hint::<{ immediate(Phase::Update) }>(),
            Phase::LoggingOff => execute_hint::<{ immediate(Phase::LoggingOff) }>(),
            Phase::Rebuild => execute_hint::<{ immediate(Phase::Rebuild) }>(),
            Phase::Exec => execute_hint::<{ immediate(Phase::Exec) }>(),
            Phase::Unmap => execute_hint::<{ immediate(Phase::Unmap) }>(),
            Phase::Round => execute_hint::<{ immediate(Phase::Round) }>(),
            Phase::Stop => execute_hint::<{ immediate(Phase::Stop) }>(),
            Phase::WholeRun => begin_unmarked_program(),
            Phase::Step => execute_hint::<FIRST_STEP>(),
        }
    }

    /// Marks the collection of the dirty bitmap at the end of a migration round.
    pub fn begin_collection() {
        execute_hint::<COLLECTION>();
    }

    /// Marks the end of that collection, after which the round goes on until the next mark.
    pub fn end_collection() {
        execute_hint::<COLLECTED>();
    }

    /// Marks the end of a phase.
    pub fn end_phase() {
        execute_hint::<PHASE_END>();
    }

    /// Marks the start of a step of a program that marks itself, from 1 to 8; other numbers have no
    /// mark.
    pub fn begin_step(number: u32) {
        match number {
            1 => execute_hint::<FIRST_STEP>(),
            2 => execute_hint::<{ FIRST_STEP + 1 }>(),
            3 => execute_hint::<{ FIRST_STEP + 2 }>(),
            4 => execute_hint::<{ FIRST_STEP + 3 }>(),
            5 => execute_hint::<{ FIRST_STEP + 4 }>(),
            6 => execute_hint::<{ FIRST_STEP + 5 }>(),
            7 => execute_hint::<{ FIRST_STEP + 6 }>(),
            8 => execute_hint::<LAST_STEP>(),
            _ => {}
        }
    }

    /// Marks the start of a program without marks; [`end_phase`] marks its end.
    pub fn begin_unmarked_program() {
        execute_hint::<UNMARKED_PROGRAM>();
    }

    /// Marks the start of a guest.
    pub fn begin_guest() {
        execute_hint::<GUEST>();
    }

    /// Marks the start of a guest's init.
    pub fn begin_guest_init() {
        execute_hint::<GUEST_INIT>();
    }

    /// Executes `HINT #IMMEDIATE` with an immediate that the Arm manual (C6.2, HINT) leaves
    /// unallocated; does nothing on other architectures.
    fn execute_hint<const IMMEDIATE: u8>() {
        #[cfg(target_arch = "aarch64")]
        // SAFETY: an unallocated hint executes as a no-op. The block is declared to touch memory so
        // that the compiler moves no access across the mark.
        unsafe {
            std::arch::asm!(
                "hint #{immediate}",
                immediate = const IMMEDIATE,
                options(nostack, preserves_flags)
            );
        }
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
            assert_eq!([COLLECTION, COLLECTED], [1, 2].map(|next| immediate(Phase::Stop) + next));
        }
    }
}
