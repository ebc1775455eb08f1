// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Phases, records and clean-up, for iterations of the test and of a migration.

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
    pub(super) tasks: Tasks,
    iteration: u32,
    resident_pages: Option<ResidentPages>,
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
        observer(RunEvent::MachineReady(&region)).map_err(HarnessError::Observer)?;
        let threads = TaskThreads::start(machine.take_vcpus(), plan.deadline)
            .map_err(HarnessError::StartVcpus)?;
        let mut runner = Self {
            tasks: Tasks::new(region, plan.config.seed, 0),
            region,
            machine,
            threads,
            plan,
            iteration: 0,
            resident_pages: None,
            observer,
        };
        runner.untimed_step("entering the guest", |tasks, _| tasks.idle_task())?;
        runner.observe(RunEvent::VcpusStarted)?;
        Ok(runner)
    }

    fn observe(&mut self, event: RunEvent<'_>) -> Result<(), HarnessError> {
        (self.observer)(event).map_err(HarnessError::Observer)
    }

    pub(super) fn begin_iteration(&mut self, iteration: u32) -> Result<(), HarnessError> {
        self.iteration = iteration;
        self.resident_pages = None;
        self.tasks = Tasks::new(self.region, self.plan.config.seed, iteration);
        self.observe(RunEvent::IterationStarted(iteration))
    }

    /// Ends an iteration: drops the backing if `unmap` is selected or another iteration follows,
    /// and prepares the region for the next iteration.
    pub(super) fn finish_iteration(&mut self) -> Result<(), HarnessError> {
        let has_next = self.iteration + 1 < self.plan.iterations;
        if self.selects(Phase::Unmap) {
            self.host_phase(Phase::Unmap, |machine| machine.drop_backing())?;
        } else if has_next {
            let dropped = self.machine.drop_backing();
            dropped.map_err(host_error("dropping the backing"))?;
        }
        if has_next {
            let restored = self.machine.restore_backing();
            restored.map_err(host_error("restoring the backing"))?;
        }
        Ok(())
    }

    pub(super) fn selects(&self, phase: Phase) -> bool {
        self.plan.phases.contains(phase)
    }

    /// Runs tasks outside the phases.
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
        let operation = error::in_phase(phase);
        let armed = self.threads.arm(&tasks, self.plan.config.seed);
        let armed = armed.map_err(threads_error(&operation))?;
        let before = self.machine.events().map_err(host_error(error::READING_COUNTERS))?;
        mark::begin_phase(phase);
        let times = armed.release();
        mark::end_phase();
        let times = times.map_err(threads_error(&operation))?;
        let after = self.read_events()?;
        if self.resident_pages.is_none() {
            self.read_backing()?;
        }
        self.record_phase(phase, times, difference(&before, &after))
    }

    /// Runs a phase that the host executes.
    pub(super) fn host_phase(
        &mut self,
        phase: Phase,
        work: impl FnOnce(&mut dyn Machine) -> Result<Nanoseconds, MachineError>,
    ) -> Result<(), HarnessError> {
        let before = self.read_events()?;
        mark::begin_phase(phase);
        let total = work(self.machine);
        mark::end_phase();
        let after = self.read_events()?;
        let times = TaskTimes {
            total: total.map_err(host_error(&error::in_phase(phase)))?,
            vcpus: Vec::new(),
        };
        self.record_phase(phase, times, difference(&before, &after))
    }

    fn read_events(&mut self) -> Result<EventCounts, HarnessError> {
        self.machine.events().map_err(host_error(error::READING_COUNTERS))
    }

    fn record_phase(
        &mut self,
        phase: Phase,
        times: TaskTimes,
        events: EventCounts,
    ) -> Result<(), HarnessError> {
        let gauges = self.machine.gauges().map_err(host_error(error::READING_COUNTERS))?;
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
            resident_pages: self.resident_pages.clone(),
            phase,
            round,
            ns: times.total,
            vcpu_ns: times.vcpus,
            events,
            gauges,
            ..Record::default()
        };
        self.observe(RunEvent::PhaseComplete(&record))
    }

    /// Reads and checks the sizes of the pages that back the region.
    fn read_backing(&mut self) -> Result<(), HarnessError> {
        let resident = self.machine.resident_pages();
        let resident = resident.map_err(host_error("reading the backing of the region"))?;
        let checked = check_backing(self.plan.config.backing, &self.region, &resident);
        self.resident_pages = Some(resident);
        match checked {
            Err(HarnessError::Fallback { backing, resident_pages, .. })
                if self.plan.accepts_fallback =>
            {
                log::warn!("{backing} fell back to {}", error::ResidentPageList(&resident_pages));
                Ok(())
            }
            checked => checked,
        }
    }
}

/// Checks that only pages of the configured size back the region.
fn check_backing(
    backing: Backing,
    region: &Region,
    resident_pages: &ResidentPages,
) -> Result<(), HarnessError> {
    let whole = [(region.backing_page_size.0, region.size.0)];
    let found = resident_pages.resident_bytes.iter();
    let found = found.map(|(page, bytes)| (*page, *bytes));
    if found.filter(|(_, bytes)| *bytes > 0).eq(whole) {
        return Ok(());
    }
    Err(HarnessError::Fallback {
        backing,
        size: region.size,
        page_size: region.backing_page_size,
        resident_pages: resident_pages.clone(),
    })
}
