// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Version of Linux on the command line.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::serialize_as_on_the_command_line;

/// Linux version without its sublevel: `5.10`. It is also the name of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct LinuxVersion {
    /// `VERSION` of the Makefile.
    pub major: u32,
    /// `PATCHLEVEL` of the Makefile.
    pub minor: u32,
}

impl LinuxVersion {
    /// Oldest version that the lab supports: the first with the stage-2 code of this test.
    pub const OLDEST: Self = Self { major: 5, minor: 10 };

    /// Returns the version that a top Makefile contains.
    pub fn of_makefile(makefile: &str) -> Option<Self> {
        let number = |name: &str| {
            let mut lines = makefile.lines();
            let value = lines.find_map(|line| line.strip_prefix(name)?.trim().strip_prefix('='));
            value?.trim().parse().ok()
        };
        Some(Self { major: number("VERSION")?, minor: number("PATCHLEVEL")? })
    }
}

impl fmt::Display for LinuxVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl FromStr for LinuxVersion {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| {
            let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| text.parse().ok()).flatten()
        };
        let parsed = text
            .split_once('.')
            .and_then(|(major, minor)| Some(Self { major: number(major)?, minor: number(minor)? }));
        parsed.ok_or_else(|| {
            "expected a version of Debian's linux-source, such as 5.10; for any other kernel set \
             --git TREE REVISION or --source TREE"
                .to_owned()
        })
    }
}

serialize_as_on_the_command_line!(LinuxVersion);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_from_a_makefile() {
        let makefile = "# SPDX\nVERSION = 6\nPATCHLEVEL = 12\nSUBLEVEL = 0\nEXTRAVERSION = -rc2\n";

        let version = LinuxVersion::of_makefile(makefile).unwrap();

        assert_eq!(version.to_string(), "6.12");
        assert_eq!(LinuxVersion::of_makefile("all:\n"), None);
    }

    #[test]
    fn versions_are_ordered_by_number() {
        let version = |text: &str| text.parse::<LinuxVersion>().unwrap();

        assert!(version("5.10") > version("5.9") && version("6.1") < version("6.12"));
    }

    #[test]
    fn another_name_of_a_kernel_is_refused_with_the_option_for_it() {
        for text in ["mainline", "7.3-rc2", "7", "7.3.1", "+5.10", ""] {
            let error = text.parse::<LinuxVersion>().unwrap_err();

            assert!(error.contains("--git TREE"), "{text}: {error}");
        }
    }
}
