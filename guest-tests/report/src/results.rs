// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results in JSON Lines: one object ([`Record`], schema `granule.result/1`) for each phase of each
//! iteration.
//!
//! The schema is stable. Within `granule.result/1`
//!
//! - fields are only added; a field keeps its name, unit and meaning;
//! - a reader ignores fields that it does not know;
//! - a value that was not measured is absent, and never 0;
//! - an absent provenance field is unknown; comparing results with unknown provenance requires
//!   `--force`.
//!
//! A change that breaks one of these rules requires another schema, which existing readers refuse.
//!
//! Each line is written and flushed before the next phase begins, so an interrupted run keeps its
//! finished phases. The optional field `left` is the number of lines that follow, so that a
//! reader recognises a file that was cut off between two lines. Blank lines are ignored.

use std::{
    fmt,
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use granule_types::record::{Record, SCHEMA};

/// Error returned when a file is incomplete or inaccessible. It names file, line and remedy.
#[derive(Debug, Error)]
#[error("{}{message}", position(.path.as_ref(), *.line))]
pub struct FileError {
    path: Option<PathBuf>,
    line: Option<usize>,
    message: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl FileError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { path: None, line: None, message: message.into(), source: None }
    }

    /// Adds the number of the faulty line, counted from 1.
    pub(crate) fn at_line(self, line: usize) -> Self {
        Self { line: Some(line), ..self }
    }

    pub(crate) fn caused_by(self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self { source: Some(Box::new(source)), ..self }
    }

    /// Adds the file, unless the error names one.
    pub(crate) fn in_file(self, path: &Path) -> Self {
        Self { path: self.path.or_else(|| Some(path.to_owned())), ..self }
    }
}

/// Formats a position in a file as the start of a message.
fn position(path: Option<&PathBuf>, line: Option<usize>) -> String {
    let path = path.map(|path| format!("{}: ", path.display()));
    path.into_iter().chain(line.map(|line| format!("line {line}: "))).collect()
}

/// Reads every record of a results file.
///
/// # Errors
/// A line is not a complete record of [`SCHEMA`], lines are missing, or the text has no line.
pub fn read_records(text: &str) -> Result<Vec<Record>, FileError> {
    let mut records = Vec::new();
    let mut before = None;
    for (line, text) in (1..).zip(text.lines()) {
        if text.trim().is_empty() {
            continue;
        }
        let (remaining, record) = read_record(text).map_err(|error| error.at_line(line))?;
        check_no_gap(before, Some(remaining))?;
        before = remaining.map(|remaining| (line, remaining));
        records.push(record);
    }
    check_no_gap(before, None)?;
    if records.is_empty() {
        return Err(FileError::new(
            "holds no record: the test ended before its first phase; run it again",
        ));
    }
    Ok(records)
}

/// Checks that no record is missing after the record `before`: its line, and the number of records
/// that it announces. `next` is the announcement of the next record; `None` at the end of the file.
fn check_no_gap(before: Option<(usize, u64)>, next: Option<Option<u64>>) -> Result<(), FileError> {
    let Some((line, required @ 1..)) = before else {
        return Ok(());
    };
    let missing = match next.flatten() {
        Some(remaining) if remaining < required => required - 1 - remaining,
        _ => required,
    };
    let fault = match (next, missing) {
        (_, 0) => return Ok(()),
        (None, 1) => "the file ends before it".to_owned(),
        (None, _) => "the file ends before them".to_owned(),
        (Some(_), 1) => "the next one is missing".to_owned(),
        (Some(_), _) => format!("the next {missing} are missing"),
    };
    let message = format!(
        "the record announces {required} more, but {fault}: the run ended early, or the file is \
         cut off; run the test again"
    );
    Err(FileError::new(message).at_line(line))
}

/// Parses one line: the number of lines that follow it, and the record. The schema is parsed first,
/// to distinguish a file of another kind or version from a damaged one.
fn read_record(text: &str) -> Result<(Option<u64>, Record), FileError> {
    #[derive(Deserialize)]
    struct RecordHeader {
        #[serde(default)]
        schema: String,
        #[serde(rename = "left")]
        remaining_lines: Option<u64>,
    }
    let header: RecordHeader = serde_json::from_str(text).map_err(|error| {
        if error.is_eof() {
            FileError::new("the record is cut off; delete the line or run the test again")
        } else {
            FileError::new(format!("not JSON; expected one object of schema {SCHEMA} a line"))
                .caused_by(error)
        }
    })?;
    if header.schema != SCHEMA {
        let message = format!("its schema is '{}'; this program reads {SCHEMA}", header.schema);
        return Err(FileError::new(message));
    }
    let record = serde_json::from_str(text).map_err(|error| {
        FileError::new(format!("not a whole record of schema {SCHEMA}; run the test again"))
            .caused_by(error)
    })?;
    Ok((header.remaining_lines, record))
}

/// A record and the number of lines that follow it.
#[derive(Serialize)]
struct ResultLine<'a> {
    #[serde(flatten)]
    record: &'a Record,
    #[serde(rename = "left")]
    remaining_lines: u64,
}

/// Formats records as the lines of a complete file.
///
/// # Errors
/// The JSON writer fails, which is not expected.
pub fn record_lines(records: &[Record]) -> Result<String, serde_json::Error> {
    let lines = records.iter().zip((0..records.len() as u64).rev());
    lines
        .map(|(record, remaining)| {
            Ok(serde_json::to_string(&ResultLine { record, remaining_lines: remaining })? + "\n")
        })
        .collect()
}

/// Writes records to a file, one a line.
pub struct RecordWriter {
    path: PathBuf,
    output: Box<dyn Write>,
    remaining_lines: u64,
}

impl fmt::Debug for RecordWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RecordWriter({})", self.path.display())
    }
}

impl RecordWriter {
    /// Creates or truncates a file for `records` records; `-` is standard output.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create(path: &Path, records: u64) -> Result<Self, FileError> {
        let output: Box<dyn Write> = if path == Path::new("-") {
            Box::new(io::stdout())
        } else {
            let message = || format!("cannot create the results file {}", path.display());
            let file = File::create(path);
            Box::new(file.map_err(|error| FileError::new(message()).caused_by(error))?)
        };
        Ok(Self { path: path.to_owned(), output, remaining_lines: records })
    }

    /// Writes and flushes one record.
    ///
    /// # Errors
    /// The line cannot be written.
    pub fn write(&mut self, record: &Record) -> Result<(), FileError> {
        self.remaining_lines = self.remaining_lines.saturating_sub(1);
        let remaining = self.remaining_lines;
        let mut write = || {
            let mut line = serde_json::to_vec(&ResultLine { record, remaining_lines: remaining })?;
            line.push(b'\n');
            self.output.write_all(&line)?;
            self.output.flush()
        };
        write().map_err(|error: io::Error| {
            let message = format!("cannot write results to {}", self.path.display());
            FileError::new(message).caused_by(error)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::record;
    use granule_types::record::HostInfo;

    fn refusal(text: &str) -> String {
        read_records(text).unwrap_err().to_string()
    }

    #[test]
    fn blank_lines_and_unknown_fields_are_ignored_and_missing_provenance_is_unknown() {
        let line = serde_json::to_string(&record()).unwrap();
        let mut value = serde_json::to_value(record()).unwrap();
        let object = value.as_object_mut().unwrap();
        object.insert("colour".to_owned(), "blue".into());
        object.remove("host");

        let records = read_records(&format!("{line}\n\n{value}\r\n")).unwrap();

        assert_eq!(records, [record(), Record { host: HostInfo::default(), ..record() }]);
    }

    #[test]
    fn a_truncated_file_is_refused_at_its_last_line() {
        let line = serde_json::to_string(&record()).unwrap();
        for cut in 1..line.len() {
            let error = refusal(&format!("{line}\n{}", &line[..cut]));
            assert!(error.starts_with("line 2: the record is cut off"), "{cut}");
        }
    }

    #[test]
    fn missing_records_are_detected_at_any_position() {
        let whole = record_lines(&vec![record(); 4]).unwrap();
        let lines: Vec<&str> = whole.lines().collect();
        let without = |gone: std::ops::Range<usize>| {
            let kept = lines.iter().enumerate().filter(|(at, _)| !gone.contains(at));
            kept.map(|(_, line)| format!("{line}\n")).collect::<String>()
        };
        for (text, expected) in [
            (without(1..4), "line 1: the record announces 3 more, but the file ends before them: "),
            (without(3..4), "line 3: the record announces 1 more, but the file ends before it: "),
            (without(1..3), "line 1: the record announces 3 more, but the next 2 are missing: "),
            (
                without(2..4) + &whole,
                "line 2: the record announces 2 more, but the next 2 are missing: ",
            ),
            (
                without(3..4) + &serde_json::to_string(&record()).unwrap(),
                "line 3: the record announces 1 more, but the next one is missing: ",
            ),
        ] {
            assert!(refusal(&text).starts_with(expected), "{text}");
        }
        assert_eq!(read_records(&format!("{whole}\n{whole}")).unwrap().len(), 8);
    }

    #[test]
    fn unknown_schemas_and_damaged_lines_are_distinguished() {
        let no_phase = format!(r#"{{"schema":"{SCHEMA}"}}"#);
        for (text, expected) in [
            ("", "no record"),
            ("\n \n", "no record"),
            ("hello", "line 1: not JSON"),
            ("[1,2]", "line 1: not JSON"),
            ("{}", "schema is ''"),
            (r#"{"schema":"granule.result/9"}"#, "granule.result/9"),
            (no_phase.as_str(), "line 1: not a whole record"),
        ] {
            let error = refusal(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

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
    fn a_file_that_cannot_be_created_or_written_is_named() {
        let create = |path: &str| RecordWriter::create(Path::new(path), 1);
        let error = create("/nowhere/results.jsonl").unwrap_err();
        assert!(error.to_string().contains("/nowhere/results.jsonl"));
        let error = create("/dev/full").unwrap().write(&record()).unwrap_err();
        assert_eq!(error.to_string(), "cannot write results to /dev/full");
    }
}
