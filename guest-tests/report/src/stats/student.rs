// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Student's t test with one variance for both samples, two-sided: for samples too small for rank
//! tests whose spread is not measurement noise. It assumes normal values.

use statrs::distribution::{ContinuousCDF, StudentsT};

use super::{descriptive::mean_and_squares, null::ALPHA};

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

/// Returns the t that is exceeded either way with probability [`ALPHA`].
pub fn student_point(freedom: f64) -> Option<f64> {
    Some(-distribution(freedom)?.inverse_cdf(ALPHA / 2.0))
}

fn distribution(freedom: f64) -> Option<StudentsT> {
    StudentsT::new(0.0, 1.0, freedom).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn critical_values_agree_with_the_published_table() {
        // The two-sided 5% points for 2 and 4 degrees of freedom.
        for (values, t) in [(2, 4.302_653), (3, 2.776_445)] {
            let spread: Vec<f64> = (0..values).map(f64::from).collect();
            let deviation = if values == 2 { 0.5_f64.sqrt() } else { 1.0 };
            let error = deviation * (2.0 / f64::from(values)).sqrt();
            let second: Vec<f64> = spread.iter().map(|value| value + t * error).collect();
            let (found, p) = student(&spread, &second).unwrap();
            assert!((found - t).abs() < 1e-9 && (p - 0.05).abs() < 1e-6, "{found} {p}");
        }
        for (freedom, point) in [(1.0, 12.706_205), (2.0, 4.302_653), (10.0, 2.228_139)] {
            assert!((student_point(freedom).unwrap() - point).abs() < 1e-5, "{freedom}");
        }
    }

    #[test]
    fn samples_without_spread_differ_or_are_equal() {
        assert_eq!(student(&[1.0; 3], &[1.0; 3]).unwrap().1, 1.0);
        assert_eq!(student(&[1.0; 3], &[2.0; 3]).unwrap().1, 0.0);
        assert_eq!(student(&[1.0], &[2.0, 3.0]), None);
    }
}
