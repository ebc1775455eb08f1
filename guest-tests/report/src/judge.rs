// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Verdicts on the rows of a table: the test of each row, the correction of its p over the whole
//! table, and the verdict.
//!
//! ```text
//!                    at least two runs a side?  ── no ──▶ inconclusive
//!                                │ yes
//!       corrected p below 5% (9% for a regression)?
//!             │ yes                             │ no
//!    ratio beyond the minimum effect?   upper end of the interval beyond it?
//!     │ yes              │ no             │ no                 │ yes
//!   regression /    no regression    no regression       inconclusive
//!   improvement
//! ```
//!
//! Rank tests assume no distribution of runs. Their p is two-sided and a regression lies on one
//! side: a p of 9% is 4.5% for that side. So at most 5% of tables without a difference report a
//! regression, and at most 2.5% an improvement, which needs a p of 5%: doubt counts against the
//! change.
//!
//! Emulated figures need fewer runs:
//!
//! - Counts are exact. Every run after must lie above every run before by more than the minimum
//!   effect; one run a side is enough.
//! - Times are exact for their schedule. No test is needed where all runs of a side are equal.
//!   Student's test on logarithms replaces rank tests that too few runs cannot satisfy.
//! - A time that grew by no more than timer ticks may add has not grown.

use serde::Serialize;

use crate::{
    spread::Spread,
    stats::{self, ALPHA, Design, RankTest},
};

/// Nanoseconds that timer ticks may add by chance under emulation: one costs up to 30 us of work,
/// several times the work of the host's own phases.
const TICKS: f64 = 60_000.0;

/// Two-sided p below which a rank test shows a regression: 4.5% for that side, a tenth less than
/// [`ALPHA`], so that fewer than 50 of 1,000 tables without a difference report one.
const ONE_SIDED: f64 = 0.09;

const STUDENT: &str = "student";

/// Verdict on a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The figure grew by more than the minimum effect.
    Regression,
    /// The figure fell by more than the minimum effect.
    Improvement,
    /// Growth beyond the minimum effect is excluded.
    NoRegression,
    /// The runs show neither a difference nor its absence.
    Inconclusive,
}

impl Verdict {
    /// Returns the name used in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Regression => "regression",
            Self::Improvement => "improvement",
            Self::NoRegression => "no-regression",
            Self::Inconclusive => "inconclusive",
        }
    }

    /// Returns the mark behind a row of a table.
    pub const fn mark(self) -> &'static str {
        match self {
            Self::Regression => "!",
            Self::Inconclusive => "?",
            Self::Improvement | Self::NoRegression => "",
        }
    }
}

/// Result of the test of one row.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Tested {
    /// `mann-whitney`, `wilcoxon` or `student`.
    pub test: &'static str,
    /// True if cases were counted; otherwise a distribution approximates them.
    pub exact: bool,
    /// U of before, the sum of positive ranks, or t.
    pub statistic: f64,
    /// Probability of such runs without a difference.
    pub p: f64,
    /// p corrected over the whole table by Holm's method.
    pub p_holm: f64,
    /// Effect size from -1 to 1: Cliff's delta, or the rank-biserial correlation of pairs.
    pub delta: f64,
    /// Hodges-Lehmann ratio on logarithms; `None` if a figure is 0.
    pub ratio: Option<f64>,
    /// 95% interval; `None` if there are too few runs.
    pub interval: Option<[f64; 2]>,
    /// Ratio that the runs would show four times in five; `None` if they can show none.
    pub detectable: Option<f64>,
}

impl Tested {
    fn new(test: &'static str, found: RankTest) -> Self {
        Self {
            test,
            exact: found.exact,
            statistic: found.statistic,
            p: found.p,
            p_holm: 1.0,
            delta: found.delta,
            ratio: None,
            interval: None,
            detectable: None,
        }
    }

    /// Reports whether a difference is shown, in either direction.
    pub fn is_found(&self) -> bool {
        self.p_holm < ALPHA
    }

    /// Returns the corrected p below which a regression is shown. Student's test already assumes
    /// more than a rank test, so it stays two-sided.
    fn enough(&self) -> f64 {
        if self.test == STUDENT { ALPHA } else { ONE_SIDED }
    }
}

/// Figures of one row, in the order of runs.
#[derive(Debug, Clone)]
pub struct Row {
    /// Figures before.
    pub before: Vec<f64>,
    /// Figures after.
    pub after: Vec<f64>,
    /// Relation between the runs of both sides.
    pub design: Design,
    /// True if an emulator made the figures, so that each is exact for its schedule.
    pub emulated: bool,
    /// True if figures are nanoseconds; otherwise they are counts.
    pub time: bool,
}

impl Row {
    fn is_testable(&self) -> bool {
        self.before.len() >= 2 && self.after.len() >= 2 && (self.time || !self.emulated)
    }

    /// Tests the row as one of `rows` in its table.
    fn test(&self, rows: usize) -> Option<Tested> {
        if !self.is_testable() {
            return None;
        }
        let Self { before, after, design, .. } = self;
        let ratio = stats::ratio(*design, before, after);
        let least_p = || stats::least_p(*design, before.len(), after.len());
        let mut tested = match design {
            Design::Paired => Tested::new("wilcoxon", self.wilcoxon(ratio.is_some())),
            Design::Independent => {
                let found = stats::mann_whitney(before, after)?;
                if self.emulated && ratio.is_some() && least_p() * rows as f64 > ALPHA {
                    let (t, p) = stats::student(&logarithms(before), &logarithms(after))?;
                    let found = RankTest { statistic: t, p, exact: false, ..found };
                    Tested::new(STUDENT, found)
                } else {
                    Tested::new("mann-whitney", found)
                }
            }
        };
        tested.ratio = ratio.map(|(ratio, _)| ratio);
        tested.interval = ratio.and_then(|(_, interval)| interval);
        Some(tested)
    }

    /// Tests the differences of logarithms, or of the figures themselves if one has no logarithm.
    fn wilcoxon(&self, on_logarithms: bool) -> RankTest {
        let [before, after] = [&self.before, &self.after].map(|figures| match on_logarithms {
            true => logarithms(figures),
            false => figures.clone(),
        });
        let differences: Vec<f64> = before.iter().zip(&after).map(|(b, a)| a - b).collect();
        stats::wilcoxon(&differences).unwrap_or(RankTest {
            statistic: 0.0,
            p: 1.0,
            delta: 0.0,
            exact: true,
        })
    }

    fn verdict(&self, tested: Option<&Tested>, effect: f64) -> Verdict {
        let spread = |figures: &[f64]| Spread::of(figures.iter().copied());
        let (Some(before), Some(after)) = (spread(&self.before), spread(&self.after)) else {
            return Verdict::Inconclusive;
        };
        let (up, down) = (1.0 + effect, 1.0 / (1.0 + effect));
        let constant = before.min == before.max && after.min == after.max;
        let repeated = before.runs > 1 && after.runs > 1;
        if self.emulated && self.time && (after.median - before.median).abs() < TICKS {
            return Verdict::NoRegression;
        }
        if self.emulated && (!self.time || constant && repeated) {
            let within = before.median * down..=before.median * up;
            return if after.min > before.max * up {
                Verdict::Regression
            } else if after.max < before.min * down {
                Verdict::Improvement
            } else if constant || within.contains(&after.median) {
                Verdict::NoRegression
            } else {
                Verdict::Inconclusive
            };
        }
        let Some(tested) = tested else {
            return Verdict::Inconclusive;
        };
        let ratio = match tested.ratio {
            Some(ratio) => ratio,
            None if before.median == after.median => 1.0,
            None => after.median / before.median,
        };
        let interval_ends_below = tested.interval.is_some_and(|[_, high]| high <= up);
        if tested.p_holm < tested.enough() && ratio > up {
            Verdict::Regression
        } else if tested.is_found() && ratio < down {
            Verdict::Improvement
        } else if tested.is_found() || interval_ends_below {
            Verdict::NoRegression
        } else {
            Verdict::Inconclusive
        }
    }
}

fn logarithms(figures: &[f64]) -> Vec<f64> {
    figures.iter().map(|figure| figure.ln()).collect()
}

/// Tests and judges every row of a table; a ratio beyond 1 + `effect` is a regression.
pub fn judge(rows: &[Row], effect: f64) -> Vec<(Option<Tested>, Verdict)> {
    let family = rows.iter().filter(|row| row.is_testable()).count();
    let mut tested: Vec<Option<Tested>> = rows.iter().map(|row| row.test(family)).collect();
    let p: Vec<f64> = tested.iter().flatten().map(|tested| tested.p).collect();
    for (tested, p_holm) in tested.iter_mut().flatten().zip(stats::holm(&p)) {
        tested.p_holm = p_holm;
    }
    let judged = rows.iter().zip(tested).map(|(row, mut tested)| {
        if let Some(tested) = &mut tested {
            let alpha = tested.enough() / family as f64;
            tested.detectable = stats::detectable(row.design, &row.before, &row.after, alpha);
        }
        let verdict = row.verdict(tested.as_ref(), effect);
        (tested, verdict)
    });
    judged.collect()
}

/// Returns the number of runs a side that a table of `rows` needs to show any difference.
pub fn least_runs(rows: usize, design: Design) -> usize {
    let enough = |&runs: &usize| stats::least_p(design, runs, runs) * rows.max(1) as f64 <= ALPHA;
    (2..=40).find(enough).unwrap_or(40)
}

#[cfg(test)]
mod tests;
