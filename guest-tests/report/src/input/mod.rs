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
//! is refused as a whole.

mod criterion;
mod log;
pub mod page_table_log;
mod perf_log;

#[cfg(test)]
mod tests;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use granule_types::record::{Record, SCHEMA};

use crate::{
    results::{FileError, read_records},
    sample::{self, Sample},
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

/// Reads the records of a results file or run directory.
///
/// # Errors
/// As for [`side`].
pub fn read(path: &Path) -> Result<Vec<Record>, FileError> {
    let (path, text) = text(path)?;
    read_records(&text).map_err(|error| error.in_file(&path))
}

/// Returns the samples in a text of any kind but criterion's.
pub(crate) fn samples(text: &str) -> Result<Vec<Sample>, FileError> {
    let start = text.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{feff}');
    if start.is_empty() {
        return Err(FileError::new("the file is empty: run the test again"));
    }
    if start.starts_with('{') {
        return Ok(sample::samples(&read_records(text)?));
    }
    let log = log::plain_text(text);
    let json = (1..).zip(log.lines()).find(|(_, line)| page_table_log::is_json(line));
    match (page_table_log::is_log(&log), json) {
        (true, None) => {}
        (true, Some((line, _))) => return Err(log::json().at(line)),
        (false, json) => {
            if json.is_some() {
                read_records(text)?;
            }
            return Err(FileError::new(format!(
                "the file is neither results ({SCHEMA}) nor a log of kvm_page_table_test, \
                 dirty_log_perf_test or demand_paging_test: pass the output of `granule bench \
                 --json` or of the test"
            )));
        }
    }
    page_table_log::check_end(&log)?;
    let (rest, mut samples) = perf_log::take(&log)?;
    if samples.is_empty() || page_table_log::is_log(&rest) {
        let records = page_table_log::records(page_table_log::read(&rest)?);
        samples.extend(sample::samples(&records));
    }
    Ok(samples)
}

/// Returns the text of a file, or of the results in a run directory, with its path.
fn text(path: &Path) -> Result<(PathBuf, String), FileError> {
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
    // A console may hold any byte; only ASCII matters here.
    match fs::read(&path) {
        Ok(bytes) => Ok((path, String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) => Err(unreadable(error).in_file(&path)),
    }
}

fn unreadable(error: io::Error) -> FileError {
    FileError::new("cannot read the file").caused_by(error)
}
