// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a run of the page-table test is asked to do.

mod selection;

pub use selection::{NothingLogged, ParsePhasesError, PhaseSelection};

use std::time::Duration;

/// How the guest's own tables map the region under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GuestMap {
    /// By the largest blocks that fit: few tables, so nearly all that faults is the region.
    #[default]
    Blocks,
    /// Page by page, as the kernel's test does: each of the tables is itself a page that faults when
    /// it is first walked, which is in `create`.
    Pages,
}

/// A load like live migration's: the vCPUs write all the time, the host collects the dirty log in
/// rounds and copies what it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Migration {
    /// How many rounds before the vCPUs are stopped, at least one.
    pub rounds: u32,
    /// How long a round lasts before its log is collected; longer where copying takes longer.
    pub round_time: Duration,
}
