// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Configuration of a run of the page-table test.

mod selection;

pub use selection::{NothingLogged, ParsePhasesError, PhaseSelection};

use std::time::Duration;

/// Mapping of the region under test by the guest's stage-1 tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GuestMap {
    /// By the largest blocks that fit: few tables, so nearly all stage-2 faults are of the region.
    #[default]
    Blocks,
    /// By pages, as the kernel's test does: each stage-1 table is a page that takes a stage-2 fault
    /// when it is first walked, in `create`.
    Pages,
}

/// A migration workload: the vCPUs write continuously; the host collects the dirty bitmap in rounds
/// and copies its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Migration {
    /// Number of rounds before the vCPUs are stopped, at least one.
    pub rounds: u32,
    /// Least time from the start of a round to the collection of its bitmap.
    pub round_time: Duration,
}
