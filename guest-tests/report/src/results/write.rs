// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Writes results. Each line is written and flushed before the next phase begins, so an interrupted
//! run keeps its finished phases.
//!
//! Each line records the number of lines that follow it (`left`), so that a reader recognises a file
//! that was cut off between two lines, or whose run ended early.

use std::{
    fmt,
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::Serialize;
use thiserror::Error;

use granule_types::record::Record;

/// Error returned when results cannot be written.
#[derive(Debug, Error)]
pub enum WriteError {
    /// The file cannot be created.
    #[error("cannot create the results file {path}")]
    Create {
        /// The file.
        path: PathBuf,
        /// Error of the host.
        #[source]
        source: io::Error,
    },
    /// A record cannot be written.
    #[error("cannot write results to {path}")]
    Write {
        /// The file; `-` is standard output.
        path: PathBuf,
        /// Error of the host.
        #[source]
        source: io::Error,
    },
}

/// A record and the number of lines that follow it.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    record: &'a Record,
    left: u64,
}

/// Returns records as the lines of a whole file.
///
/// # Errors
/// Those of the JSON writer; none is expected.
pub fn record_lines(records: &[Record]) -> Result<String, serde_json::Error> {
    let mut text = String::new();
    let lefts = (0..records.len() as u64).rev();
    for (record, left) in records.iter().zip(lefts) {
        text.push_str(&serde_json::to_string(&Line { record, left })?);
        text.push('\n');
    }
    Ok(text)
}

/// Writes records, one a line.
pub struct RecordWriter {
    path: PathBuf,
    to: Box<dyn Write>,
    left: u64,
}

impl fmt::Debug for RecordWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RecordWriter({})", self.path.display())
    }
}

impl RecordWriter {
    /// Creates or empties a file for `records` records; `-` is standard output.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create(path: &Path, records: u64) -> Result<Self, WriteError> {
        let to: Box<dyn Write> = if path == Path::new("-") {
            Box::new(io::stdout())
        } else {
            Box::new(
                File::create(path)
                    .map_err(|source| WriteError::Create { path: path.to_owned(), source })?,
            )
        };
        Ok(Self { path: path.to_owned(), to, left: records })
    }

    /// Writes and flushes one record.
    ///
    /// # Errors
    /// The line cannot be written.
    pub fn write(&mut self, record: &Record) -> Result<(), WriteError> {
        self.left = self.left.saturating_sub(1);
        let left = self.left;
        let mut write = || {
            let mut line = serde_json::to_vec(&Line { record, left })?;
            line.push(b'\n');
            self.to.write_all(&line)?;
            self.to.flush()
        };
        write().map_err(|source| WriteError::Write { path: self.path.clone(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{fixture::record, results::read_records};

    #[test]
    fn written_records_are_read_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.jsonl");
        let mut writer = RecordWriter::create(&path, 2).unwrap();

        writer.write(&record()).unwrap();
        let first = std::fs::read_to_string(&path).unwrap();
        writer.write(&record()).unwrap();
        let both = std::fs::read_to_string(&path).unwrap();

        assert!(first.ends_with("\n"), "written before the next record");
        assert!(read_records(&first).is_err(), "the next record is missing");
        assert_eq!(read_records(&both).unwrap(), [record(), record()]);
        assert_eq!(record_lines(&[record(), record()]).unwrap(), both);
    }

    #[test]
    fn a_file_that_cannot_be_created_is_named() {
        let error = RecordWriter::create(Path::new("/nowhere/results.jsonl"), 1).unwrap_err();

        assert!(error.to_string().contains("/nowhere/results.jsonl"));
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let error =
            RecordWriter::create(Path::new("/dev/full"), 1).unwrap().write(&record()).unwrap_err();

        assert!(matches!(error, WriteError::Write { .. }));
    }
}
