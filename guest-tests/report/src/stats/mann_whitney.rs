// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The Mann-Whitney U test, two-sided: exact where nothing is tied and both samples have fewer than
//! 50 values (the rule of R's `wilcox.test`) or one has at most eight (that of SciPy's
//! `mannwhitneyu`); else by the normal approximation, corrected for ties and for continuity.

use super::{
    exact::{self, Cumulated},
    normal,
    rank::Ranks,
};

/// Up to how many values in both samples cases are counted.
const EXACT_BOTH_UP_TO: usize = 49;
/// Up to how many in the smaller one, however large the other.
const EXACT_UP_TO: usize = 8;
/// Up to how many values in the larger one counts fit.
const LARGEST: usize = 10_000;

/// What the test says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MannWhitney {
    /// How many pairs have the value of the first sample above that of the second; equals count
    /// half.
    pub u: f64,
    /// How likely so unequal a U is where there is no difference.
    pub p: f64,
    /// Cliff's delta (the rank-biserial correlation): 1 where every value of the second sample is
    /// above every one of the first, -1 where it is below, 0 where it is as often so as so.
    pub delta: f64,
    /// Whether cases were counted.
    pub exact: bool,
}

/// How U lies where there is no difference.
#[derive(Debug)]
pub enum Null {
    /// Counted.
    Exact(Cumulated),
    /// Normal, with this mean and standard deviation.
    Normal(f64, f64),
}

impl Null {
    /// For samples of these sizes with this term of ties ([`Ranks::tie_term`]).
    pub fn of(one: usize, two: usize, tie_term: f64) -> Self {
        let (small, large) = (one.min(two), one.max(two));
        let counted = large <= EXACT_BOTH_UP_TO || small <= EXACT_UP_TO && large <= LARGEST;
        if tie_term == 0.0 && counted {
            return Self::Exact(exact::mann_whitney(one, two));
        }
        let (m, n) = (one as f64, two as f64);
        let all = m + n;
        let variance = m * n / 12.0 * (all + 1.0 - tie_term / (all * (all - 1.0)));
        Self::Normal(m * n / 2.0, variance.max(0.0).sqrt())
    }

    /// The two-sided p of a U that is no more than half of all pairs.
    pub fn p(&self, u: f64) -> f64 {
        let one_sided = match self {
            // Without ties, U is whole.
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            Self::Exact(null) => null.share(u as usize),
            Self::Normal(_, 0.0) => 1.0,
            Self::Normal(mean, deviation) => normal::above((mean - u - 0.5) / deviation),
        };
        (2.0 * one_sided).min(1.0)
    }
}

/// Tests whether two samples come from one distribution; `None` where one is empty.
pub fn mann_whitney(first: &[f64], second: &[f64]) -> Option<MannWhitney> {
    if first.is_empty() || second.is_empty() {
        return None;
    }
    let ranks = Ranks::of(&[first, second].concat());
    let pairs = first.len() as f64 * second.len() as f64;
    let doubled: u64 = ranks.doubled[..first.len()].iter().sum();
    let least = (first.len() * (first.len() + 1)) as f64 / 2.0;
    let u = doubled as f64 / 2.0 - least;
    let null = Null::of(first.len(), second.len(), ranks.tie_term());
    Some(MannWhitney {
        u,
        p: null.p(u.min(pairs - u)),
        delta: 1.0 - 2.0 * u / pairs,
        exact: matches!(null, Null::Exact(_)),
    })
}

/// The least p that samples of these sizes can give: below it nothing is found.
pub fn least_p(one: usize, two: usize) -> f64 {
    if one == 0 || two == 0 {
        return 1.0;
    }
    Null::of(one, two, 0.0).p(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        let test = mann_whitney(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]).unwrap();
        assert_eq!((test.u, test.delta, test.exact), (0.0, 1.0, true));
        assert!((test.p - 0.1).abs() < 1e-12);
        assert!((least_p(3, 3) - 0.1).abs() < 1e-12);
    }

    #[test]
    fn all_alike_is_no_difference() {
        let test = mann_whitney(&[5.0; 4], &[5.0; 6]).unwrap();
        assert_eq!((test.u, test.p, test.delta), (12.0, 1.0, 0.0));
    }

    #[test]
    fn an_empty_sample_is_no_sample() {
        assert_eq!(mann_whitney(&[], &[1.0]), None);
        assert_eq!(least_p(0, 5), 1.0);
    }
}
