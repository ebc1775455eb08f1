// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The figure by which a bisection judges a commit.

use granule_types::{
    phase::Phase,
    record::Record,
    units::{Nanoseconds, parse_percentage},
};

use crate::LabError;

/// Name of the metric that is elapsed time instead of a count.
const ELAPSED: &str = "elapsed";

/// Metric of a bisection, summed over all jobs.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Bisection")]
pub struct Figure {
    /// Count that a commit raised, such as 'DC CIVAC' or guest_aborts, or `elapsed`
    #[arg(long, value_name = "COUNT")]
    metric: String,
    /// Phase of the metric; repeat the option for more phases [default: all]
    #[arg(long, value_name = "PHASE", value_parser = parse_phase)]
    phase: Vec<Phase>,
    /// A commit is bad if its figure exceeds that of GOOD by more than this
    #[arg(long, value_name = "PERCENT", default_value = "5", value_parser = parse_percentage)]
    above: f64,
}

/// Families of counts that a kernel without such an instruction lacks.
const FAMILIES: [&str; 3] = ["DC ", "IC ", "TLBI "];

fn parse_phase(text: &str) -> Result<Phase, String> {
    let found = Phase::TABLE_ORDER.into_iter().find(|phase| phase.name() == text);
    let names = || Phase::TABLE_ORDER.map(Phase::name).join(", ");
    found.ok_or_else(|| format!("expected one of: {}", names()))
}

impl Figure {
    /// Returns the figure of a kernel.
    pub fn of(&self, records: &[Record]) -> Result<u64, LabError> {
        let mut values = records
            .iter()
            .filter(|record| self.phase.is_empty() || self.phase.contains(&record.phase))
            .filter_map(|record| match self.metric.as_str() {
                ELAPSED => record.elapsed_ns.map(|Nanoseconds(ns)| ns),
                name => record.counters.get(name).or_else(|| record.events.get(name)).copied(),
            })
            .peekable();
        let is_absent_count = FAMILIES.iter().any(|family| self.metric.starts_with(family));
        if values.peek().is_some() || is_absent_count {
            return Ok(values.sum());
        }
        let mut known: Vec<&str> =
            records.iter().flat_map(|record| record.counters.keys().map(String::as_str)).collect();
        known.sort_unstable();
        known.dedup();
        Err(LabError::Unusable(format!(
            "no result has the metric '{}' in {}; --metric is {ELAPSED} or one of: {}",
            self.metric,
            self.phases(),
            known.join(", ")
        )))
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
        format!("{} of {}", self.metric, self.phases())
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
        Figure { metric: metric.to_owned(), phase, above: 5.0 }
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
        let error = figure("guest_abort", vec![]).of(&[record("create", 1)]).unwrap_err();

        assert!(error.to_string().contains("one of: DC CIVAC"), "{error}");
    }

    #[test]
    fn a_figure_is_bad_above_the_limit() {
        let figure = figure("DC CIVAC", vec![]);

        assert!(!figure.is_bad(105, 100) && figure.is_bad(106, 100));
        assert!(figure.is_bad(1, 0));
    }
}
