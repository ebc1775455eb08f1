// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The geometric mean of the ratios of many rows, with a bootstrap interval.
//!
//! A resample draws as many runs of each row and side as there are, with replacement. The interval
//! lies between the 2.5% and the 97.5% quantile of the means of [`RESAMPLES`] resamples. The draws
//! come from SplitMix64 with the seed [`SEED`], so equal runs give equal intervals.

use rand_core::{Rng, SeedableRng};
use rand_xoshiro::SplitMix64;

use super::{
    descriptive::quantile,
    null::{ALPHA, Design},
};

/// Number of resamples.
const RESAMPLES: usize = 2000;
/// Seed of the draws.
const SEED: u64 = 0x9e9e_ec1a_edbf_e87a;

/// Runs of one row.
#[derive(Debug, Clone, Copy)]
pub struct Resampled<'a> {
    /// Runs before, all positive.
    pub before: &'a [f64],
    /// Runs after, all positive.
    pub after: &'a [f64],
    /// True if a run after is drawn with its run before.
    pub design: Design,
}

impl Resampled<'_> {
    fn draw(&self, random: &mut SplitMix64) -> Sides {
        let mut below = |count: usize| {
            let scaled = (u128::from(random.next_u64()) * count as u128) >> 64;
            usize::try_from(scaled).unwrap_or(0)
        };
        let mut places =
            |runs: &[f64]| -> Vec<usize> { runs.iter().map(|_| below(runs.len())).collect() };
        let drawn = |runs: &[f64], at: &[usize]| at.iter().map(|&at| runs[at]).collect();
        let before = places(self.before);
        let after = match self.design {
            Design::Paired if self.after.len() == self.before.len() => before.clone(),
            _ => places(self.after),
        };
        (drawn(self.before, &before), drawn(self.after, &after))
    }
}

/// Runs before and after.
type Sides = (Vec<f64>, Vec<f64>);

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    quantile(&values, 0.5)
}

/// Returns the geometric mean of the rows' ratios of medians, and its 95% interval if every row has
/// at least two runs a side. `None` without rows, or if a row has no runs or runs that are not
/// positive.
pub fn geometric_mean(rows: &[Resampled]) -> Option<(f64, Option<[f64; 2]>)> {
    let sides = || rows.iter().flat_map(|row| [row.before, row.after]);
    if rows.is_empty() || sides().any(|side| side.is_empty() || side.iter().any(|&x| x <= 0.0)) {
        return None;
    }
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
        return Some((ratio, None));
    }
    let mut random = SplitMix64::seed_from_u64(SEED);
    let mut means = (0..RESAMPLES)
        .map(|_| mean(&mut |row| row.draw(&mut random)))
        .collect::<Option<Vec<f64>>>()?;
    means.sort_unstable_by(f64::total_cmp);
    let ends = [quantile(&means, ALPHA / 2.0)?, quantile(&means, 1.0 - ALPHA / 2.0)?];
    Some((ratio, Some(ends)))
}

#[cfg(test)]
mod tests {
    use super::{super::draw::Normal, *};

    fn row<'a>(before: &'a [f64], after: &'a [f64]) -> Resampled<'a> {
        Resampled { before, after, design: Design::Independent }
    }

    #[test]
    fn half_and_twice_cancel() {
        let mean = geometric_mean(&[row(&[1.0], &[2.0]), row(&[4.0], &[2.0])]);
        assert_eq!(mean, Some((1.0, None)));
        assert_eq!(geometric_mean(&[]), None);
        assert_eq!(geometric_mean(&[row(&[0.0], &[1.0])]), None);
    }

    #[test]
    fn the_interval_is_repeatable_and_covers_the_truth() {
        let mut covered = 0;
        for seed in 0..40 {
            let mut normal = Normal::new(seed);
            let before = normal.sample(20, 100.0, 0.02);
            let after = normal.sample(20, 90.0, 0.02);
            let once = geometric_mean(&[row(&before, &after)]).unwrap();
            assert_eq!(once, geometric_mean(&[row(&before, &after)]).unwrap());
            let [low, high] = once.1.unwrap();
            covered += u32::from(low <= 0.9 && 0.9 <= high);
        }
        assert!(covered >= 35, "{covered} of 40");
    }
}
