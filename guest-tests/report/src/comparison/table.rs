// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The result of a comparison: every configuration and step with its verdict.

use std::collections::BTreeSet;

use serde::Serialize;

use super::{
    configuration::{Configuration, PhaseChange},
    growth::Growth,
};
use crate::{judge::Verdict, provenance::Difference, sample::Step, side::Side, stats::Design};

/// Schema of a comparison in JSON.
pub const SCHEMA: &str = "granule.comparison/2";
/// Name of the judged metric where no count is judged.
pub const TIME: &str = "time";

/// Two sides, configuration by configuration and step by step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// Side before.
    pub before: Side,
    /// Side after.
    pub after: Side,
    /// Growth that makes a regression, as a share of before.
    pub min_effect: f64,
    /// Judged metric: `time` or a count's name.
    pub metric: String,
    /// True if runs are paired.
    pub paired: bool,
    /// Command line that repeats the comparison.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Differences in provenance; empty unless forced.
    pub differences: Vec<Difference>,
    /// Limits of the figures that a reader must know.
    pub notes: Vec<String>,
    /// Geometric means of ratios of times: each step of several configurations, and all.
    pub geomeans: Vec<GeometricMean>,
    /// Growth of times with vCPUs and size, for at least three values.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub growth: Vec<Growth>,
    /// Configurations that both sides have, in the order of before.
    pub configurations: Vec<Configuration>,
}

/// Geometric mean of ratios of times.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GeometricMean {
    /// Step of the ratios; `None` for all.
    pub phase: Option<Step>,
    /// Number of ratios.
    pub rows: usize,
    /// The mean.
    pub ratio: f64,
    /// 95% bootstrap interval; `None` if a step ran once on a side.
    pub interval: Option<[f64; 2]>,
}

impl Comparison {
    /// Returns every step with its configuration.
    pub fn rows(&self) -> impl Iterator<Item = (&Configuration, &PhaseChange)> {
        self.configurations.iter().flat_map(|configuration| {
            let phases = configuration.phases.iter();
            phases.map(move |phase| (configuration, phase))
        })
    }

    /// Returns every step that is compared anywhere, in the order in which steps run.
    pub fn steps(&self) -> BTreeSet<&Step> {
        self.rows().map(|(_, phase)| &phase.phase).collect()
    }

    /// Returns the number of steps with this verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        let of = |(_, phase): &(_, &PhaseChange)| phase.verdict == Some(verdict);
        self.rows().filter(of).count()
    }

    /// Returns the regressions.
    pub fn regressions(&self) -> impl Iterator<Item = (&Configuration, &PhaseChange)> {
        self.rows().filter(|(_, phase)| phase.is_regression())
    }

    /// Reports whether times are the virtual times of an emulator on both sides.
    pub fn is_emulated(&self) -> bool {
        self.before.is_emulated() && self.after.is_emulated()
    }

    /// Reports whether the time is judged.
    pub fn judges_time(&self) -> bool {
        self.metric == TIME
    }

    /// Returns the relation between runs of both sides.
    pub const fn design(&self) -> Design {
        if self.paired { Design::Paired } else { Design::Independent }
    }
}
