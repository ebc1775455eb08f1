// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Simulation of the published rows, and their comparison.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    thread,
    time::Duration,
};

use thiserror::Error;

use super::rows::{ROWS, Row, Workload, as_f64};
use crate::{
    config::PhaseSelection,
    harness::{self, HarnessError, Plan, Progress},
    machine::Machine,
    software_machine::{
        config::{SoftwareMachineConfig, SoftwareMachineError},
        simulation::{
            config::SimulationConfig, cost::CostTable, kernels::PublishedKernel,
            machine::SimulatedMachine,
        },
    },
};
use granule_types::{phase::Phase, record::RunConfig};

/// Greatest difference of the gain of a row that is not fitted, in percentage points.
pub const TOLERANCE: f64 = 10.0;

/// Error of a simulation of the published rows.
#[derive(Debug, Error)]
pub enum PublishedError {
    /// The machine cannot be made.
    #[error(transparent)]
    Machine(#[from] SoftwareMachineError),
    /// The run failed.
    #[error(transparent)]
    Harness(#[from] HarnessError),
}

/// Returns the phases with published figures, up to `last`.
fn phases_to(last: Phase) -> PhaseSelection {
    let all = [Phase::Create, Phase::Update, Phase::Rebuild];
    let phases: Vec<_> = all.into_iter().filter(|phase| *phase <= last).collect();
    PhaseSelection::of(&phases)
}

/// Seconds by phase.
pub type Seconds = BTreeMap<Phase, f64>;

/// Simulates a workload on a kernel through the phases up to `last`. The memory is `divisor` times
/// smaller and the returned seconds are multiplied accordingly, as all parts of the memory behave
/// alike.
///
/// # Errors
/// The machine cannot be made, or the run failed.
pub fn simulate(
    workload: Workload,
    kernel: PublishedKernel,
    costs: &CostTable,
    (last, divisor): (Phase, u64),
) -> Result<Seconds, PublishedError> {
    let (smaller, times) = workload.divided(divisor);
    let mut costs = costs.clone();
    // Scans of NUMA balancing are periodic: keep their number for each part of the memory.
    costs.numa_scan_period.value /= times;
    costs.numa_scan_longest.value /= times;
    costs.numa_scan_bytes.value /= times;
    let config = SimulationConfig {
        machine: SoftwareMachineConfig {
            backing: workload.backing,
            memory: smaller.memory,
            vcpus: workload.vcpus,
            policy: kernel.name().to_owned(),
        },
        policy: kernel.policy(),
        costs_name: costs.machine.clone(),
        costs,
        prefault: false,
    };
    let mut machine = SimulatedMachine::new(&config)?;
    let plan = Plan {
        config: RunConfig {
            mode: String::new(),
            backing: workload.backing,
            memory: machine.region().size,
            vcpus: workload.vcpus,
            seed: 1,
            iteration: 0,
            prefault: false,
            options: BTreeMap::new(),
        },
        iterations: 1,
        phases: phases_to(last),
        migration: None,
        deadline: Duration::from_secs(24 * 3600),
        // With THP the host splits huge zero pages into small ones.
        accept_fallback: true,
    };
    let mut seconds = Seconds::new();
    harness::run(&mut machine, &plan, &mut |progress| {
        if let Progress::Phase(record) = progress {
            let time = as_f64(record.ns.0) * 1e-9 * times;
            seconds.insert(record.phase, time);
        }
        Ok(())
    })?;
    Ok(seconds)
}

/// A row with its simulated seconds.
#[derive(Debug, Clone, Copy)]
pub struct JudgedRow {
    /// The row.
    pub row: Row,
    /// Simulated seconds before and after the change.
    pub simulated: (f64, f64),
}

/// Returns the gain in percent: how much less `after` is than `before`.
pub fn gain((before, after): (f64, f64)) -> f64 {
    (before - after) / before * 100.0
}

impl JudgedRow {
    /// Returns the difference of the simulated and the published gain, in percentage points.
    pub fn off(&self) -> f64 {
        gain(self.simulated) - gain(self.row.seconds)
    }

    /// Returns whether the simulated change is a gain, and within [`TOLERANCE`] unless fitted.
    pub fn holds(&self) -> bool {
        let near = self.row.fitted || self.off().abs() <= TOLERANCE;
        gain(self.simulated) > 0.0 && near
    }

    /// Returns whether the row holds, or misses for a known reason.
    pub fn matches_expectation(&self) -> bool {
        self.holds() == self.row.miss.is_none()
    }
}

/// Simulates every row on a number of threads, and calls `progress` after each workload.
///
/// # Errors
/// A workload cannot be simulated.
pub fn judge(
    costs: &CostTable,
    divisor: u64,
    threads: usize,
    progress: &(dyn Fn(&Workload, PublishedKernel, &Seconds) + Sync),
) -> Result<Vec<JudgedRow>, PublishedError> {
    let mut jobs: Vec<(Workload, PublishedKernel, Phase)> = Vec::new();
    for row in &ROWS {
        for kernel in [row.kernels().0, row.kernels().1] {
            let known = jobs
                .iter_mut()
                .find(|job| (job.0, job.1) == (row.workload, kernel));
            match known {
                Some(job) => job.2 = job.2.max(row.phase),
                None => jobs.push((row.workload, kernel, row.phase)),
            }
        }
    }
    let next = Mutex::new(jobs.iter());
    let done = Mutex::new(Vec::new());
    let work = || -> Result<(), PublishedError> {
        loop {
            let job = next.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(&(workload, kernel, last)) = job else {
                return Ok(());
            };
            let seconds = simulate(workload, kernel, costs, (last, divisor))?;
            progress(&workload, kernel, &seconds);
            let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
            done.push((workload, kernel, seconds));
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .try_for_each(|worker| match worker.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            })
    })?;
    let done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    let seconds = |row: &Row, kernel| {
        done.iter()
            .find(|(workload, of, _)| (*workload, *of) == (row.workload, kernel))
            .and_then(|(_, _, seconds)| seconds.get(&row.phase).copied())
            .unwrap_or(f64::NAN)
    };
    let judged = ROWS.iter().map(|row| {
        let (before, after) = row.kernels();
        JudgedRow {
            row: *row,
            simulated: (seconds(row, before), seconds(row, after)),
        }
    });
    Ok(judged.collect())
}
