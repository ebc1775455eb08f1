// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The error of a run of the lab.

use std::{error::Error, io, path::PathBuf};

use granule_report::{CompareError, results::FileError};

use crate::{command::CommandError, kernel::KernelError};

/// Error returned when a run of the lab cannot be completed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// A program of this workspace is not built.
    #[error("{program} is missing at {path}: run scripts/lab, which builds it, or set {option}")]
    NotBuilt {
        /// The program.
        program: &'static str,
        /// The expected path.
        path: PathBuf,
        /// The option that sets the path.
        option: &'static str,
    },
    /// A source, a series or a kernel is not available.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A command or a file operation failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// Results cannot be read.
    #[error(transparent)]
    Input(#[from] FileError),
    /// Results cannot be compared.
    #[error(transparent)]
    Compare(#[from] CompareError),
    /// A record cannot be serialized.
    #[error("cannot write a record")]
    Record(#[from] serde_json::Error),
    /// Standard output cannot be written.
    #[error("cannot write to standard output")]
    Output(#[source] io::Error),
    /// No job returned a result.
    #[error("no job returned a result; see the errors above and the logs in {0}")]
    NoResults(PathBuf),
}

/// Formats an error with its causes, one a line.
pub fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!("\n  because: {error}"));
        cause = error.source();
    }
    text
}
