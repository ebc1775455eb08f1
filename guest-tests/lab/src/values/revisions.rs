// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Revisions of a Git repository on the command line.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::serialize_as_on_the_command_line;

/// Revisions on the command line: `REVISION`, or `BEFORE..AFTER`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Revisions {
    /// One revision.
    One(String),
    /// Both ends; an omitted end is `HEAD`.
    Range {
        /// Revision before.
        before: String,
        /// Revision after.
        after: String,
    },
}

impl FromStr for Revisions {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let end = |text: &str| if text.is_empty() { "HEAD" } else { text }.to_owned();
        match text.split_once("..") {
            _ if text.is_empty() || text == ".." || text.starts_with('-') => {
                Err("expected a revision, or BEFORE..AFTER".to_owned())
            }
            Some((_, after)) if after.starts_with('.') || after.contains("..") => {
                Err("a symmetric difference has no direction: expected BEFORE..AFTER".to_owned())
            }
            Some((before, after)) => Ok(Self::Range { before: end(before), after: end(after) }),
            None => Ok(Self::One(text.to_owned())),
        }
    }
}

impl fmt::Display for Revisions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(revision) => f.write_str(revision),
            Self::Range { before, after } => write!(f, "{before}..{after}"),
        }
    }
}

serialize_as_on_the_command_line!(Revisions);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_has_two_ends() {
        let range = |before: &str, after: &str| {
            Ok(Revisions::Range { before: before.to_owned(), after: after.to_owned() })
        };

        assert_eq!("v6.1..topic".parse(), range("v6.1", "topic"));
        assert_eq!("HEAD~3..".parse(), range("HEAD~3", "HEAD"));
        assert_eq!("v6.12".parse(), Ok(Revisions::One("v6.12".to_owned())));
        for text in ["a...b", "", "..", "-x", "a..b..c"] {
            assert!(text.parse::<Revisions>().is_err(), "{text}");
        }
    }
}
