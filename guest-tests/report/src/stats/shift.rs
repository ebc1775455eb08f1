// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The Hodges-Lehmann ratio: by what factor one sample lies above another.
//!
//! It is taken on logarithms: the median of log(after) - log(before) over all pairs of runs (over
//! all Walsh averages, where runs are paired), and then its exponential. A factor is what a change
//! of a kernel's path is, and it is the same read backwards. Its 95% interval holds the factors
//! that the test would not reject at 5%: the [Mann-Whitney test](super::mann_whitney), the
//! [Wilcoxon test](super::wilcoxon) where runs are paired.

use super::{exact::ends, mann_whitney, quantile, rank::Ranks, wilcoxon};

/// More runs a side than these are thinned to their quantiles, so that pairs stay few.
const MOST_RUNS: usize = 1000;

/// A ratio, and what it may be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// The ratio of after to before.
    pub ratio: f64,
    /// Its 95% interval; `None` where there are too few runs for one.
    pub interval: Option<(f64, f64)>,
}

impl Estimate {
    /// From differences of logarithms and the test's p for each count of them below zero.
    fn of(mut differences: Vec<f64>, p: impl Fn(usize) -> f64) -> Option<Self> {
        differences.sort_unstable_by(f64::total_cmp);
        let ratio = quantile(&differences, 0.5)?.exp();
        let ends = ends(differences.len(), p);
        Some(Self {
            ratio,
            interval: ends.map(|(low, high)| (differences[low].exp(), differences[high].exp())),
        })
    }
}

/// Logarithms; `None` where a value has none.
fn logarithms(values: &[f64]) -> Option<Vec<f64>> {
    let mut logs = values
        .iter()
        .map(|&value| (value > 0.0 && value.is_finite()).then(|| value.ln()))
        .collect::<Option<Vec<_>>>()?;
    if logs.len() > MOST_RUNS {
        logs.sort_unstable_by(f64::total_cmp);
        let share = |at| at as f64 / (MOST_RUNS - 1) as f64;
        logs = (0..MOST_RUNS)
            .filter_map(|at| quantile(&logs, share(at)))
            .collect();
    }
    Some(logs)
}

/// The ratio of two samples; `None` where one is empty or has a value that is not positive.
pub fn shift(before: &[f64], after: &[f64]) -> Option<Estimate> {
    let (before, after) = (logarithms(before)?, logarithms(after)?);
    // Shifted against each other, the samples keep only the ties within themselves.
    let ties = Ranks::of(&before).tie_term() + Ranks::of(&after).tie_term();
    if before.is_empty() || after.is_empty() {
        return None;
    }
    let null = mann_whitney::Null::of(before.len(), after.len(), ties);
    let pairs = after
        .iter()
        .flat_map(|after| before.iter().map(move |before| after - before));
    Estimate::of(pairs.collect(), |u| null.p(u as f64))
}

/// The ratio of runs taken in turns, the first with the first; `None` as for [`shift`], or where
/// the two are not equally many.
pub fn paired_shift(before: &[f64], after: &[f64]) -> Option<Estimate> {
    if before.len() != after.len() || before.len() > MOST_RUNS {
        return None;
    }
    let (before, after) = (logarithms(before)?, logarithms(after)?);
    let differences: Vec<f64> = before.iter().zip(&after).map(|(b, a)| a - b).collect();
    let mut averages = Vec::new();
    for (at, one) in differences.iter().enumerate() {
        averages.extend(differences[at..].iter().map(|two| (one + two) / 2.0));
    }
    // Differences that are shifted apart from zero and from each other are ranked without ties.
    let ranks: Vec<f64> = (1..=differences.len()).map(|rank| rank as f64).collect();
    let null = wilcoxon::Null::of(&Ranks::of(&ranks), 0);
    Estimate::of(averages, |sum| null.p(2 * sum))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_factor_is_found_and_read_backwards() {
        let before = [10.0, 10.1, 10.2, 10.3, 10.4];
        let after = before.map(|value| value * 3.0);

        let there = shift(&before, &after).unwrap();
        let back = shift(&after, &before).unwrap();

        assert!((there.ratio - 3.0).abs() < 1e-9);
        assert!((back.ratio - 1.0 / 3.0).abs() < 1e-9);
        let (low, high) = there.interval.unwrap();
        let (back_low, back_high) = back.interval.unwrap();
        assert!(low < 3.0 && high > 3.0);
        assert!((low * back_high - 1.0).abs() < 1e-9 && (high * back_low - 1.0).abs() < 1e-9);
    }

    #[test]
    fn pairs_take_out_what_both_have() {
        let before = [1.0, 10.0, 100.0, 1000.0, 20.0, 30.0];
        let after = before.map(|value| value * 1.1);

        let estimate = paired_shift(&before, &after).unwrap();

        assert!((estimate.ratio - 1.1).abs() < 1e-9);
        assert!(estimate.interval.unwrap().0 > 1.09);
    }

    #[test]
    fn few_runs_have_a_ratio_and_no_interval() {
        let estimate = shift(&[1.0, 1.1, 1.2], &[2.0, 2.1, 2.2]).unwrap();
        assert_eq!(estimate.interval, None);
    }

    #[test]
    fn nothing_and_zero_have_no_logarithm() {
        assert_eq!(shift(&[], &[1.0]), None);
        assert_eq!(shift(&[1.0], &[0.0]), None);
        assert_eq!(paired_shift(&[1.0, 2.0], &[1.0]), None);
    }

    #[test]
    fn very_many_runs_are_thinned() {
        let before: Vec<f64> = (0..20_000).map(|at| 1000.0 + f64::from(at % 997)).collect();
        let after: Vec<f64> = before.iter().map(|value| value * 1.5).collect();
        let estimate = shift(&before, &after).unwrap();
        assert!((estimate.ratio - 1.5).abs() < 1e-3);
    }
}
