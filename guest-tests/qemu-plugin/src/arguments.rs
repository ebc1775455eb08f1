// SPDX-License-Identifier: GPL-2.0-or-later
//! Arguments of the plugin, each `key=value`.

use std::path::PathBuf;

use thiserror::Error;

use crate::costs::Costs;

/// Arguments of the plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arguments {
    /// Output file.
    pub out: PathBuf,
    /// Name and virtual address of the functions whose calls are counted.
    pub functions: Vec<(String, u64)>,
    /// `true` to count all instructions.
    pub instructions: bool,
    /// Length of a turn in picoseconds of virtual time, if elapsed time is measured.
    pub quantum: Option<u64>,
    /// Seed of the turn lengths, if they vary.
    pub seed: Option<u64>,
    /// Costs of instructions in elapsed time.
    pub costs: Costs,
}

/// Error returned for invalid arguments.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ArgumentError {
    /// `out` is missing.
    #[error("no output file: set out=FILE")]
    MissingOutput,
    /// The argument is unknown or has an invalid value.
    #[error(
        "invalid argument '{0}'; expected out=FILE, at=NAME:HEXADDRESS, instructions=on, \
         quantum=NANOSECONDS, seed=NUMBER or cost=CLASS:PICOSECONDS"
    )]
    Invalid(String),
    /// The value of `at` is malformed.
    #[error("malformed argument 'at={0}'; expected at=NAME:HEXADDRESS")]
    MalformedFunction(String),
}

impl Arguments {
    /// Parses the arguments.
    ///
    /// # Errors
    /// An argument is unknown or malformed, or `out` is missing.
    pub fn parse<'a>(raw: impl IntoIterator<Item = &'a str>) -> Result<Self, ArgumentError> {
        let mut out = None;
        let mut functions = Vec::new();
        let mut instructions = false;
        let (mut quantum, mut seed) = (None, None);
        let mut costs = Costs::default();
        for argument in raw {
            match argument.split_once('=') {
                Some(("out", file)) if !file.is_empty() => out = Some(PathBuf::from(file)),
                Some(("at", value)) => functions.push(function(value)?),
                Some(("instructions", "on")) => instructions = true,
                Some(("quantum", value)) => match value.parse::<u32>() {
                    Ok(nanoseconds @ 1..) => quantum = Some(u64::from(nanoseconds) * 1000),
                    _ => return Err(ArgumentError::Invalid(argument.to_owned())),
                },
                Some(("seed", value)) => match value.parse() {
                    Ok(number) => seed = Some(number),
                    Err(_) => return Err(ArgumentError::Invalid(argument.to_owned())),
                },
                Some(("cost", value)) => {
                    costs.set(value).ok_or_else(|| ArgumentError::Invalid(argument.to_owned()))?
                }
                _ => return Err(ArgumentError::Invalid(argument.to_owned())),
            }
        }
        let out = out.ok_or(ArgumentError::MissingOutput)?;
        Ok(Self { out, functions, instructions, quantum, seed, costs })
    }
}

/// Parses `NAME:HEXADDRESS`.
fn function(value: &str) -> Result<(String, u64), ArgumentError> {
    value
        .split_once(':')
        .filter(|(name, _)| !name.is_empty())
        .and_then(|(name, address)| {
            let digits = address.trim_start_matches("0x");
            Some((name.to_owned(), u64::from_str_radix(digits, 16).ok()?))
        })
        .ok_or_else(|| ArgumentError::MalformedFunction(value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_functions_and_instructions_are_parsed() {
        let raw = ["out=/tmp/x", "at=aborts:ffff800010040000"];

        let arguments = Arguments::parse(raw).unwrap();

        assert_eq!(arguments.out, PathBuf::from("/tmp/x"));
        assert_eq!(arguments.functions, [("aborts".to_owned(), 0xffff_8000_1004_0000)]);
        assert!(!arguments.instructions);
        let all = Arguments::parse(raw.into_iter().chain(["instructions=on"]));
        assert!(all.unwrap().instructions);
    }

    #[test]
    fn invalid_arguments_are_refused() {
        for (raw, error) in [
            (vec![], ArgumentError::MissingOutput),
            (vec!["out="], ArgumentError::Invalid("out=".to_owned())),
            (vec!["x=1"], ArgumentError::Invalid("x=1".to_owned())),
            (vec!["instructions=1"], ArgumentError::Invalid("instructions=1".to_owned())),
            (vec!["quantum=0"], ArgumentError::Invalid("quantum=0".to_owned())),
            (vec!["cost=x:1"], ArgumentError::Invalid("cost=x:1".to_owned())),
            (vec!["out=f", "at=aborts"], ArgumentError::MalformedFunction("aborts".to_owned())),
            (vec!["out=f", "at=:10"], ArgumentError::MalformedFunction(":10".to_owned())),
            (vec!["out=f", "at=a:xyz"], ArgumentError::MalformedFunction("a:xyz".to_owned())),
        ] {
            assert_eq!(Arguments::parse(raw), Err(error));
        }
    }
}
