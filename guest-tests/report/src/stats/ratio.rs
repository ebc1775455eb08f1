// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The Hodges-Lehmann ratio: the factor by which one sample lies above another.
//!
//! The ratio is the exponential of the median of log(after) - log(before) over all pairs of runs
//! (over all Walsh averages for paired runs). Logarithms make it symmetric: the ratio of the sides
//! in reverse is its inverse. The 95% interval holds the factors that the rank test does not reject.

use super::{
    descriptive::{Ranks, logarithms, quantile},
    null::{ALPHA, Design, Null},
};

/// Sides with more runs are thinned to as many quantiles, which bounds the number of pairs.
const MOST_RUNS: usize = 1000;

/// A ratio and its 95% interval, `None` where there are too few runs for one.
pub type Estimate = (f64, Option<[f64; 2]>);

/// Returns the ratio of after to before; `None` where a side is empty or has a value that is not
/// positive, or where paired sides differ in length.
pub fn ratio(design: Design, before: &[f64], after: &[f64]) -> Option<Estimate> {
    let (before, after) = (logarithms(before)?, logarithms(after)?);
    match design {
        _ if before.is_empty() || after.is_empty() => None,
        Design::Independent => {
            let (before, after) = (thinned(before), thinned(after));
            // Shifted against each other, the samples keep only the ties within themselves.
            let ties = Ranks::of(&before).tie_term + Ranks::of(&after).tie_term;
            let pairs = after.iter().flat_map(|a| before.iter().map(move |b| a - b));
            let null = Null::mann_whitney(before.len(), after.len(), ties);
            estimate(pairs.collect(), &null)
        }
        Design::Paired if before.len() != after.len() || before.len() > MOST_RUNS => None,
        Design::Paired => {
            let differences: Vec<f64> = before.iter().zip(&after).map(|(b, a)| a - b).collect();
            let walsh = differences.iter().enumerate().flat_map(|(at, one)| {
                let rest = differences[at..].iter();
                rest.map(move |two| (one + two) / 2.0)
            });
            let null = Null::signed_ranks(&Ranks::untied(differences.len()), 0);
            estimate(walsh.collect(), &null)
        }
    }
}

fn thinned(mut logs: Vec<f64>) -> Vec<f64> {
    if logs.len() <= MOST_RUNS {
        return logs;
    }
    logs.sort_unstable_by(f64::total_cmp);
    let share = |at| at as f64 / (MOST_RUNS - 1) as f64;
    let quantiles = (0..MOST_RUNS).filter_map(|at| quantile(&logs, share(at)));
    quantiles.collect()
}

/// Returns the median of the differences with the interval of those that the test does not reject.
fn estimate(mut differences: Vec<f64>, null: &Null) -> Option<Estimate> {
    differences.sort_unstable_by(f64::total_cmp);
    let ratio = quantile(&differences, 0.5)?.exp();
    // A less extreme value has a greater p: find the first value that is not rejected. Both ends of
    // the interval are included.
    let count = differences.len();
    let values: Vec<usize> = (0..=count / 2).collect();
    let first = values.partition_point(|&value| null.p(value as f64) <= ALPHA);
    let low = first.checked_sub(1).filter(|_| first <= count / 2);
    Some((ratio, low.map(|low| [differences[low].exp(), differences[count - first].exp()])))
}

#[cfg(test)]
mod tests {
    use super::{Design::*, *};

    #[test]
    fn a_factor_is_found_and_inverts_with_the_sides() {
        let before = [10.0, 10.1, 10.2, 10.3, 10.4];
        let after = before.map(|value| value * 3.0);

        let (ratio_forward, interval) = ratio(Independent, &before, &after).unwrap();
        let (ratio_back, interval_back) = ratio(Independent, &after, &before).unwrap();

        assert!((ratio_forward - 3.0).abs() < 1e-9 && (ratio_back - 1.0 / 3.0).abs() < 1e-9);
        let ([low, high], [back_low, back_high]) = (interval.unwrap(), interval_back.unwrap());
        assert!(low < 3.0 && high > 3.0);
        assert!((low * back_high - 1.0).abs() < 1e-9 && (high * back_low - 1.0).abs() < 1e-9);
    }

    #[test]
    fn pairing_removes_the_spread_that_both_runs_share() {
        let before = [1.0, 10.0, 100.0, 1000.0, 20.0, 30.0];
        let after = before.map(|value| value * 1.1);

        let (found, interval) = ratio(Paired, &before, &after).unwrap();

        assert!((found - 1.1).abs() < 1e-9 && interval.unwrap()[0] > 1.09);
    }

    #[test]
    fn three_runs_have_a_ratio_and_no_interval() {
        let found = ratio(Independent, &[1.0, 1.1, 1.2], &[2.0, 2.1, 2.2]).unwrap();
        assert_eq!(found.1, None);
    }

    #[test]
    fn empty_zero_and_unequal_samples_have_no_ratio() {
        assert_eq!(ratio(Independent, &[], &[1.0]), None);
        assert_eq!(ratio(Independent, &[1.0], &[0.0]), None);
        assert_eq!(ratio(Paired, &[1.0, 2.0], &[1.0]), None);
    }

    #[test]
    fn large_samples_are_thinned() {
        let before: Vec<f64> = (0..20_000).map(|at| 1000.0 + f64::from(at % 997)).collect();
        let after: Vec<f64> = before.iter().map(|value| value * 1.5).collect();
        assert!((ratio(Independent, &before, &after).unwrap().0 - 1.5).abs() < 1e-3);
    }
}
