// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Quantiles, ranks, logarithms, Holm's correction, the spread of a figure over runs, and its
//! change between sides.

use serde::{Serialize, Serializer};

/// Minimum number of runs whose spread is reported as quartiles, not as minimum and maximum.
const MIN_RUNS_FOR_QUARTILES: usize = 4;

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

/// Returns the natural logarithms; `None` if a value is not positive and finite.
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

/// Ranks of values from 1. Equal values share their mean rank; doubling makes it an integer.
#[derive(Debug)]
pub struct Ranks {
    /// Twice the rank of each value, in the order of the values.
    pub doubled_ranks: Vec<u64>,
    /// Sum of t³ − t over the groups of t equal values, the correction of variances for ties.
    pub tie_term: f64,
}

impl Ranks {
    pub fn new(values: &[f64]) -> Self {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_unstable_by(|&a, &b| values[a].total_cmp(&values[b]));
        let mut ranks = Self { doubled_ranks: vec![0; values.len()], tie_term: 0.0 };
        let mut start = 0;
        while start < order.len() {
            let value = values[order[start]];
            let equal = order[start..].iter().take_while(|&&at| values[at] == value);
            // A NaN is unequal to every value, itself included: its group has no equal values.
            let count = equal.count().max(1);
            for &at in &order[start..start + count] {
                ranks.doubled_ranks[at] = (2 * start + count + 1) as u64;
            }
            let t = count as f64;
            ranks.tie_term += t * t * t - t;
            start += count;
        }
        ranks
    }

    /// Returns the ranks of `count` distinct values in ascending order.
    pub fn without_ties(count: usize) -> Self {
        Self { doubled_ranks: (1..=count as u64).map(|rank| 2 * rank).collect(), tie_term: 0.0 }
    }
}

/// Corrects p-values by Holm's method and keeps their order. At most 5% of tables without a
/// difference contain a corrected p below 5%.
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

/// Statistics of a time (in nanoseconds) or count over the runs of one side.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// Median.
    #[serde(serialize_with = "serialize_figure")]
    pub median: f64,
    /// First quartile.
    #[serde(serialize_with = "serialize_figure")]
    pub q1: f64,
    /// Third quartile.
    #[serde(serialize_with = "serialize_figure")]
    pub q3: f64,
    /// Minimum.
    #[serde(serialize_with = "serialize_figure")]
    pub min: f64,
    /// Maximum.
    #[serde(serialize_with = "serialize_figure")]
    pub max: f64,
    /// Number of runs.
    pub runs: usize,
    /// Indicates that the spread is reported as quartiles instead of minimum and maximum.
    #[serde(skip)]
    pub has_quartiles: bool,
}

/// Serializes a whole number without a decimal point.
fn serialize_figure<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    if value.fract() == 0.0 && (0.0..9e15).contains(value) {
        serializer.serialize_u64(*value as u64)
    } else {
        serializer.serialize_f64(*value)
    }
}

fn serialize_figures<S: Serializer>(values: &[f64], serializer: S) -> Result<S::Ok, S::Error> {
    struct Figure<'a>(&'a f64);
    impl Serialize for Figure<'_> {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serialize_figure(self.0, serializer)
        }
    }
    serializer.collect_seq(values.iter().map(Figure))
}

impl Spread {
    /// Returns the statistics of values; `None` without values.
    pub fn new(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        Some(Self {
            median: quantile(&values, 0.5)?,
            q1: quantile(&values, 0.25)?,
            q3: quantile(&values, 0.75)?,
            min: *values.first()?,
            max: *values.last()?,
            runs: values.len(),
            has_quartiles: values.len() >= MIN_RUNS_FOR_QUARTILES,
        })
    }

    /// Returns the quartiles, or the minimum and maximum.
    pub const fn range(&self) -> [f64; 2] {
        if self.has_quartiles { [self.q1, self.q3] } else { [self.min, self.max] }
    }
}

/// Figures of every run of both sides.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Runs {
    #[serde(serialize_with = "serialize_figures")]
    pub before: Vec<f64>,
    #[serde(serialize_with = "serialize_figures")]
    pub after: Vec<f64>,
}

impl Runs {
    pub fn sides(&self) -> [&[f64]; 2] {
        [&self.before, &self.after]
    }

    pub fn change(&self) -> Change {
        let [before, after] = self.sides().map(|side| Spread::new(side.iter().copied()));
        Change::between(before, after)
    }

    /// Returns the number of runs of the smaller side.
    pub fn runs_per_side(&self) -> usize {
        self.before.len().min(self.after.len())
    }
}

/// Change of a figure between the sides; `None` if unknown.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Change {
    pub before: Option<Spread>,
    pub after: Option<Spread>,
    /// Median *after* divided by median *before*; `None` if either is unknown or the latter is 0.
    pub ratio: Option<f64>,
}

impl Change {
    /// Returns the change of a figure. Quartiles are reported for both sides or for neither.
    pub fn between(mut before: Option<Spread>, mut after: Option<Spread>) -> Self {
        let sides = || [before, after].into_iter().flatten();
        let quartiles = sides().all(|spread| spread.has_quartiles);
        for spread in [&mut before, &mut after].into_iter().flatten() {
            spread.has_quartiles = quartiles;
        }
        let base = before.filter(|before| before.median != 0.0);
        let ratio = base.zip(after).map(|(before, after)| after.median / before.median);
        Self { before, after, ratio }
    }

    /// Returns the reduction in percent of *before*: 70 for a ratio of 0.3, negative for growth.
    pub fn gain(&self) -> Option<f64> {
        self.ratio.map(|ratio| (1.0 - ratio) * 100.0)
    }

    pub fn sides(&self) -> impl Iterator<Item = Spread> {
        [self.before, self.after].into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_interpolated() {
        assert_eq!(quantile(&[7.0], 0.25), Some(7.0));
        assert_eq!(quantile(&[], 0.5), None);
        let odd = Spread::new([5.0, 1.0, 9.0]).unwrap();
        assert_eq!((odd.median, odd.min, odd.max, odd.runs), (5.0, 1.0, 9.0, 3));
        let even = Spread::new([4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((even.median, even.q1, even.q3), (2.5, 1.75, 3.25));
        assert_eq!(Spread::new([]), None);
        let json = serde_json::to_string(&even).unwrap();
        assert!(json.contains(r#""median":2.5"#) && json.contains(r#""max":4,"#), "{json}");
    }

    #[test]
    fn holm_corrects_p_values_in_their_order() {
        let corrected = holm(&[0.01, 0.04, 0.03, 0.005]);
        for (found, expected) in corrected.iter().zip([0.03, 0.06, 0.06, 0.02]) {
            assert!((found - expected).abs() < 1e-12);
        }
        assert_eq!(holm(&[0.9, 0.8]), [1.0, 1.0]);
        assert!(holm(&[]).is_empty());
    }

    #[test]
    fn a_ratio_needs_a_median_before_above_0() {
        let change = |before: &[f64], after: &[f64]| {
            let change = Runs { before: before.to_vec(), after: after.to_vec() }.change();
            (change.ratio, change.gain())
        };
        assert_eq!(change(&[200.0], &[50.0]), (Some(0.25), Some(75.0)));
        assert_eq!(change(&[0.0], &[5.0]), (None, None));
        assert_eq!(change(&[], &[5.0]), (None, None));
        assert_eq!(change(&[5.0], &[]), (None, None));
    }
}
