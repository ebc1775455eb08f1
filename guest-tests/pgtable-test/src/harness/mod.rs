// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The harness: drives a machine through the phases and makes a record of each.
//!
//! One iteration runs `create → logging-on → update → logging-off → rebuild → exec`, verifies
//! contents (untimed), runs `unmap`, and prepares the region for a first touch again. Around each
//! phase, in this order: all vCPU threads wait at the gate, event counters are read, the phase's
//! [`mark`](granule_types::mark) is executed, *the phase* runs, the mark that ends it is executed,
//! event counters are read again. So no time or count of a phase contains the wake-up of threads or
//! the reading of counters.
//!
//! Between the phases, untimed: the backing is read from the host after `create`; the dirty bitmap
//! is collected after `update` and must contain every page that the vCPUs wrote; vCPU 0 plants the
//! instructions before `exec`. Any mismatch fails the run.
//!
//! The `migration` module runs a migration workload instead, with phases of its own.

mod checks;
mod destination;
mod error;
mod iteration;
mod migration;
#[cfg(test)]
mod migration_tests;
mod plan;
mod runner;
mod tasks;
#[cfg(test)]
mod tests;

pub use error::HarnessError;
pub use plan::{Observer, Plan, Progress};

use crate::machine::Machine;
use runner::Runner;

/// Runs the test on a machine.
///
/// # Errors
/// The machine, a vCPU, a check or the observer failed; the observer has received the records of
/// the phases before.
pub fn run(
    machine: &mut dyn Machine,
    plan: &Plan,
    observer: &mut Observer<'_>,
) -> Result<(), HarnessError> {
    let mut runner = Runner::start(machine, plan, observer)?;
    (0..plan.iterations).try_for_each(|number| match plan.migration {
        Some(config) => migration::run(&mut runner, config, number),
        None => iteration::run(&mut runner, number),
    })
}
