// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Formats figures in a few characters. A row has one unit, so that its columns are comparable.

use crate::stats::{Change, Spread};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    Count,
    /// Unit of time: its length in nanoseconds, and its name.
    Time(u32, &'static str),
}

pub const UNKNOWN: &str = "-";

impl Unit {
    /// Returns the largest unit of time in which the greater median is at least 1.
    pub fn of_time(change: &Change) -> Self {
        Self::of_nanoseconds(change.sides().map(|spread| spread.median).fold(0.0, f64::max))
    }

    /// Returns the largest unit of time in which `greatest` is at least 1.
    pub fn of_nanoseconds(greatest: f64) -> Self {
        let units = [(1_000_000_000, "s"), (1_000_000, "ms"), (1000, "us")];
        let mut fitting = units.into_iter().filter(|(size, _)| greatest >= f64::from(*size));
        let (size, name) = fitting.next().unwrap_or((1, "ns"));
        Self::Time(size, name)
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Time(_, name) => name,
            Self::Count => "",
        }
    }

    /// Formats the median with its unit: in at most 14 characters up to a day or 100 billion.
    pub fn median(self, spread: Option<Spread>) -> String {
        spread.map_or_else(|| UNKNOWN.to_owned(), |spread| self.value(spread.median))
    }

    pub fn value(self, value: f64) -> String {
        match self {
            Self::Count if value >= 1e11 => short_count(value),
            // The median is the midpoint of two counts.
            Self::Count if value.fract() != 0.0 && value < 1000.0 => format!("{value:.1}"),
            Self::Count => group_digits(&format!("{value:.0}")),
            Self::Time(1, name) if value.fract() == 0.0 => format!("{value:.0} {name}"),
            Self::Time(size, name) => format!("{:.3} {name}", value / f64::from(size)),
        }
    }

    /// Formats a value without unit, with three significant digits.
    pub fn short(self, value: f64) -> String {
        match self {
            Self::Count => short_count(value),
            Self::Time(size, _) => three_digits(value / f64::from(size)),
        }
    }

    /// Formats the ends of a spread without unit, in few digits; `None` if both print the same.
    pub fn range(self, spread: Option<Spread>) -> Option<String> {
        let bare = |value: f64| match self {
            Self::Count => short_count(value),
            Self::Time(size, _) => four_digits(value / f64::from(size)),
        };
        let [low, high] = spread?.range().map(bare);
        (low != high).then(|| format!("{low}..{high}"))
    }
}

pub fn ratio(change: &Change) -> String {
    change.ratio.map_or_else(|| UNKNOWN.to_owned(), factor)
}

/// Formats a ratio with three decimals, or with five if three are too few.
pub fn factor(ratio: f64) -> String {
    match ratio {
        ratio if ratio >= 10_000.0 => format!("{ratio:.2e}"),
        ratio if ratio >= 1000.0 => format!("{ratio:.0}"),
        ratio if ratio > 0.0 && ratio < 0.01 => format!("{ratio:.5}"),
        ratio => format!("{ratio:.3}"),
    }
}

pub fn interval([low, high]: [f64; 2]) -> String {
    format!("{}..{}", factor(low), factor(high))
}

/// Formats the decrease in percent of *before*.
pub fn gain(change: &Change) -> String {
    signed_gain(change, 1.0)
}

/// Formats the growth in percent of *before*.
pub fn growth(change: &Change) -> String {
    signed_gain(change, -1.0)
}

fn signed_gain(change: &Change, sign: f64) -> String {
    match change.gain() {
        Some(gain) if gain <= -1_000_000.0 => format!("{:+.0e}%", sign * gain),
        Some(gain) if gain <= -1000.0 => format!("{:+.0}%", sign * gain),
        // Only a gain of exactly 100% prints as 100%.
        Some(gain) if gain > 99.9 && gain < 100.0 => format!("{:+.2}%", sign * gain.min(99.99)),
        // Avoids "-0.0%".
        Some(gain) if gain.abs() < 0.05 => "0.0%".to_owned(),
        Some(gain) => format!("{:+.1}%", sign * gain),
        None => UNKNOWN.to_owned(),
    }
}

pub fn percent(value: f64) -> String {
    let text = format!("{value:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    format!("{text}%")
}

/// Formats a p-value with four decimals, or as its order of magnitude.
pub fn p_value(p: f64) -> String {
    match p {
        p if p >= 0.0001 => format!("{p:.4}"),
        0.0 => "0".to_owned(),
        p => format!("{p:.0e}"),
    }
}

/// Separates the thousands of a decimal number by commas.
pub fn group_digits(digits: &str) -> String {
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a count in at most six characters.
fn short_count(value: f64) -> String {
    for (from, size, name) in
        [(1e15, 1e15, "P"), (1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "K")]
    {
        if value >= from {
            return four_digits(value / size) + name;
        }
    }
    format!("{value:.0}")
}

/// Formats a value with three significant digits, or all digits before the decimal point.
fn three_digits(value: f64) -> String {
    let decimals = match value {
        value if value >= 100.0 => 0,
        value if value >= 10.0 => 1,
        value if value >= 1.0 || value == 0.0 => 2,
        value if value >= 0.1 => 3,
        _ => 4,
    };
    format!("{value:.decimals$}")
}

fn four_digits(value: f64) -> String {
    let decimals = match value {
        value if value >= 1000.0 => 0,
        value if value >= 100.0 => 1,
        value if value >= 10.0 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(min: u64, median: u64, max: u64) -> Option<Spread> {
        Spread::new([min, median, max].map(|value| value as f64))
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
        assert_eq!(Unit::Count.range(counts).unwrap(), "34.60M..135.0M");
        assert_eq!(Unit::Count.range(spread(33, 33, 33)), None);
        assert_eq!(Unit::Count.range(spread(33, 100, 10_000)).unwrap(), "33..10.00K");
        let between = |one: f64, two: f64| Unit::Count.median(Spread::new([one, two]));
        assert_eq!([between(0.0, 1.0), between(1.0, 3.0)], ["0.5", "2"]);
        assert_eq!(between(34_625_989.0, 34_625_990.0), "34,625,990");
    }

    #[test]
    fn ratio_and_gain_do_not_round_to_0_or_100() {
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
        assert_eq!(growth(&change(1000, 300)), "-70.0%");
        assert_eq!(growth(&change(1, 20)), "+1900%");
        assert_eq!((ratio(&change(0, 3)), gain(&change(0, 3))), ("-".into(), "-".into()));
    }

    #[test]
    fn the_longest_figures_fit_into_a_column_and_percentages_have_no_trailing_zeros() {
        let all = Some(Spread { min: 0.0, ..spread(u64::MAX, u64::MAX, u64::MAX).unwrap() });
        for unit in [Unit::Count, Unit::Time(1_000_000_000, "s")] {
            assert!(unit.range(all).unwrap().len() <= 20);
        }
        assert!(Unit::Count.median(all).len() <= 14);
        assert_eq!([3.0, 0.25, 100.0].map(percent), ["3%", "0.25%", "100%"]);
    }
}
