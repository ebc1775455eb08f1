// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Inputs: reads one side of a comparison from paths.
//!
//! ```text
//! results file, run directory ──────────────── results ─┐
//! log of kvm_page_table_test ─┐             page_table_log ─┼─ records ─ samples
//! log of dirty_log_perf_test, ├─── log ──── perf_log ───────┼─────────── samples
//!        demand_paging_test  ─┘                             │
//! target/criterion ────────────────────────── criterion ────┘
//! ```
//!
//! A file that begins with `{` holds results; any other file must be a log without results in it.
//! Criterion's files are recognised by their names and folders. An input that is damaged or cut off
//! is refused as a whole. Results whose lines do not record how many follow are cut off if a run
//! lacks phases that others have.

mod criterion;
mod log;
pub mod page_table_log;
mod perf_log;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use granule_types::{
    phase::Phase,
    record::{Record, SCHEMA},
};

use crate::{
    results::{FileError, read_records},
    sample::{self, Sample, Setup},
};

/// Name of the results in a run directory.
pub const RESULTS_FILE: &str = "results.jsonl";

/// Reads one side: the samples of every path, each path's runs after those of the one before it.
///
/// # Errors
/// A path cannot be read, or its content is not whole; the error names file, line and remedy.
pub fn side(paths: &[PathBuf]) -> Result<Vec<Sample>, FileError> {
    let mut all: Vec<Sample> = Vec::new();
    for path in paths {
        let iterations = all.iter().map(|sample| sample.iteration.saturating_add(1));
        let next = iterations.max().unwrap_or(0);
        all.extend(read_path(path)?.into_iter().map(|mut sample| {
            sample.iteration = sample.iteration.saturating_add(next);
            sample
        }));
    }
    Ok(all)
}

fn read_path(path: &Path) -> Result<Vec<Sample>, FileError> {
    if let Some(found) = criterion::read(path)? {
        return Ok(found);
    }
    let (path, text) = text(path)?;
    samples(&text).map_err(|error| error.in_file(&path))
}

/// Reads every record of the page-table test behind a path.
///
/// # Errors
/// As for [`side`].
pub fn read(path: &Path) -> Result<Vec<Record>, FileError> {
    let (path, text) = text(path)?;
    let read = || match Content::of(&text)? {
        Content::Records(records) => Ok(records),
        Content::Log(log) => Ok(page_table_log::records(&page_table_log::read(&log)?)),
    };
    read().map_err(|error: FileError| error.in_file(&path))
}

/// Returns the samples in a text of any kind but criterion's.
pub(crate) fn samples(text: &str) -> Result<Vec<Sample>, FileError> {
    match Content::of(text)? {
        Content::Records(records) => Ok(sample::samples(&records)),
        Content::Log(log) => {
            let (rest, mut samples) = perf_log::take(&log)?;
            if samples.is_empty() || page_table_log::is_log(&rest) {
                let runs = page_table_log::read(&rest)?;
                samples.extend(sample::samples(&page_table_log::records(&runs)));
            }
            Ok(samples)
        }
    }
}

/// Returns the text of a file, or of the results in a run directory, with its path.
fn text(path: &Path) -> Result<(PathBuf, String), FileError> {
    let mut path = path.to_owned();
    if path.is_dir() {
        let results = path.join(RESULTS_FILE);
        if !results.is_file() {
            let message = format!(
                "holds no {RESULTS_FILE} and no files of criterion: give a directory made by \
                 `granule lab`, target/criterion, or a file"
            );
            return Err(FileError::new(message).in_file(&path));
        }
        path = results;
    }
    // A console may hold any byte; only ASCII matters here.
    match fs::read(&path) {
        Ok(bytes) => Ok((path, String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) => Err(unreadable(error).in_file(&path)),
    }
}

fn unreadable(error: io::Error) -> FileError {
    FileError::new("cannot read the file").caused_by(error)
}

/// Content of a text.
enum Content {
    Records(Vec<Record>),
    /// Log without escape sequences.
    Log(String),
}

impl Content {
    fn of(text: &str) -> Result<Self, FileError> {
        let start = text.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{feff}');
        if start.is_empty() {
            return Err(FileError::new("the file is empty: run the test again"));
        }
        if start.starts_with('{') {
            let records = read_records(text)?;
            check_phases(&records)?;
            return Ok(Self::Records(records));
        }
        let log = log::plain_text(text);
        let json = (1..).zip(log.lines()).find(|(_, line)| page_table_log::is_json(line));
        match (page_table_log::is_log(&log), json) {
            (true, None) => {
                page_table_log::check_end(&log)?;
                return Ok(Self::Log(log));
            }
            (true, Some((line, _))) => return Err(log::json().at(line)),
            (false, Some(_)) => drop(read_records(text)?),
            (false, None) => {}
        }
        let message = format!(
            "the file is neither results ({SCHEMA}) nor a log of kvm_page_table_test, \
             dirty_log_perf_test or demand_paging_test: give the output of `granule bench --json` or \
             of the test"
        );
        Err(FileError::new(message))
    }
}

/// Checks that every run has the phases of the other runs of its configuration, and that the last
/// run does not end where runs of its engine go on.
fn check_phases(records: &[Record]) -> Result<(), FileError> {
    /// Phases of each run, by seed and iteration.
    type Phases = BTreeMap<(u64, u32), BTreeSet<Phase>>;
    let mut configurations: Vec<((Setup, &str), Phases)> = Vec::new();
    for record in records {
        let key = (Sample::from(record).setup, record.engine.as_str());
        let known = configurations.iter().position(|(other, _)| *other == key);
        let at = known.unwrap_or_else(|| {
            configurations.push((key, Phases::new()));
            configurations.len() - 1
        });
        let run = (record.config.seed, record.config.iteration);
        configurations[at].1.entry(run).or_default().insert(record.phase);
    }
    check_last_run(records)?;
    for ((setup, _), runs) in configurations {
        let all: BTreeSet<Phase> = runs.values().flatten().copied().collect();
        let mut runs = runs.into_iter();
        if let Some((run, present)) = runs.find(|(_, phases)| *phases != all) {
            return Err(lacks_phases(&setup, run, all.difference(&present)));
        }
    }
    Ok(())
}

/// Checks that the last run does not have only the first phases of its engine's runs.
fn check_last_run(records: &[Record]) -> Result<(), FileError> {
    let Some(last) = records.last() else {
        return Ok(());
    };
    let of_engine = || records.iter().filter(|record| record.engine == last.engine);
    let all: BTreeSet<Phase> = of_engine().map(|record| record.phase).collect();
    let of_run = of_engine().filter(|record| record.config == last.config);
    let present: BTreeSet<Phase> = of_run.map(|record| record.phase).collect();
    if present == all || !all.iter().take(present.len()).eq(&present) {
        return Ok(());
    }
    let run = (last.config.seed, last.config.iteration);
    Err(lacks_phases(&Sample::from(last).setup, run, all.difference(&present)))
}

fn lacks_phases<'a>(
    setup: &Setup,
    (seed, iteration): (u64, u32),
    missing: impl Iterator<Item = &'a Phase>,
) -> FileError {
    let missing: Vec<&str> = missing.map(|phase| phase.name()).collect();
    FileError::new(format!(
        "seed {seed}, iteration {iteration} of {} lacks {}, which other runs have: the file is cut \
         off; run the test again, or delete the run",
        setup.name(),
        missing.join(", ")
    ))
}
