// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Why the lab could not carry a run out.

use std::{io, path::PathBuf};

use thiserror::Error;

use super::{build::BuildError, series::SeriesError, sources::SourceError, step::StepError};
use granule_report::{CompareError, input::InputError};

/// Why the lab could not carry a run out.
#[derive(Debug, Error)]
pub enum LabError {
    /// A test is asked for that there is not.
    #[error(transparent)]
    UnknownTest(#[from] super::upstream::UnknownTest),
    /// A program of ours is not built.
    #[error(
        "{what} is missing at {path}: run scripts/lab, which builds it, or name it with {option}"
    )]
    NotBuilt {
        /// What it is.
        what: &'static str,
        /// Where it should be.
        path: PathBuf,
        /// The option that names it.
        option: &'static str,
    },
    /// Another run is preparing kernels in the same cache.
    #[error("cannot lock the cache {path}")]
    Lock {
        /// The cache.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The options leave no kernel.
    #[error("no kernel is called {wanted}; there are: {known}")]
    NoKernel {
        /// What `--only` asked for.
        wanted: String,
        /// What there is.
        known: String,
    },
    /// There is no source.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// There is no such series.
    #[error(transparent)]
    Series(#[from] SeriesError),
    /// A kernel was not built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A command or a file operation failed.
    #[error(transparent)]
    Step(#[from] StepError),
    /// Results cannot be read back.
    #[error(transparent)]
    Input(#[from] InputError),
    /// Results cannot be compared.
    #[error(transparent)]
    Compare(#[from] CompareError),
    /// A record cannot be written.
    #[error("cannot write a record")]
    Record(#[from] serde_json::Error),
    /// Nothing can be printed.
    #[error("cannot write to standard output")]
    Output(#[source] io::Error),
    /// No job gave a result.
    #[error("no job gave a result; see the errors above and the logs in {0}")]
    Nothing(PathBuf),
}
