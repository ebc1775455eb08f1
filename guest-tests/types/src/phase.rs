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

use std::fmt;

use serde::{Deserialize, Serialize};

/// A timed phase of the test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// First touch of every backing page: even vCPUs write, odd ones read.
    Create,
    /// The host switches dirty logging on.
    LoggingOn,
    /// The vCPUs write under dirty logging: KVM splits blocks and makes pages writable.
    Update,
    /// The host switches dirty logging off.
    LoggingOff,
    /// The vCPUs read every host page: KVM coalesces tables into blocks.
    Rebuild,
    /// The vCPUs execute an instruction in every backing page: instruction cache maintenance.
    Exec,
    /// The host drops the backing.
    Unmap,
    /// A migration round: the vCPUs write; the host copies the dirty pages and collects the next
    /// dirty bitmap.
    Round,
    /// The end of a migration: the vCPUs stop; the host collects the last dirty bitmap and copies
    /// its pages.
    Stop,
    /// A whole run of a program without marks, such as the kernel's test. Not part of an iteration,
    /// so not in [`Phase::ALL`].
    Whole,
}

impl Phase {
    /// The phases of an iteration, in order.
    pub const ALL: [Self; 7] = [
        Self::Create,
        Self::LoggingOn,
        Self::Update,
        Self::LoggingOff,
        Self::Rebuild,
        Self::Exec,
        Self::Unmap,
    ];

    /// The phases and rounds, in the order of tables.
    pub const IN_ORDER: [Self; 10] = [
        Self::Create,
        Self::LoggingOn,
        Self::Update,
        Self::Round,
        Self::Stop,
        Self::LoggingOff,
        Self::Rebuild,
        Self::Exec,
        Self::Unmap,
        Self::Whole,
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
            Self::Whole => "whole",
        }
    }

    /// Returns whether vCPUs work in this phase, rather than the host alone.
    pub const fn is_guest_work(self) -> bool {
        matches!(
            self,
            Self::Create | Self::Update | Self::Rebuild | Self::Exec | Self::Round | Self::Stop
        )
    }

    /// Returns the word in the line `KVM_<word>_MAPPINGS` that the kernel's `kvm_page_table_test`
    /// prints for this phase; `None` for phases that it does not have.
    pub const fn kernel_word(self) -> Option<&'static str> {
        match self {
            Self::Create => Some("CREATE"),
            Self::Update => Some("UPDATE"),
            Self::Rebuild => Some("ADJUST"),
            _ => None,
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
