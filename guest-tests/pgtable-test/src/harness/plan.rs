// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Input and output of a run: the plan, and the progress that its caller observes.

use std::{error::Error, time::Duration};

use crate::{
    config::{Migration, PhaseSelection},
    machine::Region,
};
use granule_types::{
    phase::Phase,
    record::{Record, RunConfig},
};

/// The plan of a run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The configuration in the records. [`RunConfig::seed`] delays the vCPUs' starts; the harness
    /// sets [`RunConfig::iteration`].
    pub config: RunConfig,
    /// Number of iterations.
    pub iterations: u32,
    /// The phases of an iteration.
    pub phases: PhaseSelection,
    /// A migration workload, which replaces the phases except `unmap`.
    pub migration: Option<Migration>,
    /// Limit of the time that the vCPUs work in one phase.
    pub deadline: Duration,
    /// Permission to continue when the host backs the region with other pages than configured.
    pub accept_fallback: bool,
}

impl Plan {
    /// Returns the number of records of the run: one for each phase or round of each iteration.
    pub fn records(&self) -> u64 {
        let unmap = usize::from(self.phases.contains(Phase::Unmap));
        let each = match self.migration {
            // Create, logging-on, the rounds, stop, logging-off.
            Some(migration) => u64::from(migration.rounds) + 4 + unmap as u64,
            None => {
                let phases = Phase::ALL.into_iter();
                phases.filter(|phase| self.phases.contains(*phase)).count() as u64
            }
        };
        each * u64::from(self.iterations)
    }
}

/// A step of a run.
#[derive(Debug)]
pub enum Progress<'a> {
    /// The machine is made.
    Ready(&'a Region),
    /// Every vCPU has entered the guest once.
    Started,
    /// The iteration with this number, from 0, begins.
    Iteration(u32),
    /// A phase is complete.
    Phase(&'a Record),
}

/// Receiver of the progress of a run. It runs outside any phase; its error ends the run.
pub type Observer<'a> = dyn FnMut(Progress<'_>) -> Result<(), Box<dyn Error + Send + Sync>> + 'a;
