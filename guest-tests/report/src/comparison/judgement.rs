// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Judgements of the metrics of a phase, and the verdicts that make a comparison fail.

use serde::{Deserialize, Serialize, Serializer};

use super::Comparison;
use crate::{
    judge::{TestedRow, Verdict},
    stats::Runs,
};

/// Judgement of one metric of a phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Judgement {
    /// [`super::TIME_METRIC`] or the name of a count.
    pub metric: String,
    /// Figure of every run.
    #[serde(skip)]
    pub runs: Runs,
    pub verdict: Verdict,
    /// Statistical test of the metric; `None` for too few runs.
    #[serde(rename = "tested")]
    pub tested_row: Option<TestedRow>,
}

impl Judgement {
    /// Returns the judgement of a metric whose runs are not tested yet.
    pub const fn untested(metric: String, runs: Runs) -> Self {
        Self { metric, runs, verdict: Verdict::Inconclusive, tested_row: None }
    }
}

/// Serializes the judgement of the first metric as the fields `verdict` and `tested`.
pub fn serialize_first<S: Serializer>(
    judgement: &Option<Judgement>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Fields<'a> {
        verdict: Option<Verdict>,
        tested: Option<&'a TestedRow>,
    }
    let judgement = judgement.as_ref();
    let tested = judgement.and_then(|judgement| judgement.tested_row.as_ref());
    Fields { verdict: judgement.map(|judgement| judgement.verdict), tested }.serialize(serializer)
}

/// Verdicts that make a comparison fail.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum FailOn {
    /// A regression of a judged metric
    #[default]
    Regression,
    /// A regression or an improvement of a judged metric
    Difference,
    /// No verdict
    Never,
}

impl FailOn {
    /// Reports whether the comparison contains a verdict on which to fail.
    pub fn is_failure(self, comparison: &Comparison) -> bool {
        let verdicts: &[Verdict] = match self {
            Self::Regression => &[Verdict::Regression],
            Self::Difference => &[Verdict::Regression, Verdict::Improvement],
            Self::Never => &[],
        };
        verdicts.iter().any(|&verdict| comparison.count(verdict) > 0)
    }
}
