// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The Mann-Whitney U test of independent runs and the Wilcoxon signed-rank test of paired runs,
//! both two-sided.

use super::{descriptive::Ranks, null::Null};

/// Result of a rank test.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankTest {
    /// U of the first sample (equal pairs count half), or the sum of positive ranks.
    pub statistic: f64,
    /// Two-sided p.
    pub p: f64,
    /// Effect size from -1 to 1: Cliff's delta, or the rank-biserial correlation of pairs. 1 where
    /// every value of the second sample is the greater one.
    pub delta: f64,
    /// True if cases were counted; otherwise a normal distribution approximates them.
    pub exact: bool,
}

/// Tests whether two samples come from one distribution; `None` if one is empty.
pub fn mann_whitney(first: &[f64], second: &[f64]) -> Option<RankTest> {
    if first.is_empty() || second.is_empty() {
        return None;
    }
    let ranks = Ranks::of(&[first, second].concat());
    let pairs = first.len() as f64 * second.len() as f64;
    let doubled: u64 = ranks.doubled[..first.len()].iter().sum();
    let u = doubled as f64 / 2.0 - (first.len() * (first.len() + 1)) as f64 / 2.0;
    let null = Null::mann_whitney(first.len(), second.len(), ranks.tie_term);
    Some(RankTest {
        statistic: u,
        p: null.p(u.min(pairs - u)),
        delta: 1.0 - 2.0 * u / pairs,
        exact: null.is_exact(),
    })
}

/// Tests whether differences lie about zero; differences of zero are left out, and without others
/// the result is `None`.
pub fn wilcoxon(differences: &[f64]) -> Option<RankTest> {
    let kept: Vec<f64> = differences.iter().copied().filter(|&d| d != 0.0).collect();
    if kept.is_empty() {
        return None;
    }
    let ranks = Ranks::of(&kept.iter().map(|d| d.abs()).collect::<Vec<_>>());
    let signed = kept.iter().zip(&ranks.doubled);
    let doubled: u64 = signed.filter(|(d, _)| **d > 0.0).map(|(_, rank)| rank).sum();
    let all: u64 = ranks.doubled.iter().sum();
    let null = Null::signed_ranks(&ranks, differences.len() - kept.len());
    let positive = doubled as f64 / 2.0;
    Some(RankTest {
        statistic: positive,
        p: null.p(positive),
        delta: 2.0 * doubled as f64 / all as f64 - 1.0,
        exact: null.is_exact(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_that_do_not_overlap_have_the_least_p() {
        let test = mann_whitney(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]).unwrap();
        assert_eq!((test.statistic, test.delta, test.exact), (0.0, 1.0, true));
        assert!((test.p - 0.1).abs() < 1e-12);
        let test = wilcoxon(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        assert_eq!((test.statistic, test.delta, test.exact), (21.0, 1.0, true));
        assert!((test.p - 0.03125).abs() < 1e-12);
    }

    #[test]
    fn equal_values_show_no_difference() {
        let test = mann_whitney(&[5.0; 4], &[5.0; 6]).unwrap();
        assert_eq!((test.statistic, test.p, test.delta), (12.0, 1.0, 0.0));
        assert_eq!(wilcoxon(&[0.0, 0.0]), None);
    }

    #[test]
    fn empty_samples_have_no_test() {
        assert_eq!(mann_whitney(&[], &[1.0]), None);
        assert_eq!(wilcoxon(&[]), None);
    }
}
