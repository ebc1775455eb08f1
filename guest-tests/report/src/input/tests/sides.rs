// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of repeated runs on a side.

use std::{fs, slice};

use super::{CONSOLE, bench_log, json_lines, with_cause};
use crate::{input::read_side, results::record_lines, tests::runs};
use granule_types::record::Record;

#[test]
fn a_copy_of_a_run_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, times: &[u64]| {
        let path = directory.path().join(name);
        let mut records = runs(times, &[]);
        for record in &mut records {
            // Another build of a program does not make a repetition another run.
            record.programs = [("granule".to_owned(), name.to_owned())].into();
        }
        let lines = record_lines(&records).unwrap();
        fs::write(&path, lines).unwrap();
        path
    };
    let one = file("one.jsonl", &[100, 200]);
    let others = [file("copy.jsonl", &[300, 200]), file("other.jsonl", &[300, 400])];

    let refused = read_side(&[one.clone(), others[0].clone()]).unwrap_err().to_string();
    let read = read_side(&[one, others[1].clone()]).unwrap();

    assert!(refused.contains("the same run as") && refused.contains("with seed 1"), "{refused}");
    assert_eq!(read.len(), 4);
}

#[test]
fn runs_of_one_seed_in_one_file_are_invocations() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("runs.jsonl");
    let read = |invocations: [Vec<Record>; 2]| {
        fs::write(&path, json_lines(&invocations.concat())).unwrap();
        read_side(slice::from_ref(&path))
    };

    let samples = read([runs(&[100, 200], &[300]), runs(&[110, 210], &[310])]).unwrap();
    let refused = read([runs(&[100, 200], &[300]), runs(&[110, 200], &[310])]).unwrap_err();

    let numbers: Vec<_> =
        samples.iter().map(|sample| (sample.invocation, sample.iteration, sample.seed)).collect();
    assert_eq!(numbers, [(0, 0, 0), (0, 0, 1), (0, 0, 0), (1, 1, 0), (1, 1, 1), (1, 1, 0)]);
    let refused = refused.to_string();
    assert!(refused.contains("runs.jsonl: has a run twice, with seed 1: name"), "{refused}");
}

#[test]
fn a_copy_of_a_log_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let log = |name: &str, text: &str| {
        let path = directory.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let one = log("one.log", CONSOLE);
    let [copy, other] =
        [("copy.log", 2), ("other.log", 3)].map(|(name, end)| log(name, &bench_log(end - 1)));
    let copy_of_copy = log("copy-of-copy.log", &bench_log(1));

    let refused = read_side(&[copy.clone(), one.clone(), copy_of_copy]).unwrap_err().to_string();

    assert!(refused.contains("copy-of-copy.log: is equal to "), "{refused}");
    assert!(read_side(&[one, copy, other]).is_ok());
}

#[test]
fn a_file_of_a_side_is_counted_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("one.log");
    fs::write(&file, CONSOLE).unwrap();
    let other_name = dir.path().join("./one.log");

    let error = with_cause(&read_side(&[file, other_name]).unwrap_err());

    assert!(error.contains("one.log") && error.contains("name each run once"), "{error}");
}
