// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reads results; every error names its line.
//!
//! The schema is read before the record, so that a file of another kind or version is distinguished
//! from a damaged one. Blank lines are ignored. A line may record the number of lines that follow
//! it (`left`), which are then required; older results do not record it.

use serde::Deserialize;
use thiserror::Error;

use granule_types::{
    record::{Record, SCHEMA},
    units::counted,
};

/// Error returned when a text is not a set of results. Lines count from 1.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The text has no record.
    #[error("holds no record: the test ended before its first phase; run it again")]
    Empty,
    /// The last line is cut off.
    #[error("line {0}: the record is cut off; delete the line or run the test again")]
    Truncated(usize),
    /// A line is not JSON.
    #[error("line {0}: not JSON; expected one object of schema {SCHEMA} a line")]
    NotJson(usize, #[source] serde_json::Error),
    /// A line has another schema.
    #[error("line {0}: its schema is '{1}'; this program reads {SCHEMA}")]
    Schema(usize, String),
    /// Lines behind a line are missing.
    #[error(
        "line {line}: {} behind it {} missing: the run ended early, or the file is cut off; run the \
         test again",
        counted(*.missing, "record"),
        if *.missing == 1 { "is" } else { "are" }
    )]
    Missing {
        /// The line before the gap.
        line: usize,
        /// Number of missing lines.
        missing: u64,
    },
    /// A field is missing or wrong.
    #[error("line {0}: not a whole record of schema {SCHEMA}; run the test again")]
    Field(usize, #[source] serde_json::Error),
}

/// Reads every record of a results file.
///
/// # Errors
/// A line is not a whole record of [`SCHEMA`], lines are missing, or there is no line.
pub fn read_records(text: &str) -> Result<Vec<Record>, ReadError> {
    let mut records = Vec::new();
    let mut before = None;
    for (line, text) in (1..).zip(text.lines()) {
        if text.trim().is_empty() {
            continue;
        }
        let (left, record) = read_record(line, text)?;
        check_follows(before, left)?;
        before = left.map(|left| (line, left));
        records.push(record);
    }
    check_follows(before, None)?;
    if records.is_empty() {
        return Err(ReadError::Empty);
    }
    Ok(records)
}

/// Checks that a line with `left` further lines may follow the line and its `left` in `before`.
fn check_follows(before: Option<(usize, u64)>, left: Option<u64>) -> Result<(), ReadError> {
    let Some((line, wanted @ 1..)) = before else {
        return Ok(());
    };
    let missing = match left {
        Some(left) if left < wanted => wanted - 1 - left,
        _ => wanted,
    };
    if missing == 0 {
        return Ok(());
    }
    Err(ReadError::Missing { line, missing })
}

/// Reads one line and the number of lines that follow it.
fn read_record(line: usize, text: &str) -> Result<(Option<u64>, Record), ReadError> {
    #[derive(Deserialize)]
    struct Tag {
        #[serde(default)]
        schema: String,
        left: Option<u64>,
    }
    let tag: Tag = serde_json::from_str(text).map_err(|error| {
        if error.is_eof() { ReadError::Truncated(line) } else { ReadError::NotJson(line, error) }
    })?;
    if tag.schema != SCHEMA {
        return Err(ReadError::Schema(line, tag.schema));
    }
    let record = serde_json::from_str(text);
    let record = record.map_err(|error| ReadError::Field(line, error))?;
    Ok((tag.left, record))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{fixture::record, results::record_lines};
    use granule_types::record::Host;

    #[test]
    fn blank_lines_are_ignored() {
        let line = serde_json::to_string(&record()).unwrap();

        let records = read_records(&format!("{line}\n\n{line}\r\n")).unwrap();

        assert_eq!(records, [record(), record()]);
    }

    #[test]
    fn unknown_fields_are_ignored_and_missing_provenance_is_unknown() {
        let mut value = serde_json::to_value(record()).unwrap();
        let object = value.as_object_mut().unwrap();
        object.insert("colour".to_owned(), "blue".into());
        object.remove("host");

        let records = read_records(&value.to_string()).unwrap();

        assert_eq!(records[0].host, Host::default());
    }

    #[test]
    fn a_cut_file_names_its_last_line() {
        let line = serde_json::to_string(&record()).unwrap();
        for cut in 1..line.len() {
            let error = read_records(&format!("{line}\n{}", &line[..cut])).unwrap_err();
            assert!(matches!(error, ReadError::Truncated(2)), "{cut}");
        }
    }

    #[test]
    fn missing_lines_are_found_at_any_place() {
        let whole = record_lines(&vec![record(); 4]).unwrap();
        let lines: Vec<&str> = whole.lines().collect();
        let without = |gone: std::ops::Range<usize>| {
            let kept = lines.iter().enumerate().filter(|(at, _)| !gone.contains(at));
            kept.map(|(_, line)| format!("{line}\n")).collect::<String>()
        };
        for (text, line, missing) in [
            (without(1..4), 1, 3),
            (without(3..4), 3, 1),
            (without(1..3), 1, 2),
            (without(2..4) + &whole, 2, 2),
            (without(3..4) + &serde_json::to_string(&record()).unwrap(), 3, 1),
        ] {
            let found = match read_records(&text) {
                Err(ReadError::Missing { line, missing }) => (line, missing),
                other => panic!("{other:?}"),
            };
            assert_eq!(found, (line, missing), "{text}");
        }
        assert_eq!(read_records(&format!("{whole}\n{whole}")).unwrap().len(), 8);
    }

    #[test]
    fn other_and_damaged_lines_are_distinguished() {
        let no_phase = format!(r#"{{"schema":"{SCHEMA}"}}"#);
        for (text, wanted) in [
            ("", "no record"),
            ("\n \n", "no record"),
            ("hello", "line 1: not JSON"),
            ("[1,2]", "line 1: not JSON"),
            ("{}", "schema is ''"),
            (r#"{"schema":"granule.result/9"}"#, "granule.result/9"),
            (no_phase.as_str(), "line 1: not a whole record"),
        ] {
            let error = read_records(text).unwrap_err().to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
