// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Statistics of a comparison. Nothing here knows what the figures are.
//!
//! | question | answered by |
//! |---|---|
//! | what is typical, how far does it spread | [`quantile`](fn@quantile): median and quartiles |
//! | do two sets of runs differ at all | [`mann_whitney`](fn@mann_whitney) |
//! | do a few exact runs differ | [`student`](fn@student) on logarithms |
//! | do runs differ that were taken in turns | [`wilcoxon`](fn@wilcoxon) on the logarithms' differences |
//! | by how much, and how sure is that | [`shift`] and [`paired_shift`]: Hodges-Lehmann on logarithms |
//! | how often is one above the other | [`mann_whitney::MannWhitney::delta`], Cliff's delta |
//! | how much of a whole table is chance | [`holm`](fn@holm) |
//! | what do many ratios say together | [`geomean`](fn@geomean) with a bootstrap interval |
//! | how does a figure grow | [`power_law`](fn@power_law) |
//! | what could have been found | [`detectable`], [`paired_detectable`] |
//!
//! Tests and estimates agree with each other: an interval holds exactly those shifts that the test
//! it belongs to would not reject at 5%. All are held against SciPy's output, kept as golden data
//! (`compare/golden/scipy.json`, made by `make_scipy.py` beside it).

mod exact;
mod geomean;
mod holm;
mod mann_whitney;
mod normal;
mod power;
mod power_law;
mod quantile;
mod rank;
mod shift;
mod student;
mod wilcoxon;

#[cfg(test)]
pub mod draw;
#[cfg(test)]
mod golden;

pub use self::{
    geomean::{Resampled, geomean},
    holm::holm,
    mann_whitney::{least_p, mann_whitney},
    power::{detectable, paired_detectable},
    power_law::power_law,
    quantile::quantile,
    shift::{paired_shift, shift},
    student::student,
    wilcoxon::{least_paired_p, wilcoxon},
};

/// The error that is accepted: a test rejects below it, an interval covers 1 less it.
pub const ALPHA: f64 = 0.05;
