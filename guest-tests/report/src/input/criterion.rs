// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Files of criterion benchmarks.
//!
//! ```text
//! target/criterion/GROUP/FUNCTION/new/benchmark.json   full_id, the name
//!                                     sample.json      iterations and times of each sample
//!                                     estimates.json   median
//! ```
//!
//! Each sample is a run: its time divided by its iterations. Without `sample.json` the median is a
//! single run. `new` is the last result; `FOLDER@NAME` reads the baseline of that name.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, de::DeserializeOwned};
use thiserror::Error;

use crate::sample::{Sample, Setup, Step, engine, printable};

/// Folder of the last result.
const LAST: &str = "new";
const BENCHMARK: &str = "benchmark.json";
const SAMPLE: &str = "sample.json";
const ESTIMATES: &str = "estimates.json";
/// Greatest depth of folders to search; criterion makes four levels.
const DEPTH: usize = 6;
const STEP: Step = Step::of_other_test(40, "time");

/// Error returned when a file of criterion cannot be used.
#[derive(Debug, Error)]
pub enum CriterionError {
    /// The file cannot be read.
    #[error("cannot read the file")]
    Read(#[from] io::Error),
    /// The file does not have criterion's format.
    #[error("not written by criterion, or cut off: run `cargo bench` again")]
    Parse(#[from] serde_json::Error),
    /// A sample, counted from 1, is not a time.
    #[error("line 1: sample {0} is not a time of at least one iteration: run `cargo bench` again")]
    Sample(usize),
}

/// File with its error.
type Defect = (PathBuf, CriterionError);

#[derive(Deserialize)]
struct Benchmark {
    full_id: String,
}

/// Content of `sample.json`.
#[derive(Deserialize)]
pub struct Samples {
    iters: Vec<f64>,
    times: Vec<f64>,
}

/// Content of `estimates.json`.
#[derive(Deserialize)]
pub struct Estimates {
    median: Estimate,
}

#[derive(Deserialize)]
struct Estimate {
    point_estimate: f64,
}

impl Samples {
    /// Returns the time of an iteration in each sample.
    pub fn runs(&self) -> Result<Vec<f64>, CriterionError> {
        let count = self.iters.len().max(self.times.len()).max(1);
        let run = |at: usize| {
            let (iterations, time) = (self.iters.get(at)?, self.times.get(at)?);
            Some(time / iterations).filter(|&run| is_time(run) && *iterations >= 1.0)
        };
        let runs = (0..count).map(|at| run(at).ok_or(CriterionError::Sample(at + 1)));
        runs.collect()
    }
}

impl Estimates {
    /// Returns the median.
    pub fn median(&self) -> Result<f64, CriterionError> {
        let median = self.median.point_estimate;
        if is_time(median) {
            Ok(median)
        } else {
            Err(CriterionError::Sample(1))
        }
    }
}

fn is_time(ns: f64) -> bool {
    ns.is_finite() && ns > 0.0
}

/// Reads the samples of a folder or file of criterion; `None` for other paths and for folders of
/// run directories, which hold `results`.
pub fn read(path: &Path, results: &str) -> Result<Option<Vec<Sample>>, Defect> {
    let is_named = |name: &str| path.file_name().is_some_and(|own| own == name);
    if path.is_file() && (is_named(SAMPLE) || is_named(ESTIMATES)) {
        let folder = path.parent().unwrap_or(Path::new("."));
        return benchmark(folder, is_named(ESTIMATES)).map(Some);
    }
    let (folder, baseline) = match path.to_str().and_then(|text| text.rsplit_once('@')) {
        Some((folder, name)) if !path.exists() => (Path::new(folder), name),
        _ => (path, LAST),
    };
    if !folder.is_dir() || folder.join(results).is_file() {
        return Ok(None);
    }
    let mut found = Vec::new();
    search(folder, baseline, DEPTH, &mut found)
        .map_err(|error| (folder.to_owned(), error.into()))?;
    let mut samples = Vec::new();
    for folder in &found {
        samples.extend(benchmark(folder, false)?);
    }
    Ok((!found.is_empty()).then_some(samples))
}

/// Finds every folder of this name that holds a benchmark, in the order of names.
fn search(folder: &Path, name: &str, depth: usize, found: &mut Vec<PathBuf>) -> io::Result<()> {
    let holds = |file: &str| folder.join(file).is_file();
    if folder.file_name().is_some_and(|own| own == name) && (holds(SAMPLE) || holds(ESTIMATES)) {
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
    inner
        .iter()
        .try_for_each(|folder| search(folder, name, depth - 1, found))
}

/// Reads one benchmark, from its samples unless only the estimate is wanted or there.
fn benchmark(folder: &Path, estimate: bool) -> Result<Vec<Sample>, Defect> {
    let [about, sample, estimates] = [BENCHMARK, SAMPLE, ESTIMATES].map(|file| folder.join(file));
    let name = if about.is_file() {
        parsed::<Benchmark, _>(&about, |benchmark| Ok(benchmark.full_id))?
    } else {
        let folders = folder.parent().and_then(Path::file_name);
        folders.map_or_else(String::new, |name| name.to_string_lossy().into_owned())
    };
    let runs = if !estimate && sample.is_file() {
        parsed(&sample, |samples: Samples| samples.runs())?
    } else {
        vec![parsed(&estimates, |estimates: Estimates| {
            estimates.median()
        })?]
    };
    let sample = |(iteration, ns): (u32, f64)| Sample {
        engine: engine::CRITERION.to_owned(),
        setup: Setup {
            subject: printable(&name),
            ..Setup::default()
        },
        iteration,
        step: STEP,
        ns,
        ..Sample::default()
    };
    Ok((0..).zip(runs).map(sample).collect())
}

fn parsed<T: DeserializeOwned, U>(
    path: &Path,
    read: fn(T) -> Result<U, CriterionError>,
) -> Result<U, Defect> {
    let parse = || {
        let bytes = fs::read(path)?;
        read(serde_json::from_str(&String::from_utf8_lossy(&bytes))?)
    };
    parse().map_err(|error| (path.to_owned(), error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(text: &str) -> Result<Vec<f64>, CriterionError> {
        serde_json::from_str::<Samples>(text)?.runs()
    }

    #[test]
    fn a_run_is_the_time_of_an_iteration() {
        let text = r#"{"sampling_mode":"Linear","iters":[10.0,20.0],"times":[15.0,31.0]}"#;
        assert_eq!(runs(text).unwrap(), [1.5, 1.55]);
    }

    #[test]
    fn damaged_files_are_refused() {
        for text in [
            "",
            "{}",
            r#"{"iters":[1.0],"times":[]}"#,
            r#"{"iters":[0.0],"times":[1.0]}"#,
            r#"{"iters":[],"times":[]}"#,
        ] {
            assert!(runs(text).is_err(), "{text}");
        }
        let estimates = r#"{"median":{"point_estimate":-1}}"#;
        assert!(
            serde_json::from_str::<Estimates>(estimates)
                .unwrap()
                .median()
                .is_err()
        );
        assert!(serde_json::from_str::<Benchmark>("{}").is_err());
    }

    /// Makes a benchmark's folders of its last result and of a baseline.
    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, time) in [("new", 30.0), ("main", 20.0)] {
            let folder = dir.path().join("table/map").join(name);
            fs::create_dir_all(&folder).unwrap();
            let samples = format!(r#"{{"iters":[10,10],"times":[{time},{time}]}}"#);
            for (file, text) in [
                (
                    BENCHMARK,
                    r#"{"group_id":"table","full_id":"table/map 4K"}"#,
                ),
                (SAMPLE, &samples),
                (ESTIMATES, r#"{"median":{"point_estimate":2.5}}"#),
            ] {
                fs::write(folder.join(file), text).unwrap();
            }
        }
        dir
    }

    fn samples(path: &Path) -> Vec<Sample> {
        read(path, "results").unwrap().unwrap()
    }

    #[test]
    fn last_result_baseline_and_estimate_are_found() {
        let dir = tree();
        let last = samples(dir.path());
        let baseline = samples(Path::new(&format!("{}@main", dir.path().display())));
        let estimate = samples(&dir.path().join("table/map/new/estimates.json"));

        assert_eq!(last.len(), 2);
        assert_eq!(last[0].setup.subject, "table/map 4K");
        assert_eq!((last[0].ns, baseline[0].ns), (3.0, 2.0));
        assert_eq!((estimate.len(), estimate[0].ns), (1, 2.5));
    }

    #[test]
    fn errors_name_the_file_and_other_folders_are_ignored() {
        let dir = tree();
        fs::write(
            dir.path().join("table/map/new/sample.json"),
            r#"{"iters":[10"#,
        )
        .unwrap();
        let (path, _) = read(dir.path(), "results").unwrap_err();
        assert!(path.ends_with("sample.json"), "{}", path.display());
        let other = tempfile::tempdir().unwrap();
        assert!(read(other.path(), "results").unwrap().is_none());
    }
}
