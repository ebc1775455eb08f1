// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Effect sizes: the Hodges-Lehmann ratio, the geometric mean of the ratios of many rows, the
//! smallest ratio that a rank test detects with a power of 80%, and the growth of a figure.
//!
//! The ratio is the exponential of the median of log(after) - log(before) over all pairs of runs
//! (over all Walsh averages for paired runs), so exchanging the sides inverts it. The 95% interval
//! contains the factors that the rank test does not reject.
//!
//! For samples whose logarithms are normal with standard deviation s, the Mann-Whitney test detects
//! a shift d = (z(α/2) + z(0.2)) · s · √(1/m + 1/n) / √(3/π) with a power of about 80% (65% to 70%
//! for a small α and few runs); 3/π is its asymptotic efficiency relative to the t test (Hodges and
//! Lehmann, 1956). For paired runs, s is that of the differences; √(1/n) replaces √(1/m + 1/n).
//!
//! The interval of a geometric mean comes from a bootstrap: [`RESAMPLES`] resamples draw the runs
//! of each row and side with replacement; the 2.5% and 97.5% quantiles of their means bound the
//! interval. SplitMix64 has the fixed seed [`SEED`], so equal runs produce equal intervals.
//!
//! Growth is the exponent of a power law, fitted by least squares to the logarithms of medians. Its
//! interval follows from the residuals of the fit, so growth that does not follow a power law has a
//! wide interval.

use std::f64::consts::PI;

use rand_core::{Rng, SeedableRng};
use rand_xoshiro::SplitMix64;
use statrs::distribution::{ContinuousCDF, Normal};

use super::{
    descriptive::{Ranks, Runs, logarithms, mean_and_squares, quantile},
    significance::{ALPHA, Design, NullDistribution, min_p, students_t},
};

/// Maximum number of runs of a side. Larger independent samples are reduced to quantiles.
const MAX_RUNS: usize = 1000;

const RESAMPLES: usize = 2000;
const SEED: u64 = 0x9e9e_ec1a_edbf_e87a;
/// Probability of not detecting a real difference.
const MISS_PROBABILITY: f64 = 0.2;

/// Ratio and its 95% interval, which is `None` for too few runs.
pub type RatioEstimate = (f64, Option<[f64; 2]>);

/// Returns the ratio of *after* to *before*; `None` if a side is empty or has a value that is not
/// positive, or if paired sides differ in length.
pub fn ratio(design: Design, before: &[f64], after: &[f64]) -> Option<RatioEstimate> {
    let (before, after) = (logarithms(before)?, logarithms(after)?);
    match design {
        _ if before.is_empty() || after.is_empty() => None,
        Design::Independent => {
            let (before, after) = (reduce_to_quantiles(before), reduce_to_quantiles(after));
            // After a shift of one sample, only ties within each sample remain.
            let ties = Ranks::new(&before).tie_term + Ranks::new(&after).tie_term;
            let pairs = after.iter().flat_map(|a| before.iter().map(move |b| a - b));
            let null = NullDistribution::mann_whitney(before.len(), after.len(), ties);
            hodges_lehmann(pairs.collect(), &null)
        }
        Design::Paired if before.len() != after.len() || before.len() > MAX_RUNS => None,
        Design::Paired => {
            let differences = differences(&before, &after);
            let walsh = differences.iter().enumerate().flat_map(|(at, one)| {
                let rest = differences[at..].iter();
                rest.map(move |two| (one + two) / 2.0)
            });
            let null = NullDistribution::signed_ranks(&Ranks::without_ties(differences.len()), 0);
            hodges_lehmann(walsh.collect(), &null)
        }
    }
}

/// Returns `after - before` for each pair of runs.
pub fn differences(before: &[f64], after: &[f64]) -> Vec<f64> {
    before.iter().zip(after).map(|(before, after)| after - before).collect()
}

fn reduce_to_quantiles(mut logs: Vec<f64>) -> Vec<f64> {
    if logs.len() <= MAX_RUNS {
        return logs;
    }
    logs.sort_unstable_by(f64::total_cmp);
    let share = |at| at as f64 / (MAX_RUNS - 1) as f64;
    let quantiles = (0..MAX_RUNS).filter_map(|at| quantile(&logs, share(at)));
    quantiles.collect()
}

/// Returns the Hodges-Lehmann ratio, and the interval of ratios that the test does not reject.
fn hodges_lehmann(mut differences: Vec<f64>, null: &NullDistribution) -> Option<RatioEstimate> {
    differences.sort_unstable_by(f64::total_cmp);
    let ratio = quantile(&differences, 0.5)?.exp();
    // p grows towards the centre: the first value that is not rejected bounds the interval.
    let count = differences.len();
    let values: Vec<usize> = (0..=count / 2).collect();
    let first = values.partition_point(|&value| null.p(value as f64) <= ALPHA);
    let low = first.checked_sub(1).filter(|_| first <= count / 2);
    Some((ratio, low.map(|low| [differences[low].exp(), differences[count - first].exp()])))
}

/// Returns the smallest ratio above 1 that a two-sided test at `alpha` detects; `None` for too few
/// runs. In a table, `alpha` is 5% divided by the number of rows: Holm's limit for the smallest p.
pub fn detectable_ratio(design: Design, runs: &Runs, alpha: f64) -> Option<f64> {
    let [before, after] = runs.sides();
    let (m, n) = (before.len(), after.len());
    let unpaired = design == Design::Paired && m != n;
    if m < 2 || n < 2 || unpaired || min_p(design, m, n) > alpha {
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
            let squares = mean_and_squares(&differences(&before, &after)).1;
            ((squares / (n - 1) as f64).sqrt(), 1.0 / (n as f64).sqrt())
        }
    };
    let value_above = |share| -Normal::standard().inverse_cdf(share);
    // Shift in standard errors.
    let shift = (value_above(alpha / 2.0) + value_above(MISS_PROBABILITY)) / (3.0 / PI).sqrt();
    Some((shift * deviation * size).exp())
}

/// Draws a bootstrap resample of both sides; paired runs are drawn together.
fn resample(runs: &Runs, design: Design, random: &mut SplitMix64) -> Runs {
    let mut indices = |count: usize| -> Vec<usize> {
        let below = |_| (u128::from(random.next_u64()) * count as u128) >> 64;
        (0..count).map(below).map(|index| usize::try_from(index).unwrap_or(0)).collect()
    };
    let drawn = |runs: &[f64], at: &[usize]| at.iter().map(|&at| runs[at]).collect();
    let before = indices(runs.before.len());
    let is_paired = design == Design::Paired && runs.after.len() == runs.before.len();
    let after = if is_paired { before.clone() } else { indices(runs.after.len()) };
    Runs { before: drawn(&runs.before, &before), after: drawn(&runs.after, &after) }
}

/// Returns the geometric mean of the rows' ratios of medians, and its 95% interval if every row has
/// at least two runs a side. `None` without rows, or if a row has no run or a run that is not
/// positive.
pub fn geometric_mean(rows: &[&Runs], design: Design) -> Option<RatioEstimate> {
    let sides = || rows.iter().flat_map(|row| row.sides());
    if rows.is_empty() || sides().any(|side| side.is_empty() || side.iter().any(|&x| x <= 0.0)) {
        return None;
    }
    let mean = |pick: &mut dyn FnMut(&Runs) -> Runs| {
        let ratios = rows.iter().map(|row| pick(row).change().ratio.map(f64::ln));
        let sum = ratios.sum::<Option<f64>>()?;
        Some((sum / rows.len() as f64).exp())
    };
    let ratio = mean(&mut Runs::clone)?;
    if sides().any(|side| side.len() < 2) {
        return Some((ratio, None));
    }
    let mut random = SplitMix64::seed_from_u64(SEED);
    let mut means = (0..RESAMPLES)
        .map(|_| mean(&mut |row| resample(row, design, &mut random)))
        .collect::<Option<Vec<f64>>>()?;
    means.sort_unstable_by(f64::total_cmp);
    let ends = [quantile(&means, ALPHA / 2.0)?, quantile(&means, 1.0 - ALPHA / 2.0)?];
    Some((ratio, Some(ends)))
}

/// Fits positive points (x, y) and returns the exponent (0 is flat, 1 linear, 2 quadratic) with its
/// 95% interval; `None` for fewer than three points or a single x.
pub fn fit_power_law(points: &[(f64, f64)]) -> Option<(f64, [f64; 2])> {
    let (x, y): (Vec<f64>, Vec<f64>) = points.iter().copied().unzip();
    let (x, y) = (logarithms(&x)?, logarithms(&y)?);
    if points.len() < 3 {
        return None;
    }
    let ((mean_x, squares), (mean_y, _)) = (mean_and_squares(&x), mean_and_squares(&y));
    if squares == 0.0 {
        return None;
    }
    let logs = || x.iter().zip(&y);
    let products: f64 = logs().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    let exponent = products / squares;
    let residual = |(x, y): (&f64, &f64)| (y - mean_y - exponent * (x - mean_x)).powi(2);
    let freedom = points.len() as f64 - 2.0;
    let error = (logs().map(residual).sum::<f64>() / freedom / squares).sqrt();
    // Two-sided quantile of t at ALPHA.
    let half_width = -error * students_t(freedom)?.inverse_cdf(ALPHA / 2.0);
    Some((exponent, [exponent - half_width, exponent + half_width]))
}

#[cfg(test)]
mod tests {
    use super::{
        super::{mann_whitney, tests::LogNormal, wilcoxon},
        Design::*,
        *,
    };

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
    fn few_runs_have_no_interval_and_empty_zero_and_unequal_samples_no_ratio() {
        let found = ratio(Independent, &[1.0, 1.1, 1.2], &[2.0, 2.1, 2.2]).unwrap();
        assert_eq!(found.1, None);
        assert_eq!(ratio(Independent, &[], &[1.0]), None);
        assert_eq!(ratio(Independent, &[1.0], &[0.0]), None);
        assert_eq!(ratio(Paired, &[1.0, 2.0], &[1.0]), None);
    }

    #[test]
    fn large_samples_are_reduced_to_quantiles() {
        let before: Vec<f64> = (0..20_000).map(|at| 1000.0 + f64::from(at % 997)).collect();
        let after: Vec<f64> = before.iter().map(|value| value * 1.5).collect();
        assert!((ratio(Independent, &before, &after).unwrap().0 - 1.5).abs() < 1e-3);
    }

    #[test]
    fn the_detectable_ratio_is_found_four_times_in_five() {
        for (design, runs, rows) in
            [Independent, Paired].into_iter().flat_map(|d| [(d, 12, 1), (d, 20, 1), (d, 20, 20)])
        {
            let mut normal = LogNormal::new(11);
            let alpha = ALPHA / f64::from(rows);
            let mut draw = |ratio: f64, runs: usize| {
                let own = [normal.sample(runs, 1.0, 0.02), normal.sample(runs, ratio, 0.02)];
                if design == Independent {
                    return own;
                }
                // The spread that is common to a pair is much larger than that of single runs.
                let common = normal.sample(runs, 1.0, 0.5);
                own.map(|own| own.iter().zip(&common).map(|(own, common)| own * common).collect())
            };
            let [before, after] = draw(1.0, 400);
            let wide = detectable_ratio(design, &row(&before, &after), alpha).unwrap();
            // Detectable ratio for `runs` runs, from the one for 400 runs.
            let ratio = (wide.ln() * (400.0 / runs as f64).sqrt()).exp();
            let found = (0..500).filter(|_| {
                let [before, after] = draw(ratio, runs);
                let test = match design {
                    Independent => mann_whitney(&before, &after).unwrap(),
                    Paired => wilcoxon(&differences(
                        &logarithms(&before).unwrap(),
                        &logarithms(&after).unwrap(),
                    )),
                };
                test.p < alpha
            });
            let found = found.count();
            assert!((310..=450).contains(&found), "{design:?} {runs} {rows}: {found} of 500");
        }
    }

    #[test]
    fn too_few_runs_have_no_detectable_ratio() {
        let runs = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5];
        let other = [1.1, 1.0, 1.3, 1.2, 1.5, 1.4];
        let is_found = |design, count: usize, alpha| {
            detectable_ratio(design, &row(&runs[..count], &other[..count]), alpha).is_some()
        };
        assert_eq!([1, 3, 4].map(|n| is_found(Independent, n, ALPHA)), [false, false, true]);
        assert!(!is_found(Independent, 4, ALPHA / 9.0));
        assert_eq!([5, 6].map(|n| is_found(Paired, n, ALPHA)), [false, true]);
        assert_eq!(detectable_ratio(Paired, &row(&runs, &other[..5]), ALPHA), None);
        assert_eq!(detectable_ratio(Paired, &row(&[0.0; 6], &other), ALPHA), None);
    }

    fn row(before: &[f64], after: &[f64]) -> Runs {
        Runs { before: before.to_vec(), after: after.to_vec() }
    }

    #[test]
    fn a_halved_and_a_doubled_row_have_a_mean_of_1() {
        let mean = |rows: &[&Runs]| geometric_mean(rows, Independent);
        assert_eq!(mean(&[&row(&[1.0], &[2.0]), &row(&[4.0], &[2.0])]), Some((1.0, None)));
        assert_eq!(mean(&[]), None);
        assert_eq!(mean(&[&row(&[0.0], &[1.0])]), None);
    }

    #[test]
    fn the_interval_is_repeatable_and_covers_the_truth() {
        let mut covered = 0;
        for seed in 0..40 {
            let mut normal = LogNormal::new(seed);
            let runs = row(&normal.sample(20, 100.0, 0.02), &normal.sample(20, 90.0, 0.02));
            let once = geometric_mean(&[&runs], Independent).unwrap();
            assert_eq!(once, geometric_mean(&[&runs], Independent).unwrap());
            let [low, high] = once.1.unwrap();
            covered += u32::from(low <= 0.9 && 0.9 <= high);
        }
        assert!(covered >= 35, "{covered} of 40");
    }

    #[test]
    fn a_fitted_power_law_agrees_with_scipy() {
        // The result of SciPy's linregress for these logarithms.
        let points = [(1.0, 2.0), (2.0, 5.0), (4.0, 9.0), (8.0, 30.0)];
        let (exponent, [low, high]) = fit_power_law(&points).unwrap();
        let expected = [1.256_866_869, 0.755_208_494, 1.758_525_245];
        for (found, expected) in [exponent, low, high].iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        }
    }

    #[test]
    fn too_few_points_and_zeros_have_no_power_law() {
        assert_eq!(fit_power_law(&[(1.0, 1.0), (2.0, 2.0)]), None);
        assert_eq!(fit_power_law(&[(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]), None);
        assert_eq!(fit_power_law(&[(1.0, 0.0), (2.0, 2.0), (3.0, 2.0)]), None);
    }
}
