// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use proptest::prelude::*;

use super::*;

/// Console of a lab host with carriage returns: two runs of the test from Linux 6.1.
const CONSOLE: &str = include_str!("../../../golden/console.log");

#[test]
fn every_run_of_a_console_is_read() {
    let runs = read(CONSOLE).unwrap();

    assert_eq!(runs.len(), 2);
    assert_eq!(
        runs[0],
        Run {
            line: 11,
            engine: engine::PAGE_TABLE_TEST,
            mode: "PA-bits:48,  VA-bits:48, 64K pages".to_owned(),
            backing: "anonymous_hugetlb_2mb".parse().unwrap(),
            memory: Bytes::mib(8),
            vcpus: 2,
            times: [
                (Phase::Create, Nanoseconds(1_371_008)),
                (Phase::Update, Nanoseconds(3_193_280)),
                (Phase::Rebuild, Nanoseconds(1_275_856)),
            ],
        }
    );
    assert_eq!(runs[1].backing, Backing::Anonymous);
}

#[test]
fn prefixes_and_line_ends_are_ignored() {
    let plain = CONSOLE.replace('\r', "");
    for prefix in ["# ", "[   12.345678] ", "<6>[ 1.2][ T9] ", "# # ", "\t"] {
        let prefixed: String = plain.lines().map(|l| format!("{prefix}{l}\n")).collect();
        assert_eq!(read(&prefixed), read(CONSOLE), "{prefix}");
    }
}

#[test]
fn equal_runs_are_iterations() {
    let runs = read(&format!("{CONSOLE}\n{CONSOLE}")).unwrap();

    let records = records(&runs);

    let iterations: Vec<_> = records.iter().map(|r| r.config.iteration).collect();
    assert_eq!(iterations, [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]);
    assert!(
        records.iter().all(|r| r.host == Host::default() && r.engine == engine::PAGE_TABLE_TEST)
    );
}

#[test]
fn iterations_of_the_bench_share_one_head() {
    let times = |create: u64| {
        format!(
            "KVM_CREATE_MAPPINGS: total execution time: 0.{create:09}s\n\n\
             granule: logging-on took 0.000000007s\n\n\
             KVM_UPDATE_MAPPINGS: total execution time: 0.000000002s\n\n\
             KVM_ADJUST_MAPPINGS: total execution time: 0.000000003s\n\n"
        )
    };
    let head = "Testing guest mode: m\nTesting memory backing src type: shmem\n\
                Testing memory size(aligned): 0x1000\nNumber of testing vCPUs: 1\n";
    let log = format!(
        "{head}granule: iteration 1 of 2\n{}granule: iteration 2 of 2\n{}",
        times(1),
        times(5)
    );

    let runs = read(&log).unwrap();

    let create: Vec<_> = runs.iter().map(|run| run.times[0].1.0).collect();
    assert_eq!(create, [1, 5]);
    assert!(runs.iter().all(|run| run.engine == engine::BENCH_LINES));
    assert_eq!(records(&runs)[3].config.iteration, 1);
}

/// Returns the lines of `granule bench -i N`.
fn bench(iterations: u32) -> String {
    let mut log = "Testing guest mode: m\nTesting memory backing src type: shmem\n\
                   Testing memory size(aligned): 0x1000\nNumber of testing vCPUs: 1\n\
                   Started all vCPUs successfully\n"
        .to_owned();
    for iteration in 1..=iterations {
        if iterations > 1 {
            log += &format!("granule: iteration {iteration} of {iterations}\n");
        }
        log += "KVM_CREATE_MAPPINGS: total execution time: 0.000000001s\n\n\
                granule: logging-on took 0.000000007s\n\n\
                KVM_UPDATE_MAPPINGS: total execution time: 0.000000002s\n\n\
                KVM_ADJUST_MAPPINGS: total execution time: 0.000000003s\n\n\
                granule: exec took 0.000000004s\n\n\
                granule: unmap took 0.000000005s\n";
    }
    log
}

#[test]
fn iterations_cut_off_anywhere_are_refused() {
    let log = bench(8);
    assert_eq!(read(&log).unwrap().len(), 8);
    for (cut, _) in log.match_indices('\n') {
        let cut = &log[..cut];
        if cut.len() + 1 < log.len() {
            assert!(read(cut).is_err(), "{cut}");
        }
    }
    let end = |words: &str, nth: usize| log.match_indices(words).nth(nth).unwrap().0;
    for (cut, wanted) in [
        (
            end("granule: exec", 2),
            "line 30: the run that begins here has no 'granule: iteration 4 of 8'",
        ),
        (end("KVM_UPDATE", 2), "line 30: the run that begins here has no 'KVM_UPDATE_MAPPINGS'"),
        (
            end("granule: unmap", 7),
            "line 90: the run that begins here has no 'granule: unmap took'",
        ),
    ] {
        let error = read(&log[..cut]).unwrap_err().to_string();
        assert!(error.starts_with(wanted), "{error}");
    }
}

#[test]
fn a_head_with_too_few_iterations_is_refused_at_any_place() {
    let cut = bench(3);
    let cut = &cut[..cut.find("granule: iteration 3").unwrap()];

    let error = read(&format!("{cut}{}", bench(3))).unwrap_err();

    assert!(error.to_string().contains("'granule: iteration 3 of 3'"), "{error}");
    for (from, to, wanted) in [
        ("iteration 2 of 3", "iteration 3 of 3", "iteration 3 follows 1"),
        ("iteration 2 of 3", "iteration 2 of 4", "an iteration of as many"),
        ("iteration 2 of 3", "iteration 2 von 3", "an iteration as N of M"),
        ("iteration 1 of 3", "iteration 9 of 3", "an iteration as N of M"),
    ] {
        let error = read(&bench(3).replace(from, to)).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn runs_of_the_bench_may_differ_in_their_own_phases_but_not_be_cut_off() {
    let few = bench(1).replace("granule: exec took 0.000000004s\n", "");
    let cut = &few[..few.find("granule: unmap").unwrap()];

    assert_eq!(read(&(bench(1) + &few)).unwrap().len(), 2, "--phases without exec");
    assert_eq!(read(&(few.clone() + &bench(1))).unwrap().len(), 2, "the last one has more");
    let error = read(&(few.clone() + cut)).unwrap_err().to_string();
    assert!(error.contains("has no 'granule: unmap took'"), "{error}");
}

#[test]
fn a_log_that_ends_within_a_head_is_refused() {
    for part in ["Testi", "Testing guest", "Testing guest mode:", "Testing guest mode: PA-b"] {
        for prefix in ["", "[   12.5] ", "# "] {
            let error = read(&format!("{CONSOLE}{prefix}{part}")).unwrap_err().to_string();
            let ends = error.contains("is cut off");
            assert!(error.starts_with("line 43: ") && ends, "{error}");
        }
    }
    assert!(read(&format!("{CONSOLE}a test\n")).is_ok());
    assert!(read(CONSOLE.trim_end()).is_ok(), "a terminal's copy has no last line end");
}

#[test]
fn lines_of_json_are_refused() {
    for line in
        ["{\"schema\":\"granule.result/1\"}", "  {\"a\":", "# {\"schema\":\"granule.result/1\"}"]
    {
        let after = read(&format!("{CONSOLE}{line}\n")).unwrap_err();
        let before = read(&format!("{line}\n{CONSOLE}")).unwrap_err();

        assert_eq!((after, before), (LogDefect::Json.at(43), LogDefect::Json.at(1)));
    }
}

#[test]
fn a_log_that_is_cut_off_yields_no_wrong_figure() {
    let whole = read(CONSOLE).unwrap();
    for cut in 0..CONSOLE.len() {
        if let Ok(runs) = read(&CONSOLE[..cut]) {
            assert!(whole.starts_with(&runs), "cut at {cut}");
        }
    }
}

#[test]
fn defects_are_named_with_their_line() {
    for (from, to, wanted) in [
        ("0x800000", "0x8oo", "line 14: '0x8oo' is not a size"),
        ("vCPUs: 2", "vCPUs: two", "line 17: 'two' is not a number"),
        ("src type: anonymous\r", "src type: foil\r", "line 27: 'foil'"),
        ("0.003193280s", "0.0031", "line 21: '0.0031' is not a time"),
        ("KVM_UPDATE", "KVM_ADJUST", "line 23: 'KVM_ADJUST_MAPPINGS' is repeated"),
        ("KVM_UPDATE", "KVM_MELT", "line 21: 'KVM_MELT"),
        (
            "Testing guest mode: PA-bits:48,  VA-bits:48, 64K pages\r\n",
            "",
            "line 11: 'Testing memory backing src type: anonymous_hugetlb_2mb' belongs to no run",
        ),
        ("exit 0", "==== Test Assertion Failure ====", "line 25: the test failed"),
    ] {
        let error = read(&CONSOLE.replacen(from, to, 1)).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
    let cut = CONSOLE.find("KVM_UPDATE").unwrap();
    let error = read(&CONSOLE[..cut]).unwrap_err().to_string();
    assert!(error.contains("line 11: the run that begins here has no 'KVM_UPDATE_MAPPINGS'"));
}

#[test]
fn a_text_of_another_kind_has_no_run() {
    for text in ["", "hello\nworld\n", "<html>", "KVM_CREATE_MAPPINGS\n"] {
        assert_eq!(read(text), Err(LogError::NoRun));
    }
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "\\PC*") {
        let _ = read(&text);
    }
}
