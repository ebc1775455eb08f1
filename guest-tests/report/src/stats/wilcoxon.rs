// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The Wilcoxon signed-rank test, two-sided, for runs taken in turns. Differences of zero are left
//! out. Cases are counted for up to 50 pairs without ties and zeros, and for up to 13 with them;
//! else the normal approximation is corrected for ties and for continuity. These are the rules of
//! SciPy's `wilcoxon` with `method="auto"` and `correction=True`.

use super::{
    exact::{self, Cumulated},
    normal,
    rank::Ranks,
};

/// Up to how many pairs without ties cases are counted.
const EXACT_UP_TO: usize = 50;
/// Up to how many pairs with ties.
const EXACT_TIED_UP_TO: usize = 13;

/// What the test says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Wilcoxon {
    /// The sum of the ranks of positive differences.
    pub positive: f64,
    /// How likely so unequal a sum is where there is no difference.
    pub p: f64,
    /// The rank-biserial correlation of pairs: 1 where every difference is positive.
    pub delta: f64,
    /// Whether cases were counted.
    pub exact: bool,
}

/// How the sum of positive ranks lies where there is no difference.
#[derive(Debug)]
pub enum Null {
    /// Counted, over twice the ranks.
    Exact(Cumulated),
    /// Normal, with this mean and standard deviation.
    Normal(f64, f64),
}

impl Null {
    /// For these ranks of absolute differences; `zeros` were left out.
    pub fn of(ranks: &Ranks, zeros: usize) -> Self {
        let pairs = ranks.doubled.len() + zeros;
        let plain = ranks.ties.is_empty() && zeros == 0;
        if pairs <= if plain { EXACT_UP_TO } else { EXACT_TIED_UP_TO } {
            return Self::Exact(exact::signed_ranks(&ranks.doubled));
        }
        let n = ranks.doubled.len() as f64;
        let variance = (n * (n + 1.0) * (2.0 * n + 1.0) - ranks.tie_term() / 2.0) / 24.0;
        Self::Normal(n * (n + 1.0) / 4.0, variance.max(0.0).sqrt())
    }

    /// The two-sided p of a sum given as twice itself.
    pub fn p(&self, doubled: usize) -> f64 {
        let p = match self {
            Self::Exact(null) => null.share(doubled).min(null.share_above(doubled)),
            Self::Normal(_, 0.0) => 1.0,
            Self::Normal(mean, deviation) => {
                let off = (doubled as f64 / 2.0 - mean).abs();
                normal::above((off - 0.5) / deviation)
            }
        };
        (2.0 * p).min(1.0)
    }
}

/// Tests whether differences lie about zero; `None` where there are none but zeros.
pub fn wilcoxon(differences: &[f64]) -> Option<Wilcoxon> {
    let kept: Vec<f64> = differences.iter().copied().filter(|&d| d != 0.0).collect();
    if kept.is_empty() {
        return None;
    }
    let ranks = Ranks::of(&kept.iter().map(|d| d.abs()).collect::<Vec<_>>());
    let signed = kept.iter().zip(&ranks.doubled);
    let doubled: u64 = signed
        .filter(|(d, _)| **d > 0.0)
        .map(|(_, rank)| rank)
        .sum();
    let all: u64 = ranks.doubled.iter().sum();
    let null = Null::of(&ranks, differences.len() - kept.len());
    Some(Wilcoxon {
        positive: doubled as f64 / 2.0,
        p: null.p(usize::try_from(doubled).unwrap_or(usize::MAX)),
        delta: 2.0 * doubled as f64 / all as f64 - 1.0,
        exact: matches!(null, Null::Exact(_)),
    })
}

/// The least p that this many pairs can give.
pub fn least_paired_p(pairs: usize) -> f64 {
    let values: Vec<f64> = (1..=pairs).map(|value| value as f64).collect();
    if pairs == 0 {
        return 1.0;
    }
    Null::of(&Ranks::of(&values), 0).p(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_on_one_side() {
        let test = wilcoxon(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        assert_eq!((test.positive, test.delta, test.exact), (21.0, 1.0, true));
        assert!((test.p - 0.03125).abs() < 1e-12);
        assert!((least_paired_p(6) - 0.03125).abs() < 1e-12);
    }

    #[test]
    fn zeros_alone_say_nothing() {
        assert_eq!(wilcoxon(&[0.0, 0.0]), None);
        assert_eq!(wilcoxon(&[]), None);
    }
}
