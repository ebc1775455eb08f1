// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests with complete, truncated, damaged and mutated inputs.
//!
//! `PROPTEST_CASES=1000000 cargo test --release -p granule-report --lib mutated` takes minutes.

mod sides;

use std::{cell::Cell, error::Error};

use proptest::{prelude::*, sample::Index, test_runner::TestRunner};

use super::*;
use crate::{
    Comparison, ComparisonOptions, Verdict, render,
    results::record_lines,
    sample::engine,
    tests::{record, runs, with_series},
};
use granule_types::{
    backing::Backing,
    phase::Phase,
    record::{HostInfo, RunConfig},
    units::Bytes,
};

/// Console log of a lab host, with carriage returns: two runs of Linux 6.1's `kvm_page_table_test`.
const CONSOLE: &str = include_str!("../../golden/console.log");
/// Console log with `dirty_log_perf_test`, `demand_paging_test` and `kvm_page_table_test`.
const PERF: &str = include_str!("../../golden/perf.log");

fn json_lines(records: &[Record]) -> String {
    records.iter().map(|record| serde_json::to_string(record).unwrap() + "\n").collect()
}

/// Returns the error and its cause in one line.
fn with_cause(error: &FileError) -> String {
    let cause = error.source().map(|cause| format!(": {cause}"));
    error.to_string() + &cause.unwrap_or_default()
}

fn refusal(text: &str) -> String {
    with_cause(&parse(text).map(|samples| samples.len()).unwrap_err())
}

/// Checks that each replacement of text in a log makes the reader refuse it with this error.
fn assert_refused(log: &str, cases: &[(&str, &str, &str)]) {
    for (from, to, expected) in cases {
        let damaged = log.replacen(from, to, 1);
        assert_ne!(damaged, log, "{from}");
        let error = refusal(&damaged);
        assert!(error.contains(expected), "{error}");
    }
}

/// Returns the lines of `granule bench -i N`.
fn bench_log(iterations: u32) -> String {
    let mut log = "Testing guest mode: m\nTesting memory backing src type: shmem\n\
                   Testing memory size(aligned): 0x1000\nNumber of testing vCPUs: 1\n\
                   Started all vCPUs successfully\n"
        .to_owned();
    for iteration in 1..=iterations {
        if iterations > 1 {
            log += &format!("granule: iteration {iteration} of {iterations}\n");
        }
        log += &format!("KVM_CREATE_MAPPINGS: total execution time: 0.00000000{iteration}s\n\n");
        log += "granule: logging-on took 0.000000007s\n\n\
                KVM_UPDATE_MAPPINGS: total execution time: 0.000000002s\n\n\
                KVM_ADJUST_MAPPINGS: total execution time: 0.000000003s\n\n\
                granule: exec took 0.000000004s\n\n\
                granule: unmap took 0.000000005s\n";
    }
    log
}

#[test]
fn every_run_of_a_console_is_read() {
    let runs = log::read(CONSOLE).unwrap().records;

    let config = RunConfig {
        mode: "PA-bits:48,  VA-bits:48, 64K pages".to_owned(),
        backing: "anonymous_hugetlb_2mb".parse().unwrap(),
        memory: Bytes::mib(8),
        vcpus: 2,
        ..record().config
    };
    assert_eq!((&runs[0].config, runs[0].engine.as_str()), (&config, engine::PAGE_TABLE_TEST));
    let times: Vec<_> = runs[..3].iter().map(|record| (record.phase, record.ns.0)).collect();
    let expected =
        [(Phase::Create, 1_371_008), (Phase::Update, 3_193_280), (Phase::Rebuild, 1_275_856)];
    assert_eq!((runs.len(), times.as_slice()), (6, &expected[..]));
    assert_eq!(runs[3].config.backing, Backing::Anonymous);
    let plain = CONSOLE.replace('\r', "");
    for prefix in ["# ", "[   12.345678] ", "<6>[ 1.2][ T9] ", "# # ", "\t"] {
        let prefixed: String = plain.lines().map(|l| format!("{prefix}{l}\n")).collect();
        assert_eq!(log::read(&prefixed).unwrap().records, runs, "{prefix}");
    }
}

#[test]
fn equal_runs_are_iterations() {
    let records = log::read(&CONSOLE.repeat(2)).unwrap().records;
    let iterations: Vec<_> = records.iter().map(|r| r.config.iteration).collect();
    assert_eq!(iterations, [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]);
    assert!(records.iter().all(|r| r.host == HostInfo::default()));
}

#[test]
fn bench_iterations_share_one_head_and_are_all_required() {
    let log = bench_log(8);
    let records = log::read(&log).unwrap().records;
    let create: Vec<_> = records.iter().step_by(3).map(|record| record.ns.0).collect();
    assert_eq!(create, [1, 2, 3, 4, 5, 6, 7, 8]);
    assert!(records.iter().all(|record| record.engine == engine::BENCH_LINES));
    assert_eq!(records[3].config.iteration, 1);
    let complete = log.rfind("granule: exec").unwrap();
    for (cut, _) in log[..complete - 2].match_indices('\n') {
        assert!(parse(&log[..cut]).is_err(), "{}", &log[..cut]);
    }
    assert_eq!(parse(&log[..complete]).unwrap(), parse(&log).unwrap(), "no figure is lost");
    for (words, nth, expected) in [
        (
            "granule: exec",
            2,
            "line 30: the run that begins here has no 'granule: iteration 4 of 8'",
        ),
        ("KVM_UPDATE", 2, "line 30: the run that begins here has no 'KVM_UPDATE_MAPPINGS'"),
    ] {
        let error = refusal(&log[..log.match_indices(words).nth(nth).unwrap().0]);
        assert!(error.starts_with(expected), "{error}");
    }
    let cut = &bench_log(3)[..bench_log(3).find("granule: iteration 3").unwrap()];
    let error = refusal(&format!("{cut}{}", bench_log(3)));
    assert!(error.contains("'granule: iteration 3 of 3'"), "{error}");
    assert_refused(
        &bench_log(3),
        &[
            ("iteration 2 of 3", "iteration 3 of 3", "iteration 3 follows 1"),
            ("iteration 2 of 3", "iteration 2 of 4", "an iteration of as many"),
            ("iteration 2 of 3", "iteration 2 von 3", "an iteration as N of M"),
            ("iteration 1 of 3", "iteration 9 of 3", "an iteration as N of M"),
        ],
    );
}

#[test]
fn a_log_that_ends_within_the_first_words_of_a_run_is_refused() {
    for log in [CONSOLE, PERF] {
        for part in ["Testi", "Testing guest", "Testing guest mode:"] {
            for prefix in ["", "[   12.5] ", "# "] {
                let error = refusal(&format!("{log}{prefix}{part}"));
                let line = format!("line {}: ", log.lines().count() + 1);
                assert!(error.starts_with(&line) && error.contains("is cut off"), "{error}");
            }
        }
        assert!(parse(&format!("{log}a test\n")).is_ok());
        assert!(parse(log.trim_end()).is_ok(), "a terminal's copy has no last line end");
    }
    let error = log::read(&format!("{CONSOLE}Testing guest mode: PA-b")).unwrap_err();
    assert!(error.to_string().starts_with("line 43: "), "{error}");
}

#[test]
fn a_log_that_is_cut_off_yields_no_wrong_figure() {
    let whole = log::read(CONSOLE).unwrap().records;
    for cut in 0..CONSOLE.len() {
        if let Ok(log) = log::read(&CONSOLE[..cut]) {
            assert!(whole.starts_with(&log.records), "cut at {cut}");
        }
    }
}

#[test]
fn defects_of_the_page_table_test_are_named_with_their_line() {
    let begin = "Testing guest mode: PA-bits:48,  VA-bits:48, 64K pages\r\n";
    let stray =
        "line 11: 'Testing memory backing src type: anonymous_hugetlb_2mb' belongs to no run";
    assert_refused(
        CONSOLE,
        &[
            ("0x800000", "0x8oo", "line 14: '0x8oo' is not a size"),
            ("vCPUs: 2", "vCPUs: two", "line 17: 'two' is not a number"),
            ("src type: anonymous\r", "src type: foil\r", "line 27: 'foil'"),
            ("0.003193280s", "0.0031", "line 21: '0.0031' is not a time"),
            ("KVM_UPDATE", "KVM_ADJUST", "line 23: 'KVM_ADJUST_MAPPINGS' is repeated"),
            ("KVM_UPDATE", "KVM_MELT", "line 21: 'KVM_MELT"),
            (begin, "", stray),
            ("exit 0", "==== Test Assertion Failure ====", "line 25: the test failed"),
        ],
    );
    for text in ["", "hello\nworld\n", "<html>", "KVM_CREATE_MAPPINGS\n"] {
        let error = log::read(text).unwrap_err().to_string();
        assert!(error.starts_with("holds no run of kvm_page_table_test"), "{error}");
    }
}

#[test]
fn both_perf_tests_are_read_from_one_console() {
    let log::Log { records, samples } = log::read(PERF).unwrap();

    let of = |engine: &str| -> Vec<(&str, f64)> {
        let samples = samples.iter().filter(|s| s.engine == engine);
        samples.map(|s| (s.phase.name(), s.ns / 1e3)).collect()
    };
    let dirty = [
        ("populate", 182_904.752),
        ("logging-on", 123.456),
        ("dirty-first", 110_523.456),
        ("get-first", 23.456),
        ("clear-first", 1523.456),
        ("dirty-later", 30_000.0),
        ("get-later", 18.0),
        ("clear-later", 1300.0),
        ("logging-off", 923.456),
    ];
    assert_eq!(of(engine::DIRTY_LOG_TEST)[..9], dirty);
    assert_eq!(of(engine::DEMAND_PAGING_TEST), [("demand-paging", 1_234_567.89)]);
    let last = samples.iter().rfind(|s| s.engine == engine::DIRTY_LOG_TEST);
    assert_eq!(last.unwrap().iteration, 1, "the second run");
    assert_eq!(records.len(), 3, "the page-table test's own");
}

#[test]
fn a_perf_log_that_is_cut_off_is_refused_with_its_line_and_the_missing_words() {
    let after_line = |at: usize| at + PERF[at..].find('\n').unwrap_or(PERF.len() - at);
    for (first, last) in [
        ("Populate", "Clear dirty log over"),
        ("[   12.001]", "Get dirty log over"),
        ("Finished creating", "Overall demand"),
    ] {
        let begin = PERF.find(first).unwrap();
        let end = after_line(begin + PERF[begin..].find(last).unwrap());
        for cut in after_line(begin)..end {
            let error = log::read(&PERF[..cut]).unwrap_err().to_string();
            assert!(error.starts_with("line "), "{error}");
        }
        assert!(log::read(&PERF[..end]).is_ok(), "{last}");
    }
    let clear = "line 4: the run that begins here has no 'Clear dirty log over N iterations took'";
    for (end, expected) in [
        (
            " took 0.000059456s. (Avg 0.000019",
            "line 20: 'Get dirty log over 3 iterations' is cut off",
        ),
        ("Clear dirty log over", clear),
        (
            "Overall demand",
            "line 48: the run that begins here has no 'Overall demand paging rate:'",
        ),
        (" pgs/sec/vcpu", "line 54: 'Per-vcpu demand paging rate:\t212345.678901' is cut off"),
    ] {
        let end = PERF.find(end).unwrap();
        let error = log::read(&PERF[..end]).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn defects_of_the_perf_tests_are_named_with_their_line() {
    let other_test = "line 7: the line is of another test";
    let time = "Enabling dirty logging time: ";
    assert_refused(
        PERF,
        &[
            ("Iteration 2 dirty", "Iteration 3 dirty", "line 13: iteration 3 follows 1"),
            (&format!("{time}0."), &format!("{time}x."), "line 7: 'x.000123456s'"),
            ("Iteration 2 get", "Iteration 1 get", "line 14: iteration 1 follows 2"),
            ("over 3 iterations", "over 4 iterations", "has no 'Iteration 4"),
            ("Iteration 2 clear dirty log", "lost", "has no 'clear dirty log time:'"),
            ("Populate memory time", "Total guest execution time", other_test),
        ],
    );
    let stray = log::read("Populate memory time: 0.182904752s\n").unwrap_err().to_string();
    assert!(stray.starts_with("line 1: ") && stray.contains("belongs to no run"), "{stray}");
}

#[test]
fn results_and_logs_in_one_text_are_refused_with_their_line() {
    let json = json_lines(&[record()]);
    for (content, expected) in [
        (format!("{CONSOLE}{json}"), "line 43: the line is JSON in a log"),
        (format!("{CONSOLE}  {{\"a\":\n"), "line 43: the line is JSON in a log"),
        (format!("# {json}{CONSOLE}"), "line 1: the line is JSON in a log"),
        (format!("{json}{CONSOLE}"), "line 2: not JSON"),
        (format!("hello\n{json}"), "line 1: not JSON"),
        (format!("\u{1b}[0m{json}"), "line 1: not JSON"),
    ] {
        let text = refusal(&content);
        assert!(text.contains(expected), "{text}");
    }
    let error = log::read(&format!("{CONSOLE}{json}")).unwrap_err().to_string();
    assert!(error.starts_with("line 43: the line is JSON in a log"), "{error}");
}

#[test]
fn terminal_escape_sequences_are_removed() {
    let noise = "\u{1b}]0;root@host: Testing guest mode: none\u{7}\u{1b}[1m# \u{1b}(B\u{1b}[m";
    let noisy: String =
        CONSOLE.lines().map(|line| format!("{noise}{line}\u{1b}(B\u{1b}[m\r\n")).collect();
    assert_eq!(parse(&noisy).unwrap(), parse(CONSOLE).unwrap());
    for (noisy, plain) in [
        ("\u{1b}[?25lhidden\u{1b}[?25h\r\n", "hidden\n"),
        ("\u{1b}]0;Testing guest mode: x\u{7}text", "text"),
        ("\u{9b}31mtext\u{9d}0;title\u{9c}", "text"),
        ("a\tb\u{8}\u{0}", "a\tb"),
        ("\u{1b}[3\u{fffd}1m", "\u{fffd}1m"),
        ("vCPUs: 16 \u{b5}s", "vCPUs: 16 \u{b5}s"),
    ] {
        assert_eq!(log_line::plain_text(noisy), plain, "{noisy:?}");
    }
    let title = "\u{1b}]0;title";
    for noise in ["\u{1b}", "\u{1b}[", "\u{1b}[12;", title, "\u{1b}(", "\u{1b}]\u{1b}"] {
        let text = log_line::plain_text(&format!("{noise}\ntext\n"));
        assert_eq!(text, "\ntext\n", "a broken sequence ends with its line: {noise:?}");
    }
}

#[test]
fn files_and_run_directories_are_read_or_refused_with_file_and_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let whole = json_lines(&runs(&[1, 2], &[3, 4]));
    let counted = record_lines(&runs(&[1], &[2])).unwrap();
    for (name, content, expected) in [
        ("empty", "", "is empty: run the test again"),
        ("blank", "\n \r\n", "is empty"),
        ("foreign", "<html></html>", "is neither results"),
        ("other.json", "{\"a\": 1}", "line 1: its schema is ''"),
        ("cut", &whole[..whole.len() - 20], "line 4: the record is cut off"),
        ("counted", counted.lines().next().unwrap(), "line 1: the record announces 1 more, but"),
        ("log", &CONSOLE[..CONSOLE.rfind("KVM_ADJUST").unwrap()], "has no 'KVM_ADJUST_MAPPINGS'"),
    ] {
        fs::write(path(name), content).unwrap();
        let text = with_cause(&read_side(&[path(name)]).unwrap_err());
        assert!(text.contains(expected) && text.contains(name), "{text}");
    }
    let refusal = |path: PathBuf| with_cause(&read_side(&[path]).unwrap_err());
    assert!(refusal(path("absent")).contains("cannot read"));
    assert!(refusal(dir.path().into()).contains("holds no results.jsonl"));

    fs::write(path(RESULTS_FILE), json_lines(&[record()])).unwrap();
    assert_eq!(read_results(&path(RESULTS_FILE)).unwrap(), [record()]);
    assert_eq!(read_results(dir.path()).unwrap(), [record()]);
    assert_eq!(read_side(&[dir.path().into()]).unwrap(), sample::samples(&[record()]));
    let stray_bytes = [b"\xff\xfe\x1b[0m boot\n", CONSOLE.as_bytes()].concat();
    fs::write(path("console.log"), stray_bytes).unwrap();
    assert_eq!(read_side(&[path("console.log")]).unwrap().len(), 6);
}

#[test]
fn the_last_result_and_a_baseline_of_criterion_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let folder = |name: &str| dir.path().join("table/map").join(name);
    for (name, time) in [("new", 30.0), ("main", 20.0)] {
        fs::create_dir_all(folder(name)).unwrap();
        let about = r#"{"group_id":"table","full_id":"table/map 4K"}"#;
        let samples = format!(r#"{{"iters":[10,10],"times":[{time},{time}]}}"#);
        fs::write(folder(name).join("benchmark.json"), about).unwrap();
        fs::write(folder(name).join("sample.json"), samples).unwrap();
    }
    let read = |path: &Path| criterion::read(path).map(Option::unwrap_or_default);
    let last = read(dir.path()).unwrap();
    let baseline = read(Path::new(&format!("{}@main", dir.path().display()))).unwrap();

    assert_eq!((last.len(), last[0].setup.subject.as_str()), (2, "table/map 4K"));
    assert_eq!((last[0].ns, baseline[0].ns), (3.0, 2.0));
    assert!(read(&folder("none")).unwrap().is_empty());
    for damaged in [
        "",
        "{}",
        r#"{"iters":[1.0],"times":[]}"#,
        r#"{"iters":[0.0],"times":[1.0]}"#,
        r#"{"iters":[],"times":[]}"#,
    ] {
        fs::write(folder("new").join("sample.json"), damaged).unwrap();
        let error = read(dir.path()).unwrap_err().to_string();
        assert!(error.contains("new/sample.json: "), "{error}");
    }
    fs::write(folder("new").join("benchmark.json"), "{}").unwrap();
    assert!(read(dir.path()).unwrap_err().to_string().contains("new/benchmark.json: "));
}

/// Texts to insert into an input.
const INSERTIONS: [&str; 18] = [
    "Testing guest mode: ",
    "Iteration 4294967295 dirty memory time: 0.000000001s\n",
    "KVM_CREATE_MAPPINGS: total execution time: 18446744073.709551615s\n",
    "Number of testing vCPUs: 99999999999\n",
    "granule: iteration 4294967295 of 4294967295\n",
    "Get dirty log over 0 iterations took ",
    "granule: iteration ",
    "\u{1b}[31m",
    "\u{1b}[",
    "\u{1b}]0;",
    "\u{1b}(B",
    "\u{feff}{",
    "\u{7}",
    "\r\n",
    "\n",
    "0x",
    "-1",
    "1e999",
];

/// Replaces `length` bytes at `at` with one of [`INSERTIONS`], or with `piece` bytes of an input
/// that start at `from`.
fn mutate(bytes: &mut Vec<u8>, at: Index, length: usize, words: bool, from: Index, piece: usize) {
    let at = at.index(bytes.len() + 1);
    let end = bytes.len().min(at.saturating_add(length));
    let inserted = if words {
        INSERTIONS[from.index(INSERTIONS.len())].as_bytes().to_vec()
    } else {
        let inputs = [CONSOLE.as_bytes(), PERF.as_bytes(), b"0123456789.s-\n\xff\x80"].concat();
        let start = from.index(inputs.len());
        inputs[start..].iter().copied().take(piece).collect()
    };
    bytes.splice(at..end, inserted);
}

#[test]
fn mutated_inputs_are_read_or_refused_and_compare_with_themselves() {
    let inputs = [
        CONSOLE.into(),
        PERF.into(),
        json_lines(&with_series(runs(&[1, 2], &[3, 4]))).into_bytes(),
        br#"{"sampling_mode":"Linear","iters":[10.0,20.0],"times":[15.0,31.0]}"#.to_vec(),
    ];
    let mut config = ProptestConfig::default();
    config.cases = config.cases.max(8_000);
    let length = || prop_oneof![0..2_usize, 0..200_usize];
    let lengths = prop_oneof![4 => length(), 1 => Just(usize::MAX)];
    let edit_values = (any::<Index>(), lengths, any::<bool>(), any::<Index>(), length());
    let edits = prop::collection::vec(edit_values, 1..5);
    let read = Cell::new(0);
    let outcome = TestRunner::new(config).run(&(0..inputs.len(), edits), |(input, edits)| {
        let mut bytes = inputs[input].clone();
        for (at, length, words, from, piece) in edits {
            mutate(&mut bytes, at, length, words, from, piece);
        }
        let text = String::from_utf8_lossy(&bytes);
        let _ = serde_json::from_str::<criterion::SampleFile>(&text).map(|file| file.mean_times());
        let Ok(samples) = parse(&text) else {
            return Ok(());
        };
        prop_assert!(!samples.is_empty(), "neither samples nor an error");
        read.set(read.get() + 1);
        if read.get() % 64 == 0
            && let Ok(comparison) =
                Comparison::new(&samples, &samples, &ComparisonOptions::default())
        {
            prop_assert_eq!(comparison.count(Verdict::Regression), 0);
            prop_assert!(!render::text(&comparison).is_empty());
        }
        Ok(())
    });
    outcome.unwrap();
    assert!(read.get() > 100, "only {} inputs are readable: mutate less", read.get());
}
