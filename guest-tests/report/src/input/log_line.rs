// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lines of the logs of kernel tests, and removal of terminal escape sequences (ECMA-48).
//!
//! [`LINES`] declares every recognised line: its test, its words, and the form of the value after
//! the words. The words may follow a prefix, such as a console time stamp or the `# ` of a test
//! runner.

use granule_types::{backing::Backing, units::Bytes};

use self::{Condition::*, KernelTest::*, ValueForm::*};
use crate::{results::FileError, sample::AnyPhase};

/// First words of a run of any of the kernel's KVM tests.
pub const MODE: &str = "Testing guest mode: ";
pub const BACKING: &str = "Testing memory backing src type: ";
pub const MEMORY: &str = "Testing memory size(aligned): ";
pub const VCPUS: &str = "Number of testing vCPUs: ";
/// Words after the phase name of `kvm_page_table_test`.
pub const PHASE_TIME: &str = "_MAPPINGS: total execution time: ";
/// Times of `kvm_page_table_test`: create, update, rebuild.
pub const PHASES: [&str; 3] = [
    "KVM_CREATE_MAPPINGS: total execution time: ",
    "KVM_UPDATE_MAPPINGS: total execution time: ",
    "KVM_ADJUST_MAPPINGS: total execution time: ",
];

/// Test that prints a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelTest {
    Any,
    PageTable,
    DirtyLog,
    DemandPaging,
}

/// Form of the value after the words of a line.
#[derive(Debug)]
pub enum ValueForm {
    Backing,
    Size,
    Vcpus,
    /// Time of a phase of `kvm_page_table_test`.
    PageTableTime,
    /// Time of a phase of another test.
    PhaseTime(AnyPhase),
    /// Time of an iteration, whose number precedes the words; the first phase is for the first
    /// iteration, the second for the mean of later ones.
    IterationTime([AnyPhase; 2]),
    /// Number of iterations, with the sum and the mean of their times.
    IterationTotal,
    /// Rate with this unit.
    Rate(&'static str),
    NoValue,
}

/// Condition under which `dirty_log_perf_test` and `demand_paging_test` print a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    Always,
    /// Lines printed with manual clearing of the dirty log.
    ManualClear,
    /// Lines printed by some kernels.
    Optional,
}

/// Format of a line: its test, words, form and condition.
type LineFormat = (KernelTest, &'static str, ValueForm, Condition);

pub const LINES: &[LineFormat] = &[
    (PageTable, BACKING, ValueForm::Backing, Always),
    (PageTable, MEMORY, Size, Always),
    (Any, VCPUS, Vcpus, Always),
    (PageTable, PHASES[0], PageTableTime, Always),
    (PageTable, PHASES[1], PageTableTime, Always),
    (PageTable, PHASES[2], PageTableTime, Always),
    (DirtyLog, "Populate memory time:", PhaseTime(phase(0, "populate")), Always),
    (DirtyLog, "Enabling dirty logging time:", PhaseTime(phase(1, "logging-on")), Always),
    (DirtyLog, "Disabling dirty logging time:", PhaseTime(phase(8, "logging-off")), Always),
    (DirtyLog, "Get dirty log over ", IterationTotal, Always),
    (DirtyLog, "Clear dirty log over ", IterationTotal, ManualClear),
    (DirtyLog, " dirty memory time:", iteration_time(2, ["dirty-first", "dirty-later"]), Always),
    (DirtyLog, " get dirty log time:", iteration_time(3, ["get-first", "get-later"]), Always),
    (
        DirtyLog,
        " clear dirty log time:",
        iteration_time(4, ["clear-first", "clear-later"]),
        ManualClear,
    ),
    (DemandPaging, "Finished creating vCPUs and starting uffd threads", NoValue, Optional),
    (DemandPaging, "Total guest execution time:", PhaseTime(phase(20, "demand-paging")), Always),
    (DemandPaging, "Per-vcpu demand paging rate:", Rate(" pgs/sec/vcpu"), Optional),
    (DemandPaging, "Overall demand paging rate:", Rate(" pgs/sec"), Always),
];

const fn phase(rank: usize, name: &'static str) -> AnyPhase {
    AnyPhase::of_other_test(rank, name)
}

const fn iteration_time(rank: usize, [first, later]: [&'static str; 2]) -> ValueForm {
    IterationTime([phase(rank, first), phase(rank + 3, later)])
}

#[derive(Debug)]
pub struct Line<'a> {
    pub format: &'static LineFormat,
    /// Number of the line's iteration, from 1; `None` for lines outside iterations.
    pub iteration: Option<u32>,
    /// Nanoseconds, bytes, vCPUs or iterations; 0 for other values.
    pub number: u64,
    pub value: &'a str,
}

impl<'a> Line<'a> {
    /// Parses a line; `None` if no declared words occur in it.
    pub fn parse(text: &'a str) -> Result<Option<Self>, FileError> {
        for format @ (_, words, form, _) in LINES {
            let Some((front, value)) = text.split_once(words) else {
                continue;
            };
            let mut iteration = None;
            if let IterationTime(_) = form {
                // Lines about a single vCPU have no "Iteration".
                let Some((_, found)) = front.rsplit_once("Iteration ") else {
                    continue;
                };
                let number = found.trim().parse();
                let number = number.map_err(|_| bad_value(found.trim(), "a number of iterations"));
                iteration = Some(number?);
            }
            let value = value.trim();
            return Ok(Some(Self { format, iteration, number: form.parse_value(value)?, value }));
        }
        match text.contains(PHASE_TIME) {
            true => Err(bad_value(text.trim(), "a phase of kvm_page_table_test")),
            false => Ok(None),
        }
    }
}

impl ValueForm {
    fn parse_value(&self, value: &str) -> Result<u64, FileError> {
        const TOTAL: &str = "'N iterations took S.NNNNNNNNNs. (Avg S.NNNNNNNNNs/iteration)'";
        let rate = |unit: &str| value.strip_suffix(unit)?.parse::<f64>().ok();
        let (number, expected) = match self {
            Self::Backing => (value.parse::<Backing>().ok().map(|_| 0), "a backing source type"),
            Size => (value.parse::<Bytes>().ok().map(|size| size.0), "a size"),
            Vcpus => (value.parse::<u32>().ok().map(u64::from), "a number of vCPUs"),
            PageTableTime | PhaseTime(_) | IterationTime(_) => {
                (parse_nanoseconds(value), "a time as S.NNNNNNNNNs")
            }
            IterationTotal => (parse_total(value), TOTAL),
            Rate(unit) => (rate(unit).map(|_| 0), "a rate in pages a second"),
            NoValue => (Some(0), ""),
        };
        number.ok_or_else(|| bad_value(value, expected))
    }
}

/// Parses seconds with exactly nine decimals, as the kernel's tests print them.
fn parse_nanoseconds(text: &str) -> Option<u64> {
    let (whole, part) = text.strip_suffix('s')?.split_once('.')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(part) || part.len() != 9 {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    whole.checked_mul(1_000_000_000)?.checked_add(part.parse().ok()?)
}

/// Parses the number of iterations in a complete total: `3 iterations took 0.000059456s. (Avg
/// 0.000019818s/iteration)`.
fn parse_total(value: &str) -> Option<u64> {
    let (iterations, times) = value.split_once(" iterations took ")?;
    let (total, average) = times.split_once(". (Avg ")?;
    parse_nanoseconds(total)?;
    parse_nanoseconds(average.strip_suffix("/iteration)")?)?;
    iterations.parse::<u32>().ok().map(u64::from)
}

/// Returns the error for a value that does not have the form of its line.
pub fn bad_value(value: &str, expected: &str) -> FileError {
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

/// Replaces each C1 control character with its two-character escape sequence. Inserts CAN before
/// any other non-ASCII character in a control sequence, so that the sequence ends there.
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
