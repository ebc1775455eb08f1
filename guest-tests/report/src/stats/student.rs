// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Student's t test with one variance for both samples, two-sided: for samples too small for ranks
//! to say anything, whose spread is no measurement's noise. It supposes normal values.

use statrs::function::beta::beta_reg;

/// What the test says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Student {
    /// How far the second mean lies above the first, in standard errors.
    pub t: f64,
    /// How likely so great a distance is where there is no difference.
    pub p: f64,
}

/// Tests whether two samples have one mean; `None` where one has fewer than two values.
pub fn student(first: &[f64], second: &[f64]) -> Option<Student> {
    if first.len() < 2 || second.len() < 2 {
        return None;
    }
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let squares = |values: &[f64]| {
        let mean = mean(values);
        values
            .iter()
            .map(|value| (value - mean).powi(2))
            .sum::<f64>()
    };
    let (m, n) = (first.len() as f64, second.len() as f64);
    let freedom = m + n - 2.0;
    let variance = (squares(first) + squares(second)) / freedom;
    let apart = mean(second) - mean(first);
    if variance == 0.0 {
        return Some(if apart == 0.0 {
            Student { t: 0.0, p: 1.0 }
        } else {
            Student {
                t: apart.signum() * f64::INFINITY,
                p: 0.0,
            }
        });
    }
    let t = apart / (variance * (1.0 / m + 1.0 / n)).sqrt();
    Some(Student {
        t,
        p: beta_reg(freedom / 2.0, 0.5, freedom / (freedom + t * t)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_agrees_with_the_published_table() {
        // The two-sided 5% points for 2 and 4 degrees of freedom.
        for (values, t) in [(2, 4.302_653), (3, 2.776_445)] {
            let spread: Vec<f64> = (0..values).map(f64::from).collect();
            let deviation = if values == 2 { 0.5_f64.sqrt() } else { 1.0 };
            let error = deviation * (2.0 / f64::from(values)).sqrt();
            let second: Vec<f64> = spread.iter().map(|value| value + t * error).collect();
            let test = student(&spread, &second).unwrap();
            assert!(
                (test.t - t).abs() < 1e-9 && (test.p - 0.05).abs() < 1e-6,
                "{test:?}"
            );
        }
    }

    #[test]
    fn values_all_alike_differ_or_do_not() {
        assert_eq!(student(&[1.0; 3], &[1.0; 3]).unwrap().p, 1.0);
        assert_eq!(student(&[1.0; 3], &[2.0; 3]).unwrap().p, 0.0);
        assert_eq!(student(&[1.0], &[2.0, 3.0]), None);
    }
}
