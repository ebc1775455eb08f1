// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A figure over several runs, and its change.

use serde::{Serialize, Serializer};

use crate::stats::quantile;

/// Runs from which on a spread is given by its quartiles, instead of its least and greatest value.
const ENOUGH_FOR_QUARTILES: usize = 4;

/// A figure over the runs of one side: nanoseconds or a count.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// Median.
    #[serde(serialize_with = "figure")]
    pub median: f64,
    /// Lower quartile.
    #[serde(serialize_with = "figure")]
    pub q1: f64,
    /// Upper quartile.
    #[serde(serialize_with = "figure")]
    pub q3: f64,
    /// Least value.
    #[serde(serialize_with = "figure")]
    pub min: f64,
    /// Greatest value.
    #[serde(serialize_with = "figure")]
    pub max: f64,
    /// Number of runs.
    pub runs: usize,
}

/// Serializes a whole number without a decimal point.
fn figure<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    if value.fract() == 0.0 && (0.0..9e15).contains(value) {
        serializer.serialize_u64(*value as u64)
    } else {
        serializer.serialize_f64(*value)
    }
}

/// Serializes whole numbers without a decimal point.
pub fn figures<S: Serializer>(values: &[f64], serializer: S) -> Result<S::Ok, S::Error> {
    struct Figure<'a>(&'a f64);
    impl Serialize for Figure<'_> {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            figure(self.0, serializer)
        }
    }
    serializer.collect_seq(values.iter().map(Figure))
}

impl Spread {
    /// Returns the spread of values; `None` without values.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        Some(Self {
            median: quantile(&values, 0.5)?,
            q1: quantile(&values, 0.25)?,
            q3: quantile(&values, 0.75)?,
            min: *values.first()?,
            max: *values.last()?,
            runs: values.len(),
        })
    }

    /// Returns the quartiles, or the least and greatest value.
    pub const fn ends(&self, quartiles: bool) -> [f64; 2] {
        if quartiles { [self.q1, self.q3] } else { [self.min, self.max] }
    }

    /// Reports whether there are enough runs for quartiles.
    pub const fn has_quartiles(&self) -> bool {
        self.runs >= ENOUGH_FOR_QUARTILES
    }
}

/// A figure before and after.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Change {
    /// Before; `None` if unknown.
    pub before: Option<Spread>,
    /// After; `None` if unknown.
    pub after: Option<Spread>,
    /// Median after divided by median before; `None` if the latter is unknown or 0.
    pub ratio: Option<f64>,
}

impl Change {
    /// Returns the change between two spreads.
    pub fn between(before: Option<Spread>, after: Option<Spread>) -> Self {
        let base = before.filter(|before| before.median != 0.0);
        let ratio = base.zip(after).map(|(before, after)| after.median / before.median);
        Self { before, after, ratio }
    }

    /// Returns the reduction in percent of before: 70 for a ratio of 0.3, negative for growth.
    pub fn gain(&self) -> Option<f64> {
        self.ratio.map(|ratio| (1.0 - ratio) * 100.0)
    }

    /// Returns the known sides.
    pub fn sides(&self) -> impl Iterator<Item = Spread> {
        [self.before, self.after].into_iter().flatten()
    }

    /// Reports whether every known side has enough runs for quartiles.
    pub fn has_quartiles(&self) -> bool {
        self.sides().next().is_some() && self.sides().all(|spread| spread.has_quartiles())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_sorts_its_values() {
        let odd = Spread::of([5.0, 1.0, 9.0]).unwrap();
        let even = Spread::of([4.0, 1.0, 3.0, 2.0]).unwrap();

        assert_eq!((odd.median, odd.min, odd.max, odd.runs), (5.0, 1.0, 9.0, 3));
        assert_eq!((even.median, even.q1, even.q3), (2.5, 1.75, 3.25));
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn a_change_needs_a_base_above_0() {
        let change = |before: &[f64], after: &[f64]| {
            let [before, after] = [before, after].map(|side| Spread::of(side.iter().copied()));
            let change = Change::between(before, after);
            (change.ratio, change.gain())
        };
        assert_eq!(change(&[200.0], &[50.0]), (Some(0.25), Some(75.0)));
        assert_eq!(change(&[0.0], &[5.0]), (None, None));
        assert_eq!(change(&[], &[5.0]), (None, None));
        assert_eq!(change(&[5.0], &[]), (None, None));
    }

    #[test]
    fn whole_figures_are_written_without_a_decimal_point() {
        let spread = Spread::of([1.0, 2.0]).unwrap();
        let json = serde_json::to_string(&spread).unwrap();
        assert!(json.contains(r#""median":1.5"#) && json.contains(r#""max":2,"#), "{json}");
    }
}
