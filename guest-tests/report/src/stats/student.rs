// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Student's distribution: the t test, and the growth of a figure.
//!
//! The t test has one variance for both samples and is two-sided: for samples too small for rank
//! tests whose spread is not measurement noise. It assumes normal values.
//!
//! Growth is the exponent of a power law, fitted by least squares to the logarithms of medians. Its
//! interval follows from the residuals of the fit, so growth that does not follow a power law has a
//! wide interval.

use statrs::distribution::{ContinuousCDF, StudentsT};

use super::{
    descriptive::{logarithms, mean_and_squares},
    rank_tests::ALPHA,
};

/// Returns t (the distance of the second mean above the first in standard errors) and its two-sided
/// p; `None` if a sample has fewer than two values.
pub fn student(first: &[f64], second: &[f64]) -> Option<(f64, f64)> {
    if first.len() < 2 || second.len() < 2 {
        return None;
    }
    let (m, n) = (first.len() as f64, second.len() as f64);
    let ((mean_first, squares_first), (mean_second, squares_second)) =
        (mean_and_squares(first), mean_and_squares(second));
    let freedom = m + n - 2.0;
    let variance = (squares_first + squares_second) / freedom;
    let apart = mean_second - mean_first;
    if variance == 0.0 {
        return Some(match apart {
            0.0 => (0.0, 1.0),
            apart => (apart.signum() * f64::INFINITY, 0.0),
        });
    }
    let t = apart / (variance * (1.0 / m + 1.0 / n)).sqrt();
    Some((t, 2.0 * distribution(freedom)?.sf(t.abs())))
}

fn distribution(freedom: f64) -> Option<StudentsT> {
    StudentsT::new(0.0, 1.0, freedom).ok()
}

/// Fits positive points (x, y) and returns the exponent (0 is flat, 1 linear, 2 quadratic) with its
/// 95% interval; `None` for fewer than three points or a single x.
pub fn power_law(points: &[(f64, f64)]) -> Option<(f64, [f64; 2])> {
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
    // The t that is exceeded either way with probability ALPHA.
    let reach = -error * distribution(freedom)?.inverse_cdf(ALPHA / 2.0);
    Some((exponent, [exponent - reach, exponent + reach]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_without_spread_differ_or_are_equal() {
        assert_eq!(student(&[1.0; 3], &[1.0; 3]).unwrap().1, 1.0);
        assert_eq!(student(&[1.0; 3], &[2.0; 3]).unwrap().1, 0.0);
        assert_eq!(student(&[1.0], &[2.0, 3.0]), None);
    }

    #[test]
    fn a_power_agrees_with_scipy() {
        // The result of SciPy's linregress for these logarithms.
        let points = [(1.0, 2.0), (2.0, 5.0), (4.0, 9.0), (8.0, 30.0)];
        let (exponent, [low, high]) = power_law(&points).unwrap();
        let expected = [1.256_866_869, 0.755_208_494, 1.758_525_245];
        for (found, expected) in [exponent, low, high].iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        }
    }

    #[test]
    fn too_few_points_and_zeros_have_no_power() {
        assert_eq!(power_law(&[(1.0, 1.0), (2.0, 2.0)]), None);
        assert_eq!(power_law(&[(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]), None);
        assert_eq!(power_law(&[(1.0, 0.0), (2.0, 2.0), (3.0, 2.0)]), None);
    }
}
