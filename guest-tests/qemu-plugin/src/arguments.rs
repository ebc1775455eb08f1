// SPDX-License-Identifier: GPL-2.0-or-later
//! The plugin's arguments, as QEMU passes them: `key=value` each.

use std::path::PathBuf;

use thiserror::Error;

/// What the plugin is told to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arguments {
    /// Where the segments go.
    pub out: PathBuf,
    /// Names and virtual addresses of functions whose entries are counted.
    pub at: Vec<(String, u64)>,
    /// Count all instructions too.
    pub instructions: bool,
}

/// Why arguments cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ArgumentError {
    /// No file to write to.
    #[error("no output file: give out=FILE")]
    NoOutput,
    /// None of those.
    #[error(
        "'{0}' is no argument of this plugin: use out=FILE, at=NAME:HEXADDRESS and instructions=on"
    )]
    Unknown(String),
    /// Not of the form `NAME:HEXADDRESS`.
    #[error("'at={0}' names no address: use at=NAME:HEXADDRESS")]
    NoAddress(String),
}

impl Arguments {
    /// Reads the arguments.
    ///
    /// # Errors
    /// One is unknown or malformed, or `out` is missing.
    pub fn parse<'a>(raw: impl IntoIterator<Item = &'a str>) -> Result<Self, ArgumentError> {
        let mut out = None;
        let mut at = Vec::new();
        let mut instructions = false;
        for argument in raw {
            match argument.split_once('=') {
                Some(("out", file)) if !file.is_empty() => out = Some(PathBuf::from(file)),
                Some(("at", place)) => at.push(function(place)?),
                Some(("instructions", "on")) => instructions = true,
                _ => return Err(ArgumentError::Unknown(argument.to_owned())),
            }
        }
        Ok(Self {
            out: out.ok_or(ArgumentError::NoOutput)?,
            at,
            instructions,
        })
    }
}

fn function(place: &str) -> Result<(String, u64), ArgumentError> {
    place
        .split_once(':')
        .filter(|(name, _)| !name.is_empty())
        .and_then(|(name, address)| {
            let digits = address.trim_start_matches("0x");
            Some((name.to_owned(), u64::from_str_radix(digits, 16).ok()?))
        })
        .ok_or_else(|| ArgumentError::NoAddress(place.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_and_functions_are_read() {
        let raw = ["out=/tmp/x", "at=aborts:ffff800010040000"];

        let arguments = Arguments::parse(raw).unwrap();

        assert_eq!(arguments.out, PathBuf::from("/tmp/x"));
        assert_eq!(arguments.at, [("aborts".to_owned(), 0xffff_8000_1004_0000)]);
        assert!(!arguments.instructions);
        let all = Arguments::parse(raw.into_iter().chain(["instructions=on"]));
        assert!(all.unwrap().instructions);
    }

    #[test]
    fn what_is_no_argument_is_refused() {
        for (raw, error) in [
            (vec![], ArgumentError::NoOutput),
            (vec!["out="], ArgumentError::Unknown("out=".to_owned())),
            (vec!["x=1"], ArgumentError::Unknown("x=1".to_owned())),
            (
                vec!["instructions=1"],
                ArgumentError::Unknown("instructions=1".to_owned()),
            ),
            (
                vec!["out=f", "at=aborts"],
                ArgumentError::NoAddress("aborts".to_owned()),
            ),
            (
                vec!["out=f", "at=:10"],
                ArgumentError::NoAddress(":10".to_owned()),
            ),
            (
                vec!["out=f", "at=a:xyz"],
                ArgumentError::NoAddress("a:xyz".to_owned()),
            ),
        ] {
            assert_eq!(Arguments::parse(raw), Err(error));
        }
    }
}
