// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lines of the logs of kernel tests, and the removal of a terminal's escape sequences (ECMA-48:
//! colours, cursor, title).
//!
//! [`LINES`] declares every line that is read: its test, its words, and the form of the value behind
//! them. A line is recognised by its words at any position, after a time stamp of the console or the
//! `# ` of a test runner.

use std::str::FromStr;

use granule_types::{backing::Backing, units::Bytes};

use crate::results::FileError;

/// Test that prints a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Test {
    PageTable,
    DirtyLog,
    DemandPaging,
}

/// Words that begin a run of any of the kernel's KVM tests.
pub const MODE: &str = "Testing guest mode: ";
pub const FAILURE: &str = "==== Test Assertion Failure ====";
pub const BACKING: &str = "Testing memory backing src type: ";
pub const MEMORY: &str = "Testing memory size(aligned): ";
pub const VCPUS: &str = "Number of testing vCPUs: ";
/// Words behind the name of a phase of `kvm_page_table_test`.
pub const PHASE_TIME: &str = "_MAPPINGS: total execution time: ";
/// Times of `kvm_page_table_test`: create, update, rebuild.
pub const PHASES: [&str; 3] = [
    "KVM_CREATE_MAPPINGS: total execution time: ",
    "KVM_UPDATE_MAPPINGS: total execution time: ",
    "KVM_ADJUST_MAPPINGS: total execution time: ",
];
pub const POPULATE: &str = "Populate memory time:";
pub const LOGGING_ON: &str = "Enabling dirty logging time:";
pub const LOGGING_OFF: &str = "Disabling dirty logging time:";
/// Times of an iteration of `dirty_log_perf_test`; the last one needs manual clearing.
pub const ITERATION_TIMES: [&str; 3] =
    [" dirty memory time:", " get dirty log time:", " clear dirty log time:"];
/// Lines that end `dirty_log_perf_test`; the second needs manual clearing.
pub const TOTALS: [&str; 2] = ["Get dirty log over ", "Clear dirty log over "];
pub const DEMAND: &str = "Total guest execution time:";
pub const DEMAND_BEGINS: &str = "Finished creating vCPUs and starting uffd threads";
/// Line that ends `demand_paging_test` of every kernel.
pub const OVERALL_RATE: &str = "Overall demand paging rate:";

/// Form of the value behind the words of a line.
#[derive(Clone, Copy)]
enum Form {
    Backing,
    Size,
    Vcpus,
    Time,
    /// Time of an iteration, whose number precedes the words.
    IterationTime,
    /// Number of iterations with the sum and the average of their times.
    Total,
    /// Pages in this unit.
    Rate(&'static str),
    None,
}

/// Test, words and form; lines of several tests have no test.
const LINES: [(Option<Test>, &str, Form); 18] = [
    (Some(Test::PageTable), BACKING, Form::Backing),
    (Some(Test::PageTable), MEMORY, Form::Size),
    (None, VCPUS, Form::Vcpus),
    (Some(Test::PageTable), PHASES[0], Form::Time),
    (Some(Test::PageTable), PHASES[1], Form::Time),
    (Some(Test::PageTable), PHASES[2], Form::Time),
    (Some(Test::DirtyLog), POPULATE, Form::Time),
    (Some(Test::DirtyLog), LOGGING_ON, Form::Time),
    (Some(Test::DirtyLog), LOGGING_OFF, Form::Time),
    (Some(Test::DirtyLog), ITERATION_TIMES[0], Form::IterationTime),
    (Some(Test::DirtyLog), ITERATION_TIMES[1], Form::IterationTime),
    (Some(Test::DirtyLog), ITERATION_TIMES[2], Form::IterationTime),
    (Some(Test::DirtyLog), TOTALS[0], Form::Total),
    (Some(Test::DirtyLog), TOTALS[1], Form::Total),
    (Some(Test::DemandPaging), DEMAND_BEGINS, Form::None),
    (Some(Test::DemandPaging), DEMAND, Form::Time),
    // Newer kernels only.
    (Some(Test::DemandPaging), "Per-vcpu demand paging rate:", Form::Rate(" pgs/sec/vcpu")),
    (Some(Test::DemandPaging), OVERALL_RATE, Form::Rate(" pgs/sec")),
];

/// One line of a test.
#[derive(Debug)]
pub struct Line<'a> {
    pub test: Option<Test>,
    pub words: &'static str,
    /// Number of its iteration, from 1; `None` for a line of the run.
    pub iteration: Option<u32>,
    /// Nanoseconds, bytes, vCPUs or iterations; 0 for other values.
    pub number: u64,
    pub value: &'a str,
}

impl<'a> Line<'a> {
    /// Recognises a line; `None` for other lines.
    pub fn of(text: &'a str) -> Result<Option<Self>, FileError> {
        for (test, words, form) in LINES {
            let Some((front, value)) = text.split_once(words) else {
                continue;
            };
            let mut iteration = None;
            if let Form::IterationTime = form {
                // Lines of single vCPUs begin with other words.
                let Some((_, number)) = front.rsplit_once("Iteration ") else {
                    continue;
                };
                iteration = Some(parsed(number.trim(), "a number of iterations")?);
            }
            let value = value.trim();
            return Ok(Some(Self { test, words, iteration, number: form.read(value)?, value }));
        }
        match text.contains(PHASE_TIME) {
            true => Err(damaged(text.trim(), "a phase of kvm_page_table_test")),
            false => Ok(None),
        }
    }
}

impl Form {
    fn read(self, value: &str) -> Result<u64, FileError> {
        let (number, expected) = match self {
            Self::Backing => (value.parse::<Backing>().ok().map(|_| 0), "a backing source type"),
            Self::Size => (value.parse::<Bytes>().ok().map(|size| size.0), "a size"),
            Self::Vcpus => (value.parse::<u32>().ok().map(u64::from), "a number of vCPUs"),
            Self::Time | Self::IterationTime => (nanoseconds(value), "a time as S.NNNNNNNNNs"),
            Self::Total => {
                (total(value), "'N iterations took S.NNNNNNNNNs. (Avg S.NNNNNNNNNs/iteration)'")
            }
            Self::Rate(unit) => {
                let rate = value.strip_suffix(unit).and_then(|rate| rate.parse::<f64>().ok());
                (rate.map(|_| 0), "a rate in pages a second")
            }
            Self::None => (Some(0), ""),
        };
        number.ok_or_else(|| damaged(value, expected))
    }
}

/// Reads seconds with exactly nine decimals, as the kernel's tests print them.
fn nanoseconds(text: &str) -> Option<u64> {
    let (whole, part) = text.strip_suffix('s')?.split_once('.')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(part) || part.len() != 9 {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    whole.checked_mul(1_000_000_000)?.checked_add(part.parse().ok()?)
}

/// Reads the number of iterations of a complete total: `3 iterations took 0.000059456s. (Avg
/// 0.000019818s/iteration)`.
fn total(value: &str) -> Option<u64> {
    let (iterations, times) = value.split_once(" iterations took ")?;
    let (total, average) = times.split_once(". (Avg ")?;
    nanoseconds(total)?;
    nanoseconds(average.strip_suffix("/iteration)")?)?;
    iterations.parse::<u32>().ok().map(u64::from)
}

/// Reads a value.
pub fn parsed<T: FromStr>(value: &str, expected: &str) -> Result<T, FileError> {
    value.parse().map_err(|_| damaged(value, expected))
}

/// Returns the error of a value that does not have the form its line requires.
pub fn damaged(value: &str, expected: &str) -> FileError {
    FileError::new(format!("'{value}' is not {expected}: the line is damaged"))
}

/// Removes escape sequences and control characters. A broken sequence ends with its line, so the
/// number of lines stays the same.
pub fn plain_text(text: &str) -> String {
    let separators = ['\n', '\t'];
    let pieces = text.split_inclusive(separators).map(|piece| {
        let words = piece.trim_end_matches(separators);
        strip_ansi_escapes::strip_str(ascii_escapes(words)) + &piece[words.len()..]
    });
    pieces.collect()
}

/// Replaces each control character above ASCII with its two-character form, and ends a control
/// sequence that another character above ASCII breaks, so that it does not consume further text.
fn ascii_escapes(text: &str) -> String {
    const CANCEL: char = '\u{18}';
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\u{80}'..='\u{9f}' => {
                out.push('\u{1b}');
                out.extend(char::from_u32(u32::from(c) - 0x40));
            }
            c if c.is_ascii() => out.push(c),
            c => {
                let is_parameter = |c: char| (' '..='?').contains(&c);
                if out.trim_end_matches(is_parameter).ends_with("\u{1b}[") {
                    out.push(CANCEL);
                }
                out.push(c);
            }
        }
    }
    out
}
