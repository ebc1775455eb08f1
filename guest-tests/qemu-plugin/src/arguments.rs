// SPDX-License-Identifier: GPL-2.0-or-later
//! Arguments of the plugin, each `key=value`.

use std::{num::NonZeroU32, path::PathBuf};

use thiserror::Error;

use crate::{costs::CostTable, observe::arguments::TraceArguments};

/// Arguments of the plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arguments {
    /// Output file.
    pub out: PathBuf,
    /// Name and virtual address of the functions whose calls are counted.
    pub functions: Vec<(String, u64)>,
    /// Indicates that all instructions are counted.
    pub counts_instructions: bool,
    /// Length of a turn in picoseconds of virtual time, if elapsed time is measured.
    pub quantum: Option<u64>,
    /// Seed of the turn lengths, if they vary.
    pub seed: Option<u64>,
    /// Costs of instructions in elapsed time.
    pub costs: CostTable,
    /// Arguments of the trace.
    pub trace: TraceArguments,
}

/// Error returned for invalid arguments.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ArgumentError {
    /// Error returned when `out` is missing.
    #[error("no output file: set out=FILE")]
    MissingOutput,
    /// Error returned for an unknown argument or an invalid value.
    #[error(
        "invalid argument '{0}'; expected out=FILE, at=NAME:HEXADDRESS, instructions=on, \
         quantum=NANOSECONDS, seed=NUMBER, cost=CLASS:PICOSECONDS, trace=FILE, \
         function=NUMBER:HEXADDRESS:HEXEND, physical=NUMBER, lock=NUMBER:HEXOFFSET, \
         free=HEXADDRESS:HEXOFFSET, stacks=off or verify=on"
    )]
    Invalid(String),
    /// Error returned for an argument of the trace without a trace.
    #[error("no trace: set trace=FILE, or omit function, lock, free, stacks and verify")]
    MissingTrace,
    /// Error returned for a malformed value of `at`.
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
        let mut costs = CostTable::default();
        let mut trace = TraceArguments::default();
        for argument in raw {
            let invalid = || ArgumentError::Invalid(argument.to_owned());
            match argument.split_once('=') {
                Some(("out", file)) if !file.is_empty() => out = Some(PathBuf::from(file)),
                Some(("at", value)) => functions.push(function(value)?),
                Some(("instructions", "on")) => instructions = true,
                Some(("quantum", value)) => {
                    let nanoseconds: NonZeroU32 = value.parse().map_err(|_| invalid())?;
                    quantum = Some(u64::from(nanoseconds.get()) * 1000);
                }
                Some(("seed", value)) => seed = Some(value.parse().map_err(|_| invalid())?),
                Some(("cost", value)) => costs.set(value).ok_or_else(invalid)?,
                Some((key, value)) => trace.set(key, value).ok_or_else(invalid)?,
                None => return Err(invalid()),
            }
        }
        if trace.file.is_none() && trace != TraceArguments::default() {
            return Err(ArgumentError::MissingTrace);
        }
        let out = out.ok_or(ArgumentError::MissingOutput)?;
        Ok(Self { out, functions, counts_instructions: instructions, quantum, seed, costs, trace })
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
        assert!(!arguments.counts_instructions);
        let all = Arguments::parse(raw.into_iter().chain(["instructions=on"]));
        assert!(all.unwrap().counts_instructions);
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
            (vec!["out=f", "free=0"], ArgumentError::Invalid("free=0".to_owned())),
            (vec!["out=f", "stacks=off"], ArgumentError::MissingTrace),
            (vec!["out=f", "at=aborts"], ArgumentError::MalformedFunction("aborts".to_owned())),
            (vec!["out=f", "at=:10"], ArgumentError::MalformedFunction(":10".to_owned())),
            (vec!["out=f", "at=a:xyz"], ArgumentError::MalformedFunction("a:xyz".to_owned())),
        ] {
            assert_eq!(Arguments::parse(raw), Err(error));
        }
    }
}
