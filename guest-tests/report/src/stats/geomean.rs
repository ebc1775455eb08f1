// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What many ratios say together: their geometric mean, with a bootstrap interval.
//!
//! Each resample draws as many runs of each row and side as there were, with replacement, and takes
//! the geometric mean of the ratios of medians; the interval lies between the 2.5% and the 97.5%
//! quantile of 2,000 of them. The draws are seeded, so the same runs give the same interval.

use super::{ALPHA, quantile};
use granule_types::seed::mix;

/// How many resamples.
const RESAMPLES: u64 = 2000;
/// Where the draws begin: any constant will do.
const SEED: u64 = 0x0067_7261_6e75_6c65;

/// The runs of one row, all positive.
#[derive(Debug, Clone, Copy)]
pub struct Resampled<'a> {
    /// Before.
    pub before: &'a [f64],
    /// After.
    pub after: &'a [f64],
    /// Whether run belongs to run, so that they are drawn together.
    pub paired: bool,
}

/// A geometric mean of ratios.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Geomean {
    /// The mean.
    pub ratio: f64,
    /// Its 95% interval; `None` where a row has one run on a side.
    pub interval: Option<(f64, f64)>,
}

/// A stream of draws.
struct Draws(u64);

impl Draws {
    fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let scaled = (u128::from(mix(self.0)) * count as u128) >> 64;
        usize::try_from(scaled).unwrap_or(0)
    }
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    quantile(&values, 0.5)
}

/// The geometric mean of the rows' ratios of medians; `None` without a row, or where a row has no
/// runs or runs that are not positive.
pub fn geomean(rows: &[Resampled]) -> Option<Geomean> {
    let sides = || rows.iter().flat_map(|row| [row.before, row.after]);
    if rows.is_empty() || sides().any(|side| side.is_empty() || side.iter().any(|&x| x <= 0.0)) {
        return None;
    }
    /// Before and after of a row.
    type Sides = (Vec<f64>, Vec<f64>);
    let mean = |pick: &mut dyn FnMut(&Resampled) -> Sides| {
        let mut sum = 0.0;
        for row in rows {
            let (before, after) = pick(row);
            sum += (median(after)? / median(before)?).ln();
        }
        Some((sum / rows.len() as f64).exp())
    };
    let ratio = mean(&mut |row| (row.before.to_vec(), row.after.to_vec()))?;
    if sides().any(|side| side.len() < 2) {
        return Some(Geomean {
            ratio,
            interval: None,
        });
    }
    let mut draws = Draws(SEED);
    let mut means = Vec::new();
    for _ in 0..RESAMPLES {
        means.push(mean(&mut |row| {
            let drawn: Vec<usize> = row
                .before
                .iter()
                .map(|_| draws.below(row.before.len()))
                .collect();
            let before = drawn.iter().map(|&at| row.before[at]).collect();
            let after = if row.paired && row.after.len() == row.before.len() {
                drawn.iter().map(|&at| row.after[at]).collect()
            } else {
                let mut one = |_| row.after[draws.below(row.after.len())];
                row.after.iter().map(&mut one).collect()
            };
            (before, after)
        })?);
    }
    means.sort_unstable_by(f64::total_cmp);
    let (low, high) = (
        quantile(&means, ALPHA / 2.0)?,
        quantile(&means, 1.0 - ALPHA / 2.0)?,
    );
    Some(Geomean {
        ratio,
        interval: Some((low, high)),
    })
}

#[cfg(test)]
mod tests {
    use super::{super::draw::Normal, *};

    fn row<'a>(before: &'a [f64], after: &'a [f64]) -> Resampled<'a> {
        Resampled {
            before,
            after,
            paired: false,
        }
    }

    #[test]
    fn half_and_twice_are_nothing() {
        let mean = geomean(&[row(&[1.0], &[2.0]), row(&[4.0], &[2.0])]).unwrap();
        assert_eq!((mean.ratio, mean.interval), (1.0, None));
        assert_eq!(geomean(&[]), None);
        assert_eq!(geomean(&[row(&[0.0], &[1.0])]), None);
    }

    #[test]
    fn the_interval_is_repeatable_and_covers_the_truth() {
        let mut covered = 0;
        for seed in 0..40 {
            let mut normal = Normal::new(seed);
            let before = normal.sample(20, 100.0, 0.02);
            let after = normal.sample(20, 90.0, 0.02);
            let once = geomean(&[row(&before, &after)]).unwrap();
            assert_eq!(once, geomean(&[row(&before, &after)]).unwrap());
            let (low, high) = once.interval.unwrap();
            covered += u32::from(low <= 0.9 && 0.9 <= high);
        }
        assert!(covered >= 35, "{covered} of 40");
    }
}
