// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The comparison of two sides, each a list of samples.
//!
//! ```text
//! samples ─ configuration ─ growth ─ build: Comparison::new ─ set
//! ```
//!
//! Samples form one group for each configuration (engine, mode, backing, size, vCPUs, options);
//! seeds and iterations are the runs of a group. Both sides need the same provenance. A statistical
//! test compares the runs of each phase, and its p is corrected over the whole table. Counts
//! explain a time; a verdict on a count requires [`ComparisonOptions::metrics`].

mod build;
mod configuration;
mod growth;
mod judgement;
mod labelled_side;
mod set;
mod setup_field;
mod timer_tick;

use std::{collections::BTreeSet, sync::OnceLock};

use serde::Serialize;
use thiserror::Error;

use self::configuration::GroupKey;
pub(crate) use self::{
    configuration::{Configuration, Group, PhaseChange, SelectCounts, groups},
    growth::{Fit, Growth, Sweep, SweepParameter, sweeps},
    judgement::Judgement,
    labelled_side::groups_of_sides,
    set::ConfigurationInSet,
    timer_tick::TICK_NS,
};
pub use self::{
    judgement::FailOn, labelled_side::LabelledSide, set::ComparisonSet, setup_field::SetupField,
};
use crate::{
    judge::Verdict,
    metric::Metric,
    provenance::{Difference, Side},
    sample::AnyPhase,
    stats::Design,
};

pub(crate) use crate::metric::TIME_METRIC;

const SCHEMA: &str = "granule.comparison/2";
/// Name of the second time metric, the work of all CPUs, beside elapsed time.
pub(crate) const WORK_METRIC: &str = "work";

/// Comparison of two sides, by configuration and phase. Serializes to the JSON schema
/// `granule.comparison/2`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    schema: &'static str,
    pub(crate) before: Side,
    pub(crate) after: Side,
    /// Smallest slowdown that is a regression, relative to *before*.
    pub(crate) min_effect: f64,
    /// Indicates that times are the elapsed time of emulated CPUs that run in parallel.
    #[serde(rename = "elapsed", skip_serializing_if = "std::ops::Not::not")]
    pub(crate) has_elapsed_times: bool,
    /// First judged metric: [`TIME_METRIC`] or a count's name.
    pub(crate) metric: String,
    /// Further judged metrics.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) further_metrics: Vec<String>,
    #[serde(rename = "paired")]
    is_paired: bool,
    /// Command line that repeats the comparison.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) command: Option<String>,
    /// Differences in provenance; empty unless forced.
    pub(crate) differences: Vec<Difference>,
    pub(crate) notes: Vec<String>,
    /// Geometric means of time ratios: of each phase with several configurations, and of all. They
    /// omit phases shorter than a timer tick.
    pub(crate) geomeans: Vec<GeometricMean>,
    /// Growth of times with vCPUs and size, for at least three values.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) growth: Vec<Growth>,
    /// Configurations of both sides, in the order of the side *before*.
    pub(crate) configurations: Vec<Configuration>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct GeometricMean {
    /// Phase of the ratios; `None` for all phases.
    pub phase: Option<AnyPhase>,
    pub rows: usize,
    pub ratio: f64,
    /// 95% bootstrap interval; `None` if a side has a single run of a phase.
    pub interval: Option<[f64; 2]>,
}

impl Comparison {
    pub(crate) fn rows(&self) -> impl Iterator<Item = (&Configuration, &PhaseChange)> {
        self.configurations.iter().flat_map(|configuration| {
            let phases = configuration.phases.iter();
            phases.map(move |phase| (configuration, phase))
        })
    }

    /// Returns the configuration of a group.
    fn of_key(&self, key: &GroupKey) -> Option<&Configuration> {
        let is_same = |one: &&Configuration| one.engine == key.engine && one.setup == key.setup;
        self.configurations.iter().find(is_same)
    }

    /// Returns the phases of all configurations, in execution order.
    pub(crate) fn phases(&self) -> BTreeSet<&AnyPhase> {
        self.rows().map(|(_, change)| &change.phase).collect()
    }

    /// Returns the judgements of all metrics of all phases.
    pub(crate) fn judgements(&self) -> impl Iterator<Item = &Judgement> {
        self.rows().flat_map(|(_, change)| change.judgements())
    }

    /// Returns the number of judged figures with this verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.judgements().filter(|judgement| judgement.verdict == verdict).count()
    }

    /// Reports whether times are the virtual times of an emulator on both sides.
    pub(crate) fn is_emulated(&self) -> bool {
        self.before.is_emulated() && self.after.is_emulated()
    }

    /// Reports whether some run has a metric that is judged in no phase, because others lack it.
    pub fn has_unjudged_metric(&self) -> bool {
        self.metrics().any(|metric| self.is_unjudged(metric))
    }

    pub(crate) fn is_unjudged(&self, metric: &str) -> bool {
        self.judgements().all(|judgement| judgement.metric != metric)
            && self.rows().any(|(_, change)| change.count(metric).is_some())
    }

    /// Returns the judged metrics.
    pub(crate) fn metrics(&self) -> impl Iterator<Item = &str> {
        [&self.metric].into_iter().chain(&self.further_metrics).map(String::as_str)
    }

    /// Returns the experimental design: independent or paired runs.
    pub(crate) const fn design(&self) -> Design {
        if self.is_paired { Design::Paired } else { Design::Independent }
    }
}

/// Options of a comparison.
#[derive(Debug, Clone, Default)]
pub struct ComparisonOptions {
    /// Names of the two sides: files, directories or series; `None` for "before" and "after".
    pub labels: Option<[String; 2]>,
    /// Compares sides although their provenance differs.
    pub is_forced: bool,
    /// Smallest relative slowdown that is a regression; `None` for 0.01, or 0.03 under emulation.
    pub min_effect: Option<f64>,
    /// Metrics to judge: `time` and names of counts; the time if empty.
    pub metrics: Vec<Metric>,
    /// Phases to compare, by name; all if empty. `round` selects every round.
    pub phases: Vec<String>,
    /// Pairs the runs of both sides by seed and iteration.
    pub is_paired: bool,
    /// Command line that repeats the comparison, for reports.
    pub command: Option<String>,
}

static COMMAND_LINE: OnceLock<String> = OnceLock::new();

/// Replaces the command line of reports: this process continues the work of another one.
pub fn set_command_line(line: String) {
    let _ = COMMAND_LINE.set(line);
}

/// Returns the command line of this process, quoted for a shell, for reports.
pub fn command_line() -> String {
    if let Some(line) = COMMAND_LINE.get() {
        return line.clone();
    }
    let mut words: Vec<String> =
        std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    if let Some(program) = words.first_mut()
        && let Some((_, name)) = program.rsplit_once('/')
    {
        *program = name.to_owned();
    }
    // Fails only for an argument with a NUL, which no process can have.
    shlex::try_join(words.iter().map(String::as_str)).unwrap_or_default()
}

/// Error returned when two sides cannot be compared.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "each message describes its variant")]
pub enum CompareError {
    #[error("expected two or more sides to compare")]
    SingleSide,
    #[error("--by {0}: a result does not state its {0}: omit --by or that result")]
    UnknownValue(SetupField),
    #[error("--by {field}: every result has the same value, {value}: add results of another")]
    SingleValue { field: SetupField, value: String },
    #[error("{0} holds no results: run the test again")]
    EmptySide(String),
    #[error(
        "the two sides do not compare: these differ or are unknown:{}\n\
         Run both on the same host, or add --force to compare anyway.",
        .0.iter().map(|difference| format!("\n  {difference}")).collect::<String>()
    )]
    ProvenanceDiffers(Vec<Difference>),
    #[error(
        "{} of any configuration is on both sides. Before: {}. After: {}. Run the same test on \
         both.",
        match .phases.as_slice() {
            [] => "no phase".to_owned(),
            phases => format!("none of {}", phases.join(", ")),
        },
        .sides[0].join("; "),
        .sides[1].join("; ")
    )]
    NothingInCommon { sides: [Vec<String>; 2], phases: Vec<String> },
    #[error("--phase '{name}' is on neither side: expected one of {}", .known.join(", "))]
    UnknownPhase { name: String, known: Vec<String> },
    #[error(
        "--metric '{name}' is not counted on both sides: {}",
        match .known.as_slice() {
            [] => "no count is".to_owned(),
            known => format!("expected one of {}", known.join(", ")),
        }
    )]
    UnknownMetric { name: String, known: Vec<String> },
    #[error("--paired needs the same runs on both sides, but those of {0} differ: omit --paired")]
    UnpairedRuns(String),
}
