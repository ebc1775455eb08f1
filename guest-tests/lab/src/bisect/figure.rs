// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The figure by which a bisection judges a commit.

use std::collections::BTreeSet;

use granule_report::Metric;
use granule_types::{phase::Phase, record::Record, units::parse_percentage};
use serde::{Deserialize, Serialize};

use crate::error::LabError;

/// Options of the figure.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Bisection")]
pub struct FigureOptions {
    /// Metric that a commit raised: a count, such as 'DC CIVAC' or guest_aborts, TLBI for all TLBI
    /// instructions, or time (elapsed)
    #[arg(long, value_name = "COUNT", required_unless_present = "resume",
          value_parser = Metric::parse_of_lab)]
    metric: Option<Metric>,
    /// Phase of the metric; repeat the option for more phases [default: all]
    #[arg(long, value_name = "PHASE")]
    phase: Vec<Phase>,
    /// A commit is bad if its figure exceeds that of GOOD by more than this
    #[arg(long, value_name = "PERCENT", default_value = "5", value_parser = parse_percentage)]
    above: f64,
}

impl FigureOptions {
    /// Returns the figure; `None` without a metric.
    pub fn figure(&self) -> Option<Figure> {
        let Self { metric, phase, above } = self.clone();
        Some(Figure { metric: metric?, phase, above })
    }
}

/// Metric of a bisection, summed over all jobs.
#[derive(Debug, Clone)]
pub struct Figure {
    metric: Metric,
    /// Phases of the metric; all if empty.
    phase: Vec<Phase>,
    /// Percentage by which a bad figure exceeds that of GOOD.
    above: f64,
}

impl Figure {
    /// Returns the records of the selected phases.
    fn selected<'a>(&self, records: &'a [Record]) -> impl Iterator<Item = &'a Record> {
        records.iter().filter(|record| self.phase.is_empty() || self.phase.contains(&record.phase))
    }

    /// Returns the figure of a kernel.
    pub fn of(&self, records: &[Record]) -> Result<u64, LabError> {
        // A phase without any counter executed no instruction that is counted, if the run has counters.
        let has_counters = records.iter().any(|record| !record.counters.is_empty());
        let missing = (has_counters && self.metric.is_zero_if_absent()).then_some(0);
        let figure = |record| self.metric.figure(record).or(missing);
        let mut figures = self.selected(records).filter_map(figure).peekable();
        if figures.peek().is_some() {
            return Ok(figures.sum());
        }
        Err(LabError::Unusable(format!(
            "no result has the metric '{}' in {}; {}",
            self.metric.name(),
            self.phases(),
            self.expectation(&self.occurring(records)),
        )))
    }

    /// Returns the names of the counts that are not 0 in the selected phases.
    pub fn occurring(&self, records: &[Record]) -> BTreeSet<String> {
        let counts = self.selected(records).flat_map(|one| one.counters.iter().chain(&one.events));
        counts.filter(|(_, count)| **count > 0).map(|(name, _)| name.clone()).collect()
    }

    /// Returns the refusal of a metric that is 0 on GOOD and on BAD.
    pub fn never_occurs(&self, occurring: &BTreeSet<String>) -> LabError {
        LabError::Unusable(format!(
            "{} is 0 at GOOD and at BAD, so no commit raised it; {}",
            self.describe(),
            self.expectation(occurring),
        ))
    }

    fn expectation(&self, occurring: &BTreeSet<String>) -> String {
        let names: Vec<&str> = occurring.iter().map(String::as_str).collect();
        format!("in {} these occur: time, {}", self.phases(), names.join(", "))
    }

    /// Reports whether a figure is bad.
    pub fn is_bad(&self, figure: u64, good: u64) -> bool {
        figure > self.limit(good)
    }

    /// Returns the largest figure that is good.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a limit need not be exact"
    )]
    pub fn limit(&self, good: u64) -> u64 {
        (good as f64 * (1.0 + self.above / 100.0)) as u64
    }

    /// Formats the metric with its phases: `DC CIVAC of update`.
    pub fn describe(&self) -> String {
        let metric = if self.metric.is_time() { "elapsed ns" } else { self.metric.name() };
        format!("{metric} of {}", self.phases())
    }

    fn phases(&self) -> String {
        match self.phase.as_slice() {
            [] => "all phases".to_owned(),
            phases => phases.iter().map(|phase| phase.name()).collect::<Vec<_>>().join(", "),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(phase: &str, count: u64) -> Record {
        serde_json::from_value(serde_json::json!({
            "schema": "", "engine": "kvm", "phase": phase, "ns": 5, "elapsed_ns": 3,
            "config": {"mode": "", "backing": "anonymous", "memory": 65536, "vcpus": 2,
                       "seed": 0, "iteration": 0},
            "counters": {"DC CIVAC": count},
        }))
        .unwrap()
    }

    fn figure(metric: &str, phase: Vec<Phase>) -> Figure {
        Figure { metric: metric.into(), phase, above: 5.0 }
    }

    #[test]
    fn the_figure_is_the_sum_over_the_selected_phases() {
        let records = [record("create", 10), record("update", 7), record("update", 1)];

        assert_eq!(figure("DC CIVAC", vec![]).of(&records).unwrap(), 18);
        assert_eq!(figure("DC CIVAC", vec![Phase::Update]).of(&records).unwrap(), 8);
        assert_eq!(figure("elapsed", vec![]).of(&records).unwrap(), 9);
    }

    #[test]
    fn an_unknown_metric_is_refused_with_the_known_ones() {
        let error = figure("kvm_exits", vec![]).of(&[record("create", 1)]).unwrap_err();

        assert!(error.to_string().contains("these occur: time, DC CIVAC"), "{error}");
    }

    #[test]
    fn an_instruction_that_never_occurs_is_refused_with_those_that_do() {
        let figure = figure("DC CVAC", vec![]);
        let records = [record("create", 1)];

        let error = figure.never_occurs(&figure.occurring(&records)).to_string();

        assert_eq!(figure.of(&records).unwrap(), 0);
        assert!(
            error.ends_with(
                "0 at GOOD and at BAD, so no commit raised it; in all phases these \
                                 occur: time, DC CIVAC"
            ),
            "{error}"
        );
    }

    #[test]
    fn a_figure_is_bad_above_the_limit() {
        let figure = figure("DC CIVAC", vec![]);

        assert!(!figure.is_bad(105, 100) && figure.is_bad(106, 100));
        assert!(figure.is_bad(1, 0));
    }
}
