// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A figure over several runs, and how it changed.

use serde::Serialize;

/// A figure over the runs of one side: nanoseconds, or a count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Spread {
    /// The middle value, or the midpoint of the two in the middle, rounded down.
    pub median: u64,
    /// The least.
    pub min: u64,
    /// The greatest.
    pub max: u64,
    /// Over how many runs.
    pub runs: usize,
}

impl Spread {
    /// The spread of some values; `None` where there are none.
    pub fn of(values: impl IntoIterator<Item = u64>) -> Option<Self> {
        let mut values: Vec<u64> = values.into_iter().collect();
        values.sort_unstable();
        let (&min, &max) = (values.first()?, values.last()?);
        let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
        Some(Self {
            median: low + (high - low) / 2,
            min,
            max,
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
            (Some(before), Some(after)) if before.median != 0 => {
                Some(after.median as f64 / before.median as f64)
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
        let odd = Spread::of([5, 1, 9]).unwrap();
        let even = Spread::of([u64::MAX, 1, u64::MAX - 2, 2]).unwrap();

        assert_eq!((odd.median, odd.min, odd.max, odd.runs), (5, 1, 9, 3));
        assert_eq!(even.median, u64::MAX / 2);
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn gain_is_what_was_saved() {
        let change = Change::between(Spread::of([200]), Spread::of([50]));
        assert_eq!((change.ratio, change.gain()), (Some(0.25), Some(75.0)));
    }

    #[test]
    fn without_a_base_there_is_no_ratio() {
        assert_eq!(
            Change::between(Spread::of([0]), Spread::of([5])).ratio,
            None
        );
        assert_eq!(Change::between(None, Spread::of([5])).ratio, None);
        assert_eq!(Change::between(Spread::of([5]), None).ratio, None);
    }
}
