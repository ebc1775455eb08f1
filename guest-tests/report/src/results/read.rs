// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reads results back: JSON Lines, every error with its line.
//!
//! The schema is looked at before anything else, so that a file of another kind or of a later
//! version is told from a damaged one. Blank lines and unknown fields are passed over; provenance
//! that is missing becomes unknown ([`Host::default`](super::Host)), which the comparison notices.
//! Where lines say how many follow them, those must follow; files of earlier versions say nothing.

use serde::Deserialize;
use thiserror::Error;

use granule_types::record::{Record, SCHEMA};

/// Why a text is no set of results. Lines count from 1.
#[derive(Debug, Error)]
pub enum ReadError {
    /// There is not one record in it.
    #[error("holds no record: run the test again, it ended before its first phase did")]
    Empty,
    /// The last line breaks off.
    #[error("line {line}: breaks off in the middle of a record; delete that line or run again")]
    Truncated {
        /// Where.
        line: usize,
    },
    /// A line is not JSON.
    #[error(
        "line {line}: not JSON; results are one object of schema {SCHEMA} a line: delete what is \
         none, or make the file again"
    )]
    NotJson {
        /// Where.
        line: usize,
        /// What JSON says to it.
        #[source]
        source: serde_json::Error,
    },
    /// A line is JSON, but not ours.
    #[error("line {line}: its schema is '{found}'; this program reads {SCHEMA}")]
    Schema {
        /// Where.
        line: usize,
        /// What it calls itself.
        found: String,
    },
    /// Lines are missing.
    #[error(
        "line {line}: {missing} of the records that belong behind it {}: the run ended early, or \
         the file is cut off; run again",
        if *.missing == 1 { "is missing" } else { "are missing" }
    )]
    Missing {
        /// Behind which.
        line: usize,
        /// How many.
        missing: u64,
    },
    /// A line is ours, but a field is missing or wrong.
    #[error("line {line}: not a whole record of schema {SCHEMA}; make the file again")]
    Field {
        /// Where.
        line: usize,
        /// Which field, and what is wrong with it.
        #[source]
        source: serde_json::Error,
    },
}

/// Reads every record of a results file.
///
/// # Errors
/// The first line that is not a whole record of [`SCHEMA`], or that there is none.
pub fn read_records(text: &str) -> Result<Vec<Record>, ReadError> {
    let mut records = Vec::new();
    // The line before, and how many are to follow it.
    let mut before = None;
    for (index, text) in text.lines().enumerate() {
        if text.trim().is_empty() {
            continue;
        }
        let line = index + 1;
        let (tag, record) = read_record(line, text)?;
        follows(before, tag.left)?;
        before = tag.left.map(|left| (line, left));
        records.push(record);
    }
    follows(before, None)?;
    if records.is_empty() {
        return Err(ReadError::Empty);
    }
    Ok(records)
}

/// Checks that a line that has `left` to follow it may stand behind the one before it.
fn follows(before: Option<(usize, u64)>, left: Option<u64>) -> Result<(), ReadError> {
    match before {
        None | Some((_, 0)) => Ok(()),
        Some((line, wanted)) => match left {
            Some(left) if left == wanted - 1 => Ok(()),
            Some(left) if left < wanted => Err(ReadError::Missing {
                line,
                missing: wanted - 1 - left,
            }),
            _ => Err(ReadError::Missing {
                line,
                missing: wanted,
            }),
        },
    }
}

/// What is looked at before the record itself.
#[derive(Deserialize)]
struct Tag {
    #[serde(default)]
    schema: String,
    left: Option<u64>,
}

/// Reads one line.
fn read_record(line: usize, text: &str) -> Result<(Tag, Record), ReadError> {
    let tag: Tag = serde_json::from_str(text).map_err(|source| {
        if source.is_eof() {
            ReadError::Truncated { line }
        } else {
            ReadError::NotJson { line, source }
        }
    })?;
    if tag.schema != SCHEMA {
        return Err(ReadError::Schema {
            line,
            found: tag.schema,
        });
    }
    let record = serde_json::from_str(text);
    let record = record.map_err(|source| ReadError::Field { line, source })?;
    Ok((tag, record))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::results::record_lines;
    use granule_types::{
        phase::Phase,
        record::{Host, RunConfig},
        units::{Bytes, Nanoseconds},
    };

    pub(in crate::results) fn record() -> Record {
        Record {
            schema: SCHEMA.to_owned(),
            host: Host {
                arch: "aarch64".to_owned(),
                ..Host::default()
            },
            engine: "kvm".to_owned(),
            config: RunConfig {
                mode: "PA-bits:48,  VA-bits:48,  4K pages".to_owned(),
                backing: "anonymous_hugetlb_2mb".parse().unwrap(),
                memory: Bytes::mib(64),
                vcpus: 16,
                seed: 1,
                iteration: 0,
                prefault: false,
                options: Default::default(),
            },
            obtained: None,
            phase: Phase::Create,
            round: None,
            ns: Nanoseconds(42_000_000),
            vcpu_ns: vec![],
            counters: [("DC CIVAC".to_owned(), 34_625_989)].into(),
            events: Default::default(),
            gauges: Default::default(),
        }
    }

    #[test]
    fn what_was_written_is_read_again() {
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
    fn a_cut_file_names_the_line_that_breaks_off() {
        let line = serde_json::to_string(&record()).unwrap();
        for cut in 1..line.len() {
            let error = read_records(&format!("{line}\n{}", &line[..cut])).unwrap_err();
            assert!(matches!(error, ReadError::Truncated { line: 2 }), "{cut}");
        }
    }

    #[test]
    fn lines_that_are_missing_are_told_wherever_they_are() {
        let whole = record_lines(&vec![record(); 4]).unwrap();
        let lines: Vec<&str> = whole.lines().collect();
        let without = |gone: std::ops::Range<usize>| {
            let kept = lines
                .iter()
                .enumerate()
                .filter(|(at, _)| !gone.contains(at));
            kept.map(|(_, line)| format!("{line}\n"))
                .collect::<String>()
        };
        for (text, line, missing) in [
            (without(1..4), 1, 3),
            (without(3..4), 3, 1),
            (without(1..3), 1, 2),
            (without(2..4) + &whole, 2, 2),
            (
                without(3..4) + &serde_json::to_string(&record()).unwrap(),
                3,
                1,
            ),
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
    fn foreign_and_damaged_lines_are_told_apart() {
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
