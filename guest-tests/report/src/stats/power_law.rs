// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a figure grows: the exponent of a power law, by least squares through the logarithms of
//! medians. The interval is Student's, over how far the medians lie off the line, so that growth
//! that is no power law has a wide one.

use statrs::function::beta::inv_beta_reg;

use super::ALPHA;

/// An exponent: 0 is flat, 1 linear, 2 quadratic.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PowerLaw {
    /// The exponent.
    pub exponent: f64,
    /// Its 95% interval.
    pub interval: (f64, f64),
}

/// Fits through points (x, y), all positive; `None` for fewer than three different x.
pub fn power_law(points: &[(f64, f64)]) -> Option<PowerLaw> {
    if points.iter().any(|(x, y)| *x <= 0.0 || *y <= 0.0) || points.len() < 3 {
        return None;
    }
    let logs: Vec<(f64, f64)> = points.iter().map(|(x, y)| (x.ln(), y.ln())).collect();
    let n = logs.len() as f64;
    let mean_x = logs.iter().map(|(x, _)| x).sum::<f64>() / n;
    let mean_y = logs.iter().map(|(_, y)| y).sum::<f64>() / n;
    let squares: f64 = logs.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
    if squares == 0.0 {
        return None;
    }
    let products: f64 = logs.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    let exponent = products / squares;
    let off = |(x, y): &(f64, f64)| (y - mean_y - exponent * (x - mean_x)).powi(2);
    let freedom = n - 2.0;
    let error = (logs.iter().map(off).sum::<f64>() / freedom / squares).sqrt();
    let reach = error * student_point(freedom);
    Some(PowerLaw {
        exponent,
        interval: (exponent - reach, exponent + reach),
    })
}

/// Student's t that is exceeded either way with a chance of [`ALPHA`].
fn student_point(freedom: f64) -> f64 {
    let share = inv_beta_reg(freedom / 2.0, 0.5, ALPHA);
    (freedom * (1.0 - share) / share).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn students_points_are_those_of_the_table() {
        for (freedom, point) in [
            (1.0, 12.706_205),
            (2.0, 4.302_653),
            (3.0, 3.182_446),
            (10.0, 2.228_139),
        ] {
            assert!((student_point(freedom) - point).abs() < 1e-5, "{freedom}");
        }
    }

    #[test]
    fn powers_are_found() {
        for power in [0.0, 1.0, 2.0] {
            let points: Vec<_> = [1.0, 2.0, 4.0, 8.0]
                .map(|x: f64| (x, 3.0 * x.powf(power)))
                .into();
            let fit = power_law(&points).unwrap();
            assert!((fit.exponent - power).abs() < 1e-9);
            assert!(fit.interval.1 - fit.interval.0 < 1e-6);
        }
        // As SciPy's linregress has it for these logarithms.
        let fit = power_law(&[(1.0, 2.0), (2.0, 5.0), (4.0, 9.0), (8.0, 30.0)]).unwrap();
        let wanted = [1.256_866_869, 0.755_208_494, 1.758_525_245];
        let found = [fit.exponent, fit.interval.0, fit.interval.1];
        for (found, wanted) in found.iter().zip(wanted) {
            assert!((found - wanted).abs() < 1e-6, "{fit:?}");
        }
    }

    #[test]
    fn two_points_are_no_law() {
        assert_eq!(power_law(&[(1.0, 1.0), (2.0, 2.0)]), None);
        assert_eq!(power_law(&[(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]), None);
        assert_eq!(power_law(&[(1.0, 0.0), (2.0, 2.0), (3.0, 2.0)]), None);
    }
}
