// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The release of a kernel source, by which a page is sorted.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// Release of a source: `6.12.117`, `6.12.0-rc3`. A release candidate precedes its release.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Release {
    numbers: [u32; 3],
    /// Number of the release candidate; the largest number for a release.
    candidate: u32,
}

impl Release {
    /// Returns the release that a top Makefile contains; other extra versions are ignored.
    pub fn of_makefile(makefile: &str) -> Option<Self> {
        let value = |name: &str| {
            let mut lines = makefile.lines();
            lines.find_map(|line| line.strip_prefix(name)?.trim().strip_prefix('=')).map(str::trim)
        };
        let number = |name: &str| value(name)?.parse().ok();
        let candidate =
            value("EXTRAVERSION").and_then(|text| text.strip_prefix("-rc")?.parse().ok());
        Some(Self {
            numbers: [number("VERSION")?, number("PATCHLEVEL")?, number("SUBLEVEL").unwrap_or(0)],
            candidate: candidate.unwrap_or(u32::MAX),
        })
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [major, minor, sublevel] = self.numbers;
        write!(f, "{major}.{minor}.{sublevel}")?;
        match self.candidate {
            u32::MAX => Ok(()),
            candidate => write!(f, "-rc{candidate}"),
        }
    }
}

impl FromStr for Release {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let (numbers, candidate) = match text.split_once("-rc") {
                Some((numbers, candidate)) => (numbers, candidate.parse().ok()?),
                None => (text, u32::MAX),
            };
            let numbers: Result<Vec<u32>, _> = numbers.split('.').map(str::parse).collect();
            Some(Self { numbers: numbers.ok()?.try_into().ok()?, candidate })
        };
        parse().ok_or_else(|| format!("'{text}' is no Linux release such as 6.12.1 or 6.12.0-rc1"))
    }
}

crate::values::serialize_as_on_the_command_line!(Release);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_sorted_by_number_and_candidates_precede() {
        let texts = ["5.10.262", "6.1.9", "6.12.0-rc1", "6.12.0-rc10", "6.12.0", "6.12.1"];

        let releases: Vec<Release> = texts.iter().map(|text| text.parse().unwrap()).collect();

        assert!(releases.is_sorted());
        assert_eq!(releases.iter().map(Release::to_string).collect::<Vec<_>>(), texts);
        assert!("6.12".parse::<Release>().is_err() && "6.12.0-rcx".parse::<Release>().is_err());
    }

    #[test]
    fn a_makefile_contains_the_release() {
        let makefile = "# x\nVERSION = 6\nPATCHLEVEL = 13\nSUBLEVEL = 0\nEXTRAVERSION = -rc2\n";

        let of = |text: &str| Release::of_makefile(text).map(|release| release.to_string());

        assert_eq!(of(makefile).as_deref(), Some("6.13.0-rc2"));
        assert_eq!(of("VERSION = 6\nPATCHLEVEL = 1\nEXTRAVERSION =\n").as_deref(), Some("6.1.0"));
        assert_eq!(of("all:\n"), None);
    }
}
