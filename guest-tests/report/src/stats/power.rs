// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What could have been found: the least ratio that the test finds four times in five.
//!
//! For samples whose logarithms spread normally with a standard deviation s, the Mann-Whitney test
//! finds a shift d = (z(α/2) + z(0.2)) · s · √(1/m + 1/n) / √(3/π) with a chance of about 80%
//! (65% to 70% where α is a thousandth or so and runs are few, since ranks then say less than
//! values); 3/π is its efficiency against the t test there (Hodges and Lehmann, 1956). α is for the
//! caller to say: what Holm's correction leaves to the least of all p-values of a table.
//!
//! For runs in turns s is that of the n differences, and the shift is that times 1/√n: Wilcoxon's
//! signed ranks have the same efficiency.

use std::f64::consts::PI;

use super::{mann_whitney::least_p, normal, wilcoxon::least_paired_p};

/// How likely it is to be found.
const POWER: f64 = 0.8;

/// The least ratio above 1 that would be found by a two-sided p of less than `alpha`; `None` where
/// no difference can be, however large, since there are too few runs.
pub fn detectable(before: &[f64], after: &[f64], alpha: f64) -> Option<f64> {
    let (m, n) = (before.len(), after.len());
    if m < 2 || n < 2 || least_p(m, n) > alpha {
        return None;
    }
    let squares = squares(&logarithms(before)?) + squares(&logarithms(after)?);
    let deviation = (squares / (m + n - 2) as f64).sqrt();
    let size = (1.0 / m as f64 + 1.0 / n as f64).sqrt();
    Some((reach(alpha) * deviation * size).exp())
}

/// The same for runs taken in turns, the first with the first.
pub fn paired_detectable(before: &[f64], after: &[f64], alpha: f64) -> Option<f64> {
    let n = before.len();
    if n < 2 || after.len() != n || least_paired_p(n) > alpha {
        return None;
    }
    let (before, after) = (logarithms(before)?, logarithms(after)?);
    let differences: Vec<f64> = before.iter().zip(&after).map(|(b, a)| a - b).collect();
    let deviation = (squares(&differences) / (n - 1) as f64).sqrt();
    Some((reach(alpha) * deviation / (n as f64).sqrt()).exp())
}

/// How many standard errors a shift must have.
fn reach(alpha: f64) -> f64 {
    (normal::value_above(alpha / 2.0) + normal::value_above(1.0 - POWER)) / (3.0 / PI).sqrt()
}

/// Logarithms; `None` where a value has none.
fn logarithms(values: &[f64]) -> Option<Vec<f64>> {
    let log = |&value: &f64| (value > 0.0).then(|| value.ln());
    values.iter().map(log).collect()
}

/// The sum of squared distances from the mean.
fn squares(values: &[f64]) -> f64 {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    values.iter().map(|value| (value - mean).powi(2)).sum()
}

#[cfg(test)]
mod tests {
    use super::{
        super::{ALPHA, draw::Normal, mann_whitney, wilcoxon},
        *,
    };

    #[test]
    fn what_is_said_to_be_found_is_found_four_times_in_five() {
        for (runs, rows) in [(10, 1), (20, 1), (20, 20)] {
            let mut normal = Normal::new(7);
            let pilot = (normal.sample(400, 1.0, 0.02), normal.sample(400, 1.0, 0.02));
            // The same spread, seen through as many runs.
            let alpha = ALPHA / f64::from(rows);
            let ratio = detectable(&pilot.0[..runs], &pilot.1[..runs], alpha).unwrap();
            let truth = {
                let reach = normal::value_above(alpha / 2.0) + normal::value_above(0.2);
                (reach * 0.02 * (2.0 / runs as f64).sqrt() / (3.0 / PI).sqrt()).exp()
            };
            assert!(
                (ratio.ln() / truth.ln() - 1.0).abs() < 0.5,
                "{ratio} {truth}"
            );
            let mut found = 0;
            for _ in 0..500 {
                let (before, after) = (
                    normal.sample(runs, 1.0, 0.02),
                    normal.sample(runs, truth, 0.02),
                );
                let test = mann_whitney(&before, &after).unwrap();
                found += u32::from(test.p < alpha);
            }
            assert!(
                (335..=450).contains(&found),
                "{runs} runs, {rows} rows: {found} of 500"
            );
        }
    }

    #[test]
    fn pairs_find_what_is_said_four_times_in_five_too() {
        for (runs, rows) in [(12, 1), (20, 1), (20, 20)] {
            let mut normal = Normal::new(11);
            let alpha = ALPHA / f64::from(rows);
            let mut pairs = |ratio: f64, runs: usize| {
                // What both runs of a pair have is far more than what each has alone.
                let common = normal.sample(runs, 1.0, 0.5);
                let (one, two) = (
                    normal.sample(runs, 1.0, 0.02),
                    normal.sample(runs, ratio, 0.02),
                );
                let with = |own: &[f64]| -> Vec<f64> {
                    own.iter()
                        .zip(&common)
                        .map(|(own, common)| own * common.abs().max(0.01))
                        .collect()
                };
                (with(&one), with(&two))
            };
            let (before, after) = pairs(1.0, 400);
            let wide = paired_detectable(&before, &after, alpha).unwrap();
            // Of so many pairs, seen through as many runs.
            let ratio = (wide.ln() * (400.0 / runs as f64).sqrt()).exp();
            let mut found = 0;
            for _ in 0..500 {
                let (before, after) = pairs(ratio, runs);
                let differences: Vec<f64> = before
                    .iter()
                    .zip(&after)
                    .map(|(b, a)| a.ln() - b.ln())
                    .collect();
                found += u32::from(wilcoxon(&differences).unwrap().p < alpha);
            }
            assert!(
                (310..=450).contains(&found),
                "{runs} runs, {rows} rows: {found} of 500"
            );
        }
    }

    #[test]
    fn too_few_pairs_find_nothing() {
        let runs = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5];
        let other = [1.1, 1.0, 1.3, 1.2, 1.5, 1.4];
        assert_eq!(paired_detectable(&runs[..5], &other[..5], ALPHA), None);
        assert!(paired_detectable(&runs, &other, ALPHA).is_some());
        assert_eq!(paired_detectable(&runs, &other[..5], ALPHA), None);
        assert_eq!(paired_detectable(&[0.0; 6], &other, ALPHA), None);
    }

    #[test]
    fn too_few_runs_find_nothing() {
        assert_eq!(detectable(&[1.0, 1.1, 1.2], &[1.0, 1.1, 1.2], ALPHA), None);
        assert_eq!(detectable(&[1.0], &[1.0], ALPHA), None);
        assert!(detectable(&[1.0, 1.1, 1.2, 1.3], &[1.0, 1.1, 1.2, 1.3], ALPHA).is_some());
        assert_eq!(
            detectable(&[1.0, 1.1, 1.2, 1.3], &[1.0, 1.1, 1.2, 1.3], ALPHA / 9.0),
            None
        );
    }
}
