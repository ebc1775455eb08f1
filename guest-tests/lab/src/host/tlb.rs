// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Model of the TLBs of the emulated CPU, and its sizes.
//!
//! The plugin feeds a copy of the model for each size of the linear map's leaves with the data
//! accesses of one run, and counts those that walk the tables.

use std::{fmt, str::FromStr};

use granule_types::units::{Bytes, parse_nonzero_size};
use serde::{Deserialize, Serialize};

/// Entries of both levels, as `FIRST:WAYSxSETS`: a fully associative level, and one with sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct TlbSizes {
    first: u32,
    ways: u32,
    sets: u32,
}

impl FromStr for TlbSizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok().filter(|size| (1..=1 << 20).contains(size));
        let parse = || -> Option<Self> {
            let (first, second) = text.split_once(':')?;
            let (ways, sets) = second.split_once('x')?;
            Some(Self { first: number(first)?, ways: number(ways)?, sets: number(sets)? })
        };
        parse().ok_or_else(|| {
            "expected FIRST:WAYSxSETS with numbers from 1 to 1048576, such as 48:4x320".to_owned()
        })
    }
}

crate::values::serialize_as_on_the_command_line!(TlbSizes);

impl fmt::Display for TlbSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}x{}", self.first, self.ways, self.sets)
    }
}

/// Parses the size of a leaf, a power of two of at least 4K.
pub fn parse_grain(text: &str) -> Result<Bytes, String> {
    match parse_nonzero_size(text)? {
        Bytes(size) if size.is_power_of_two() && size >= 4096 => Ok(Bytes(size)),
        Bytes(_) => Err("expected a power of two of at least 4K".to_owned()),
    }
}

/// Model of TLBs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlbModel {
    pub sizes: TlbSizes,
    /// Sizes of the linear map's leaves.
    pub grains: Vec<Bytes>,
}

impl TlbModel {
    /// Returns the arguments of the plugin, each after a comma.
    pub fn plugin_arguments(&self) -> String {
        let grains: String =
            self.grains.iter().map(|grain| format!(",grain={}", grain.0)).collect();
        format!(",tlb={}{grains}", self.sizes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_formatted_as_they_are_parsed() {
        let sizes: TlbSizes = "48:4x320".parse().unwrap();

        assert_eq!(sizes.to_string(), "48:4x320");
        for text in ["48", "48:4", "0:4x320", "48:4x0", "48:4x2097152", ""] {
            assert!(text.parse::<TlbSizes>().unwrap_err().contains("48:4x320"), "{text}");
        }
    }

    #[test]
    fn a_grain_is_a_power_of_two_and_no_smaller_than_a_page() {
        assert_eq!(parse_grain("2M"), Ok(Bytes::mib(2)));

        for text in ["3M", "2K", "0", "x"] {
            assert!(parse_grain(text).is_err(), "{text}");
        }
    }

    #[test]
    fn arguments_name_each_grain() {
        let grains = vec![Bytes::kib(4), Bytes::mib(2)];
        let model = TlbModel { sizes: "48:4x320".parse().unwrap(), grains };

        assert_eq!(model.plugin_arguments(), ",tlb=48:4x320,grain=4096,grain=2097152");
    }
}
