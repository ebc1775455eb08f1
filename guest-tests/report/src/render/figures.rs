// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Figures in a few characters. One unit for a row, so that its columns can be read against
//! each other; four digits where a range must fit into a column.

use crate::{Change, Spread};

/// What a row's figures are, and the unit they are written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// A plain count.
    Count,
    /// Time: nanoseconds in one of these, and its name.
    Time(u32, &'static str),
}

/// What stands where there is no figure.
pub const NONE: &str = "-";

impl Unit {
    /// The largest unit of time that keeps the greater of two medians at 1 or more.
    pub fn of_time(change: &Change) -> Self {
        let medians = [change.before, change.after].into_iter().flatten();
        Self::of_nanoseconds(medians.map(|spread| spread.median).fold(0.0, f64::max))
    }

    /// The largest unit that keeps a time at 1 or more.
    pub fn of_nanoseconds(greatest: f64) -> Self {
        for (size, name) in [(1_000_000_000, "s"), (1_000_000, "ms"), (1000, "us")] {
            if greatest >= f64::from(size) {
                return Self::Time(size, name);
            }
        }
        Self::Time(1, "ns")
    }

    /// The median with its unit, at most 14 characters up to a day or 100 billion.
    pub fn median(self, spread: Option<Spread>) -> String {
        spread.map_or_else(|| NONE.to_owned(), |spread| self.value(spread.median))
    }

    /// A figure with its unit.
    pub fn value(self, value: f64) -> String {
        match self {
            Self::Count if value >= 1e11 => short(value),
            // Between two runs, one of which did not count any.
            Self::Count if value.fract() != 0.0 && value < 1000.0 => format!("{value:.1}"),
            Self::Count => grouped(value),
            Self::Time(1, name) if value.fract() == 0.0 => format!("{value:.0} {name}"),
            Self::Time(size, name) => format!("{:.3} {name}", value / f64::from(size)),
        }
    }

    /// A figure in this unit without its name, in few digits.
    pub fn bare(self, value: f64) -> String {
        match self {
            Self::Count => short(value),
            Self::Time(size, _) => digits(value / f64::from(size)),
        }
    }

    /// Least and greatest, or the quartiles of four runs and more, where they differ in what can be
    /// shown.
    pub fn range(self, spread: Option<Spread>, quartiles: bool) -> Option<String> {
        let spread = spread?;
        let (low, high) = if quartiles {
            (spread.q1, spread.q3)
        } else {
            (spread.min, spread.max)
        };
        let (low, high) = (self.bare(low), self.bare(high));
        (low != high).then(|| format!("{low}..{high}"))
    }
}

/// Whether the spread of a row is told by its quartiles: there must be runs enough on both sides.
pub fn has_quartiles(change: &Change) -> bool {
    let sides = [change.before, change.after].into_iter().flatten();
    sides.map(|spread| spread.runs).min().unwrap_or(0) >= 4
}

/// Three digits behind the point, five where that would leave too little.
pub fn ratio(change: &Change) -> String {
    change.ratio.map_or_else(|| NONE.to_owned(), factor)
}

/// The same of any ratio.
pub fn factor(ratio: f64) -> String {
    match ratio {
        ratio if ratio >= 10_000.0 => format!("{ratio:.2e}"),
        ratio if ratio >= 1000.0 => format!("{ratio:.0}"),
        ratio if ratio > 0.0 && ratio < 0.01 => format!("{ratio:.5}"),
        ratio => format!("{ratio:.3}"),
    }
}

/// The gain, with its sign.
pub fn gain(change: &Change) -> String {
    match change.gain() {
        Some(gain) if gain <= -1_000_000.0 => format!("{gain:+.0e}%"),
        Some(gain) if gain <= -1000.0 => format!("{gain:+.0}%"),
        // What is left is not nothing.
        Some(gain) if gain > 99.9 && gain < 100.0 => format!("{:+.2}%", gain.min(99.99)),
        // Not "-0.0%".
        Some(gain) if gain.abs() < 0.05 => "0.0%".to_owned(),
        Some(gain) => format!("{gain:+.1}%"),
        None => NONE.to_owned(),
    }
}

/// A percentage with no more digits than it has.
pub fn percent(value: f64) -> String {
    let text = format!("{value:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    format!("{text}%")
}

/// Digits in groups of three.
pub fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count in at most six characters.
pub fn short(value: f64) -> String {
    for (size, name) in [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "K")] {
        if value >= size {
            let size = if name == "K" { 1e3 } else { size };
            return digits(value / size) + name;
        }
    }
    format!("{value:.0}")
}

/// A p-value: four digits behind the point, or its order.
pub fn p_value(p: f64) -> String {
    match p {
        p if p >= 0.0001 => format!("{p:.4}"),
        0.0 => "0".to_owned(),
        p => format!("{p:.0e}"),
    }
}

/// Four digits.
fn digits(value: f64) -> String {
    let behind = match value {
        value if value >= 1000.0 => 0,
        value if value >= 100.0 => 1,
        value if value >= 10.0 => 2,
        _ => 3,
    };
    format!("{value:.behind$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(min: u64, median: u64, max: u64) -> Option<Spread> {
        Spread::of([min, median, max].map(|value| value as f64))
    }

    #[test]
    fn a_row_has_one_unit() {
        let change = Change::between(spread(1, 42_209_280, 43_000_000), spread(1, 950, 2000));
        let unit = Unit::of_time(&change);

        assert_eq!(unit.median(change.before), "42.209 ms");
        assert_eq!(unit.median(change.after), "0.001 ms");
        assert_eq!(unit.median(None), "-");
    }

    #[test]
    fn counts_are_grouped_and_ranges_are_short() {
        let counts = spread(34_600_000, 34_625_989, 135_000_000);

        assert_eq!(Unit::Count.median(counts), "34,625,989");
        assert_eq!(Unit::Count.range(counts, false).unwrap(), "34.60M..135.0M");
        assert_eq!(Unit::Count.range(spread(33, 33, 33), false), None);
        assert_eq!(
            Unit::Count.range(spread(33, 100, 10_000), false).unwrap(),
            "33..10.00K"
        );
    }

    #[test]
    fn a_median_between_two_small_counts_is_not_rounded_away() {
        let between = |one: u64, two: u64| Spread::of([one as f64, two as f64]);
        assert_eq!(Unit::Count.median(between(0, 1)), "0.5");
        assert_eq!(Unit::Count.median(between(1, 3)), "2");
        assert_eq!(
            Unit::Count.median(between(34_625_989, 34_625_990)),
            "34,625,990"
        );
    }

    #[test]
    fn ratio_and_gain_never_lie_by_rounding() {
        let change = |before, after| {
            Change::between(spread(before, before, before), spread(after, after, after))
        };
        assert_eq!(ratio(&change(100_000, 107)), "0.00107");
        assert_eq!(gain(&change(100_000, 100_001)), "0.0%");
        assert_eq!(gain(&change(100, 105)), "-5.0%");
        assert_eq!(gain(&change(1000, 300)), "+70.0%");
        assert_eq!(gain(&change(100_000, 25)), "+99.98%");
        assert_eq!(gain(&change(100_000_000, 1)), "+99.99%");
        assert_eq!(gain(&change(5, 0)), "+100.0%");
        assert_eq!(
            (ratio(&change(0, 3)), gain(&change(0, 3))),
            ("-".into(), "-".into())
        );
    }

    #[test]
    fn no_figure_leaves_its_column() {
        let all = Some(Spread {
            min: 0.0,
            ..spread(u64::MAX, u64::MAX, u64::MAX).unwrap()
        });
        for unit in [Unit::Count, Unit::Time(1_000_000_000, "s")] {
            assert!(unit.range(all, false).unwrap().len() <= 20);
        }
        assert!(Unit::Count.median(all).len() <= 14);
    }

    #[test]
    fn a_percentage_has_no_needless_digits() {
        assert_eq!(percent(3.0), "3%");
        assert_eq!(percent(0.25), "0.25%");
        assert_eq!(percent(100.0), "100%");
    }
}
