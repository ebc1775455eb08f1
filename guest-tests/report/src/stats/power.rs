// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The smallest ratio that a rank test finds four times in five.
//!
//! For samples whose logarithms are normal with standard deviation s, the Mann-Whitney test finds a
//! shift d = (z(α/2) + z(0.2)) · s · √(1/m + 1/n) / √(3/π) with a probability of about 80% (65% to
//! 70% for a small α and few runs); 3/π is its efficiency against the t test (Hodges and Lehmann,
//! 1956). For paired runs s is that of the n differences, and √(1/n) replaces √(1/m + 1/n).

use std::f64::consts::PI;

use statrs::distribution::{ContinuousCDF, Normal};

use super::{
    descriptive::{logarithms, mean_and_squares},
    null::{Design, least_p},
};

/// Probability of not finding the difference.
const MISS: f64 = 0.2;

/// Returns the least ratio above 1 that a two-sided p below `alpha` finds; `None` where there are
/// too few runs to find any. Holm's correction leaves a part of 5% to the least p of a table, which
/// is the `alpha` to give.
pub fn detectable(design: Design, before: &[f64], after: &[f64], alpha: f64) -> Option<f64> {
    let (m, n) = (before.len(), after.len());
    let unpaired = design == Design::Paired && m != n;
    if m < 2 || n < 2 || unpaired || least_p(design, m, n) > alpha {
        return None;
    }
    let (before, after) = (logarithms(before)?, logarithms(after)?);
    let (deviation, size) = match design {
        Design::Independent => {
            let squares = mean_and_squares(&before).1 + mean_and_squares(&after).1;
            let deviation = (squares / (m + n - 2) as f64).sqrt();
            (deviation, (1.0 / m as f64 + 1.0 / n as f64).sqrt())
        }
        Design::Paired => {
            let differences: Vec<f64> = before.iter().zip(&after).map(|(b, a)| a - b).collect();
            let squares = mean_and_squares(&differences).1;
            ((squares / (n - 1) as f64).sqrt(), 1.0 / (n as f64).sqrt())
        }
    };
    Some((reach(alpha) * deviation * size).exp())
}

/// Returns the number of standard errors that a shift must have.
fn reach(alpha: f64) -> f64 {
    let value_above = |share| -Normal::standard().inverse_cdf(share);
    (value_above(alpha / 2.0) + value_above(MISS)) / (3.0 / PI).sqrt()
}

#[cfg(test)]
mod tests {
    use super::{
        super::{ALPHA, draw::Normal, mann_whitney, wilcoxon},
        Design::*,
        *,
    };

    #[test]
    fn the_detectable_ratio_is_found_four_times_in_five() {
        for (runs, rows) in [(10, 1), (20, 1), (20, 20)] {
            let mut normal = Normal::new(7);
            let pilot = (normal.sample(400, 1.0, 0.02), normal.sample(400, 1.0, 0.02));
            let alpha = ALPHA / f64::from(rows);
            let (before, after) = (&pilot.0[..runs], &pilot.1[..runs]);
            let ratio = detectable(Independent, before, after, alpha).unwrap();
            // The ratio for the true deviation, of which the pilot's is an estimate.
            let truth = (reach(alpha) * 0.02 * (2.0 / runs as f64).sqrt()).exp();
            assert!((ratio.ln() / truth.ln() - 1.0).abs() < 0.5, "{ratio} {truth}");
            let found = (0..500).filter(|_| {
                let before = normal.sample(runs, 1.0, 0.02);
                let after = normal.sample(runs, truth, 0.02);
                mann_whitney(&before, &after).unwrap().p < alpha
            });
            let found = found.count();
            assert!((335..=450).contains(&found), "{runs} runs, {rows} rows: {found} of 500");
        }
    }

    #[test]
    fn the_detectable_ratio_of_pairs_is_found_four_times_in_five() {
        for (runs, rows) in [(12, 1), (20, 1), (20, 20)] {
            let mut normal = Normal::new(11);
            let alpha = ALPHA / f64::from(rows);
            let mut pairs = |ratio: f64, runs: usize| {
                // Both runs of a pair share far more spread than each has alone.
                let common = normal.sample(runs, 1.0, 0.5);
                let own = [normal.sample(runs, 1.0, 0.02), normal.sample(runs, ratio, 0.02)];
                own.map(|own| -> Vec<f64> {
                    let pairs = own.iter().zip(&common);
                    pairs.map(|(own, common)| own * common.abs().max(0.01)).collect()
                })
            };
            let [before, after] = pairs(1.0, 400);
            let wide = detectable(Paired, &before, &after, alpha).unwrap();
            // The ratio for as many runs, from the deviation of 400.
            let ratio = (wide.ln() * (400.0 / runs as f64).sqrt()).exp();
            let found = (0..500).filter(|_| {
                let [before, after] = pairs(ratio, runs);
                let pairs = before.iter().zip(&after);
                let differences: Vec<f64> = pairs.map(|(b, a)| a.ln() - b.ln()).collect();
                wilcoxon(&differences).unwrap().p < alpha
            });
            let found = found.count();
            assert!((310..=450).contains(&found), "{runs} runs, {rows} rows: {found} of 500");
        }
    }

    #[test]
    fn too_few_runs_find_nothing() {
        let runs = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5];
        let other = [1.1, 1.0, 1.3, 1.2, 1.5, 1.4];
        let is_found = |design, count: usize, alpha| {
            detectable(design, &runs[..count], &other[..count], alpha).is_some()
        };
        assert_eq!([1, 3, 4].map(|n| is_found(Independent, n, ALPHA)), [false, false, true]);
        assert!(!is_found(Independent, 4, ALPHA / 9.0));
        assert_eq!([5, 6].map(|n| is_found(Paired, n, ALPHA)), [false, true]);
        assert_eq!(detectable(Paired, &runs, &other[..5], ALPHA), None);
        assert_eq!(detectable(Paired, &[0.0; 6], &other, ALPHA), None);
    }
}
