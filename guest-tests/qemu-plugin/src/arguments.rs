// SPDX-License-Identifier: GPL-2.0-or-later
//! Arguments of the plugin, each `key=value`.

use std::{num::NonZeroU32, path::PathBuf};

use thiserror::Error;

use crate::{
    costs::CostTable, hexadecimal::hexadecimal, interval::IntervalArguments,
    observe::arguments::TraceArguments, tlb::TlbArguments,
};

/// Arguments of the plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arguments {
    /// Output file.
    pub out: PathBuf,
    /// Name and virtual address of the functions whose calls are counted.
    pub functions: Vec<(String, u64)>,
    /// Function whose call is a segment of its own: name and virtual address.
    pub span: Option<(String, u64)>,
    /// Interval whose instructions are counted.
    pub interval: Option<IntervalArguments>,
    /// Indicates that all instructions are counted.
    pub counts_instructions: bool,
    /// Indicates that stores are counted.
    pub counts_stores: bool,
    /// Indicates that `DSB` and `ISB` are counted.
    pub counts_barriers: bool,
    /// Indicates that executions of blocks are counted.
    pub counts_blocks: bool,
    /// Length of a turn in picoseconds of virtual time, if elapsed time is measured.
    pub quantum: Option<u64>,
    /// Seed of the turn lengths, if they vary.
    pub seed: Option<u64>,
    /// Costs of instructions in elapsed time.
    pub costs: CostTable,
    /// Model of TLBs.
    pub tlb: TlbArguments,
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
        "invalid argument '{0}'; expected out=FILE, at=NAME:HEXADDRESS, span=NAME:HEXADDRESS, \
         interval=NAME:HEXSTART:HEXEND:HEXCANCEL[:cpu|:pinned], instructions=on, stores=on, \
         barriers=on, blocks=on, quantum=NANOSECONDS, seed=NUMBER, \
         cost=CLASS:PICOSECONDS, tlb=FIRST:WAYSxSETS, grain=BYTES, linear=HEXSTART:HEXEND, \
         guest=HEXENTRY:HEXEXIT, trace=FILE, function=NUMBER:HEXADDRESS:HEXEND, \
         cold=NUMBER:HEXADDRESS:HEXEND, lock=NUMBER:HEXOFFSET, physical=NUMBER, \
         load=NUMBER:ARGUMENT:POINTER:HEXOFFSET, free=HEXADDRESS:HEXOFFSET, threads=on, stage1=on, \
         stacks=off or verify=on"
    )]
    Invalid(String),
    /// Error returned for an argument of the trace without a trace.
    #[error("no trace: set trace=FILE, or omit the arguments of the trace")]
    MissingTrace,
    /// Error returned for a model of TLBs without sizes or grains.
    #[error(
        "incomplete model of TLBs: set tlb=FIRST:WAYSxSETS and at least one grain=BYTES, or neither"
    )]
    IncompleteTlb,
    /// Error returned for a malformed value of `at` or `span`.
    #[error("malformed argument '{key}={value}'; expected {key}=NAME:HEXADDRESS")]
    MalformedFunction {
        /// The argument.
        key: &'static str,
        /// Value of the argument.
        value: String,
    },
    /// Error returned for a second span.
    #[error("argument 'span' is repeated; set one span")]
    RepeatedSpan,
}

impl Arguments {
    /// Parses the arguments.
    ///
    /// # Errors
    /// An argument is unknown or malformed, or `out` is missing.
    pub fn parse<'a>(raw: impl IntoIterator<Item = &'a str>) -> Result<Self, ArgumentError> {
        let mut out = None;
        let mut functions = Vec::new();
        let (mut span, mut interval) = (None, None);
        let (mut instructions, mut stores, mut barriers) = (false, false, false);
        let mut blocks = false;
        let (mut quantum, mut seed) = (None, None);
        let mut costs = CostTable::default();
        let mut trace = TraceArguments::default();
        let mut tlb = TlbArguments::default();
        for argument in raw {
            let invalid = || ArgumentError::Invalid(argument.to_owned());
            match argument.split_once('=') {
                Some(("out", file)) if !file.is_empty() => out = Some(PathBuf::from(file)),
                Some(("at", value)) => functions.push(function("at", value)?),
                Some(("span", _)) if span.is_some() => return Err(ArgumentError::RepeatedSpan),
                Some(("span", value)) => span = Some(function("span", value)?),
                Some(("interval", value)) => {
                    interval = Some(IntervalArguments::parse(value).ok_or_else(invalid)?);
                }
                Some(("instructions", "on")) => instructions = true,
                Some(("stores", "on")) => stores = true,
                Some(("barriers", "on")) => barriers = true,
                Some(("blocks", "on")) => blocks = true,
                Some(("quantum", value)) => {
                    let nanoseconds: NonZeroU32 = value.parse().map_err(|_| invalid())?;
                    quantum = Some(u64::from(nanoseconds.get()) * 1000);
                }
                Some(("seed", value)) => seed = Some(value.parse().map_err(|_| invalid())?),
                Some(("cost", value)) => costs.set(value).ok_or_else(invalid)?,
                Some((key @ ("tlb" | "grain" | "linear" | "guest"), value)) => {
                    tlb.set(key, value).ok_or_else(invalid)?;
                }
                Some((key, value)) => trace.set(key, value).ok_or_else(invalid)?,
                None => return Err(invalid()),
            }
        }
        if trace.file.is_none() && trace != TraceArguments::default() {
            return Err(ArgumentError::MissingTrace);
        }
        if tlb.sizes.is_none() != tlb.grains.is_empty()
            || tlb.sizes.is_none() && tlb != TlbArguments::default()
        {
            return Err(ArgumentError::IncompleteTlb);
        }
        let out = out.ok_or(ArgumentError::MissingOutput)?;
        Ok(Self {
            out,
            functions,
            span,
            interval,
            counts_instructions: instructions,
            counts_stores: stores,
            counts_barriers: barriers,
            counts_blocks: blocks,
            quantum,
            seed,
            costs,
            tlb,
            trace,
        })
    }
}

/// Parses `NAME:HEXADDRESS`.
fn function(key: &'static str, value: &str) -> Result<(String, u64), ArgumentError> {
    value
        .split_once(':')
        .filter(|(name, _)| !name.is_empty())
        .and_then(|(name, address)| Some((name.to_owned(), hexadecimal(address)?)))
        .ok_or_else(|| ArgumentError::MalformedFunction { key, value: value.to_owned() })
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
        let all = ["instructions=on", "stores=on", "barriers=on", "blocks=on", "span=f:10"];
        let all = Arguments::parse(raw.into_iter().chain(all)).unwrap();
        assert!(all.counts_instructions && all.counts_stores);
        assert!(all.counts_barriers && all.counts_blocks);
        assert_eq!(all.span, Some(("f".to_owned(), 16)));
    }

    #[test]
    fn invalid_arguments_are_refused() {
        let malformed =
            |key, value: &str| ArgumentError::MalformedFunction { key, value: value.to_owned() };
        for (raw, error) in [
            (vec![], ArgumentError::MissingOutput),
            (vec!["out="], ArgumentError::Invalid("out=".to_owned())),
            (vec!["x=1"], ArgumentError::Invalid("x=1".to_owned())),
            (vec!["interval=f:1"], ArgumentError::Invalid("interval=f:1".to_owned())),
            (vec!["instructions=1"], ArgumentError::Invalid("instructions=1".to_owned())),
            (vec!["quantum=0"], ArgumentError::Invalid("quantum=0".to_owned())),
            (vec!["cost=x:1"], ArgumentError::Invalid("cost=x:1".to_owned())),
            (vec!["out=f", "tlb=48"], ArgumentError::Invalid("tlb=48".to_owned())),
            (vec!["out=f", "free=0"], ArgumentError::Invalid("free=0".to_owned())),
            (vec!["out=f", "stacks=off"], ArgumentError::MissingTrace),
            (vec!["out=f", "grain=4096"], ArgumentError::IncompleteTlb),
            (vec!["out=f", "tlb=48:4x320"], ArgumentError::IncompleteTlb),
            (vec!["out=f", "guest=1:2"], ArgumentError::IncompleteTlb),
            (vec!["out=f", "at=aborts"], malformed("at", "aborts")),
            (vec!["out=f", "at=:10"], malformed("at", ":10")),
            (vec!["out=f", "span=f"], malformed("span", "f")),
            (vec!["out=f", "span=f:1", "span=g:2"], ArgumentError::RepeatedSpan),
            (vec!["out=f", "at=a:xyz"], malformed("at", "a:xyz")),
        ] {
            assert_eq!(Arguments::parse(raw), Err(error));
        }
    }
}
