// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Quantiles, ranks, logarithms and the correction of p-values over a table.

/// Returns the quantile at `share` (0 to 1) of sorted values, interpolated between neighbours (type
/// 7 of Hyndman and Fan, the default of R and NumPy); `None` without values.
pub fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let at = share.clamp(0.0, 1.0) * last as f64;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let below = at.floor() as usize;
    let (low, high) = (sorted[below], sorted[(below + 1).min(last)]);
    Some(low + (high - low) * (at - below as f64))
}

/// Returns the natural logarithms; `None` where a value has none.
pub fn logarithms(values: &[f64]) -> Option<Vec<f64>> {
    let log = |&value: &f64| (value > 0.0 && value.is_finite()).then(|| value.ln());
    values.iter().map(log).collect()
}

/// Returns the mean and the sum of squared distances from it.
pub fn mean_and_squares(values: &[f64]) -> (f64, f64) {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let square = |value: &f64| (value - mean).powi(2);
    (mean, values.iter().map(square).sum())
}

/// Ranks of values from 1, doubled so that they are whole: equal values share the middle rank.
#[derive(Debug)]
pub struct Ranks {
    /// Twice the rank of each value, in the order of the values.
    pub doubled: Vec<u64>,
    /// Sum of t³ − t over the groups of t equal values, the correction of variances for ties.
    pub tie_term: f64,
}

impl Ranks {
    /// Ranks `values`.
    pub fn of(values: &[f64]) -> Self {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_unstable_by(|&a, &b| values[a].total_cmp(&values[b]));
        let mut ranks = Self { doubled: vec![0; values.len()], tie_term: 0.0 };
        let mut start = 0;
        while start < order.len() {
            let value = values[order[start]];
            let equal = order[start..].iter().take_while(|&&at| values[at] == value);
            // A NaN equals nothing, not even itself, and forms a group of its own.
            let count = equal.count().max(1);
            for &at in &order[start..start + count] {
                ranks.doubled[at] = (2 * start + count + 1) as u64;
            }
            let t = count as f64;
            ranks.tie_term += t * t * t - t;
            start += count;
        }
        ranks
    }

    /// Returns the ranks of `count` different values in order.
    pub fn untied(count: usize) -> Self {
        Self { doubled: (1..=count as u64).map(|rank| 2 * rank).collect(), tie_term: 0.0 }
    }
}

/// Corrects p-values by Holm's method, in the order given: of tables without a difference, at most
/// 5% contain a corrected p below 5%.
pub fn holm(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[a].total_cmp(&p[b]));
    let mut corrected = vec![1.0; p.len()];
    let mut greatest = 0.0_f64;
    for (done, at) in order.into_iter().enumerate() {
        let left = (p.len() - done) as f64;
        greatest = greatest.max((p[at] * left).min(1.0));
        corrected[at] = greatest;
    }
    corrected
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_neighbours() {
        let values = [1.0, 2.0, 4.0, 8.0];
        assert_eq!(quantile(&values, 0.5), Some(3.0));
        assert_eq!(quantile(&values, 0.25), Some(1.75));
        assert_eq!(quantile(&values, 1.0), Some(8.0));
        assert_eq!(quantile(&[7.0], 0.25), Some(7.0));
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn equal_values_share_the_middle_rank() {
        let ranks = Ranks::of(&[5.0, 1.0, 5.0, 9.0, 5.0]);
        assert_eq!((ranks.doubled, ranks.tie_term), (vec![6, 2, 6, 10, 6], 24.0));
        let ranks = Ranks::of(&[0.3, 0.1, 0.2]);
        assert_eq!((ranks.doubled, ranks.tie_term), (vec![6, 2, 4], 0.0));
    }

    #[test]
    fn holm_steps_down() {
        let corrected = holm(&[0.01, 0.04, 0.03, 0.005]);
        for (found, wanted) in corrected.iter().zip([0.03, 0.06, 0.06, 0.02]) {
            assert!((found - wanted).abs() < 1e-12);
        }
        assert_eq!(holm(&[0.9, 0.8]), [1.0, 1.0]);
        assert!(holm(&[]).is_empty());
    }
}
