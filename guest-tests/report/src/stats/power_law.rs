// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Growth of a figure: the exponent of a power law, fitted by least squares to the logarithms of
//! medians. Student's interval comes from the distance of the medians from the line, so growth that
//! does not follow a power law has a wide one.

use super::{
    descriptive::{logarithms, mean_and_squares},
    student::student_point,
};

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
    let reach = error * student_point(freedom)?;
    Some((exponent, [exponent - reach, exponent + reach]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_are_found() {
        for power in [0.0, 1.0, 2.0] {
            let points = [1.0, 2.0, 4.0, 8.0].map(|x: f64| (x, 3.0 * x.powf(power)));
            let (exponent, [low, high]) = power_law(&points).unwrap();
            assert!((exponent - power).abs() < 1e-9 && high - low < 1e-6);
        }
        // The result of SciPy's linregress for these logarithms.
        let points = [(1.0, 2.0), (2.0, 5.0), (4.0, 9.0), (8.0, 30.0)];
        let (exponent, [low, high]) = power_law(&points).unwrap();
        let wanted = [1.256_866_869, 0.755_208_494, 1.758_525_245];
        for (found, wanted) in [exponent, low, high].iter().zip(wanted) {
            assert!((found - wanted).abs() < 1e-6, "{found} {wanted}");
        }
    }

    #[test]
    fn too_few_points_and_zeros_have_no_power() {
        assert_eq!(power_law(&[(1.0, 1.0), (2.0, 2.0)]), None);
        assert_eq!(power_law(&[(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]), None);
        assert_eq!(power_law(&[(1.0, 0.0), (2.0, 2.0), (3.0, 2.0)]), None);
    }
}
