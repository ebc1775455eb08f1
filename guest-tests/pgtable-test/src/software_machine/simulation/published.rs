// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The figures published for a Kunpeng 920, and their simulation.
//!
//! Costs are [fitted](CostFit) to four rows, so that the simulation reproduces their published
//! figures.
//! All other rows test the simulation: the gain must have the published sign and be within
//! [`TOLERANCE`] percentage points. A row that misses states the reason; a row that states a reason
//! and holds is an error, too.
//!
//! The example `kunpeng920` fits, judges and prints the table of `docs/simulation.md`.

use std::{
    collections::BTreeMap,
    error::Error,
    fmt, panic,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use super::{PublishedKernel, SimulatedMachine, SimulationConfig, cost::CostTable};
use crate::{
    config::PhaseSelection,
    harness::{self, RunEvent, RunPlan},
    machine::Machine,
    software_machine::SoftwareMachineConfig,
};
use granule_types::{backing::Backing, phase::Phase, units::Bytes};

/// Error of a simulation of the published rows.
pub type PublishedError = Box<dyn Error + Send + Sync>;

/// Maximum difference of the gain of a row that is not fitted, in percentage points.
pub const TOLERANCE: f64 = 10.0;

/// The workload of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Backing of the memory.
    pub backing: Backing,
    /// Size of the memory.
    pub memory: Bytes,
    /// Number of vCPUs.
    pub vcpus: u32,
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}, {}", self.backing, self.memory, self.vcpus)
    }
}

impl Workload {
    /// Returns the workload with less memory, at least one page, and the factor of the reduction.
    fn scaled_down(self, by: u64) -> (Self, f64) {
        let page = match self.backing {
            Backing::AnonymousHugetlb(Some(size)) => size.0,
            _ => 2 << 20,
        };
        let memory = (self.memory.0 / by / page).max(1) * page;
        let smaller = Self { memory: Bytes(memory), ..self };
        (smaller, as_f64(self.memory.0) / as_f64(memory))
    }
}

#[expect(clippy::cast_precision_loss, reason = "all numbers are below 2^53")]
fn as_f64(number: u64) -> f64 {
    number as f64
}

/// One row of the published figures.
#[derive(Debug, Clone, Copy)]
pub struct PublishedRow {
    /// Number of the published change.
    pub change: u8,
    /// The workload.
    pub workload: Workload,
    /// The phase.
    pub phase: Phase,
    /// Published seconds before and after the change.
    pub seconds: (f64, f64),
    /// `true` if costs are fitted to the row.
    pub fitted: bool,
    /// The reason for a row that the simulation is known to miss.
    pub miss: Option<&'static str>,
}

const THP: Backing = Backing::AnonymousThp;
const HUGETLB: Backing = Backing::AnonymousHugetlb(Some(Bytes::gib(1)));

const fn row(
    change: u8,
    (backing, gib, vcpus): (Backing, u64, u32),
    phase: Phase,
    seconds: (f64, f64),
) -> PublishedRow {
    PublishedRow {
        change,
        workload: Workload { backing, memory: Bytes::gib(gib), vcpus },
        phase,
        seconds,
        fitted: false,
        miss: None,
    }
}

const fn fitted(row: PublishedRow) -> PublishedRow {
    PublishedRow { fitted: true, ..row }
}

const fn missed(row: PublishedRow, why: &'static str) -> PublishedRow {
    PublishedRow { miss: Some(why), ..row }
}

const NO_COALESCING: &str = "a reader is first on every block and maps the host's huge zero page, so \
    no block becomes private and none is coalesced, before or after the change; which blocks the \
    real machine coalesced is not known";

/// The published rows, in the order of publication.
pub const ROWS: [PublishedRow; 13] = [
    row(1, (Backing::Anonymous, 1, 80), Phase::Create, (104.63, 97.30)),
    row(1, (Backing::Anonymous, 1, 80), Phase::Update, (78.47, 77.18)),
    fitted(row(1, (THP, 20, 40), Phase::Create, (15.70, 7.36))),
    row(1, (THP, 20, 40), Phase::Update, (161.00, 135.03)),
    row(1, (THP, 20, 40), Phase::Rebuild, (170.49, 145.46)),
    fitted(row(1, (HUGETLB, 20, 40), Phase::Create, (104.55, 3.69))),
    fitted(row(1, (HUGETLB, 20, 40), Phase::Update, (160.67, 130.65))),
    row(1, (HUGETLB, 20, 40), Phase::Rebuild, (103.95, 2.96)),
    missed(row(2, (THP, 20, 20), Phase::Rebuild, (73.64, 57.75)), NO_COALESCING),
    missed(row(2, (THP, 20, 40), Phase::Rebuild, (145.4, 130.8)), NO_COALESCING),
    fitted(row(2, (HUGETLB, 1, 80), Phase::Rebuild, (0.166, 0.035))),
    row(2, (HUGETLB, 20, 20), Phase::Rebuild, (2.875, 0.282)),
    row(2, (HUGETLB, 20, 40), Phase::Rebuild, (2.965, 0.359)),
];

impl PublishedRow {
    /// Returns the kernels before and after the change.
    pub const fn kernels(&self) -> (PublishedKernel, PublishedKernel) {
        match self.change {
            1 => (PublishedKernel::Base, PublishedKernel::Handlers),
            _ => (PublishedKernel::Handlers, PublishedKernel::InstallFirst),
        }
    }
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
    let (smaller, times) = workload.scaled_down(divisor);
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
    let memory = machine.region().size;
    let mut plan = RunPlan {
        phases: phases_to(last),
        deadline: Duration::from_secs(24 * 3600),
        // With THP the host splits huge zero pages into small ones.
        accept_fallback: true,
        ..RunPlan::new(String::new(), workload.backing, memory, workload.vcpus)
    };
    plan.config.seed = 1;
    let mut seconds = Seconds::new();
    harness::run(&mut machine, &plan, &mut |progress| {
        if let RunEvent::Phase(record) = progress {
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
    pub row: PublishedRow,
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
            let known = jobs.iter_mut().find(|job| (job.0, job.1) == (row.workload, kernel));
            match known {
                Some(job) => job.2 = job.2.max(row.phase),
                None => jobs.push((row.workload, kernel, row.phase)),
            }
        }
    }
    let next = AtomicUsize::new(0);
    let work = || -> Result<Vec<_>, PublishedError> {
        let mut done = Vec::new();
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let &(workload, kernel, last) = job;
            let seconds = simulate(workload, kernel, costs, (last, divisor))?;
            progress(&workload, kernel, &seconds);
            done.push((workload, kernel, seconds));
        }
        Ok(done)
    };
    let done = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
        let results = workers.into_iter().map(|worker| worker.join());
        results
            .map(|result| result.unwrap_or_else(|panic| panic::resume_unwind(panic)))
            .collect::<Result<Vec<_>, _>>()
    })?
    .concat();
    let seconds = |row: &PublishedRow, kernel| {
        done.iter()
            .find(|(workload, of, _)| (*workload, *of) == (row.workload, kernel))
            .and_then(|(_, _, seconds)| seconds.get(&row.phase).copied())
            .unwrap_or(f64::NAN)
    };
    let judged = ROWS.iter().map(|row| {
        let (before, after) = row.kernels();
        JudgedRow { row: *row, simulated: (seconds(row, before), seconds(row, after)) }
    });
    Ok(judged.collect())
}

/// A fitted number of the cost table.
#[derive(Debug, Clone, Copy)]
pub struct CostFit {
    /// Name of the number.
    pub number: &'static str,
    /// Index of the row in [`ROWS`].
    pub row: usize,
    /// The fitted quantity of the row.
    pub of: FitQuantity,
}

/// A quantity of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FitQuantity {
    /// Published time after the change, in seconds.
    After,
    /// Reduction of the published time by the change, in seconds.
    Saved,
    /// The gain in percent.
    Gain,
}

impl FitQuantity {
    fn value(self, (before, after): (f64, f64)) -> f64 {
        match self {
            Self::After => after,
            Self::Saved => before - after,
            Self::Gain => gain((before, after)),
        }
    }
}

/// The fitted numbers, in the order of fitting.
pub const FITS: [CostFit; 6] = [
    fit("clean_line_long", 5, FitQuantity::Saved),
    fit("zero_rate", 5, FitQuantity::After),
    fit("fault_locked", 6, FitQuantity::After),
    fit("clean_start", 6, FitQuantity::Saved),
    fit("clean_line", 2, FitQuantity::Gain),
    fit("guest_touch_shared", 10, FitQuantity::After),
];

const fn fit(number: &'static str, row: usize, of: FitQuantity) -> CostFit {
    CostFit { number, row, of }
}

impl CostFit {
    /// Returns the published quantity, and the one simulated on memory `divisor` times smaller.
    ///
    /// # Errors
    /// The row cannot be simulated.
    pub fn measure(&self, costs: &CostTable, divisor: u64) -> Result<(f64, f64), PublishedError> {
        let row = &ROWS[self.row];
        let seconds = |kernel| {
            let of = simulate(row.workload, kernel, costs, (row.phase, divisor))?;
            Ok::<_, PublishedError>(of.get(&row.phase).copied().unwrap_or(f64::NAN))
        };
        let after = seconds(row.kernels().1)?;
        let before = match self.of {
            FitQuantity::After => after,
            _ => seconds(row.kernels().0)?,
        };
        Ok((self.of.value(row.seconds), self.of.value((before, after))))
    }

    /// Sets the number by linear interpolation between two simulations, so that the simulated
    /// quantity equals the published one, and returns it.
    ///
    /// # Errors
    /// As [`CostFit::measure`].
    pub fn improve(&self, costs: &mut CostTable, divisor: u64) -> Result<f64, PublishedError> {
        let set = |costs: &mut CostTable, to: f64| {
            let mut numbers = costs.numbers().into_iter();
            let number = numbers.find(|(name, _)| *name == self.number);
            number.map_or(f64::NAN, |(_, number)| std::mem::replace(&mut number.value, to))
        };
        let here = set(costs, 0.0);
        let aside = here * 1.25;
        set(costs, aside);
        let (_, there) = self.measure(costs, divisor)?;
        set(costs, here);
        let (published, now) = self.measure(costs, divisor)?;
        let slope = (there - now) / (aside - here);
        let best = (here + (published - now) / slope).clamp(here / 4.0, here * 4.0);
        // The published figures have at most three digits.
        let best = format!("{best:.2e}").parse().unwrap_or(here);
        set(costs, best);
        Ok(best)
    }
}
