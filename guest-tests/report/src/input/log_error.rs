// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What can be wrong with a log.

use thiserror::Error;

use super::page_table_log::MODE;

/// Why a text is no log of the kernel's test. Lines count from 1.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LogError {
    /// Nothing of the test is in it.
    #[error("holds no run of kvm_page_table_test: no line says '{}'", MODE.trim_end())]
    Foreign,
    /// The test itself failed.
    #[error("line {line}: the test failed here; what it says there is the thing to look into")]
    Failed {
        /// Where.
        line: usize,
    },
    /// A line stands outside any run.
    #[error("line {line}: '{text}' belongs to no run: the line '{}' before it is lost", MODE.trim_end())]
    Stray {
        /// Where.
        line: usize,
        /// Its words.
        text: String,
    },
    /// A value cannot be read.
    #[error("line {line}: '{value}' is not {wanted}: the line is damaged")]
    Value {
        /// Where.
        line: usize,
        /// What stands there.
        value: String,
        /// What should.
        wanted: &'static str,
    },
    /// A line comes a second time in one run.
    #[error("line {line}: '{text}' a second time in the run begun at line {begun}: lines are lost")]
    Twice {
        /// Where.
        line: usize,
        /// Its words.
        text: String,
        /// Where the run began.
        begun: usize,
    },
    /// A line of another test stands in a run.
    #[error(
        "line {line}: a line of another test in the run begun at line {begun}: two logs are mixed"
    )]
    Mixed {
        /// Where.
        line: usize,
        /// Where the run began.
        begun: usize,
    },
    /// An iteration is missing.
    #[error("line {line}: iteration {found} follows {last}: lines are lost; run it again")]
    OutOfTurn {
        /// Where.
        line: usize,
        /// Which iteration stands there.
        found: u32,
        /// Which came before it; 0 for none.
        last: u32,
    },
    /// The file ends within a line.
    #[error(
        "line {line}: '{text}' breaks off: the file is cut off; run it again, or delete that line"
    )]
    BreaksOff {
        /// Where.
        line: usize,
        /// What is left of it.
        text: String,
    },
    /// A line of results in JSON.
    #[error(
        "line {line}: a line of JSON in a log: put results of `granule bench --json` and logs into \
         files of their own"
    )]
    Json {
        /// Where.
        line: usize,
    },
    /// A run ends early.
    #[error(
        "line {line}: the run begun here ends without '{missing}': cut off; run it again, or \
         delete it from the file"
    )]
    Incomplete {
        /// Where it began.
        line: usize,
        /// The first line it lacks.
        missing: String,
    },
}
