// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One side of a comparison from paths: results files, logs of the kernel's tests, run directories
//! of the lab, and what criterion wrote.
//!
//! What a file is, its first character tells: results begin with `{`; anything else must be a log,
//! and have no results in it. Criterion's files are known by their names and by the folders they lie
//! in.
//! Results are held to be whole. Where their lines do not say themselves how many follow, every run
//! of a configuration must have the phases its other runs have, and the last run of a file must not
//! end where runs of other configurations go on, since a file cut off between two lines cannot be
//! told otherwise.

mod benchmarks;
pub(crate) mod criterion;
mod log_error;
pub mod page_table_log;
mod perf_log;
mod terminal;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use thiserror::Error;

use self::criterion::CriterionError;
use crate::{
    results::{ReadError, read_records},
    sample::{self, Sample, Setup},
};
use granule_types::{phase::Phase, record::Record};

pub use self::log_error::LogError;

/// Engines whose samples carry no host.
pub(crate) const FOREIGN_ENGINES: [&str; 5] = [
    page_table_log::ENGINE,
    page_table_log::BENCH_ENGINE,
    criterion::ENGINE,
    perf_log::ENGINES[0],
    perf_log::ENGINES[1],
];

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
        "{} holds no {RESULTS_FILE} and nothing of criterion's: give a directory that `granule lab` \
         made, target/criterion, or a file",
        .0.display()
    )]
    Directory(PathBuf),
    /// There is nothing in the file.
    #[error("{} is empty: run the test again", .0.display())]
    Empty(PathBuf),
    /// It is neither results nor a log.
    #[error(
        "{} is neither results ({}) nor a log of kvm_page_table_test, dirty_log_perf_test or \
         demand_paging_test: give what `granule bench --json` or the test itself wrote",
        .0.display(),
        granule_types::record::SCHEMA
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
    /// A file of criterion's is damaged.
    #[error("{}", .path.display())]
    Criterion {
        /// Which.
        path: PathBuf,
        /// Where, and how.
        #[source]
        source: CriterionError,
    },
    /// A run lacks phases.
    #[error(
        "{}: seed {seed}, iteration {iteration} of {configuration} lacks {}, which other runs \
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

/// Reads one side: every sample behind some paths, each path's runs following those of the one
/// before it.
///
/// # Errors
/// There is nothing to read, or it is not whole; the error names file, line and remedy.
pub fn side(paths: &[PathBuf]) -> Result<Vec<Sample>, InputError> {
    let mut all: Vec<Sample> = Vec::new();
    for path in paths {
        let next = all
            .iter()
            .map(|s| s.iteration.saturating_add(1))
            .max()
            .unwrap_or(0);
        for mut sample in one(path)? {
            sample.iteration = sample.iteration.saturating_add(next);
            all.push(sample);
        }
    }
    Ok(all)
}

/// Reads every sample behind one path.
fn one(path: &Path) -> Result<Vec<Sample>, InputError> {
    if let Some(found) = benchmarks::read(path)? {
        return Ok(found);
    }
    let (path, text) = text(path)?;
    samples(&text).map_err(|error| error.of(path))
}

/// The samples in a text of any kind but criterion's.
pub(crate) fn samples(text: &str) -> Result<Vec<Sample>, TextError> {
    match records_or_log(text)? {
        Kind::Records(records) => Ok(sample::samples(&records)),
        Kind::Log(log) => {
            let (rest, mut samples) = perf_log::take(&log).map_err(TextError::Log)?;
            if samples.is_empty() || page_table_log::is_log(&rest) {
                let runs = page_table_log::read(&rest).map_err(TextError::Log)?;
                samples.extend(sample::samples(&page_table_log::records(&runs)));
            }
            Ok(samples)
        }
    }
}

/// Reads every record of the page-table test behind a path.
///
/// # Errors
/// There is nothing to read, or it is not whole; the error names file, line and remedy.
pub fn read(path: &Path) -> Result<Vec<Record>, InputError> {
    let (path, text) = text(path)?;
    let read = || match records_or_log(&text)? {
        Kind::Records(records) => Ok(records),
        Kind::Log(log) => Ok(page_table_log::records(
            &page_table_log::read(&log).map_err(TextError::Log)?,
        )),
    };
    read().map_err(|error: TextError| error.of(path))
}

/// The text behind a path, and the file that it came from.
fn text(path: &Path) -> Result<(PathBuf, String), InputError> {
    let mut path = path.to_owned();
    if path.is_dir() {
        let results = path.join(RESULTS_FILE);
        if !results.is_file() {
            return Err(InputError::Directory(path));
        }
        path = results;
    }
    // A console may hold any byte; only ASCII matters here.
    match fs::read(&path) {
        Ok(bytes) => Ok((path, String::from_utf8_lossy(&bytes).into_owned())),
        Err(source) => Err(InputError::Read { path, source }),
    }
}

/// What a text turned out to be.
enum Kind {
    Records(Vec<Record>),
    /// Without what only a terminal understands.
    Log(String),
}

fn records_or_log(text: &str) -> Result<Kind, TextError> {
    let start = text.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{feff}');
    if start.is_empty() {
        return Err(TextError::Empty);
    }
    if start.starts_with('{') {
        let records = read_records(text).map_err(TextError::Results)?;
        whole(&records)?;
        return Ok(Kind::Records(records));
    }
    let log = terminal::plain_text(text);
    let json = log.lines().position(page_table_log::is_json);
    match (page_table_log::is_log(&log), json) {
        (true, None) => {
            page_table_log::ends_whole(&log).map_err(TextError::Log)?;
            Ok(Kind::Log(log))
        }
        (true, Some(before)) => Err(TextError::Log(LogError::Json { line: before + 1 })),
        (false, Some(_)) => match read_records(text) {
            Err(error) => Err(TextError::Results(error)),
            Ok(_) => Err(TextError::Foreign),
        },
        (false, None) => Err(TextError::Foreign),
    }
}

/// Why a text gives no results; the file is not known here.
#[derive(Debug)]
pub(crate) enum TextError {
    Empty,
    Foreign,
    Results(ReadError),
    Log(LogError),
    Incomplete {
        configuration: String,
        seed: u64,
        iteration: u32,
        missing: Vec<Phase>,
    },
}

impl TextError {
    fn of(self, path: PathBuf) -> InputError {
        match self {
            Self::Empty => InputError::Empty(path),
            Self::Foreign => InputError::Foreign(path),
            Self::Results(source) => InputError::Results { path, source },
            Self::Log(source) => InputError::Log { path, source },
            Self::Incomplete {
                configuration,
                seed,
                iteration,
                missing,
            } => InputError::Incomplete {
                path,
                configuration,
                seed,
                iteration,
                missing,
            },
        }
    }
}

/// Checks that every run has the phases that the other runs of its configuration have.
fn whole(records: &[Record]) -> Result<(), TextError> {
    /// The phases of each run, by seed and iteration.
    type Phases = BTreeMap<(u64, u32), BTreeSet<Phase>>;
    let mut configurations: Vec<(Setup, &str, Phases)> = Vec::new();
    for record in records {
        let setup = Sample::from(record).setup;
        let known =
            |(other, engine, _): &(Setup, &str, _)| *other == setup && *engine == record.engine;
        let at = configurations.iter().position(known).unwrap_or_else(|| {
            configurations.push((setup, &record.engine, BTreeMap::new()));
            configurations.len() - 1
        });
        let run = (record.config.seed, record.config.iteration);
        configurations[at]
            .2
            .entry(run)
            .or_default()
            .insert(record.phase);
    }
    if let Some(last) = records.last() {
        last_is_whole(last, records)?;
    }
    for (setup, _, runs) in configurations {
        let all: BTreeSet<Phase> = runs.values().flatten().copied().collect();
        for ((seed, iteration), present) in runs {
            if present != all {
                return Err(TextError::Incomplete {
                    configuration: setup.name(),
                    seed,
                    iteration,
                    missing: all.difference(&present).copied().collect(),
                });
            }
        }
    }
    Ok(())
}

/// Checks that the last run has not just the first of the phases that runs of its engine have.
fn last_is_whole(last: &Record, records: &[Record]) -> Result<(), TextError> {
    let phases = |of: &dyn Fn(&&Record) -> bool| -> BTreeSet<Phase> {
        records
            .iter()
            .filter(of)
            .map(|record| record.phase)
            .collect()
    };
    let all = phases(&|record| record.engine == last.engine);
    let present = phases(&|record| record.engine == last.engine && record.config == last.config);
    let missing: Vec<Phase> = all.difference(&present).copied().collect();
    if missing.is_empty() || !all.iter().take(present.len()).eq(&present) {
        return Ok(());
    }
    Err(TextError::Incomplete {
        configuration: Sample::from(last).setup.name(),
        seed: last.config.seed,
        iteration: last.config.iteration,
        missing,
    })
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;
    use crate::fixture::{record, runs};

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
    fn a_sweep_cut_off_in_its_last_configuration_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("sweep.jsonl");
        let mut records = runs(&[1], &[2]);
        let mut more = runs(&[3], &[4]);
        for record in &mut more {
            record.config.vcpus = 80;
        }
        records.extend(more);
        fs::write(&file, lines(&records)).unwrap();
        assert_eq!(read(&file).unwrap().len(), 4);

        fs::write(&file, lines(&records[..3])).unwrap();
        let text = refusal(&file);
        let wanted = "iteration 0 of anonymous_hugetlb_2mb, 64M, 80 vCPUs lacks update";
        assert!(text.contains(wanted), "{text}");
    }

    #[test]
    fn results_that_say_how_many_they_are_must_be_all_there() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("cut.jsonl");
        let whole = crate::results::record_lines(&runs(&[1], &[2])).unwrap();
        fs::write(&file, whole.split_inclusive('\n').next().unwrap()).unwrap();

        let text = refusal(&file);

        assert!(
            text.contains("cut.jsonl: line 1: 1 of the records that belong behind it is missing"),
            "{text}"
        );
    }

    #[test]
    fn results_and_logs_in_one_file_are_refused_with_the_line() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("mixed");
        let (log, json) = (include_str!("../../golden/console.log"), lines(&[record()]));
        for (content, wanted) in [
            (format!("{log}{json}"), "line 43: a line of JSON in a log"),
            (format!("{json}{log}"), "line 2: not JSON"),
            (format!("hello\n{json}"), "line 1: not JSON"),
            (format!("\u{1b}[0m{json}"), "line 1: not JSON"),
        ] {
            fs::write(&file, content).unwrap();
            let text = refusal(&file);
            assert!(text.contains(wanted) && text.contains("mixed"), "{text}");
        }
    }

    #[test]
    fn a_terminals_capture_is_a_log() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("typescript");
        let noise = "\u{1b}]0;root@host: Testing guest mode: none\u{7}\u{1b}[1m# \u{1b}(B\u{1b}[m";
        let log = include_str!("../../golden/console.log");
        let noisy: String = log
            .lines()
            .map(|line| format!("{noise}{line}\u{1b}(B\u{1b}[m\r\n"))
            .collect();
        fs::write(&file, noisy).unwrap();
        let plain = dir.path().join("plain");
        fs::write(&plain, log).unwrap();

        assert_eq!(read(&file).unwrap(), read(&plain).unwrap());
    }

    #[test]
    fn a_console_with_stray_bytes_is_a_log() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("console.log");
        let mut bytes = b"\xff\xfe\x1b[0m boot\n".to_vec();
        bytes.extend(include_bytes!("../../golden/console.log"));
        fs::write(&file, bytes).unwrap();

        assert_eq!(read(&file).unwrap().len(), 6);
    }

    #[test]
    fn a_log_of_any_test_that_ends_within_the_first_words_of_a_run_is_refused() {
        for log in [
            include_str!("../../golden/console.log"),
            include_str!("../../golden/perf.log"),
        ] {
            assert!(samples(log).is_ok());
            for cut in ["Testing", "[    1.500] Testing guest mode:"] {
                let found = samples(&format!("{log}{cut}"));
                let wanted = matches!(found, Err(TextError::Log(LogError::BreaksOff { .. })));
                assert!(wanted, "{cut}: {found:?}");
            }
        }
    }

    #[test]
    fn what_gives_no_results_is_refused_with_file_and_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let whole = lines(&runs(&[1, 2], &[3, 4]));
        let log = include_str!("../../golden/console.log");
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
