// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Samples of criterion benchmarks.
//!
//! ```text
//! target/criterion/GROUP/FUNCTION/new/benchmark.json   full_id, the name
//!                                     sample.json      iterations and times of each sample
//! ```
//!
//! Each sample is a run: its time divided by its iterations. `new` is the last result; `FOLDER@NAME`
//! reads the baseline of that name.

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

impl Samples {
    /// Returns the time of an iteration in each sample.
    pub fn runs(&self) -> Result<Vec<f64>, CriterionError> {
        let count = self.iters.len().max(self.times.len()).max(1);
        let run = |at: usize| {
            let (iterations, time) = (self.iters.get(at)?, self.times.get(at)?);
            Some(time / iterations)
                .filter(|run| run.is_finite() && *run > 0.0 && *iterations >= 1.0)
        };
        let runs = (0..count).map(|at| run(at).ok_or(CriterionError::Sample(at + 1)));
        runs.collect()
    }
}

/// Reads the samples of a folder of criterion; `None` for other paths and for run directories, which
/// hold `results`.
pub fn read(path: &Path, results: &str) -> Result<Option<Vec<Sample>>, Defect> {
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
        samples.extend(benchmark(folder)?);
    }
    Ok((!found.is_empty()).then_some(samples))
}

/// Finds every folder of this name that holds a benchmark, in the order of names.
fn search(folder: &Path, name: &str, depth: usize, found: &mut Vec<PathBuf>) -> io::Result<()> {
    if folder.file_name().is_some_and(|own| own == name) && folder.join(SAMPLE).is_file() {
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

fn benchmark(folder: &Path) -> Result<Vec<Sample>, Defect> {
    let name = parsed(&folder.join(BENCHMARK), |about: Benchmark| Ok(about.full_id))?;
    let runs = parsed(&folder.join(SAMPLE), |samples: Samples| samples.runs())?;
    let sample = |(iteration, ns): (u32, f64)| Sample {
        engine: engine::CRITERION.to_owned(),
        setup: Setup { subject: printable(&name), ..Setup::default() },
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
                (BENCHMARK, r#"{"group_id":"table","full_id":"table/map 4K"}"#),
                (SAMPLE, &samples),
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
    fn last_result_and_baseline_are_found() {
        let dir = tree();
        let last = samples(dir.path());
        let baseline = samples(Path::new(&format!("{}@main", dir.path().display())));

        assert_eq!(last.len(), 2);
        assert_eq!(last[0].setup.subject, "table/map 4K");
        assert_eq!((last[0].ns, baseline[0].ns), (3.0, 2.0));
    }

    #[test]
    fn errors_name_the_file_and_other_folders_are_ignored() {
        let dir = tree();
        fs::write(dir.path().join("table/map/new/sample.json"), r#"{"iters":[10"#).unwrap();
        let (path, _) = read(dir.path(), "results").unwrap_err();
        assert!(path.ends_with("sample.json"), "{}", path.display());
        let other = tempfile::tempdir().unwrap();
        assert!(read(other.path(), "results").unwrap().is_none());
    }
}
