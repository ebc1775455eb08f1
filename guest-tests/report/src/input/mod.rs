// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Readers of the inputs of a comparison.
//!
//! ```text
//! results file, run directory ── results ─┐
//! log of a test ──────────────── log ─────┼─ samples
//! target/criterion ───────────── criterion┘
//! ```
//!
//! A file that begins with `{` contains results; any other file must be a log without results.
//! Criterion's files are recognised by their names and folders. A damaged or truncated input is
//! refused as a whole.

mod criterion;
mod log;
mod log_line;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use granule_types::record::{Record, SCHEMA};

use crate::{
    results::{FileError, read_records},
    sample::{self, AnyPhase, Sample},
};

/// Name of the results file in a run directory.
pub const RESULTS_FILE: &str = "results.jsonl";

/// Reads one side: the samples of all paths, in the order of the paths. Each invocation of the test has
/// an index, and iterations of its own.
///
/// # Errors
/// A path cannot be read, a path or a run is repeated, or the content of a file is incomplete; the error
/// names file, line and remedy.
pub fn read_side(paths: &[PathBuf]) -> Result<Vec<Sample>, FileError> {
    let mut all: Vec<Sample> = Vec::new();
    let mut known = BTreeSet::new();
    let mut runs = Runs::default();
    for path in paths {
        // Runs that are counted twice would make a difference look more certain than it is.
        if !known.insert(fs::canonicalize(path).unwrap_or_else(|_| path.clone())) {
            let repeated = "a side has this file twice: name each run once";
            return Err(FileError::new(repeated).in_file(path));
        }
        for samples in invocations(runs.read(path)?) {
            if let Some((other, seed)) = runs.add(path, &samples) {
                let place = match other == *path {
                    true => "a run twice".to_owned(),
                    false => format!("the same run as {}", other.display()),
                };
                let repeated = format!(
                    "has {place}, with seed {seed}: name each run once, and repeat runs with other \
                     seeds"
                );
                return Err(FileError::new(repeated).in_file(path));
            }
            let next = |number: fn(&Sample) -> u32| {
                all.iter().map(|sample| number(sample).saturating_add(1)).max().unwrap_or(0)
            };
            let (invocation, first) =
                (next(|sample| sample.invocation), next(|sample| sample.iteration));
            all.extend(samples.into_iter().map(|mut sample| {
                sample.invocation = invocation;
                sample.iteration = sample.iteration.saturating_add(first);
                sample
            }));
        }
    }
    Ok(all)
}

/// Separates the samples of a file by invocation of the test. An invocation has each phase of an
/// iteration once, so a phase that occurs again begins another one: files were concatenated.
fn invocations(samples: Vec<Sample>) -> Vec<Vec<Sample>> {
    type Schedule = (String, String, String, u64);
    let mut known: BTreeMap<Schedule, (usize, BTreeSet<(u32, AnyPhase)>)> = BTreeMap::new();
    let mut invocations: Vec<Vec<Sample>> = Vec::new();
    for sample in samples {
        let setup = &sample.setup;
        let schedule = (sample.engine.clone(), setup.mode.clone(), setup.name(), sample.seed);
        let (index, phases) = known.entry(schedule).or_default();
        let phase = (sample.iteration, sample.phase.clone());
        if !phases.insert(phase.clone()) {
            *index += 1;
            *phases = [phase].into();
        }
        let index = *index;
        invocations.resize_with(invocations.len().max(index + 1), Vec::new);
        invocations[index].push(sample);
    }
    invocations
}

/// Runs of a side, to find those that are repeated.
#[derive(Debug, Default)]
struct Runs {
    /// Samples of each invocation, with its file, by seed, setup and the file's iteration.
    invocations: Vec<(PathBuf, BTreeMap<RunKey, Vec<Sample>>)>,
    /// Logs, which have too few figures to recognise a run.
    logs: Vec<(PathBuf, String)>,
}

type RunKey = (u64, String, u32);

impl Runs {
    /// Reads a file.
    ///
    /// # Errors
    /// The file cannot be read, or is a log that equals an earlier one.
    fn read(&mut self, path: &Path) -> Result<Vec<Sample>, FileError> {
        if let Some(found) = criterion::read(path)? {
            return Ok(found);
        }
        let (file, text) = read_text(path)?;
        let samples = parse(&text).map_err(|error| error.in_file(&file))?;
        if samples.iter().any(Sample::is_without_host) {
            if let Some((other, _)) = self.logs.iter().find(|(_, other)| *other == text) {
                let repeated = format!("is equal to {}: name each run once", other.display());
                return Err(FileError::new(repeated).in_file(&file));
            }
            self.logs.push((file, text));
        }
        Ok(samples)
    }

    /// Adds the runs of an invocation. Returns an earlier file with the same run, and its seed: a copy,
    /// or an emulated run that was repeated. All figures of two other runs are never equal.
    fn add(&mut self, path: &Path, samples: &[Sample]) -> Option<(PathBuf, u64)> {
        let mut runs: BTreeMap<RunKey, Vec<Sample>> = BTreeMap::new();
        for sample in samples.iter().filter(|sample| !sample.is_without_host()) {
            let key = (sample.seed, sample.setup.name(), sample.iteration);
            // An emulated run is repeated also by other builds of the programs, if these do not differ
            // in effect.
            let run = Sample { programs: BTreeMap::new(), ..sample.clone() };
            runs.entry(key).or_default().push(run);
        }
        let file_with = |key: &RunKey, run: &Vec<Sample>| {
            let mut others = self.invocations.iter();
            others.find(|(_, others)| others.get(key) == Some(run)).map(|(path, _)| path)
        };
        let repeated =
            runs.iter().find_map(|(key, run)| Some((file_with(key, run)?.clone(), key.0)));
        self.invocations.push((path.to_owned(), runs));
        repeated
    }
}

/// Reads the records of a results file or run directory.
///
/// # Errors
/// As for [`read_side`].
pub fn read_results(path: &Path) -> Result<Vec<Record>, FileError> {
    let (path, text) = read_text(path)?;
    read_records(&text).map_err(|error| error.in_file(&path))
}

/// Parses the samples in the text of a results file or a log.
pub(crate) fn parse(text: &str) -> Result<Vec<Sample>, FileError> {
    let start = text.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{feff}');
    if start.is_empty() {
        return Err(FileError::new("the file is empty: run the test again"));
    }
    if start.starts_with('{') {
        return Ok(sample::samples(&read_records(text)?));
    }
    let plain = log_line::plain_text(text);
    if !log::is_log(&plain) {
        if plain.lines().any(log::is_json) {
            read_records(text)?;
        }
        return Err(FileError::new(format!(
            "the file is neither results ({SCHEMA}) nor a log of kvm_page_table_test, \
             dirty_log_perf_test or demand_paging_test: pass the output of `granule bench --json` \
             or of the test"
        )));
    }
    let log = log::read(&plain)?;
    Ok([log.samples, sample::samples(&log.records)].concat())
}

/// Returns the records of a log of `kvm_page_table_test`, which does not name its host.
///
/// # Errors
/// The log has no run, or a run failed, is damaged or is cut off.
pub fn page_table_records(text: &str) -> Result<Vec<Record>, FileError> {
    Ok(log::read(text)?.records)
}

/// Returns the text of a file, or of the results in a run directory, with its path.
fn read_text(path: &Path) -> Result<(PathBuf, String), FileError> {
    let mut path = path.to_owned();
    if path.is_dir() {
        let results = path.join(RESULTS_FILE);
        if !results.is_file() {
            let message = format!(
                "holds no {RESULTS_FILE} and no files of criterion: pass a directory made by \
                 `granule lab`, target/criterion, or a file"
            );
            return Err(FileError::new(message).in_file(&path));
        }
        path = results;
    }
    // A console log may contain any byte; the recognised lines are ASCII.
    match fs::read(&path) {
        Ok(bytes) => Ok((path, String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) => Err(read_error(error).in_file(&path)),
    }
}

fn read_error(error: io::Error) -> FileError {
    FileError::new("cannot read the file").caused_by(error)
}
