// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The harness: drives a machine through the phases and creates a record of each.
//!
//! One iteration runs `create → logging-on → update → logging-off → rebuild → exec`, verifies
//! contents (untimed), runs `unmap`, and prepares the region for another first touch. For each
//! phase, the vCPU threads wait at the gate while the harness reads the event counters and executes
//! the phase's [`mark`](granule_types::mark). Then *the phase* runs. Then the harness marks its end
//! and reads the counters again. So a phase's times and counts include neither the wake-up of
//! threads nor the reading of counters.
//!
//! Between phases, untimed: the harness reads the page sizes of the backing from the host after
//! `create`; it checks after `update` that the dirty bitmap contains every page that the vCPUs
//! wrote; vCPU 0 installs the instructions before `exec`. Any mismatch fails the run.
//!
//! The `migration` module runs a migration workload instead.

mod error;
mod migration;
mod runner;
mod tasks;
#[cfg(test)]
mod tests;

use std::{error::Error, time::Duration};

use crate::{
    config::{Migration, PhaseSelection},
    machine::{Machine, Region},
    task::{Task, TaskAccess},
};
use granule_types::{
    backing::Backing,
    phase::Phase,
    record::{Record, RunConfig},
    units::{Bytes, GuestAddress},
};

pub use error::HarnessError;
use error::host_error;
use runner::Runner;

/// The plan of a run.
#[derive(Debug, Clone)]
pub struct RunPlan {
    /// The configuration in the records. The harness sets [`RunConfig::iteration`].
    pub config: RunConfig,
    /// Number of iterations.
    pub iterations: u32,
    /// The phases of an iteration.
    pub phases: PhaseSelection,
    /// A migration workload, which replaces the phases except `unmap`.
    pub migration: Option<Migration>,
    /// Time limit for the vCPUs in one phase.
    pub deadline: Duration,
    /// Lets the run continue if the host backs the region with pages of another size.
    pub accepts_fallback: bool,
}

impl RunPlan {
    /// Returns a plan of one iteration of all phases, with seed 0 and a time limit of one minute.
    pub fn new(mode: String, backing: Backing, memory: Bytes, vcpus: u32) -> Self {
        Self {
            config: RunConfig {
                mode,
                backing,
                memory,
                vcpus,
                seed: 0,
                iteration: 0,
                prefault: false,
                options: Default::default(),
            },
            iterations: 1,
            phases: PhaseSelection::all(),
            migration: None,
            deadline: Duration::from_secs(60),
            accepts_fallback: false,
        }
    }

    /// Returns the number of records of the run: one for each phase or round, in each iteration.
    pub fn record_count(&self) -> u64 {
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

/// Event of a run.
#[derive(Debug)]
pub enum RunEvent<'a> {
    /// Creation of the machine, with its region.
    MachineReady(&'a Region),
    /// Completion of the first guest entry of every vCPU.
    VcpusStarted,
    /// Start of an iteration, whose number counts from 0.
    IterationStarted(u32),
    /// Completion of a phase.
    PhaseComplete(&'a Record),
}

/// Receiver of a run's events, called outside the phases. Its error ends the run.
pub type Observer<'a> = dyn FnMut(RunEvent<'_>) -> Result<(), Box<dyn Error + Send + Sync>> + 'a;

/// Runs the test on a machine.
///
/// # Errors
/// The machine, a vCPU, a check or the observer failed. The observer has received the records of
/// all complete phases.
pub fn run(
    machine: &mut dyn Machine,
    plan: &RunPlan,
    observer: &mut Observer<'_>,
) -> Result<(), HarnessError> {
    let mut runner = Runner::start(machine, plan, observer)?;
    (0..plan.iterations).try_for_each(|number| match plan.migration {
        Some(config) => migration::run(&mut runner, config, number),
        None => run_iteration(&mut runner, number),
    })
}

fn run_iteration(runner: &mut Runner<'_, '_>, iteration: u32) -> Result<(), HarnessError> {
    runner.begin_iteration(iteration)?;
    let written = create_and_update(runner)?;
    if runner.selects(Phase::Rebuild) {
        runner.guest_phase(Phase::Rebuild)?;
    }
    if runner.selects(Phase::Exec) {
        runner.untimed_step("installing instructions", |tasks, vcpu| match vcpu {
            0 => tasks.install_return(),
            _ => tasks.idle_task(),
        })?;
        runner.guest_phase(Phase::Exec)?;
    }
    if let Some(written) = written {
        runner.untimed_step("verifying contents", |tasks, vcpu| match vcpu {
            0 => Task { access: TaskAccess::Verify, ..written },
            _ => tasks.idle_task(),
        })?;
        check_contents(runner.machine, written)?;
    }
    runner.finish_iteration()
}

/// Runs the phases up to `logging-off` and returns the last task that wrote.
fn create_and_update(runner: &mut Runner<'_, '_>) -> Result<Option<Task>, HarnessError> {
    let mut written = None;
    if runner.selects(Phase::Create) {
        runner.guest_phase(Phase::Create)?;
        written = Some(runner.tasks.writes_of(Phase::Create));
    }
    if runner.selects(Phase::LoggingOn) {
        runner.host_phase(Phase::LoggingOn, |machine| machine.set_dirty_logging(true))?;
    }
    if runner.selects(Phase::Update) {
        runner.guest_phase(Phase::Update)?;
        let update = runner.tasks.writes_of(Phase::Update);
        let log = runner.machine.dirty_log();
        let log = log.map_err(host_error("reading the dirty bitmap"))?;
        check_dirty_log(&runner.region, update, &log)?;
        written = Some(update);
    }
    if runner.selects(Phase::LoggingOff) {
        runner.host_phase(Phase::LoggingOff, |machine| machine.set_dirty_logging(false))?;
    } else if runner.selects(Phase::LoggingOn) {
        let off = runner.machine.set_dirty_logging(false);
        off.map_err(host_error("switching dirty logging off"))?;
    }
    Ok(written)
}

/// Checks that the dirty bitmap contains every written page; it may report clean pages too.
fn check_dirty_log(region: &Region, written: Task, log: &[u64]) -> Result<(), HarnessError> {
    let is_clean = |address: &GuestAddress| {
        let page = (address.0 - region.start.0) / region.host_page_size.0;
        let word = usize::try_from(page / 64).ok().and_then(|index| log.get(index));
        word.is_none_or(|word| word >> (page % 64) & 1 == 0)
    };
    let mut missing = written.addresses().filter(is_clean);
    let Some(first) = missing.next() else {
        return Ok(());
    };
    Err(HarnessError::IncompleteDirtyLog {
        missing_pages: 1 + missing.count() as u64,
        written_pages: written.count,
        first_page: first,
    })
}

/// Checks that the host reads the values that the guest wrote.
fn check_contents(machine: &dyn Machine, written: Task) -> Result<(), HarnessError> {
    for address in written.addresses() {
        let found = machine.read_u64(address);
        let found = found.map_err(host_error("reading the region"))?;
        let expected = Task::value_at(written.seed, address);
        if found != expected {
            return Err(HarnessError::WrongContents { address, expected, found });
        }
    }
    Ok(())
}
