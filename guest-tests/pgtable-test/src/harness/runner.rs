// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The parts of a run that iterations and migrations share: phases, records, clean-up.

use super::{
    Observer, RunEvent, RunPlan,
    error::{self, HarnessError, host_error, threads_error},
    tasks::Tasks,
};
use crate::{
    machine::{Machine, MachineError, Region},
    task::Task,
    vcpu_threads::{TaskThreads, TaskTimes},
};
use granule_types::{
    backing::Backing,
    mark,
    phase::Phase,
    record::{EventCounts, Record, ResidentPages, RunConfig, SCHEMA},
    units::Nanoseconds,
};
use granule_vmm::kvm::tracepoints::difference;

/// Measurements of a phase or round.
pub(super) struct PhaseMeasurement {
    pub(super) phase: Phase,
    /// Number of the round of a migration.
    pub(super) round: Option<u32>,
    pub(super) times: TaskTimes,
    pub(super) events: EventCounts,
    pub(super) gauges: EventCounts,
}

/// A run in progress.
pub(super) struct Runner<'a, 'o> {
    pub(super) machine: &'a mut dyn Machine,
    pub(super) threads: TaskThreads,
    pub(super) plan: &'a RunPlan,
    pub(super) region: Region,
    /// The tasks of the current iteration.
    pub(super) tasks: Tasks,
    iteration: u32,
    obtained: Option<ResidentPages>,
    observer: &'a mut Observer<'o>,
}

impl<'a, 'o> Runner<'a, 'o> {
    /// Starts the vCPU threads and enters the guest once on each vCPU.
    pub(super) fn start(
        machine: &'a mut dyn Machine,
        plan: &'a RunPlan,
        observer: &'a mut Observer<'o>,
    ) -> Result<Self, HarnessError> {
        let region = machine.region();
        observer(RunEvent::Ready(&region)).map_err(HarnessError::Observer)?;
        let threads =
            TaskThreads::start(machine.take_vcpus(), plan.deadline).map_err(HarnessError::Start)?;
        let mut runner = Self {
            tasks: Tasks::new(region, plan.config.seed, 0),
            region,
            machine,
            threads,
            plan,
            iteration: 0,
            obtained: None,
            observer,
        };
        runner.untimed_step("entering the guest", |tasks, _| tasks.nothing())?;
        runner.observe(RunEvent::Started)?;
        Ok(runner)
    }

    fn observe(&mut self, progress: RunEvent<'_>) -> Result<(), HarnessError> {
        (self.observer)(progress).map_err(HarnessError::Observer)
    }

    /// Begins an iteration, with new tasks and unknown backing.
    pub(super) fn begin(&mut self, iteration: u32) -> Result<(), HarnessError> {
        self.iteration = iteration;
        self.obtained = None;
        self.tasks = Tasks::new(self.region, self.plan.config.seed, iteration);
        self.observe(RunEvent::Iteration(iteration))
    }

    /// Ends an iteration: drops the backing, where selected or needed, and prepares the region for
    /// the next iteration.
    pub(super) fn finish(&mut self) -> Result<(), HarnessError> {
        let more = self.iteration + 1 < self.plan.iterations;
        if self.selects(Phase::Unmap) {
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

    /// Returns whether the plan selects a phase.
    pub(super) fn selects(&self, phase: Phase) -> bool {
        self.plan.phases.contains(phase)
    }

    /// Runs tasks outside any phase.
    pub(super) fn untimed_step(
        &mut self,
        operation: &str,
        task: impl Fn(Tasks, usize) -> Task,
    ) -> Result<(), HarnessError> {
        let vcpus = 0..self.threads.vcpus();
        let tasks: Vec<_> = vcpus.map(|vcpu| task(self.tasks, vcpu)).collect();
        self.threads
            .arm(&tasks, 0)
            .and_then(|armed| armed.release())
            .map(drop)
            .map_err(threads_error(operation))
    }

    /// Runs a phase that the vCPUs execute.
    pub(super) fn guest_phase(&mut self, phase: Phase) -> Result<(), HarnessError> {
        let vcpus = 0..self.threads.vcpus();
        let tasks: Vec<_> = vcpus.map(|vcpu| self.tasks.for_vcpu(phase, vcpu)).collect();
        let operation = error::phase(phase);
        let armed = self.threads.arm(&tasks, self.plan.config.seed);
        let armed = armed.map_err(threads_error(&operation))?;
        let before = self.machine.events().map_err(host_error(error::COUNTERS))?;
        mark::phase(phase);
        let times = armed.release();
        mark::outside();
        let times = times.map_err(threads_error(&operation))?;
        let after = self.events()?;
        if self.obtained.is_none() {
            self.read_backing()?;
        }
        self.record(phase, times, difference(&before, &after))
    }

    /// Runs a phase that the host executes.
    pub(super) fn host_phase(
        &mut self,
        phase: Phase,
        work: impl FnOnce(&mut dyn Machine) -> Result<Nanoseconds, MachineError>,
    ) -> Result<(), HarnessError> {
        let before = self.events()?;
        mark::phase(phase);
        let total = work(self.machine);
        mark::outside();
        let after = self.events()?;
        let times = TaskTimes {
            total: total.map_err(host_error(&error::phase(phase)))?,
            vcpus: Vec::new(),
        };
        self.record(phase, times, difference(&before, &after))
    }

    fn events(&mut self) -> Result<EventCounts, HarnessError> {
        self.machine.events().map_err(host_error(error::COUNTERS))
    }

    fn record(
        &mut self,
        phase: Phase,
        times: TaskTimes,
        events: EventCounts,
    ) -> Result<(), HarnessError> {
        let gauges = self.machine.gauges().map_err(host_error(error::COUNTERS))?;
        self.observe_phase(PhaseMeasurement { phase, round: None, times, events, gauges })
    }

    /// Passes the record of a phase or round to the observer.
    pub(super) fn observe_phase(
        &mut self,
        PhaseMeasurement { phase, round, times, events, gauges }: PhaseMeasurement,
    ) -> Result<(), HarnessError> {
        let record = Record {
            schema: SCHEMA.to_owned(),
            host: self.machine.host().clone(),
            engine: self.machine.engine().to_owned(),
            config: RunConfig { iteration: self.iteration, ..self.plan.config.clone() },
            obtained: self.obtained.clone(),
            phase,
            round,
            ns: times.total,
            elapsed_ns: None,
            vcpu_ns: times.vcpus,
            counters: Default::default(),
            events,
            gauges,
        };
        self.observe(RunEvent::Phase(&record))
    }

    /// Reads and checks the page sizes that back the region.
    fn read_backing(&mut self) -> Result<(), HarnessError> {
        let obtained = self.machine.obtained();
        let obtained = obtained.map_err(host_error("reading the backing of the region"))?;
        let checked = check_backing(self.plan.config.backing, &self.region, &obtained);
        self.obtained = Some(obtained);
        match checked {
            Err(HarnessError::Backing { backing, obtained, .. }) if self.plan.accept_fallback => {
                log::warn!("{backing} fell back to {}", error::PageList(&obtained));
                Ok(())
            }
            checked => checked,
        }
    }
}

/// Checks that pages of the backing's size, and no others, back the whole region.
fn check_backing(
    backing: Backing,
    region: &Region,
    obtained: &ResidentPages,
) -> Result<(), HarnessError> {
    let whole = [(region.backing_page.0, region.size.0)];
    let found = obtained.resident.iter();
    let found = found.map(|(page, bytes)| (*page, *bytes));
    if found.filter(|(_, bytes)| *bytes > 0).eq(whole) {
        return Ok(());
    }
    Err(HarnessError::Backing {
        backing,
        size: region.size,
        page: region.backing_page,
        obtained: obtained.clone(),
    })
}
