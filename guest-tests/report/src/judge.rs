// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the runs of one row show: the test, how its p stands in the whole table, and the verdict.
//!
//! ```text
//!                       more than one run a side?  ── no ──▶ cannot tell
//!                                  │ yes
//!         p, corrected over the table, below 5% (9% if it is more)?
//!               │ yes                           │ no
//!      ratio beyond the least effect?   upper end of the interval beyond it?
//!       │ yes            │ no              │ no               │ yes
//!   worse/better     not worse          not worse        cannot tell
//! ```
//!
//! The test is by ranks, so that nothing is supposed of how runs spread. Its p is two-sided, but a
//! regression lies on one side: p below 9% is 4.5% for that side, and is enough for *worse*. Of
//! tables without a difference at most 5% therefore show a regression, and at most 2.5% a gain, for
//! which p must be below 5%: doubt goes against the change, never in its favour.
//!
//! Under emulation there is less to doubt:
//!
//! - Counts are exact: worse is where each run after is above each run before by more than the least
//!   effect, even if there is one of each.
//! - Times are exact for their interleaving. Where all runs of a side agree, no test is asked. Where
//!   runs are too few for ranks to reject anything, Student's test on logarithms stands in.
//! - A time that grew by no more than a timer's ticks may add has not grown.

use serde::Serialize;

use crate::{
    spread::Spread,
    stats::{self, ALPHA},
};

/// Nanoseconds that timer ticks may add by chance under emulation, where one costs up to 30 us of
/// work: several times what the host alone does in its phases.
const TICKS: f64 = 60_000.0;

/// The two-sided p below which there is more: 4.5% for that side, a tenth less than [`ALPHA`], so
/// that of a thousand tables without a difference fewer than fifty say there is.
const ONE_SIDED: f64 = 0.09;

const STUDENT: &str = "student";

/// What a row shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// More of it than before, beyond the least effect: a regression.
    Worse,
    /// Less of it than before, beyond the least effect.
    Better,
    /// More of it beyond the least effect was excluded, or what was found lies within it.
    NotWorse,
    /// Neither a difference nor its absence is shown.
    CannotTell,
}

impl Verdict {
    /// Its name in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Worse => "worse",
            Self::Better => "better",
            Self::NotWorse => "not-worse",
            Self::CannotTell => "cannot-tell",
        }
    }

    /// What stands behind a row in a table.
    pub const fn mark(self) -> &'static str {
        match self {
            Self::Worse => "!",
            Self::CannotTell => "?",
            Self::Better | Self::NotWorse => "",
        }
    }
}

/// What a test of one row says.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Tested {
    /// `mann-whitney`, `wilcoxon` or `student`.
    pub test: &'static str,
    /// Whether its cases were counted, or a normal distribution stands in for them.
    pub exact: bool,
    /// The statistic: U of before, the sum of positive ranks, or t.
    pub statistic: f64,
    /// How likely such runs are where there is no difference.
    pub p: f64,
    /// The same over the whole table (Holm).
    pub p_holm: f64,
    /// The effect's size from -1 to 1: Cliff's delta, or the rank-biserial correlation of pairs.
    pub delta: f64,
    /// The Hodges-Lehmann ratio on logarithms; `None` where a figure is 0.
    pub ratio: Option<f64>,
    /// Its 95% interval; `None` where there are too few runs for one.
    pub interval: Option<[f64; 2]>,
    /// The ratio from which on a change would have been found four times in five; `None` where no
    /// change could be.
    pub detectable: Option<f64>,
}

/// The runs of one row, before and after.
#[derive(Debug, Clone)]
pub struct Row {
    /// Before, in the order of runs.
    pub before: Vec<f64>,
    /// After.
    pub after: Vec<f64>,
    /// Whether run belongs to run.
    pub paired: bool,
    /// Whether figures are exact, each for its interleaving.
    pub emulated: bool,
    /// Whether figures are nanoseconds.
    pub time: bool,
}

impl Row {
    /// The least p that a test of this many runs by ranks could give.
    fn least_p(&self) -> f64 {
        if self.paired {
            stats::least_paired_p(self.before.len())
        } else {
            stats::least_p(self.before.len(), self.after.len())
        }
    }

    /// Whether there is anything to be tested.
    fn is_testable(&self) -> bool {
        self.before.len() >= 2 && self.after.len() >= 2 && (self.time || !self.emulated)
    }

    /// Tests a row of a table of so many.
    fn test(&self, rows: usize) -> Option<Tested> {
        if !self.is_testable() {
            return None;
        }
        let estimate = if self.paired {
            stats::paired_shift(&self.before, &self.after)
        } else {
            stats::shift(&self.before, &self.after)
        };
        let tested = if self.paired {
            self.wilcoxon(estimate.is_some())
        } else if self.emulated && estimate.is_some() && self.least_p() * rows as f64 > ALPHA {
            self.student()?
        } else {
            self.mann_whitney()?
        };
        let interval = estimate.and_then(|estimate| estimate.interval);
        Some(Tested {
            ratio: estimate.map(|estimate| estimate.ratio),
            interval: interval.map(|(low, high)| [low, high]),
            ..tested
        })
    }

    /// On logarithms, like the ratio; on differences where there is none.
    fn wilcoxon(&self, logarithms: bool) -> Tested {
        let difference = |(before, after): (&f64, &f64)| match logarithms {
            true => after.ln() - before.ln(),
            false => after - before,
        };
        let differences: Vec<_> = self
            .before
            .iter()
            .zip(&self.after)
            .map(difference)
            .collect();
        match stats::wilcoxon(&differences) {
            Some(found) => Tested {
                test: "wilcoxon",
                exact: found.exact,
                statistic: found.positive,
                p: found.p,
                delta: found.delta,
                ..Tested::NOTHING
            },
            None => Tested {
                test: "wilcoxon",
                ..Tested::NOTHING
            },
        }
    }

    fn mann_whitney(&self) -> Option<Tested> {
        let found = stats::mann_whitney(&self.before, &self.after)?;
        Some(Tested {
            test: "mann-whitney",
            exact: found.exact,
            statistic: found.u,
            p: found.p,
            delta: found.delta,
            ..Tested::NOTHING
        })
    }

    fn student(&self) -> Option<Tested> {
        let logs = |values: &[f64]| values.iter().map(|value| value.ln()).collect::<Vec<_>>();
        let found = stats::student(&logs(&self.before), &logs(&self.after))?;
        Some(Tested {
            test: STUDENT,
            exact: false,
            statistic: found.t,
            p: found.p,
            ..self.mann_whitney()?
        })
    }

    fn verdict(&self, tested: Option<Tested>, effect: f64) -> Verdict {
        let (Some(before), Some(after)) = (
            Spread::of(self.before.iter().copied()),
            Spread::of(self.after.iter().copied()),
        ) else {
            return Verdict::CannotTell;
        };
        let (up, down) = (1.0 + effect, 1.0 / (1.0 + effect));
        let agreed = before.min == before.max && after.min == after.max;
        let repeated = before.runs > 1 && after.runs > 1;
        if self.emulated && self.time && (after.median - before.median).abs() < TICKS {
            return Verdict::NotWorse;
        }
        if self.emulated && (!self.time || agreed && repeated) {
            return if after.min > before.max * up {
                Verdict::Worse
            } else if after.max < before.min * down {
                Verdict::Better
            } else if agreed || (before.median * down..=before.median * up).contains(&after.median)
            {
                Verdict::NotWorse
            } else {
                Verdict::CannotTell
            };
        }
        let Some(tested) = tested else {
            return Verdict::CannotTell;
        };
        let ratio = match tested.ratio {
            Some(ratio) => ratio,
            None if before.median == after.median => 1.0,
            None => after.median / before.median,
        };
        let interval_ends_below = tested.interval.is_some_and(|[_, high]| high <= up);
        if tested.shows_more() && ratio > up {
            Verdict::Worse
        } else if tested.is_found() && ratio < down {
            Verdict::Better
        } else if tested.is_found() || interval_ends_below {
            Verdict::NotWorse
        } else {
            Verdict::CannotTell
        }
    }
}

impl Tested {
    const NOTHING: Self = Self {
        test: "",
        exact: true,
        statistic: 0.0,
        p: 1.0,
        p_holm: 1.0,
        delta: 0.0,
        ratio: None,
        interval: None,
        detectable: None,
    };

    /// Whether a difference is shown, whichever way it lies.
    pub fn is_found(&self) -> bool {
        self.p_holm < ALPHA
    }

    /// Whether it is shown that there is more, if the ratio says so: one-sided for ranks. Student's
    /// test supposes enough already to be held to both sides.
    fn shows_more(&self) -> bool {
        self.p_holm < self.enough()
    }

    /// Below which p there is shown to be more.
    fn enough(&self) -> f64 {
        if self.test == STUDENT {
            ALPHA
        } else {
            ONE_SIDED
        }
    }
}

/// Tests every row of a table and judges it. A ratio beyond 1 + `effect` is worse.
pub fn judge(rows: &[Row], effect: f64) -> Vec<(Option<Tested>, Verdict)> {
    let family = rows.iter().filter(|row| row.is_testable()).count();
    let mut tested: Vec<Option<Tested>> = rows.iter().map(|row| row.test(family)).collect();
    let p: Vec<f64> = tested.iter().flatten().map(|tested| tested.p).collect();
    for (tested, p_holm) in tested.iter_mut().flatten().zip(stats::holm(&p)) {
        tested.p_holm = p_holm;
    }
    rows.iter()
        .zip(tested)
        .map(|(row, mut tested)| {
            if let Some(tested) = &mut tested {
                let enough = tested.enough() / family as f64;
                let detectable = match row.paired {
                    true => stats::paired_detectable,
                    false => stats::detectable,
                };
                tested.detectable = detectable(&row.before, &row.after, enough);
            }
            (tested, row.verdict(tested, effect))
        })
        .collect()
}

/// How many runs a side it takes before a table of so many rows can show any difference.
pub fn least_runs(rows: usize, paired: bool) -> usize {
    let enough = |runs: &usize| {
        let least = if paired {
            stats::least_paired_p(*runs)
        } else {
            stats::least_p(*runs, *runs)
        };
        least * rows.max(1) as f64 <= ALPHA
    };
    (2..=40).find(enough).unwrap_or(40)
}

#[cfg(test)]
mod tests;
