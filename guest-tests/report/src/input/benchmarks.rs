// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Finds criterion's files: a whole `target/criterion`, a benchmark's folder in it, or one file.
//! `FOLDER@NAME` takes the baseline of that name instead of what ran last.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{
    InputError, RESULTS_FILE,
    criterion::{self, CriterionError, FILES, LAST},
};
use crate::sample::Sample;

/// How deep folders are looked into; criterion makes four levels.
const DEPTH: usize = 6;

/// The samples behind a path; `None` where it is none of criterion's.
pub fn read(path: &Path) -> Result<Option<Vec<Sample>>, InputError> {
    let named = |names: &[&str]| {
        path.file_name()
            .is_some_and(|n| names.iter().any(|&k| n == k))
    };
    if path.is_file() && named(&FILES[1..]) {
        let folder = path.parent().unwrap_or(Path::new("."));
        return benchmark(folder, Some(path)).map(Some);
    }
    let (folder, baseline) = match path.to_str().and_then(|text| text.rsplit_once('@')) {
        Some((folder, name)) if !path.exists() => (PathBuf::from(folder), name),
        _ => (path.to_owned(), LAST),
    };
    if !folder.is_dir() || folder.join(RESULTS_FILE).is_file() {
        return Ok(None);
    }
    let mut found = Vec::new();
    search(&folder, baseline, DEPTH, &mut found).map_err(|source| InputError::Read {
        path: folder,
        source,
    })?;
    let mut samples = Vec::new();
    for folder in &found {
        samples.extend(benchmark(folder, None)?);
    }
    Ok((!found.is_empty()).then_some(samples))
}

/// Every folder of this name that holds a benchmark, in the order of names.
fn search(folder: &Path, name: &str, depth: usize, found: &mut Vec<PathBuf>) -> io::Result<()> {
    let holds = |folder: &Path| FILES[1..].iter().any(|file| folder.join(file).is_file());
    if folder.file_name().is_some_and(|own| own == name) && holds(folder) {
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

/// One benchmark, from the file asked for, or from the best there is.
fn benchmark(folder: &Path, only: Option<&Path>) -> Result<Vec<Sample>, InputError> {
    let [about, sample, estimates] = FILES.map(|file| folder.join(file));
    let name = if about.is_file() {
        parse(&about, criterion::name)?
    } else {
        let folders = folder.parent().and_then(Path::file_name);
        folders.map_or_else(String::new, |name| name.to_string_lossy().into_owned())
    };
    let runs = if only.is_none_or(|only| only == sample) && sample.is_file() {
        parse(&sample, criterion::runs)?
    } else {
        vec![parse(&estimates, criterion::median)?]
    };
    Ok(criterion::samples(&name, &runs))
}

fn parse<T>(path: &Path, read: fn(&str) -> Result<T, CriterionError>) -> Result<T, InputError> {
    let bytes = fs::read(path).map_err(|source| InputError::Read {
        path: path.to_owned(),
        source,
    })?;
    read(&String::from_utf8_lossy(&bytes)).map_err(|source| InputError::Criterion {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, file: &str, text: &str) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join(file), text).unwrap();
    }

    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, time) in [("new", 30.0), ("main", 20.0)] {
            let folder = dir.path().join("table/map").join(name);
            write(
                &folder,
                "benchmark.json",
                r#"{"group_id":"table","full_id":"table/map 4K"}"#,
            );
            write(
                &folder,
                "sample.json",
                &format!(r#"{{"iters":[10,10],"times":[{time},{time}]}}"#),
            );
            write(
                &folder,
                "estimates.json",
                r#"{"median":{"point_estimate":2.5}}"#,
            );
        }
        dir
    }

    #[test]
    fn last_and_baseline_are_found_below() {
        let dir = tree();
        let last = read(dir.path()).unwrap().unwrap();
        let baseline = PathBuf::from(format!("{}@main", dir.path().display()));
        let baseline = read(&baseline).unwrap().unwrap();

        assert_eq!(last.len(), 2);
        assert_eq!(last[0].setup.subject, "table/map 4K");
        assert_eq!((last[0].ns, baseline[0].ns), (3.0, 2.0));
    }

    #[test]
    fn estimates_alone_are_one_run() {
        let dir = tree();
        let file = dir.path().join("table/map/new/estimates.json");
        let samples = read(&file).unwrap().unwrap();
        assert_eq!((samples.len(), samples[0].ns), (1, 2.5));
    }

    #[test]
    fn damage_names_the_file_and_other_folders_are_not_ours() {
        let dir = tree();
        write(
            &dir.path().join("table/map/new"),
            "sample.json",
            r#"{"iters":[10"#,
        );
        let error = read(dir.path()).unwrap_err();
        assert!(error.to_string().ends_with("sample.json"), "{error}");
        assert!(read(tempfile::tempdir().unwrap().path()).unwrap().is_none());
    }
}
