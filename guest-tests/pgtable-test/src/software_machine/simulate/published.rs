// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The figures that were published for a Kunpeng 920, and the same simulated.
//!
//! Four rows may be [fitted](Fit): numbers of the table of costs are chosen so that the simulation
//! gives what was published there. All others are a test of the simulation: the gain must go the
//! published way and lie within [`TOLERANCE`]. A row that misses is listed with the reason in words,
//! and a reason without a miss is an error too, so that the list stays true.
//!
//! `guest-tests/examples/kunpeng920.rs` fits, judges and prints; its table stands in
//! `docs/simulation.md`.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Mutex, PoisonError},
    thread,
    time::Duration,
};

use granule_stage2::{CmoPlacement, Coalesce, ExistingLeaf, Policy};
use thiserror::Error;

use super::{SimulatedMachine, SimulationConfig, cost::CostTable};
use crate::{
    config::PhaseSelection,
    harness::{self, HarnessError, Plan, Progress},
    machine::Machine,
    software_machine::{ModelConfig, ModelError},
};
use granule_types::{backing::Backing, phase::Phase, record::RunConfig, units::Bytes};

/// Percentage points that a gain may be off on a row that was not fitted.
pub const TOLERANCE: f64 = 10.0;

/// The kernels that the figures compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kernel {
    /// Linux 5.12-rc2: as 5.10, but a leaf that differs in permissions alone is left.
    Base,
    /// With cache maintenance moved into the handlers.
    Handlers,
    /// With the block installed before the tables are freed, too. As published, the block's memory
    /// is then not cleaned.
    InstallFirst,
}

impl Kernel {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Base, Self::Handlers, Self::InstallFirst];

    /// The name that `--policy` takes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Base => "linux-5.12",
            Self::Handlers => "linux-5.12+handlers",
            Self::InstallFirst => "linux-5.12+handlers+install-first",
        }
    }

    /// What it does.
    pub const fn policy(self) -> Policy {
        let base = Policy {
            existing_leaf: ExistingLeaf::Retry,
            ..Policy::LINUX_5_10
        };
        match self {
            Self::Base => base,
            Self::Handlers => Policy {
                cmo: CmoPlacement::BetweenBreakAndMake,
                ..base
            },
            Self::InstallFirst => Policy {
                cmo: CmoPlacement::BetweenBreakAndMake,
                coalesce: Coalesce::InstallWithoutCmo,
                ..base
            },
        }
    }
}

/// One load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// What is behind the memory.
    pub backing: Backing,
    /// How much.
    pub memory: Bytes,
    /// How many vCPUs.
    pub vcpus: u32,
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}, {}", self.backing, self.memory, self.vcpus)
    }
}

impl Load {
    /// The same with less memory, not less than one page of it, and how often it then fits.
    fn divided(self, by: u64) -> (Self, f64) {
        let page = match self.backing {
            Backing::AnonymousHugetlb(Some(size)) => size.0,
            _ => 2 << 20,
        };
        let memory = (self.memory.0 / by / page).max(1) * page;
        let load = Self {
            memory: Bytes(memory),
            ..self
        };
        (load, seconds_of(self.memory.0) / seconds_of(memory))
    }
}

#[expect(clippy::cast_precision_loss, reason = "nothing here has 53 bits")]
fn seconds_of(number: u64) -> f64 {
    number as f64
}

/// One row of the published figures.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Which change, by the number it was published under.
    pub change: u8,
    /// The load.
    pub load: Load,
    /// The phase.
    pub phase: Phase,
    /// Seconds before and after.
    pub seconds: (f64, f64),
    /// Whether numbers were fitted to it.
    pub fitted: bool,
    /// Why the simulation misses it, where it does.
    pub miss: Option<&'static str>,
}

const THP: Backing = Backing::AnonymousThp;
const HUGETLB: Backing = Backing::AnonymousHugetlb(Some(Bytes::gib(1)));

const fn row(
    change: u8,
    (backing, gib, vcpus): (Backing, u64, u32),
    phase: Phase,
    seconds: (f64, f64),
) -> Row {
    Row {
        change,
        load: Load {
            backing,
            memory: Bytes::gib(gib),
            vcpus,
        },
        phase,
        seconds,
        fitted: false,
        miss: None,
    }
}

const fn fitted(row: Row) -> Row {
    Row {
        fitted: true,
        ..row
    }
}

const fn missed(row: Row, why: &'static str) -> Row {
    Row {
        miss: Some(why),
        ..row
    }
}

const NO_COALESCING: &str = "with the host's huge zero page a reader is first on every block, so no \
    block is the guest's own and none is put together again, before or after the change; what \
    coalescing there was on the real machine is not known";

/// The rows, in the order of publication.
pub const ROWS: [Row; 13] = [
    row(
        1,
        (Backing::Anonymous, 1, 80),
        Phase::Create,
        (104.63, 97.30),
    ),
    row(
        1,
        (Backing::Anonymous, 1, 80),
        Phase::Update,
        (78.47, 77.18),
    ),
    fitted(row(1, (THP, 20, 40), Phase::Create, (15.70, 7.36))),
    row(1, (THP, 20, 40), Phase::Update, (161.00, 135.03)),
    row(1, (THP, 20, 40), Phase::Rebuild, (170.49, 145.46)),
    fitted(row(1, (HUGETLB, 20, 40), Phase::Create, (104.55, 3.69))),
    fitted(row(1, (HUGETLB, 20, 40), Phase::Update, (160.67, 130.65))),
    row(1, (HUGETLB, 20, 40), Phase::Rebuild, (103.95, 2.96)),
    missed(
        row(2, (THP, 20, 20), Phase::Rebuild, (73.64, 57.75)),
        NO_COALESCING,
    ),
    missed(
        row(2, (THP, 20, 40), Phase::Rebuild, (145.4, 130.8)),
        NO_COALESCING,
    ),
    fitted(row(2, (HUGETLB, 1, 80), Phase::Rebuild, (0.166, 0.035))),
    row(2, (HUGETLB, 20, 20), Phase::Rebuild, (2.875, 0.282)),
    row(2, (HUGETLB, 20, 40), Phase::Rebuild, (2.965, 0.359)),
];

impl Row {
    /// The kernels before and after.
    pub const fn kernels(&self) -> (Kernel, Kernel) {
        match self.change {
            1 => (Kernel::Base, Kernel::Handlers),
            _ => (Kernel::Handlers, Kernel::InstallFirst),
        }
    }
}

/// Why the figures cannot be simulated.
#[derive(Debug, Error)]
pub enum PublishedError {
    /// There is no such machine.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The test failed.
    #[error(transparent)]
    Harness(#[from] HarnessError),
}

/// Those phases up to `last` that figures were published for.
fn phases_to(last: Phase) -> PhaseSelection {
    let all = [Phase::Create, Phase::Update, Phase::Rebuild];
    let wanted: Vec<_> = all.into_iter().filter(|phase| *phase <= last).collect();
    PhaseSelection::of(&wanted)
}

/// Seconds by phase.
pub type Seconds = BTreeMap<Phase, f64>;

/// Runs a load on a kernel through the phases up to `last`, on memory `divisor` times smaller (the
/// seconds are for all of it: whatever happens, happens in every part).
///
/// # Errors
/// The machine cannot be made, or the test failed.
pub fn simulate(
    load: Load,
    kernel: Kernel,
    costs: &CostTable,
    (last, divisor): (Phase, u64),
) -> Result<Seconds, PublishedError> {
    let (smaller, times) = load.divided(divisor);
    let mut costs = costs.clone();
    // What comes by the clock comes as often for each part of the memory.
    costs.numa_scan_period.value /= times;
    costs.numa_scan_longest.value /= times;
    costs.numa_scan_bytes.value /= times;
    let config = SimulationConfig {
        model: ModelConfig {
            backing: load.backing,
            memory: smaller.memory,
            vcpus: load.vcpus,
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
            backing: load.backing,
            memory: machine.region().size,
            vcpus: load.vcpus,
            seed: 1,
            iteration: 0,
            prefault: false,
            options: BTreeMap::new(),
        },
        iterations: 1,
        phases: phases_to(last),
        migration: None,
        deadline: Duration::from_secs(24 * 3600),
        // Small zero pages where huge pages were asked for: that is the host's way.
        accept_fallback: true,
    };
    let mut seconds = Seconds::new();
    harness::run(&mut machine, &plan, &mut |progress| {
        if let Progress::Phase(record) = progress {
            let time = seconds_of(record.ns.0) * 1e-9 * times;
            seconds.insert(record.phase, time);
        }
        Ok(())
    })?;
    Ok(seconds)
}

/// A row and what the simulation makes of it.
#[derive(Debug, Clone, Copy)]
pub struct Judged {
    /// The row.
    pub row: Row,
    /// Simulated seconds before and after.
    pub simulated: (f64, f64),
}

/// Percent that `after` is less than `before`.
pub fn gain((before, after): (f64, f64)) -> f64 {
    (before - after) / before * 100.0
}

impl Judged {
    /// Percentage points that the simulated gain is above the published one.
    pub fn off(&self) -> f64 {
        gain(self.simulated) - gain(self.row.seconds)
    }

    /// Whether the direction is right, and where it was not fitted the gain near enough.
    pub fn holds(&self) -> bool {
        let near = self.row.fitted || self.off().abs() <= TOLERANCE;
        gain(self.simulated) > 0.0 && near
    }

    /// Whether it is as the row says: held, or missed for a reason that is told.
    pub fn is_as_told(&self) -> bool {
        self.holds() == self.row.miss.is_none()
    }
}

/// Simulates every row, as many loads at once as there are `threads`, each told to `progress` when
/// it is done.
///
/// # Errors
/// A load could not be simulated.
pub fn judge(
    costs: &CostTable,
    divisor: u64,
    threads: usize,
    progress: &(dyn Fn(&Load, Kernel, &Seconds) + Sync),
) -> Result<Vec<Judged>, PublishedError> {
    let mut jobs: Vec<(Load, Kernel, Phase)> = Vec::new();
    for row in &ROWS {
        for kernel in [row.kernels().0, row.kernels().1] {
            let known = jobs
                .iter_mut()
                .find(|job| (job.0, job.1) == (row.load, kernel));
            match known {
                Some(job) => job.2 = job.2.max(row.phase),
                None => jobs.push((row.load, kernel, row.phase)),
            }
        }
    }
    let next = Mutex::new(jobs.iter());
    let done = Mutex::new(Vec::new());
    let work = || -> Result<(), PublishedError> {
        loop {
            let job = next.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(&(load, kernel, last)) = job else {
                return Ok(());
            };
            let seconds = simulate(load, kernel, costs, (last, divisor))?;
            progress(&load, kernel, &seconds);
            let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
            done.push((load, kernel, seconds));
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
            .find(|(load, of, _)| (*load, *of) == (row.load, kernel))
            .and_then(|(_, _, seconds)| seconds.get(&row.phase).copied())
            .unwrap_or(f64::NAN)
    };
    let judged = ROWS.iter().map(|row| {
        let (before, after) = row.kernels();
        Judged {
            row: *row,
            simulated: (seconds(row, before), seconds(row, after)),
        }
    });
    Ok(judged.collect())
}

/// One number of the table and what it is fitted to.
#[derive(Debug, Clone, Copy)]
pub struct Fit {
    /// The number.
    pub number: &'static str,
    /// The row, by its place in [`ROWS`].
    pub row: usize,
    /// What of the row: seconds before or after, seconds between, or the gain.
    pub of: Quantity,
}

/// What of a row is fitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantity {
    /// Seconds after the change.
    After,
    /// Seconds that the change saved.
    Saved,
    /// The gain in percent.
    Gain,
}

impl Quantity {
    fn of(self, (before, after): (f64, f64)) -> f64 {
        match self {
            Self::After => after,
            Self::Saved => before - after,
            Self::Gain => gain((before, after)),
        }
    }
}

/// What is fitted, in this order.
pub const FITS: [Fit; 6] = [
    fit("clean_line_long", 5, Quantity::Saved),
    fit("zero_rate", 5, Quantity::After),
    fit("fault_locked", 6, Quantity::After),
    fit("clean_start", 6, Quantity::Saved),
    fit("clean_line", 2, Quantity::Gain),
    fit("guest_touch_shared", 10, Quantity::After),
];

const fn fit(number: &'static str, row: usize, of: Quantity) -> Fit {
    Fit { number, row, of }
}

impl Fit {
    /// What was published, and what the simulation gives on memory `divisor` times smaller.
    ///
    /// # Errors
    /// The row cannot be simulated.
    pub fn measure(&self, costs: &CostTable, divisor: u64) -> Result<(f64, f64), PublishedError> {
        let row = &ROWS[self.row];
        let seconds = |kernel| {
            let of = simulate(row.load, kernel, costs, (row.phase, divisor))?;
            Ok::<_, PublishedError>(of.get(&row.phase).copied().unwrap_or(f64::NAN))
        };
        let after = seconds(row.kernels().1)?;
        let before = match self.of {
            Quantity::After => after,
            _ => seconds(row.kernels().0)?,
        };
        Ok((self.of.of(row.seconds), self.of.of((before, after))))
    }

    /// Moves the number to where a straight line through two points meets what was published; gives
    /// it.
    ///
    /// # Errors
    /// As [`Fit::measure`].
    pub fn improve(&self, costs: &mut CostTable, divisor: u64) -> Result<f64, PublishedError> {
        let set = |costs: &mut CostTable, to: f64| {
            costs
                .number_mut(self.number)
                .map(|number| std::mem::replace(&mut number.value, to))
        };
        let Some(here) = set(costs, 0.0) else {
            return Ok(f64::NAN);
        };
        let aside = here * 1.25;
        set(costs, aside);
        let (_, there) = self.measure(costs, divisor)?;
        set(costs, here);
        let (wanted, now) = self.measure(costs, divisor)?;
        let slope = (there - now) / (aside - here);
        let best = (here + (wanted - now) / slope).clamp(here / 4.0, here * 4.0);
        // Three digits are more than the figures have.
        let best = format!("{best:.2e}").parse().unwrap_or(here);
        set(costs, best);
        Ok(best)
    }
}
