// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whole, cut and damaged logs.

use super::*;

const LOG: &str = include_str!("../../../golden/perf.log");

fn steps(samples: &[Sample]) -> Vec<(&str, f64)> {
    samples.iter().map(|s| (s.step.name(), s.ns / 1e3)).collect()
}

#[test]
fn both_tests_are_read_from_one_console() {
    let (rest, samples) = take(LOG).unwrap();

    let [dirty, demand] = [engine::DIRTY_LOG_TEST, engine::DEMAND_PAGING_TEST].map(|engine| {
        let of = samples.iter().filter(|s| s.engine == engine).cloned();
        of.collect::<Vec<_>>()
    });
    assert_eq!(
        steps(&dirty)[..9],
        [
            ("populate", 182_904.752),
            ("logging-on", 123.456),
            ("dirty-first", 110_523.456),
            ("get-first", 23.456),
            ("clear-first", 1523.456),
            ("dirty-later", 30_000.0),
            ("get-later", 18.0),
            ("clear-later", 1300.0),
            ("logging-off", 923.456),
        ]
    );
    assert_eq!(dirty.last().unwrap().iteration, 1, "the second run");
    assert_eq!(steps(&demand), [("demand-paging", 1_234_567.89)]);
    assert_eq!(rest.lines().count(), LOG.lines().count());
    assert_eq!(page_table_log::read(&rest).unwrap().len(), 1, "the page-table test's own");
}

#[test]
fn a_run_that_is_cut_off_is_refused() {
    let whole = |from: &str, last: &str| {
        let begin = LOG.find(from).unwrap();
        begin + LOG[begin..].find(last).unwrap()
    };
    let line = |at: usize| at + LOG[at..].find('\n').unwrap_or(LOG.len() - at);
    for (first, last) in [
        ("Populate", "Clear dirty log over"),
        ("[   12.001]", "Get dirty log over"),
        ("Finished creating", "Overall demand"),
    ] {
        let from = line(LOG.find(first).unwrap());
        let end = line(whole(first, last));
        for cut in from..end {
            let error = take(&LOG[..cut]).map(|_| &LOG[from..cut]).unwrap_err();
            assert!(error.to_string().starts_with("line "), "{error}");
        }
        assert!(take(&LOG[..end]).is_ok(), "{last}");
    }
}

#[test]
fn a_cut_is_named_with_its_line_and_the_missing_words() {
    for (end, wanted) in [
        (823, "line 20: 'Get dirty log over 3 iterations' is cut off"),
        (
            LOG.find("Clear dirty log over").unwrap(),
            "line 4: the run that begins here has no 'Clear dirty log over N iterations took'",
        ),
        (
            LOG.find("Overall demand").unwrap(),
            "line 48: the run that begins here has no 'Overall demand paging rate:'",
        ),
        (
            LOG.find(" pgs/sec/vcpu").unwrap(),
            "line 54: 'Per-vcpu demand paging rate:\t212345.678901' is cut off",
        ),
    ] {
        let error = take(&LOG[..end]).unwrap_err().to_string();
        assert!(error.starts_with(wanted), "{error}");
    }
}

#[test]
fn defects_are_named_with_their_line() {
    for (from, to, wanted) in [
        ("Iteration 2 dirty", "Iteration 3 dirty", "line 13: iteration 3 follows 1"),
        (
            "Enabling dirty logging time: 0.",
            "Enabling dirty logging time: x.",
            "line 7: 'x.000123456s'",
        ),
        ("Iteration 2 get", "Iteration 1 get", "line 14: iteration 1 follows 2"),
        ("over 3 iterations", "over 4 iterations", "has no 'Iteration 4"),
        ("Iteration 2 clear dirty log", "lost", "has no 'clear dirty log time:'"),
        (
            "Populate memory time",
            "Total guest execution time",
            "line 7: the line is of another test",
        ),
    ] {
        let damaged = LOG.replacen(from, to, 1);
        assert_ne!(damaged, LOG, "{from}");
        let error = take(&damaged).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
    let stray = take("Populate memory time: 0.182904752s\n").unwrap_err();
    assert!(matches!(stray, LogError::Line(1, LogDefect::Stray(_))));
}
