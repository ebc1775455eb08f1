// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Errors of inputs.

use std::{
    error, fmt, io,
    path::{Path, PathBuf},
};

use thiserror::Error;

use super::{complete::Incomplete, criterion::CriterionError, log::LogError};
use crate::results::ReadError;
use granule_types::record::SCHEMA;

/// Error returned when a path has no usable results.
#[derive(Debug)]
pub struct InputError {
    path: PathBuf,
    defect: Defect,
}

impl fmt::Display for InputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.defect)
    }
}

impl error::Error for InputError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        error::Error::source(&self.defect)
    }
}

impl InputError {
    pub(super) fn new(path: &Path, defect: impl Into<Defect>) -> Self {
        Self { path: path.to_owned(), defect: defect.into() }
    }
}

/// Defect of an input.
#[derive(Debug, Error)]
pub enum Defect {
    /// The file cannot be read.
    #[error("cannot read the file")]
    Read(#[source] io::Error),
    /// The directory is neither a run directory nor criterion's.
    #[error(
        "holds no results.jsonl and no files of criterion: give a directory made by `granule lab`, \
         target/criterion, or a file"
    )]
    Directory,
    /// The file is empty.
    #[error("the file is empty: run the test again")]
    Empty,
    /// The file is neither results nor a log.
    #[error(
        "the file is neither results ({SCHEMA}) nor a log of kvm_page_table_test, dirty_log_perf_test or \
         demand_paging_test: give the output of `granule bench --json` or of the test"
    )]
    Unknown,
    /// The results are damaged.
    #[error(transparent)]
    Results(#[from] ReadError),
    /// The log is damaged.
    #[error(transparent)]
    Log(#[from] LogError),
    /// A file of criterion is damaged.
    #[error(transparent)]
    Criterion(#[from] CriterionError),
    /// A run lacks phases.
    #[error(transparent)]
    Incomplete(#[from] Incomplete),
}
