// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two sets of results side by side: before and after.
//!
//! ```text
//! results, run directories ─┐
//! logs of the kernel's tests ├─ input ─ [Sample] ─┐                     ┌─ text, markdown, html
//! criterion's estimates ────┘                     ├─ Comparison::of ────┼─ csv, json
//!                            (and once more) ─────┘  (provenance,       └─ ktap, benchstat
//!                                                     table, judge, stats)       (render)
//! ```
//!
//! Samples are put into one group for each configuration (engine, mode, backing, size, vCPUs) and
//! step; seeds and iterations are the runs within a group. Before any figure is given, the two sides
//! must have the same provenance (provenance). Then each step's runs are tested against each
//! other and judged, over the whole table at once . Counts explain a time and are judged
//! by the reader, unless one of them is what is asked for ([`Options::metric`]).

mod error;
mod group;
mod growth;
mod notes;
mod table;

use std::collections::BTreeMap;

use serde::Serialize;

pub use self::{
    error::CompareError,
    group::{Group, groups},
    growth::{Family, Fit, Growing, Growth, families, fit, is_exact},
};
use crate::{
    judge::{Tested, Verdict},
    provenance::Difference,
    sample::{Sample, Setup, Step},
    side::Side,
    spread::{self, Change},
};

/// The schema of a comparison in JSON.
pub const SCHEMA: &str = "granule.comparison/2";
/// From which share of before on more is worse, unless told otherwise.
pub const LEAST_EFFECT: f64 = 0.01;
/// The same under emulation, where another interleaving alone makes a difference.
pub const LEAST_EFFECT_EMULATED: f64 = 0.03;

/// How to compare.
#[derive(Debug, Clone)]
pub struct Options {
    /// What the two sides are called: a file, a directory, a series.
    pub labels: [String; 2],
    /// Compare in spite of unequal provenance.
    pub force: bool,
    /// How much worse a step must be to be a regression, as a share of before (0.03 is 3%);
    /// without it [`LEAST_EFFECT`] or [`LEAST_EFFECT_EMULATED`].
    pub min_effect: Option<f64>,
    /// Judge by this count instead of the time.
    pub metric: Option<String>,
    /// Only these steps; all where there is none.
    pub phases: Vec<String>,
    /// The runs were taken in turns, so each before belongs to one after.
    pub paired: bool,
    /// The command that makes this comparison, for reports.
    pub command: Option<String>,
}

impl Default for Options {
    /// Nothing forced, times judged, runs independent.
    fn default() -> Self {
        Self {
            labels: ["before".to_owned(), "after".to_owned()],
            force: false,
            min_effect: None,
            metric: None,
            phases: Vec::new(),
            paired: false,
            command: None,
        }
    }
}

/// Two sets of results, configuration by configuration and step by step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// What stood before.
    pub before: Side,
    /// What stands after.
    pub after: Side,
    /// From which share of before on more is worse.
    pub min_effect: f64,
    /// What is judged: `time`, or a count's name.
    pub metric: String,
    /// Whether runs were taken in turns.
    pub paired: bool,
    /// The command that makes this comparison.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// What differs in provenance; empty unless forced.
    pub differences: Vec<Difference>,
    /// What a reader must know to judge the figures.
    pub notes: Vec<String>,
    /// Ratios of times taken together: each step that several configurations have, and all.
    pub geomeans: Vec<Together>,
    /// How times grow, where three numbers of vCPUs or sizes and more are compared.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub growth: Vec<Growth>,
    /// One for each configuration that both sides have, in the order of before.
    pub configurations: Vec<Configuration>,
}

/// Many ratios of times taken together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Together {
    /// Of which step; `None` for all.
    pub phase: Option<Step>,
    /// How many ratios.
    pub rows: usize,
    /// Their geometric mean.
    pub ratio: f64,
    /// Its 95% bootstrap interval; `None` where a step ran once on a side.
    pub interval: Option<[f64; 2]>,
}

/// One configuration on both sides.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Configuration {
    /// What ran it; empty where different ones are compared by force.
    pub engine: String,
    /// What was run.
    #[serde(flatten)]
    pub setup: Setup,
    /// Its steps that both sides have, in the order in which they run.
    pub phases: Vec<PhaseChange>,
}

/// One step on both sides.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PhaseChange {
    /// Which step.
    pub phase: Step,
    /// Its time in nanoseconds.
    pub time: Change,
    /// The time of every run.
    pub runs: Runs,
    /// What every run has of [`Comparison::metric`], where that is a count; `None` where this step
    /// does not have it.
    #[serde(skip)]
    pub counted: Option<Runs>,
    /// The time of every vCPU of every run; empty where only the host worked.
    pub vcpus: Runs,
    /// What is shown of [`Comparison::metric`]; `None` where this step does not have it.
    pub verdict: Option<Verdict>,
    /// What the test of [`Comparison::metric`] says; `None` where there is nothing to be tested.
    pub tested: Option<Tested>,
    /// System instructions by name; emulation only. Those that never occur are left out.
    pub counters: BTreeMap<String, Change>,
    /// The host kernel's events by name. Those that never occur are left out.
    pub events: BTreeMap<String, Change>,
    /// What stood at the end of the step, by name. What was 0 throughout is left out.
    pub gauges: BTreeMap<String, Change>,
}

/// Every single figure.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Runs {
    /// Before.
    #[serde(serialize_with = "spread::figures")]
    pub before: Vec<f64>,
    /// After.
    #[serde(serialize_with = "spread::figures")]
    pub after: Vec<f64>,
}

impl PhaseChange {
    /// A count by its name.
    pub fn count(&self, name: &str) -> Option<&Change> {
        let kinds = [&self.counters, &self.events, &self.gauges];
        kinds.into_iter().find_map(|counts| counts.get(name))
    }

    /// Whether it is worse by more than the least effect.
    pub fn is_regression(&self) -> bool {
        self.verdict == Some(Verdict::Worse)
    }
}

/// The command line of this process, as a shell would take it again; what a report says it was made
/// by.
pub fn command_line() -> String {
    let words = std::env::args_os().enumerate().map(|(at, word)| {
        let word = word.to_string_lossy().into_owned();
        let word = match word.rsplit_once('/') {
            Some((_, name)) if at == 0 => name.to_owned(),
            _ => word,
        };
        shlex::try_quote(&word).map_or_else(|_| word.clone(), |quoted| quoted.into_owned())
    });
    words.collect::<Vec<_>>().join(" ")
}

impl Comparison {
    /// Compares `after` with `before`.
    ///
    /// # Errors
    /// A side is empty, no configuration and step is on both, the count to be judged is nowhere,
    /// runs cannot be paired, or the provenance is unequal and nothing forces the comparison. Inputs
    /// that tell nothing of where they come from compare all the same, with a note.
    pub fn of(
        before: &[Sample],
        after: &[Sample],
        options: &Options,
    ) -> Result<Self, CompareError> {
        table::compare(before, after, options)
    }

    /// Every step with its configuration.
    pub fn rows(&self) -> impl Iterator<Item = (&Configuration, &PhaseChange)> {
        self.configurations.iter().flat_map(|configuration| {
            let phases = configuration.phases.iter();
            phases.map(move |phase| (configuration, phase))
        })
    }

    /// How many steps have this verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        let of = |(_, phase): &(_, &PhaseChange)| phase.verdict == Some(verdict);
        self.rows().filter(of).count()
    }

    /// The steps that are worse by more than the least effect.
    pub fn regressions(&self) -> impl Iterator<Item = (&Configuration, &PhaseChange)> {
        self.rows().filter(|(_, phase)| phase.is_regression())
    }

    /// Whether a time here is the virtual time of an emulator on both sides.
    pub fn is_emulated(&self) -> bool {
        self.before.is_emulated() && self.after.is_emulated()
    }
}
