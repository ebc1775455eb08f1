// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sizes and times, each with its unit in its type.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use vm_memory::GuestAddress;

/// A size or a distance in bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// Virtual address in a host process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostVirtAddr(pub u64);

/// A span of time in nanoseconds. Under emulation it is virtual time: the work of all CPUs.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Nanoseconds(pub u64);

/// Error returned when a text is not a size.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("'{0}' is not a size; expected a whole number, optionally followed by K, M, G or T")]
pub struct ParseBytesError(String);

/// Returns a count with its noun: `1 run`, `2 runs`.
pub fn pluralize(count: impl TryInto<u64>, noun: &str) -> String {
    let count = count.try_into().unwrap_or(u64::MAX);
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

/// Parses a size above zero, for the command line.
///
/// # Errors
/// The text is not a size, or the size is zero.
pub fn parse_nonzero_size(text: &str) -> Result<Bytes, String> {
    match text.parse::<Bytes>() {
        Ok(Bytes(0)) => Err("the size is 0; expected a size above 0".to_owned()),
        Ok(size) => Ok(size),
        Err(error) => Err(error.to_string()),
    }
}

/// Parses a percentage, with or without `%`, for the command line.
///
/// # Errors
/// The text is not a number of at least 0.
pub fn parse_percentage(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text);
    match number.parse::<f64>() {
        Ok(percent) if percent.is_finite() && percent >= 0.0 => Ok(percent),
        _ => Err("expected a percentage of at least 0, such as 3 or 0.5".to_owned()),
    }
}

impl Bytes {
    /// Returns `n` KiB.
    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }

    /// Returns `n` MiB.
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// Returns `n` GiB.
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    /// Returns the smallest multiple of `step` that is at least this size, or `None` on overflow.
    pub const fn checked_align_up(self, step: Self) -> Option<Self> {
        match self.0.checked_next_multiple_of(step.0) {
            Some(n) => Some(Self(n)),
            None => None,
        }
    }
}

impl FromStr for Bytes {
    type Err = ParseBytesError;

    /// Reads a decimal or `0x` number, optionally followed by K, M, G or T (powers of 1024).
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseBytesError(text.to_owned());
        let (digits, shift) = match text.char_indices().next_back() {
            Some((at, 'k' | 'K')) => (&text[..at], 10),
            Some((at, 'm' | 'M')) => (&text[..at], 20),
            Some((at, 'g' | 'G')) => (&text[..at], 30),
            Some((at, 't' | 'T')) => (&text[..at], 40),
            _ => (text, 0),
        };
        let number = match digits.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => digits.parse(),
        };
        number.ok().and_then(|n| n.checked_mul(1 << shift)).map(Self).ok_or_else(wrong)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "K")] {
            if self.0 != 0 && self.0.trailing_zeros() >= shift {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for Nanoseconds {
    /// Prints seconds with nine decimal places, as the kernel's test does.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:09}s", self.0 / 1_000_000_000, self.0 % 1_000_000_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_in_every_unit() {
        for (text, bytes) in [
            ("4096", Bytes(4096)),
            ("64K", Bytes::kib(64)),
            ("64m", Bytes::mib(64)),
            ("20G", Bytes::gib(20)),
            ("0x1000", Bytes(4096)),
        ] {
            assert_eq!(text.parse(), Ok(bytes));
        }
    }

    #[test]
    fn malformed_sizes_are_refused() {
        for text in ["", "G", "12Q", "-1", "1.5G", "99999999999T"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_percentage_parses_with_and_without_a_percent_sign() {
        assert_eq!(parse_percentage("3"), Ok(3.0));
        assert_eq!(parse_percentage("0.5%"), Ok(0.5));
        for text in ["", "-1", "NaN", "inf", "three", "3%%"] {
            assert!(parse_percentage(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_size_prints_in_its_largest_whole_unit() {
        assert_eq!(Bytes::mib(64).to_string(), "64M");
        assert_eq!(Bytes(4097).to_string(), "4097");
    }

    #[test]
    fn a_time_prints_as_in_the_kernels_test() {
        assert_eq!(Nanoseconds(1_042_000_007).to_string(), "1.042000007s");
    }
}
