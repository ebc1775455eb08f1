// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use std::error::Error;

use super::*;
use crate::fixture::{record, runs};

fn lines(records: &[Record]) -> String {
    let line = |record| serde_json::to_string(record).unwrap() + "\n";
    records.iter().map(line).collect()
}

/// Returns the error and its causes in one line.
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
fn a_run_directory_reads_as_its_results() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(RESULTS_FILE);
    fs::write(&file, lines(&[record()])).unwrap();

    assert_eq!(read(&file).unwrap(), [record()]);
    assert_eq!(read(dir.path()).unwrap(), [record()]);
}

#[test]
fn a_sweep_that_is_cut_off_in_its_last_configuration_is_refused() {
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
fn results_that_record_their_number_must_be_complete() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("cut.jsonl");
    let whole = crate::results::record_lines(&runs(&[1], &[2])).unwrap();
    fs::write(&file, whole.split_inclusive('\n').next().unwrap()).unwrap();

    let text = refusal(&file);

    assert!(text.contains("cut.jsonl: line 1: 1 record behind it is missing"), "{text}");
}

#[test]
fn results_and_logs_in_one_file_are_refused_with_their_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("mixed");
    let (log, json) = (include_str!("../../golden/console.log"), lines(&[record()]));
    for (content, wanted) in [
        (format!("{log}{json}"), "line 43: the line is JSON in a log"),
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
fn a_capture_of_a_terminal_is_a_log() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("typescript");
    let noise = "\u{1b}]0;root@host: Testing guest mode: none\u{7}\u{1b}[1m# \u{1b}(B\u{1b}[m";
    let log = include_str!("../../golden/console.log");
    let noisy: String =
        log.lines().map(|line| format!("{noise}{line}\u{1b}(B\u{1b}[m\r\n")).collect();
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
fn a_log_that_ends_within_the_first_words_of_a_run_is_refused() {
    for log in [include_str!("../../golden/console.log"), include_str!("../../golden/perf.log")] {
        assert!(samples(log).is_ok());
        for cut in ["Testing", "[    1.500] Testing guest mode:"] {
            let found = samples(&format!("{log}{cut}"));
            let wanted = matches!(found, Err(Defect::Log(LogError::Line(_, LogDefect::CutOff(_)))));
            assert!(wanted, "{cut}: {found:?}");
        }
    }
}

#[test]
fn unusable_inputs_are_refused_with_file_and_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let whole = lines(&runs(&[1, 2], &[3, 4]));
    let log = include_str!("../../golden/console.log");
    for (name, content, wanted) in [
        ("empty", "", "is empty: run the test again"),
        ("blank", "\n \r\n", "is empty"),
        ("foreign", "<html></html>", "is neither results"),
        ("other.json", "{\"a\": 1}", "line 1: its schema is ''"),
        ("cut", &whole[..whole.len() - 20], "line 4: the record is cut off"),
        (
            "cut-between-lines",
            &whole[..whole[..whole.len() - 1].rfind('\n').unwrap() + 1],
            "seed 1, iteration 0 of anonymous_hugetlb_2mb, 64M, 16 vCPUs lacks update",
        ),
        ("cut.log", &log[..log.rfind("KVM_ADJUST").unwrap()], "has no 'KVM_ADJUST_MAPPINGS'"),
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
