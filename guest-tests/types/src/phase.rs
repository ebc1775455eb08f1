// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The phases of the page-table test, in the order in which an iteration runs them.
//!
//! `create → logging-on → update → logging-off → rebuild → exec → unmap`. In `create`, `update`,
//! `rebuild` and `exec` the vCPUs work; in the others the host does and the vCPUs stand still.
//!
//! Under a load like migration's an iteration is `create → logging-on → round, round, … → stop →
//! logging-off → unmap`; in a `round` both work.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One timed step of the test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// First touch of every backing page: even vCPUs write, odd ones read.
    Create,
    /// The host switches dirty logging on.
    LoggingOn,
    /// The vCPUs write under dirty logging: blocks are split, pages made writable again.
    Update,
    /// The host switches dirty logging off.
    LoggingOff,
    /// The vCPUs read every host page: tables become blocks again (the kernel's `ADJUST`).
    Rebuild,
    /// The vCPUs execute an instruction in every backing page: I-side maintenance.
    Exec,
    /// The host drops the backing.
    Unmap,
    /// The vCPUs write all the time; the host copies what the log named and collects the next log.
    Round,
    /// The vCPUs are stopped, the last log is collected and what it names copied.
    Stop,
    /// All that a foreign test did, from its start to its end: counts cannot be taken apart there.
    /// Not a step of an iteration, so not in [`Phase::ALL`].
    Whole,
}

impl Phase {
    /// Every step of an iteration, in order.
    pub const ALL: [Self; 7] = [
        Self::Create,
        Self::LoggingOn,
        Self::Update,
        Self::LoggingOff,
        Self::Rebuild,
        Self::Exec,
        Self::Unmap,
    ];

    /// All there are, as they follow each other in tables.
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

    /// The name used in results and on the command line.
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

    /// Whether the vCPUs work in this phase, or the host alone.
    pub const fn is_guest_work(self) -> bool {
        matches!(
            self,
            Self::Create | Self::Update | Self::Rebuild | Self::Exec | Self::Round | Self::Stop
        )
    }

    /// The word the kernel's `kvm_page_table_test` prints for this phase: `KVM_<word>_MAPPINGS`.
    pub const fn upstream_word(self) -> Option<&'static str> {
        match self {
            Self::Create => Some("CREATE"),
            Self::Update => Some("UPDATE"),
            Self::Rebuild => Some("ADJUST"),
            Self::LoggingOn
            | Self::LoggingOff
            | Self::Exec
            | Self::Unmap
            | Self::Round
            | Self::Stop
            | Self::Whole => None,
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
