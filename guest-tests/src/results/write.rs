// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Writes results: JSON Lines, each line whole and out of the process before the next phase begins,
//! so that a run that is cut off loses no phase it has finished.

use std::{
    fmt,
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
};

use thiserror::Error;

use super::Record;

/// Why results could not be written.
#[derive(Debug, Error)]
pub enum WriteError {
    /// The file cannot be made.
    #[error("cannot create the results file {path}")]
    Create {
        /// Which file.
        path: PathBuf,
        /// What the host says to it.
        #[source]
        source: io::Error,
    },
    /// A record cannot be written.
    #[error("cannot write results to {path}")]
    Write {
        /// Which file; `-` is standard output.
        path: PathBuf,
        /// What the host says to it.
        #[source]
        source: io::Error,
    },
}

/// Writes records, one a line.
pub struct RecordWriter {
    path: PathBuf,
    to: Box<dyn Write>,
}

impl fmt::Debug for RecordWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RecordWriter({})", self.path.display())
    }
}

impl RecordWriter {
    /// Writes to a file, which is made or emptied, or to standard output for `-`.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn create(path: &Path) -> Result<Self, WriteError> {
        let to: Box<dyn Write> = if path == Path::new("-") {
            Box::new(io::stdout())
        } else {
            Box::new(File::create(path).map_err(|source| WriteError::Create {
                path: path.to_owned(),
                source,
            })?)
        };
        Ok(Self {
            path: path.to_owned(),
            to,
        })
    }

    /// Writes one record as one line and flushes it.
    ///
    /// # Errors
    /// The line cannot be written.
    pub fn write(&mut self, record: &Record) -> Result<(), WriteError> {
        let mut write = || {
            let mut line = serde_json::to_vec(record)?;
            line.push(b'\n');
            self.to.write_all(&line)?;
            self.to.flush()
        };
        write().map_err(|source| WriteError::Write {
            path: self.path.clone(),
            source,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{read::tests::record, read_records};

    #[test]
    fn what_is_written_is_read_again_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.jsonl");
        let mut writer = RecordWriter::create(&path).unwrap();

        writer.write(&record()).unwrap();
        let first = std::fs::read_to_string(&path).unwrap();
        writer.write(&record()).unwrap();
        let both = std::fs::read_to_string(&path).unwrap();

        assert_eq!(read_records(&first).unwrap(), [record()]);
        assert_eq!(read_records(&both).unwrap(), [record(), record()]);
    }

    #[test]
    fn a_file_that_cannot_be_made_is_named() {
        let error = RecordWriter::create(Path::new("/nowhere/results.jsonl")).unwrap_err();

        assert!(error.to_string().contains("/nowhere/results.jsonl"));
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let error = RecordWriter::create(Path::new("/dev/full"))
            .unwrap()
            .write(&record())
            .unwrap_err();

        assert!(matches!(error, WriteError::Write { .. }));
    }
}
