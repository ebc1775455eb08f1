// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reader of the results of criterion benchmarks.
//!
//! ```text
//! target/criterion/GROUP/FUNCTION/new/benchmark.json   full_id, the name
//!                                     sample.json      iterations and times of each sample
//! ```
//!
//! Each sample is a run with the mean time of its iterations. `new` is the last result;
//! `FOLDER@NAME` reads the baseline `NAME`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use granule_types::make_printable;
use serde::{Deserialize, de::DeserializeOwned};

use super::{RESULTS_FILE, read_error};
use crate::{
    results::FileError,
    sample::{AnyPhase, RunSetup, Sample, engine},
};

const LAST_RESULT: &str = "new";
const BENCHMARK_FILE: &str = "benchmark.json";
const SAMPLE_FILE: &str = "sample.json";
/// Maximum folder depth of the search; criterion creates four levels.
const MAX_DEPTH: usize = 6;
const TIME_PHASE: AnyPhase = AnyPhase::of_other_test(40, "time");

#[derive(Deserialize)]
struct BenchmarkFile {
    full_id: String,
}

#[derive(Deserialize)]
pub struct SampleFile {
    iters: Vec<f64>,
    times: Vec<f64>,
}

impl SampleFile {
    /// Returns the mean time of an iteration in each sample.
    pub fn mean_times(&self) -> Result<Vec<f64>, FileError> {
        let count = self.iters.len().max(self.times.len()).max(1);
        let run = |at: usize| {
            let (iterations, time) = (self.iters.get(at)?, self.times.get(at)?);
            let run = time / iterations;
            (run.is_finite() && run > 0.0 && *iterations >= 1.0).then_some(run)
        };
        let error = |at: usize| {
            FileError::new(format!(
                "sample {} is not a time of at least one iteration: run `cargo bench` again",
                at + 1
            ))
            .at_line(1)
        };
        (0..count).map(|at| run(at).ok_or_else(|| error(at))).collect()
    }
}

/// Reads the samples in a criterion folder; `None` for other paths and for run directories.
pub fn read(path: &Path) -> Result<Option<Vec<Sample>>, FileError> {
    let (folder, baseline) = match path.to_str().and_then(|text| text.rsplit_once('@')) {
        Some((folder, name)) if !path.exists() => (Path::new(folder), name),
        _ => (path, LAST_RESULT),
    };
    if !folder.is_dir() || folder.join(RESULTS_FILE).is_file() {
        return Ok(None);
    }
    let mut found = Vec::new();
    search(folder, baseline, MAX_DEPTH, &mut found)
        .map_err(|error| read_error(error).in_file(folder))?;
    let mut samples = Vec::new();
    for folder in &found {
        samples.extend(read_benchmark(folder)?);
    }
    Ok((!found.is_empty()).then_some(samples))
}

/// Adds each folder of this name with a benchmark to `found`, sorted by path.
fn search(folder: &Path, name: &str, depth: usize, found: &mut Vec<PathBuf>) -> io::Result<()> {
    if folder.file_name().is_some_and(|own| own == name) && folder.join(SAMPLE_FILE).is_file() {
        found.push(folder.to_owned());
        return Ok(());
    }
    if depth == 0 {
        return Ok(());
    }
    let mut inner = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            inner.push(entry.path());
        }
    }
    inner.sort();
    inner.iter().try_for_each(|folder| search(folder, name, depth - 1, found))
}

fn read_benchmark(folder: &Path) -> Result<Vec<Sample>, FileError> {
    let name = read_json::<BenchmarkFile>(&folder.join(BENCHMARK_FILE))?.full_id;
    let path = folder.join(SAMPLE_FILE);
    let runs = read_json::<SampleFile>(&path)?.mean_times().map_err(|e| e.in_file(&path))?;
    let sample = |(iteration, ns): (u32, f64)| Sample {
        engine: engine::CRITERION.to_owned(),
        setup: RunSetup { subject: make_printable(&name), ..RunSetup::default() },
        iteration,
        phase: TIME_PHASE,
        ns,
        ..Sample::default()
    };
    Ok((0..).zip(runs).map(sample).collect())
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, FileError> {
    let bytes = fs::read(path).map_err(|error| read_error(error).in_file(path))?;
    serde_json::from_str(&String::from_utf8_lossy(&bytes)).map_err(|error| {
        FileError::new("not written by criterion, or cut off: run `cargo bench` again")
            .caused_by(error)
            .in_file(path)
    })
}
