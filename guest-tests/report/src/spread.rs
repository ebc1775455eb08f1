// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A figure over several runs, and how it changed.

use serde::{Serialize, Serializer};

use crate::stats::quantile;

/// A figure over the runs of one side: nanoseconds, or a count.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// The middle value, or the midpoint of the two in the middle.
    #[serde(serialize_with = "figure")]
    pub median: f64,
    /// A quarter of the runs lie below.
    #[serde(serialize_with = "figure")]
    pub q1: f64,
    /// A quarter of the runs lie above.
    #[serde(serialize_with = "figure")]
    pub q3: f64,
    /// The least.
    #[serde(serialize_with = "figure")]
    pub min: f64,
    /// The greatest.
    #[serde(serialize_with = "figure")]
    pub max: f64,
    /// Over how many runs.
    pub runs: usize,
}

/// A whole number without a point.
pub fn figure<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    if value.fract() == 0.0 && (0.0..9e15).contains(value) {
        serializer.serialize_u64(*value as u64)
    } else {
        serializer.serialize_f64(*value)
    }
}

/// Whole numbers without a point.
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
    /// The spread of some values; `None` where there are none.
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
}

/// A figure before and after.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Change {
    /// Before; `None` where it was not counted.
    pub before: Option<Spread>,
    /// After; `None` where it was not counted.
    pub after: Option<Spread>,
    /// The median after through the median before: below 1 is less. `None` where there is no
    /// median before, or it is 0.
    pub ratio: Option<f64>,
}

impl Change {
    /// The change between two spreads.
    pub fn between(before: Option<Spread>, after: Option<Spread>) -> Self {
        let ratio = match (before, after) {
            (Some(before), Some(after)) if before.median != 0.0 => {
                Some(after.median / before.median)
            }
            _ => None,
        };
        Self {
            before,
            after,
            ratio,
        }
    }

    /// What was saved, in percent of before: 70 for a ratio of 0.3, negative where it grew.
    pub fn gain(&self) -> Option<f64> {
        self.ratio.map(|ratio| (1.0 - ratio) * 100.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_of_the_sorted_values() {
        let odd = Spread::of([5.0, 1.0, 9.0]).unwrap();
        let even = Spread::of([4.0, 1.0, 3.0, 2.0]).unwrap();

        assert_eq!((odd.median, odd.min, odd.max, odd.runs), (5.0, 1.0, 9.0, 3));
        assert_eq!((even.median, even.q1, even.q3), (2.5, 1.75, 3.25));
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn gain_is_what_was_saved() {
        let change = Change::between(Spread::of([200.0]), Spread::of([50.0]));
        assert_eq!((change.ratio, change.gain()), (Some(0.25), Some(75.0)));
    }

    #[test]
    fn without_a_base_there_is_no_ratio() {
        let change = Change::between(Spread::of([0.0]), Spread::of([5.0]));
        assert_eq!(change.ratio, None);
        assert_eq!(Change::between(None, Spread::of([5.0])).ratio, None);
        assert_eq!(Change::between(Spread::of([5.0]), None).ratio, None);
    }

    #[test]
    fn whole_figures_are_written_without_a_point() {
        let spread = Spread::of([1.0, 2.0]).unwrap();
        let json = serde_json::to_string(&spread).unwrap();
        assert!(
            json.contains(r#""median":1.5"#) && json.contains(r#""max":2,"#),
            "{json}"
        );
    }
}
