// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lines and errors that the logs of all kernel tests share.

use thiserror::Error;

use granule_types::units::Nanoseconds;

/// Words that begin a run of any of the kernel's KVM tests.
pub const MODE: &str = "Testing guest mode: ";
/// Line of a failed test.
pub const FAILURE: &str = "==== Test Assertion Failure ====";

/// Error returned when a text is not a whole log of a kernel test.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LogError {
    /// The log has no run.
    #[error("holds no run of kvm_page_table_test: no line contains '{}'", MODE.trim_end())]
    NoRun,
    /// A line, counted from 1, has a defect.
    #[error("line {0}: {1}")]
    Line(usize, LogDefect),
}

/// Defect of a line of a log.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LogDefect {
    /// The test failed.
    #[error("the test failed: see its message in the log")]
    Failed,
    /// The line belongs to no run.
    #[error("'{0}' belongs to no run: the line '{mode}' before it is missing", mode = MODE.trim_end())]
    Stray(String),
    /// The value is not what the line requires.
    #[error("'{0}' is not {1}: the line is damaged")]
    Value(String, &'static str),
    /// The line is repeated in a run.
    #[error("'{0}' is repeated in the run that begins at line {1}: lines are missing")]
    Repeated(String, usize),
    /// The line is of another test than its run.
    #[error("the line is of another test than the run that begins at line {0}: two logs are mixed")]
    Mixed(usize),
    /// The iteration does not follow the one before it.
    #[error("iteration {found} follows {last}: lines are missing; run the test again")]
    Iteration {
        /// Number on the line.
        found: u32,
        /// Number before it; 0 for none.
        last: u32,
    },
    /// The file ends within the line.
    #[error("'{0}' is cut off: run the test again, or delete the line")]
    CutOff(String),
    /// The line is JSON.
    #[error(
        "the line is JSON in a log: use separate files for logs and results of `granule bench --json`"
    )]
    Json,
    /// The run that begins at the line lacks a further line.
    #[error(
        "the run that begins here has no '{0}': it is cut off; run the test again, or delete the run"
    )]
    Incomplete(String),
}

impl LogDefect {
    /// Returns the error of this defect at a line.
    pub const fn at(self, line: usize) -> LogError {
        LogError::Line(line, self)
    }

    /// Returns the defect of a value.
    pub fn value(value: &str, wanted: &'static str) -> Self {
        Self::Value(value.to_owned(), wanted)
    }

    /// Returns the defect of a run without a line.
    pub fn incomplete(missing: &str) -> Self {
        Self::Incomplete(missing.trim().to_owned())
    }
}

/// Returns the text behind `words` in a line that contains them.
pub fn behind<'a>(text: &'a str, words: &str) -> Option<&'a str> {
    text.split_once(words).map(|(_, value)| value.trim())
}

/// Reads a value of a line.
pub fn parsed<T: std::str::FromStr>(
    line: usize,
    value: &str,
    wanted: &'static str,
) -> Result<T, LogError> {
    let read = value.parse();
    read.map_err(|_| LogDefect::value(value, wanted).at(line))
}

/// Reads seconds with exactly nine decimals, as the kernel's tests print them.
pub fn seconds(text: &str) -> Option<Nanoseconds> {
    let (whole, part) = text.strip_suffix('s')?.split_once('.')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(part) || part.len() != 9 {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let part: u64 = part.parse().ok()?;
    Some(Nanoseconds(whole.checked_mul(1_000_000_000)?.checked_add(part)?))
}

/// Reads a time of a line.
pub fn time(line: usize, value: &str) -> Result<Nanoseconds, LogError> {
    let time = seconds(value);
    time.ok_or_else(|| LogDefect::value(value, "a time as S.NNNNNNNNNs").at(line))
}
