// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two-sided tests: the Mann-Whitney U test of independent runs and the Wilcoxon signed-rank test
//! of paired runs, with their null distributions; and Student's t test with pooled variance, for
//! normal samples that are too small for rank tests.
//!
//! The p of small samples is exact: every case is counted in integers. Other samples use the normal
//! approximation with corrections for ties and continuity.
//!
//! | statistic | exact for |
//! |---|---|
//! | U, no ties | both sides below 50 runs (R's `wilcox.test`), or one at most 8 (SciPy) |
//! | signed ranks | at most 50 pairs, or 13 with ties or zeros (SciPy's `wilcoxon`) |

use serde::Serialize;
use statrs::distribution::{ContinuousCDF, Normal, StudentsT};

use super::descriptive::{Ranks, mean_and_squares};

/// Significance level of tests; intervals have a coverage of `1 - ALPHA`.
pub const ALPHA: f64 = 0.05;

/// Relation between the runs of both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Design {
    /// Independent runs: Mann-Whitney.
    Independent,
    /// Runs paired by position: Wilcoxon.
    Paired,
}

/// Distribution of a test statistic if the sides do not differ.
#[derive(Debug)]
pub(super) enum NullDistribution {
    /// Number of cases at or below each value; `scale` makes values integers.
    Exact {
        cumulative_counts: Vec<i128>,
        scale: f64,
    },
    Normal {
        mean: f64,
        deviation: f64,
    },
}

impl NullDistribution {
    /// Returns the distribution of U for two samples of these sizes.
    pub fn mann_whitney(one: usize, two: usize, tie_term: f64) -> Self {
        let (small, large) = (one.min(two), one.max(two));
        // The counts for 49 and 49 values, and for 8 and 10,000, fit into 128 bits.
        if tie_term == 0.0 && (large <= 49 || small <= 8 && large <= 10_000) {
            return Self::exact(u_frequencies(small, large), 1.0);
        }
        let (m, n) = (one as f64, two as f64);
        let all = m + n;
        let variance = m * n / 12.0 * (all + 1.0 - tie_term / (all * (all - 1.0)));
        Self::normal(m * n / 2.0, variance)
    }

    /// Returns the distribution of the sum of positive ranks, with `zeros` differences omitted.
    pub fn signed_ranks(ranks: &Ranks, zeros: usize) -> Self {
        let pairs = ranks.doubled_ranks.len() + zeros;
        let plain = ranks.tie_term == 0.0 && zeros == 0;
        if pairs <= if plain { 50 } else { 13 } {
            return Self::exact(signed_rank_frequencies(&ranks.doubled_ranks), 2.0);
        }
        let n = ranks.doubled_ranks.len() as f64;
        let variance = (n * (n + 1.0) * (2.0 * n + 1.0) - ranks.tie_term / 2.0) / 24.0;
        Self::normal(n * (n + 1.0) / 4.0, variance)
    }

    fn exact(frequencies: Vec<i128>, scale: f64) -> Self {
        let sum = |sum: &mut i128, count| {
            *sum += count;
            Some(*sum)
        };
        let cumulative = frequencies.into_iter().scan(0, sum).collect();
        Self::Exact { cumulative_counts: cumulative, scale }
    }

    fn normal(mean: f64, variance: f64) -> Self {
        let deviation = variance.max(0.0).sqrt();
        Self::Normal { mean, deviation }
    }

    pub const fn is_exact(&self) -> bool {
        matches!(self, Self::Exact { .. })
    }

    /// Returns the two-sided p of a statistic.
    pub fn p(&self, value: f64) -> f64 {
        let one_sided = match self {
            Self::Exact { cumulative_counts: cumulative, scale } => {
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
                let at = (value * scale) as usize;
                let all = cumulative.last().copied().unwrap_or(1) as f64;
                let count = |at: usize| cumulative.get(at).map_or(all, |&count| count as f64);
                let above = at.checked_sub(1).map_or(all, |under| all - count(under));
                count(at).min(above) / all
            }
            Self::Normal { deviation: 0.0, .. } => 1.0,
            Self::Normal { mean, deviation } => {
                let off = ((value - mean).abs() - 0.5) / deviation;
                Normal::standard().sf(off)
            }
        };
        (2.0 * one_sided).min(1.0)
    }
}

/// Returns the smallest p that samples of these sizes can have.
pub fn min_p(design: Design, before: usize, after: usize) -> f64 {
    match design {
        _ if before == 0 || after == 0 => 1.0,
        Design::Independent => NullDistribution::mann_whitney(before, after, 0.0).p(0.0),
        Design::Paired => NullDistribution::signed_ranks(&Ranks::without_ties(before), 0).p(0.0),
    }
}

/// Counts the cases of each U, which are the coefficients of a Gaussian binomial.
fn u_frequencies(small: usize, large: usize) -> Vec<i128> {
    let mut frequencies = vec![0_i128; small * large + 1];
    frequencies[0] = 1;
    for i in 1..=small {
        // Multiply by 1 - q^(large + i), from the highest term, so that each term is used once.
        for at in (large + i..frequencies.len()).rev() {
            frequencies[at] -= frequencies[at - large - i];
        }
        // Divide by 1 - q^i.
        for at in i..frequencies.len() {
            frequencies[at] += frequencies[at - i];
        }
    }
    frequencies
}

/// Counts the cases of each sum of positive ranks. Tied ranks keep the counts exact.
fn signed_rank_frequencies(doubled: &[u64]) -> Vec<i128> {
    let ranks = || doubled.iter().filter_map(|&rank| usize::try_from(rank).ok());
    let mut frequencies = vec![0_i128; ranks().sum::<usize>() + 1];
    frequencies[0] = 1;
    for rank in ranks() {
        for at in (rank..frequencies.len()).rev() {
            frequencies[at] += frequencies[at - rank];
        }
    }
    frequencies
}

/// Result of the statistical test of a row.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TestedRow {
    /// `mann-whitney`, `wilcoxon` or `student`.
    pub test: &'static str,
    /// Indicates that p is exact; otherwise it is an approximation.
    #[serde(rename = "exact")]
    pub is_exact: bool,
    /// U of *before* (equal pairs count half), the sum of positive ranks, or t.
    pub statistic: f64,
    /// Probability of a statistic at least as extreme if the sides do not differ.
    pub p: f64,
    /// p corrected over the whole table by Holm's method.
    pub p_holm: f64,
    /// Effect size from -1 to 1: Cliff's delta, or the rank-biserial correlation of pairs. It is 1
    /// if every value *after* is greater.
    pub delta: f64,
    /// Hodges-Lehmann ratio on logarithms; `None` if a figure is 0.
    pub ratio: Option<f64>,
    /// 95% interval; `None` if there are too few runs.
    pub interval: Option<[f64; 2]>,
    /// Ratio that the test detects with a power of 80%; `None` for too few runs.
    #[serde(rename = "detectable")]
    pub detectable_ratio: Option<f64>,
}

impl TestedRow {
    fn new(test: &'static str, is_exact: bool, statistic: f64, p: f64, delta: f64) -> Self {
        let (p_holm, ratio, interval, detectable_ratio) = (1.0, None, None, None);
        Self { test, is_exact, statistic, p, p_holm, delta, ratio, interval, detectable_ratio }
    }
}

/// Tests whether two samples come from one distribution; `None` if one is empty.
pub fn mann_whitney(first: &[f64], second: &[f64]) -> Option<TestedRow> {
    if first.is_empty() || second.is_empty() {
        return None;
    }
    let ranks = Ranks::new(&[first, second].concat());
    let pairs = first.len() as f64 * second.len() as f64;
    let doubled: u64 = ranks.doubled_ranks[..first.len()].iter().sum();
    let u = doubled as f64 / 2.0 - (first.len() * (first.len() + 1)) as f64 / 2.0;
    let null = NullDistribution::mann_whitney(first.len(), second.len(), ranks.tie_term);
    let (p, delta) = (null.p(u.min(pairs - u)), 1.0 - 2.0 * u / pairs);
    Some(TestedRow::new("mann-whitney", null.is_exact(), u, p, delta))
}

/// Tests whether differences are centred at zero; differences of zero are omitted.
pub fn wilcoxon(differences: &[f64]) -> TestedRow {
    let kept: Vec<f64> = differences.iter().copied().filter(|&d| d != 0.0).collect();
    if kept.is_empty() {
        return TestedRow::new("wilcoxon", true, 0.0, 1.0, 0.0);
    }
    let ranks = Ranks::new(&kept.iter().map(|d| d.abs()).collect::<Vec<_>>());
    let signed = kept.iter().zip(&ranks.doubled_ranks);
    let doubled: u64 = signed.filter(|(d, _)| **d > 0.0).map(|(_, rank)| rank).sum();
    let all: u64 = ranks.doubled_ranks.iter().sum();
    let null = NullDistribution::signed_ranks(&ranks, differences.len() - kept.len());
    let positive = doubled as f64 / 2.0;
    let delta = 2.0 * doubled as f64 / all as f64 - 1.0;
    TestedRow::new("wilcoxon", null.is_exact(), positive, null.p(positive), delta)
}

/// Returns t (second mean minus first mean, in standard errors) and its two-sided p; `None` if a
/// sample has fewer than two values.
pub fn student(first: &[f64], second: &[f64]) -> Option<(f64, f64)> {
    if first.len() < 2 || second.len() < 2 {
        return None;
    }
    let (m, n) = (first.len() as f64, second.len() as f64);
    let ((mean_first, squares_first), (mean_second, squares_second)) =
        (mean_and_squares(first), mean_and_squares(second));
    let freedom = m + n - 2.0;
    let variance = (squares_first + squares_second) / freedom;
    let apart = mean_second - mean_first;
    if variance == 0.0 {
        return Some(match apart {
            0.0 => (0.0, 1.0),
            apart => (apart.signum() * f64::INFINITY, 0.0),
        });
    }
    let t = apart / (variance * (1.0 / m + 1.0 / n)).sqrt();
    Some((t, 2.0 * students_t(freedom)?.sf(t.abs())))
}

pub fn students_t(freedom: f64) -> Option<StudentsT> {
    StudentsT::new(0.0, 1.0, freedom).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn u_of_the_largest_samples_does_not_overflow() {
        let all = |small, large| u_frequencies(small, large).iter().sum::<i128>() as f64;
        // C(98, 49) and C(10008, 8).
        assert!((all(49, 49) / 2.547_761_225_898_086e28 - 1.0).abs() < 1e-12);
        assert!((all(8, 10_000) / 2.489_100_854_509_538e27 - 1.0).abs() < 1e-12);
        assert!(NullDistribution::mann_whitney(49, 49, 0.0).p(1200.0) > 0.99);
    }

    #[test]
    fn samples_that_do_not_overlap_have_the_smallest_p() {
        let test = mann_whitney(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]).unwrap();
        assert_eq!((test.statistic, test.delta, test.is_exact), (0.0, 1.0, true));
        let least = min_p(Design::Independent, 3, 3);
        assert!((test.p - 0.1).abs() < 1e-12 && test.p == least);
        let test = wilcoxon(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!((test.statistic, test.delta, test.is_exact), (21.0, 1.0, true));
        let least = min_p(Design::Paired, 6, 6);
        assert!((test.p - 0.03125).abs() < 1e-12 && test.p == least);
        assert_eq!([(0, 5), (5, 0)].map(|(m, n)| min_p(Design::Independent, m, n)), [1.0; 2]);
    }

    #[test]
    fn equal_values_show_no_difference_and_empty_samples_have_no_test() {
        let test = mann_whitney(&[5.0; 4], &[5.0; 6]).unwrap();
        assert_eq!((test.statistic, test.p, test.delta), (12.0, 1.0, 0.0));
        let test = wilcoxon(&[0.0, 0.0]);
        assert_eq!((test.statistic, test.p, test.delta), (0.0, 1.0, 0.0));
        assert_eq!(mann_whitney(&[], &[1.0]), None);
    }

    #[test]
    fn students_test_decides_samples_without_spread() {
        assert_eq!(student(&[1.0; 3], &[1.0; 3]).unwrap().1, 1.0);
        assert_eq!(student(&[1.0; 3], &[2.0; 3]).unwrap().1, 0.0);
        assert_eq!(student(&[1.0], &[2.0, 3.0]), None);
    }
}
