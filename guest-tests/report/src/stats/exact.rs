// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Null distributions by counting every case, in whole numbers, so that nothing is rounded before
//! the last division; and what both tests do with a null distribution.

use super::ALPHA;

/// How many of `choose` cases lie at or below each value.
#[derive(Debug, Clone)]
pub struct Cumulated {
    below: Vec<i128>,
    all: f64,
}

impl Cumulated {
    fn of(cases: Vec<i128>) -> Self {
        let mut sum = 0;
        let below: Vec<i128> = cases
            .into_iter()
            .map(|count| {
                sum += count;
                sum
            })
            .collect();
        let all = below.last().copied().unwrap_or(1) as f64;
        Self { below, all }
    }

    /// The share of cases at or below a value.
    pub fn share(&self, value: usize) -> f64 {
        let at = value.min(self.below.len().saturating_sub(1));
        self.below
            .get(at)
            .map_or(1.0, |&below| below as f64 / self.all)
    }

    /// The share of cases at or above a value.
    pub fn share_above(&self, value: usize) -> f64 {
        match value.checked_sub(1) {
            Some(under) => {
                let at = under.min(self.below.len().saturating_sub(1));
                self.below
                    .get(at)
                    .map_or(1.0, |&below| (self.all - below as f64) / self.all)
            }
            None => 1.0,
        }
    }
}

/// The distribution of Mann and Whitney's U for untied samples of these sizes: the coefficients of
/// the Gaussian binomial, built factor by factor. Each is at most the binomial coefficient, which
/// must fit (8 with 10,000 and 49 with 49 are safe).
pub fn mann_whitney(one: usize, two: usize) -> Cumulated {
    let (small, large) = (one.min(two), one.max(two));
    let mut cases = vec![0_i128; small * large + 1];
    cases[0] = 1;
    for i in 1..=small {
        // Times 1 - q^(large + i), from the top so that each term is taken once.
        for at in (large + i..cases.len()).rev() {
            cases[at] -= cases[at - large - i];
        }
        // Through 1 - q^i.
        for at in i..cases.len() {
            cases[at] += cases[at - i];
        }
    }
    Cumulated::of(cases)
}

/// The distribution of the sum of positive ranks, each rank being positive or negative by even
/// chance: ranks as they are, so ties are exact too. At most 100 of them.
pub fn signed_ranks(ranks: &[u64]) -> Cumulated {
    let ranks: Vec<usize> = ranks
        .iter()
        .filter_map(|&r| usize::try_from(r).ok())
        .collect();
    let mut cases = vec![0_i128; ranks.iter().sum::<usize>() + 1];
    cases[0] = 1;
    for rank in ranks {
        for at in (rank..cases.len()).rev() {
            cases[at] += cases[at - rank];
        }
    }
    Cumulated::of(cases)
}

/// The positions of the ends of an interval among sorted candidates: the first value of a statistic
/// (from 0) whose two-sided p is above [`ALPHA`], by which both ends are counted in. `None` where no
/// value is rejected, so that the interval has no ends.
pub fn ends(candidates: usize, p: impl Fn(usize) -> f64) -> Option<(usize, usize)> {
    // A less extreme value has a greater p.
    let (mut first, mut end) = (0, candidates / 2 + 1);
    while first < end {
        let middle = first + (end - first) / 2;
        if p(middle) > ALPHA {
            end = middle;
        } else {
            first = middle + 1;
        }
    }
    if first > candidates / 2 {
        return None;
    }
    let low = first.checked_sub(1)?;
    Some((low, candidates - first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn u_counts_every_case() {
        // Every way to lay two values among three others.
        let null = mann_whitney(2, 3);
        let shares: Vec<f64> = (0..=6).map(|u| null.share(u) * 10.0).collect();
        assert_eq!(shares, [1.0, 2.0, 4.0, 6.0, 8.0, 9.0, 10.0]);
        assert_eq!(null.share_above(6), 0.1);
        assert_eq!(null.share_above(0), 1.0);
    }

    #[test]
    fn u_of_the_largest_samples_does_not_overflow() {
        let null = mann_whitney(8, 10_000);
        assert!((null.share(40_000) - 0.5).abs() < 1e-4);
        assert!((null.share(80_000) - 1.0).abs() < 1e-12);
        // C(98, 49) cases.
        let null = mann_whitney(49, 49);
        assert!((null.all / 2.547_761_225_898_086e28 - 1.0).abs() < 1e-12);
        assert!((null.share(1200) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn u_agrees_with_the_published_table() {
        // Critical values of U, two-sided 5%: the greatest U that is rejected.
        for (one, two, critical) in [(4, 4, 0), (5, 5, 2), (6, 8, 8), (8, 8, 13), (8, 20, 41)] {
            let null = mann_whitney(one, two);
            assert!(2.0 * null.share(critical) <= ALPHA, "{one} {two}");
            assert!(2.0 * null.share(critical + 1) > ALPHA, "{one} {two}");
        }
    }

    #[test]
    fn signed_ranks_agree_with_the_published_table() {
        for (n, critical) in [(6, 0), (8, 3), (10, 8), (15, 25), (20, 52), (25, 89)] {
            let null = signed_ranks(&(1..=n).collect::<Vec<_>>());
            assert!(2.0 * null.share(critical) <= ALPHA, "{n}");
            assert!(2.0 * null.share(critical + 1) > ALPHA, "{n}");
        }
    }
}
