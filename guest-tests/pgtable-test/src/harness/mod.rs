// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The harness: drives a machine through the phases and makes a record of each.
//!
//! One iteration goes through `create → logging-on → update → logging-off → rebuild → exec`, then
//! verifies, untimed, what was written, then through `unmap`, and makes the region ready for a first
//! touch again. Around each phase, in this order: the vCPUs gather behind the gate, the events are
//! read, the [`mark`] is set, *the phase*, the mark is taken back, the events are read again. So
//! neither waking threads nor reading counters is in the time or the counts of any phase.
//!
//! Between the phases, untimed: the backing is read back after `create`, the dirty log is collected
//! after `update` and must have every page that the vCPUs wrote, vCPU 0 plants the instructions
//! before `exec`. Any mismatch ends the run as a failure.
//!
//! A load like live migration's has phases of its own: `migration`.

mod check;
mod destination;
mod error;
mod migration;
#[cfg(test)]
mod migration_tests;
mod tasks;
#[cfg(test)]
mod tests;

use std::{error::Error, time::Duration};

pub use error::HarnessError;

use crate::{
    config::{Migration, PhaseSelection},
    machine::{Machine, MachineError, Region, Task, VcpuFailure},
    vcpu_threads::{Crew, CrewError, RoundTimes},
};
use granule_types::{
    mark,
    phase::Phase,
    record::{EventCounts, Obtained, Record, RunConfig, SCHEMA},
    units::Nanoseconds,
};
use granule_vmm::kvm::tracepoints as events;
use tasks::{Tasks, Written};

/// What to run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// What the records say was asked for; [`RunConfig::seed`] staggers the vCPUs' starts, and
    /// [`RunConfig::iteration`] is filled in.
    pub config: RunConfig,
    /// How many iterations.
    pub iterations: u32,
    /// Which phases.
    pub phases: PhaseSelection,
    /// Instead: a load like migration's.
    pub migration: Option<Migration>,
    /// How long the vCPUs may work in one phase.
    pub deadline: Duration,
    /// Whether to go on when the host backs the region otherwise than asked.
    pub accept_fallback: bool,
}

impl Plan {
    /// How many records the run makes: one for each phase of each iteration, and for each round.
    pub fn records(&self) -> u64 {
        let unmap = usize::from(self.phases.contains(Phase::Unmap));
        let each = match self.migration {
            // Create, logging on, the rounds, stop, logging off.
            Some(migration) => u64::from(migration.rounds) + 4 + unmap as u64,
            None => {
                let phases = Phase::ALL.into_iter();
                phases.filter(|phase| self.phases.contains(*phase)).count() as u64
            }
        };
        each * u64::from(self.iterations)
    }
}

/// How far a run has come.
#[derive(Debug)]
pub enum Progress<'a> {
    /// The machine stands.
    Ready(&'a Region),
    /// Every vCPU has been in the guest once.
    Started,
    /// An iteration begins, counted from 0.
    Iteration(u32),
    /// A phase is done.
    Phase(&'a Record),
}

/// Who is told of progress. What it does is in no phase; its error ends the run.
pub type Observer<'a> = dyn FnMut(Progress<'_>) -> Result<(), Box<dyn Error + Send + Sync>> + 'a;

/// Runs the test.
///
/// # Errors
/// The machine, a vCPU, a check or the observer failed; records up to there have been handed on.
pub fn run(
    machine: &mut dyn Machine,
    plan: &Plan,
    observer: &mut Observer<'_>,
) -> Result<(), HarnessError> {
    let region = machine.region();
    let mut tell = |progress: Progress<'_>| observer(progress).map_err(HarnessError::Observer);
    tell(Progress::Ready(&region))?;
    let crew = Crew::start(machine.take_vcpus(), plan.deadline).map_err(HarnessError::Start)?;
    let mut run = Run {
        tasks: Tasks::new(region, plan.config.seed, 0),
        region,
        machine,
        crew,
        plan,
        iteration: 0,
        obtained: None,
        observer: &mut tell,
    };
    run.step("to enter the guest", |tasks, _| tasks.nothing())?;
    (run.observer)(Progress::Started)?;
    (0..plan.iterations).try_for_each(|iteration| match plan.migration {
        Some(migration) => run.migrate(migration, iteration),
        None => run.iterate(iteration),
    })
}

struct Run<'a> {
    machine: &'a mut dyn Machine,
    crew: Crew,
    plan: &'a Plan,
    region: Region,
    tasks: Tasks,
    iteration: u32,
    obtained: Option<Obtained>,
    observer: &'a mut dyn FnMut(Progress<'_>) -> Result<(), HarnessError>,
}

impl Run<'_> {
    fn begin(&mut self, iteration: u32) -> Result<(), HarnessError> {
        self.iteration = iteration;
        self.obtained = None;
        self.tasks = Tasks::new(self.region, self.plan.config.seed, iteration);
        (self.observer)(Progress::Iteration(iteration))
    }

    fn iterate(&mut self, iteration: u32) -> Result<(), HarnessError> {
        self.begin(iteration)?;
        let mut written = None;
        if self.wants(Phase::Create) {
            self.guest_phase(Phase::Create)?;
            written = Some(self.tasks.written_by(Phase::Create));
        }
        if self.wants(Phase::LoggingOn) {
            self.host_phase(Phase::LoggingOn, |machine| machine.set_dirty_logging(true))?;
        }
        if self.wants(Phase::Update) {
            self.guest_phase(Phase::Update)?;
            let update = self.tasks.written_by(Phase::Update);
            self.check_dirty_log(update)?;
            written = Some(update);
        }
        if self.wants(Phase::LoggingOff) {
            self.host_phase(Phase::LoggingOff, |machine| {
                machine.set_dirty_logging(false)
            })?;
        } else if self.wants(Phase::LoggingOn) {
            let off = self.machine.set_dirty_logging(false);
            off.map_err(host_error("switching dirty logging off"))?;
        }
        if self.wants(Phase::Rebuild) {
            self.guest_phase(Phase::Rebuild)?;
        }
        if self.wants(Phase::Exec) {
            self.step("planting instructions", |tasks, vcpu| match vcpu {
                0 => tasks.plant(),
                _ => tasks.nothing(),
            })?;
            self.guest_phase(Phase::Exec)?;
        }
        if let Some(written) = written {
            self.step("verifying contents", |tasks, vcpu| match vcpu {
                0 => tasks.verify(written),
                _ => tasks.nothing(),
            })?;
            check::contents(self.machine, written)?;
        }
        self.finish(iteration + 1 < self.plan.iterations)
    }

    /// Drops the backing, where asked for or needed, and makes ready for what follows.
    fn finish(&mut self, more: bool) -> Result<(), HarnessError> {
        if self.wants(Phase::Unmap) {
            self.host_phase(Phase::Unmap, |machine| machine.drop_backing())?;
        } else if more {
            let dropped = self.machine.drop_backing();
            dropped.map_err(host_error("dropping the backing"))?;
        }
        if more {
            let restored = self.machine.restore_backing();
            restored.map_err(host_error("restoring the backing"))?;
        }
        Ok(())
    }

    /// A machine that runs rounds itself has no crew.
    fn vcpus(&self) -> usize {
        match self.crew.vcpus() {
            0 => usize::try_from(self.plan.config.vcpus).unwrap_or(usize::MAX),
            crew => crew,
        }
    }

    fn wants(&self, phase: Phase) -> bool {
        self.plan.phases.contains(phase)
    }

    /// A round that belongs to no phase.
    fn step(
        &mut self,
        doing: &str,
        task: impl Fn(Tasks, usize) -> Task,
    ) -> Result<(), HarnessError> {
        let tasks: Vec<_> = (0..self.vcpus())
            .map(|vcpu| task(self.tasks, vcpu))
            .collect();
        if let Some(round) = self.machine.run_round(&tasks, 0, self.plan.deadline) {
            return round.map(drop).map_err(vcpu_error(doing));
        }
        self.crew
            .muster(&tasks, 0)
            .and_then(|muster| muster.release())
            .map(drop)
            .map_err(crew_error(doing))
    }

    fn guest_phase(&mut self, phase: Phase) -> Result<(), HarnessError> {
        let tasks: Vec<_> = (0..self.vcpus())
            .map(|vcpu| self.tasks.of(phase, vcpu))
            .collect();
        let seed = self.plan.config.seed;
        let before = self.machine.events().map_err(host_error("counting"))?;
        let own = self.machine.run_round(&tasks, seed, self.plan.deadline);
        let (before, times) = if let Some(round) = own {
            (before, round.map_err(vcpu_error(&in_phase(phase)))?)
        } else {
            let crew = &mut self.crew;
            let muster = crew.muster(&tasks, seed);
            let muster = muster.map_err(crew_error(&in_phase(phase)))?;
            let before = self.machine.events().map_err(host_error("counting"))?;
            mark::phase(phase);
            let times = muster.release();
            mark::outside();
            (before, times.map_err(crew_error(&in_phase(phase)))?)
        };
        let after = self.machine.events().map_err(host_error("counting"))?;
        if self.obtained.is_none() {
            self.read_backing_back()?;
        }
        self.record(phase, times, events::difference(&before, &after))
    }

    fn host_phase(
        &mut self,
        phase: Phase,
        work: impl FnOnce(&mut dyn Machine) -> Result<Nanoseconds, MachineError>,
    ) -> Result<(), HarnessError> {
        let before = self.machine.events().map_err(host_error("counting"))?;
        mark::phase(phase);
        let total = work(self.machine);
        mark::outside();
        let after = self.machine.events().map_err(host_error("counting"))?;
        let times = RoundTimes {
            total: total.map_err(host_error(&in_phase(phase)))?,
            vcpus: Vec::new(),
        };
        self.record(phase, times, events::difference(&before, &after))
    }

    fn record(
        &mut self,
        phase: Phase,
        times: RoundTimes,
        events: EventCounts,
    ) -> Result<(), HarnessError> {
        let gauges = self.machine.gauges().map_err(host_error("counting"))?;
        self.hand_on(phase, None, times, events, gauges)
    }

    fn hand_on(
        &mut self,
        phase: Phase,
        round: Option<u32>,
        times: RoundTimes,
        events: EventCounts,
        gauges: EventCounts,
    ) -> Result<(), HarnessError> {
        let record = Record {
            schema: SCHEMA.to_owned(),
            host: self.machine.host().clone(),
            engine: self.machine.engine().to_owned(),
            config: RunConfig {
                iteration: self.iteration,
                ..self.plan.config.clone()
            },
            obtained: self.obtained.clone(),
            phase,
            round,
            ns: times.total,
            vcpu_ns: times.vcpus,
            counters: Default::default(),
            events,
            gauges,
        };
        (self.observer)(Progress::Phase(&record))
    }

    fn read_backing_back(&mut self) -> Result<(), HarnessError> {
        let obtained = self
            .machine
            .obtained()
            .map_err(host_error("telling what backs the region"))?;
        let checked = check::backing(self.plan.config.backing, &self.region, &obtained);
        self.obtained = Some(obtained);
        match checked {
            Err(HarnessError::Backing {
                backing, obtained, ..
            }) if self.plan.accept_fallback => {
                log::warn!("{backing} fell back to {}", error::Listed(&obtained));
                Ok(())
            }
            checked => checked,
        }
    }

    fn check_dirty_log(&mut self, written: Written) -> Result<(), HarnessError> {
        let log = self
            .machine
            .dirty_log()
            .map_err(host_error("giving the dirty log"))?;
        check::dirty_log(&self.region, written, &log)
    }
}

fn in_phase(phase: Phase) -> String {
    format!("in {phase}")
}

fn crew_error(doing: &str) -> impl FnOnce(CrewError) -> HarnessError {
    |source| HarnessError::Crew {
        doing: doing.to_owned(),
        source,
    }
}

/// A machine that has no crew tells itself which vCPU failed.
fn vcpu_error(doing: &str) -> impl FnOnce(VcpuFailure) -> HarnessError {
    let told = crew_error(doing);
    |failure| told(CrewError::Failed(Box::new(failure)))
}

fn host_error(doing: &str) -> impl FnOnce(MachineError) -> HarnessError {
    |source| HarnessError::Host {
        doing: doing.to_owned(),
        source,
    }
}
