// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Inputs: reads one side of a comparison from paths.
//!
//! ```text
//! results file, run directory ──────────────── results ─┐
//! log of kvm_page_table_test ─┐             page_table_log ─┼─ records ─ samples
//! log of dirty_log_perf_test, ├─ terminal ─ perf_log ───────┼─────────── samples
//!        demand_paging_test  ─┘                             │
//! target/criterion ────────────────────────── criterion ────┘
//! ```
//!
//! A file that begins with `{` holds results; any other file must be a log without results in it.
//! Criterion's files are recognised by their names and folders. An input that is damaged or cut off
//! is refused as a whole.

mod complete;
pub(crate) mod criterion;
mod error;
mod log;
pub mod page_table_log;
mod perf_log;
mod terminal;

#[cfg(test)]
mod tests;

use std::{
    fs,
    path::{Path, PathBuf},
};

pub use self::{
    complete::Incomplete,
    criterion::CriterionError,
    error::{Defect, InputError},
    log::{LogDefect, LogError},
};
use crate::{
    results::read_records,
    sample::{self, Sample},
};
use granule_types::record::Record;

/// Name of the results in a run directory.
pub const RESULTS_FILE: &str = "results.jsonl";

/// Reads one side: the samples of every path, each path's runs after those of the one before it.
///
/// # Errors
/// A path cannot be read, or its content is not whole; the error names file, line and remedy.
pub fn side(paths: &[PathBuf]) -> Result<Vec<Sample>, InputError> {
    let mut all: Vec<Sample> = Vec::new();
    for path in paths {
        let iterations = all.iter().map(|sample| sample.iteration.saturating_add(1));
        let next = iterations.max().unwrap_or(0);
        all.extend(one(path)?.into_iter().map(|mut sample| {
            sample.iteration = sample.iteration.saturating_add(next);
            sample
        }));
    }
    Ok(all)
}

fn one(path: &Path) -> Result<Vec<Sample>, InputError> {
    let found = criterion::read(path, RESULTS_FILE);
    if let Some(found) = found.map_err(|(path, error)| InputError::new(&path, error))? {
        return Ok(found);
    }
    let (path, text) = text(path)?;
    samples(&text).map_err(|defect| InputError::new(&path, defect))
}

/// Reads every record of the page-table test behind a path.
///
/// # Errors
/// As for [`side`].
pub fn read(path: &Path) -> Result<Vec<Record>, InputError> {
    let (path, text) = text(path)?;
    let read = || match Content::of(&text)? {
        Content::Records(records) => Ok(records),
        Content::Log(log) => Ok(page_table_log::records(&page_table_log::read(&log)?)),
    };
    read().map_err(|defect: Defect| InputError::new(&path, defect))
}

/// Returns the samples in a text of any kind but criterion's.
pub(crate) fn samples(text: &str) -> Result<Vec<Sample>, Defect> {
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
fn text(path: &Path) -> Result<(PathBuf, String), InputError> {
    let mut path = path.to_owned();
    if path.is_dir() {
        let results = path.join(RESULTS_FILE);
        if !results.is_file() {
            return Err(InputError::new(&path, Defect::Directory));
        }
        path = results;
    }
    // A console may hold any byte; only ASCII matters here.
    match fs::read(&path) {
        Ok(bytes) => Ok((path, String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) => Err(InputError::new(&path, Defect::Read(error))),
    }
}

/// Content of a text.
enum Content {
    Records(Vec<Record>),
    /// Log without escape sequences.
    Log(String),
}

impl Content {
    fn of(text: &str) -> Result<Self, Defect> {
        let start = text.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{feff}');
        if start.is_empty() {
            return Err(Defect::Empty);
        }
        if start.starts_with('{') {
            let records = read_records(text)?;
            complete::check(&records)?;
            return Ok(Self::Records(records));
        }
        let log = terminal::plain_text(text);
        let json = (1..).zip(log.lines()).find(|(_, line)| page_table_log::is_json(line));
        match (page_table_log::is_log(&log), json) {
            (true, None) => {
                page_table_log::check_end(&log)?;
                Ok(Self::Log(log))
            }
            (true, Some((line, _))) => Err(LogDefect::Json.at(line).into()),
            (false, Some(_)) => {
                Err(read_records(text).map_or_else(Into::into, |_| Defect::Unknown))
            }
            (false, None) => Err(Defect::Unknown),
        }
    }
}
