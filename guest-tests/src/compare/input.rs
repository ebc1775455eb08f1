// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One side of a comparison from a path: a results file, a raw log, or a run directory.
//!
//! What a file is, its first character tells: results begin with `{`; anything else must be a log.
//! Results are held to be whole: every run of a configuration has the phases its other runs have,
//! since a file cut off between two lines cannot be told otherwise.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use thiserror::Error;

use super::raw_log::{self, LogError};
use crate::{
    phase::Phase,
    results::{ReadError, Record, read_records},
};

/// The results inside a run directory.
pub const RESULTS_FILE: &str = "results.jsonl";

/// Why a path gives no results.
#[derive(Debug, Error)]
pub enum InputError {
    /// The file cannot be read.
    #[error("cannot read {}", .path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A directory is none of the lab's.
    #[error(
        "{} holds no {RESULTS_FILE}: give a directory that `granule lab` made, or a file",
        .0.display()
    )]
    Directory(PathBuf),
    /// There is nothing in the file.
    #[error("{} is empty: run the test again", .0.display())]
    Empty(PathBuf),
    /// It is neither results nor a log.
    #[error(
        "{} is neither results ({}) nor a log of kvm_page_table_test: give what `granule bench \
         --json` or the test itself wrote",
        .0.display(),
        crate::results::SCHEMA
    )]
    Foreign(PathBuf),
    /// Its results are damaged.
    #[error("{}", .path.display())]
    Results {
        /// Which.
        path: PathBuf,
        /// Where, and how.
        #[source]
        source: ReadError,
    },
    /// Its log is damaged.
    #[error("{}", .path.display())]
    Log {
        /// Which.
        path: PathBuf,
        /// Where, and how.
        #[source]
        source: LogError,
    },
    /// A run lacks phases.
    #[error(
        "{}: seed {seed}, iteration {iteration} of {configuration} lacks {}, which its other runs \
         have: the file is cut off; run again, or delete that run from it",
        .path.display(),
        .missing.iter().map(|phase| phase.name()).collect::<Vec<_>>().join(", ")
    )]
    Incomplete {
        /// Which file.
        path: PathBuf,
        /// The configuration.
        configuration: String,
        /// The run's seed.
        seed: u64,
        /// The run's iteration.
        iteration: u32,
        /// What it lacks.
        missing: Vec<Phase>,
    },
}

/// Reads every record behind a path.
///
/// # Errors
/// There is nothing to read, or it is not whole; the error names file, line and remedy.
pub fn read(path: &Path) -> Result<Vec<Record>, InputError> {
    let mut path = path.to_owned();
    if path.is_dir() {
        let results = path.join(RESULTS_FILE);
        if !results.is_file() {
            return Err(InputError::Directory(path));
        }
        path = results;
    }
    // A console may hold any byte; only ASCII matters here.
    let text = match fs::read(&path) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(source) => return Err(InputError::Read { path, source }),
    };
    let start = text.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{feff}');
    if start.is_empty() {
        return Err(InputError::Empty(path));
    }
    if start.starts_with('{') {
        return match read_records(&text) {
            Ok(records) => whole(&path, &records).map(|()| records),
            Err(source) => Err(InputError::Results { path, source }),
        };
    }
    if !raw_log::is_log(&text) {
        return Err(InputError::Foreign(path));
    }
    match raw_log::read(&text) {
        Ok(runs) => Ok(raw_log::records(&runs)),
        Err(source) => Err(InputError::Log { path, source }),
    }
}

/// Checks that every run has the phases that the other runs of its configuration have.
fn whole(path: &Path, records: &[Record]) -> Result<(), InputError> {
    for group in super::group::groups(records, true) {
        let phases = |record: &&&Record| record.phase;
        let all: BTreeSet<_> = group.records.iter().map(|r| phases(&r)).collect();
        let run = |record: &Record| (record.config.seed, record.config.iteration);
        let runs: BTreeSet<_> = group.records.iter().map(|record| run(record)).collect();
        for (seed, iteration) in runs {
            let of_run = group.records.iter().filter(|r| run(r) == (seed, iteration));
            let present: BTreeSet<_> = of_run.map(|r| phases(&r)).collect();
            if present != all {
                return Err(InputError::Incomplete {
                    path: path.to_owned(),
                    configuration: group.key.name(),
                    seed,
                    iteration,
                    missing: all.difference(&present).copied().collect(),
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::{
        super::fixture::{record, runs},
        *,
    };

    fn lines(records: &[Record]) -> String {
        let line = |record| serde_json::to_string(record).unwrap() + "\n";
        records.iter().map(line).collect()
    }

    /// The error and its causes in one line.
    fn refusal(path: &Path) -> String {
        let error = read(path).unwrap_err();
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            text += &format!(": {error}");
            cause = error.source();
        }
        text
    }

    #[test]
    fn a_file_and_the_directory_it_lies_in_give_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(RESULTS_FILE);
        fs::write(&file, lines(&[record()])).unwrap();

        assert_eq!(read(&file).unwrap(), [record()]);
        assert_eq!(read(dir.path()).unwrap(), [record()]);
    }

    #[test]
    fn a_console_with_stray_bytes_is_a_log() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("console.log");
        let mut bytes = b"\xff\xfe\x1b[0m boot\n".to_vec();
        bytes.extend(include_bytes!("golden/console.log"));
        fs::write(&file, bytes).unwrap();

        assert_eq!(read(&file).unwrap().len(), 6);
    }

    #[test]
    fn what_gives_no_results_is_refused_with_file_and_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let whole = lines(&runs(&[1, 2], &[3, 4]));
        let log = include_str!("golden/console.log");
        for (name, content, wanted) in [
            ("empty", "", "is empty: run the test again"),
            ("blank", "\n \r\n", "is empty"),
            ("foreign", "<html></html>", "is neither results"),
            ("other.json", "{\"a\": 1}", "line 1: its schema is ''"),
            ("cut", &whole[..whole.len() - 20], "line 4: breaks off"),
            (
                "cut-between-lines",
                &whole[..whole[..whole.len() - 1].rfind('\n').unwrap() + 1],
                "seed 1, iteration 0 of anonymous_hugetlb_2mb, 64M, 16 vCPUs lacks update",
            ),
            (
                "cut.log",
                &log[..log.rfind("KVM_ADJUST").unwrap()],
                "ends without 'KVM_ADJUST_MAPPINGS'",
            ),
        ] {
            let path = dir.path().join(name);
            fs::write(&path, content).unwrap();
            let text = refusal(&path);
            assert!(text.contains(wanted), "{text}");
            assert!(text.contains(name), "{text}");
        }
        assert!(refusal(&dir.path().join("absent")).contains("cannot read"));
        assert!(refusal(dir.path()).contains("holds no results.jsonl"));
    }
}
