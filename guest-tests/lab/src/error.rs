// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Errors of the lab, which name the remedy.

use std::{error::Error, io};

use granule_report::{CompareError, results::FileError};

use crate::command::CommandError;

/// Error returned when a run of the lab or of one of its tools fails.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message describes its variant")]
#[non_exhaustive]
pub enum LabError {
    /// Error returned for a missing requirement or an unusable input. The message names the remedy.
    #[error("{0}")]
    Unusable(String),
    #[error("{message}")]
    Failed {
        message: String,
        #[source]
        source: CommandError,
    },
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error(transparent)]
    Input(#[from] FileError),
    #[error(transparent)]
    Compare(#[from] CompareError),
    #[error("cannot write a record")]
    Record(#[from] serde_json::Error),
    #[error("cannot write to standard output")]
    Output(#[source] io::Error),
    /// Error returned when the current directory or the path of this program is unknown.
    #[error(transparent)]
    Path(#[from] io::Error),
}

/// Formats an error and its causes, each on a line.
pub fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!("\n  because: {error}"));
        cause = error.source();
    }
    text
}
