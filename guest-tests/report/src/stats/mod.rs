// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Statistics of a comparison. The module knows samples of `f64`, not what they measure.
//!
//! | question | answer |
//! |---|---|
//! | typical value and spread | [`Spread`]: median and quartiles |
//! | difference between independent runs | [`mann_whitney`] |
//! | difference between paired runs | [`wilcoxon`] on differences of logarithms |
//! | difference between a few exact runs | [`student`] on logarithms |
//! | size of the difference | [`ratio`]: Hodges-Lehmann on logarithms, with its interval |
//! | share of a table that chance explains | [`holm`] |
//! | ratios of many rows together | [`geometric_mean`], with a bootstrap interval |
//! | growth with vCPUs or memory | [`power_law`] |
//! | smallest difference that the runs could show | [`detectable`] |
//!
//! A test and its interval agree: the interval holds exactly the ratios that the test does not
//! reject at 5%. All results match SciPy's to six digits (`golden/scipy.json`, written by
//! `make_scipy.py` beside it).
//!
//! Distributions come from `statrs`. Its Mann-Whitney test has no null distribution to invert into
//! an interval and counts cases for at most eight values, and it has no Wilcoxon test, so the rank
//! tests are implemented here.

mod descriptive;
mod effect;
mod rank_tests;
mod student;

#[cfg(test)]
pub mod tests;

pub use self::{
    descriptive::{Change, Spread, figures, holm},
    effect::{Resampled, detectable, geometric_mean, ratio},
    rank_tests::{ALPHA, Design, RankTest, least_p, mann_whitney, wilcoxon},
    student::{power_law, student},
};
