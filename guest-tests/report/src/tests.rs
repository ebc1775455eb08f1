// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use crate::{
    fixture::{patched, record, runs},
    input::page_table_log,
    *,
};
use granule_types::{
    phase::Phase,
    record::{Host, Record},
};

/// With 3% as the least effect.
fn options() -> Options {
    Options {
        min_effect: Some(0.03),
        ..Options::default()
    }
}

fn compare_by(
    before: &[Record],
    after: &[Record],
    options: &Options,
) -> Result<Comparison, CompareError> {
    Comparison::of(&samples(before), &samples(after), options)
}

fn compare(before: &[Record], after: &[Record]) -> Result<Comparison, CompareError> {
    compare_by(before, after, &options())
}

fn pair() -> (Vec<Record>, Vec<Record>) {
    let before = runs(&[42_209, 40_100, 43_000], &[522_255, 519_000, 530_000]);
    let after = patched(runs(
        &[12_613, 11_900, 13_000],
        &[560_000, 559_000, 571_500],
    ));
    (before, after)
}

/// The text of a golden file; run with `GOLDEN=write` to make it anew, then read the difference.
fn golden(name: &str, text: &str) {
    let path = format!("{}/golden/{name}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("GOLDEN").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    assert_eq!(text, std::fs::read_to_string(&path).unwrap(), "{name}");
}

#[test]
fn medians_of_each_phase_are_set_against_each_other() {
    let (before, after) = pair();

    let comparison = compare(&before, &after).unwrap();

    let phases = &comparison.configurations[0].phases;
    assert_eq!(phases[0].phase, Phase::Create.into());
    let time = phases[0].time;
    let before = time.before.unwrap();
    assert_eq!(
        (before.median, before.min, before.max),
        (42_209e3, 40_100e3, 43_000e3)
    );
    assert_eq!((before.q1, before.runs), (41_154.5e3, 3));
    assert_eq!(time.after.unwrap().median, 12_613e3);
    assert!((time.ratio.unwrap() - 0.2988).abs() < 1e-4);
    assert_eq!(comparison.regressions().count(), 1);
}

#[test]
fn it_prints_as_it_always_did() {
    let (before, after) = pair();
    let options = Options {
        labels: ["base".to_owned(), "stage2-fault-path".to_owned()],
        ..options()
    };
    let comparison = compare_by(&before, &after, &options).unwrap();

    golden("pair.txt", &render::text(&comparison));
    golden("pair.md", &render::markdown(&comparison));
    golden("pair.json", &render::json(&comparison).unwrap());
}

#[test]
fn one_run_of_a_raw_log_prints_with_its_caveats() {
    let log = include_str!("../golden/console.log");
    let before = page_table_log::records(&page_table_log::read(log).unwrap());
    let faster = log.replace("0.003193280s", "0.001000000s");
    let after = page_table_log::records(&page_table_log::read(&faster).unwrap());

    let comparison = compare(&before, &after).unwrap();

    golden("raw.txt", &render::text(&comparison));
}

#[test]
fn text_fits_into_a_mail() {
    let (mut before, mut after) = pair();
    for record in before.iter_mut().chain(&mut after) {
        record
            .counters
            .insert("TLBI RVAALE1ISNXS and then some".to_owned(), 7);
        record.host.emulator = Some("QEMU 7.2.22 ".to_owned() + &"-option value ".repeat(20));
    }
    let text = render::text(&compare(&before, &after).unwrap());

    for line in text.lines() {
        assert!(line.len() <= 75, "{line}");
    }
}

#[test]
fn text_fits_into_a_mail_whatever_it_is_given() {
    let (mut before, mut after) = pair();
    for records in [&mut before, &mut after] {
        let mut rounds = Vec::new();
        for (round, vcpus) in (1..=9).flat_map(|round| [(round, 4), (round, 8)]) {
            for mut record in records.iter().filter(|r| r.phase == Phase::Create).cloned() {
                record.phase = Phase::Round;
                record.round = Some(round);
                record.config.vcpus = vcpus;
                let options = [("migrate", "4"), ("a-long-option", "and-a-long-value")];
                let options = options.map(|(name, value)| (name.to_owned(), value.repeat(3)));
                record.config.options = options.into();
                record.counters.insert("long_name_".repeat(9), 7);
                rounds.push(record);
            }
        }
        *records = rounds;
    }
    let options = Options {
        labels: ["/a/path/of/one/word".repeat(9), "b".to_owned()],
        ..Options::default()
    };
    let comparison = Comparison::of(&samples(&before), &samples(&after), &options).unwrap();
    let text = render::text(&comparison);

    for line in text.lines() {
        assert!(line.len() <= 75, "{line}");
    }
    let overview = text
        .split("Time after through time before:")
        .nth(1)
        .unwrap();
    for round in 1..=9 {
        assert_eq!(
            overview.matches(&format!(" round-{round}\n")).count()
                + overview.matches(&format!(" round-{round} ")).count(),
            1,
            "{text}"
        );
    }
}

#[test]
fn nothing_that_is_read_commands_whoever_reads_the_output() {
    let (mut before, mut after) = pair();
    let hostile = "x\u{1b}[31m\r\nnot ok 7 forged\n| a | b &lt; ~~c~~ \u{202e}\u{85}\0";
    for record in before.iter_mut().chain(&mut after) {
        let host = &mut record.host;
        for word in [&mut host.cpu, &mut host.emulator] {
            *word = Some(hostile.to_owned());
        }
        host.kernel += hostile;
        host.arch = hostile.to_owned();
        host.features = [(hostile.to_owned(), 1)].into();
        record.engine = hostile.to_owned();
        record.config.mode = hostile.to_owned();
        record.config.options = [(hostile.to_owned(), hostile.to_owned())].into();
        record.counters.insert(hostile.to_owned(), 7);
        record.events.insert(hostile.to_owned(), 7);
        record.gauges.insert(hostile.to_owned(), 7);
    }
    let options = Options {
        labels: [hostile.to_owned(), hostile.to_owned()],
        ..Options::default()
    };
    let comparison = Comparison::of(&samples(&before), &samples(&after), &options).unwrap();

    let markdown = render::markdown(&comparison);
    for text in [
        render::text(&comparison),
        markdown.clone(),
        render::html(&comparison),
        render::csv(&comparison),
        render::json(&comparison).unwrap(),
        render::ktap(&comparison),
        render::benchstat(&comparison),
    ] {
        let bad = |c: char| c != '\n' && c.is_control() || c == '\u{202e}';
        assert!(!text.contains(bad), "{text:?}");
        assert!(
            !text.contains("\nnot ok 7") && !text.contains("\n| a"),
            "{text}"
        );
    }
    assert!(markdown.contains("\\&lt; \\~\\~c"), "{markdown}");
}

#[test]
fn a_regression_begins_behind_the_least_effect() {
    let verdicts = |us: u64| {
        let before = runs(&[100_000; 2], &[]);
        let comparison = compare(&before, &patched(runs(&[us; 2], &[]))).unwrap();
        comparison.regressions().count()
    };
    assert_eq!(
        [102_999, 103_000, 103_100, 90_000].map(verdicts),
        [0, 0, 1, 0]
    );
}

#[test]
fn a_timer_tick_more_under_emulation_is_no_regression() {
    let verdicts = |us: u64| {
        let comparison = compare(&runs(&[20; 2], &[]), &patched(runs(&[us; 2], &[]))).unwrap();
        comparison.regressions().count()
    };
    assert_eq!([75, 79, 81].map(verdicts), [0, 0, 1]);
}

#[test]
fn one_run_is_no_regression_and_no_acquittal() {
    let comparison = compare(&runs(&[100_000], &[]), &patched(runs(&[150_000], &[]))).unwrap();

    assert_eq!(comparison.regressions().count(), 0);
    assert_eq!(comparison.count(Verdict::CannotTell), 1);
    assert_eq!(comparison.configurations[0].phases[0].time.ratio, Some(1.5));
    assert!(render::text(&comparison).contains("One run proves nothing"));
}

#[test]
fn a_count_can_be_what_is_judged() {
    let (before, after) = pair();
    let by = |metric: &str| Options {
        metric: Some(metric.to_owned()),
        ..options()
    };

    let fewer = compare_by(&before, &after, &by("DC CIVAC")).unwrap();
    let once = compare_by(&after[..1], &before[..1], &by("DC CIVAC")).unwrap();
    let nothing = compare_by(&before, &after, &by("DC ZVA")).unwrap_err();

    let verdict =
        |comparison: &Comparison, at: usize| comparison.configurations[0].phases[at].verdict;
    assert_eq!(verdict(&fewer, 0), Some(Verdict::Better));
    assert_eq!(verdict(&fewer, 1), Some(Verdict::Worse));
    assert_eq!(verdict(&once, 0), Some(Verdict::Worse), "counts are exact");
    assert!(
        nothing.to_string().contains("choose one of DC CIVAC, TLBI"),
        "{nothing}"
    );
}

#[test]
fn phases_can_be_chosen() {
    let (before, after) = pair();
    let of = |phase: &str| Options {
        phases: vec![phase.to_owned()],
        ..options()
    };
    let comparison = compare_by(&before, &after, &of("create")).unwrap();
    assert_eq!(comparison.rows().count(), 1);
    assert_eq!(comparison.regressions().count(), 0);
    let error = compare_by(&before, &after, &of("exec")).unwrap_err();
    assert!(
        error.to_string().starts_with("none of exec of any"),
        "{error}"
    );
}

#[test]
fn runs_in_turns_are_paired_and_must_be_as_many() {
    let ramp: Vec<u64> = (1..=8).map(|at| at * 100_000).collect();
    let slower: Vec<u64> = ramp.iter().map(|us| us * 11 / 10 + us % 7).collect();
    let real = |times: &[u64]| {
        let mut records = runs(times, &[]);
        for record in &mut records {
            record.host.emulator = None;
        }
        records
    };
    let paired = Options {
        paired: true,
        ..options()
    };

    let found = compare_by(&real(&ramp), &patched(real(&slower)), &paired).unwrap();
    let alone = compare(&real(&ramp), &patched(real(&slower))).unwrap();
    let uneven = compare_by(&real(&ramp), &patched(real(&slower[1..])), &paired);

    assert_eq!(found.regressions().count(), 1);
    assert_eq!(alone.count(Verdict::CannotTell), 1);
    assert!(matches!(uneven, Err(CompareError::Unpaired(_))));
}

#[test]
fn every_format_says_the_same() {
    let (before, after) = pair();
    let comparison = compare(&before, &after).unwrap();

    let csv = render::csv(&comparison);
    let ktap = render::ktap(&comparison);
    let benchstat = render::benchstat(&comparison);

    let columns: Vec<usize> = csv.lines().map(|line| line.split(',').count()).collect();
    assert!(
        columns[1..].iter().all(|&count| count == columns[0] + 2),
        "the mode has two commas"
    );
    assert!(csv.contains("create,time,42209000,"), "{csv}");
    assert!(
        csv.lines()
            .any(|line| line.contains("update,time") && line.ends_with(",worse"))
    );
    assert!(ktap.starts_with("KTAP version 1\n1..2\n"), "{ktap}");
    assert!(
        ktap.contains("\nok 1 anonymous_hugetlb_2mb 64M 16 vCPUs create\n"),
        "{ktap}"
    );
    assert!(
        ktap.contains("\nnot ok 2 anonymous_hugetlb_2mb 64M 16 vCPUs update\n"),
        "{ktap}"
    );
    let lines = benchstat
        .lines()
        .filter(|line| line.starts_with("Benchmark"));
    assert_eq!(lines.count(), 12);
    assert!(
        benchstat.contains("/phase=create/") && benchstat.contains("/vcpus=16 1 42209000 ns/op")
    );
}

#[test]
fn only_counts_that_occur_are_shown_and_uncounted_is_not_zero() {
    let before = vec![record()];
    let mut after = vec![record()];
    after[0].counters.remove("TLBI VMALLS12E1IS");
    after[0].counters.insert("TLBI IPAS2E1IS".to_owned(), 5);
    after[0].events.clear();

    let comparison = compare(&before, &after).unwrap();

    let phase = &comparison.configurations[0].phases[0];
    let names: Vec<_> = phase.counters.keys().collect();
    assert_eq!(names, ["DC CIVAC", "TLBI IPAS2E1IS", "TLBI VMALLS12E1IS"]);
    assert_eq!(
        phase.counters["TLBI VMALLS12E1IS"].after.unwrap().median,
        0.0
    );
    assert_eq!(phase.counters["TLBI IPAS2E1IS"].before.unwrap().median, 0.0);
    assert_eq!(phase.events["kvm_guest_fault"].after, None);
}

#[test]
fn unequal_provenance_is_refused_unless_forced() {
    let before = vec![record()];
    let mut after = vec![record()];
    after[0].host.cpu = Some("cortex-a72".to_owned());
    after[0].host.page_size = None;

    let refused = compare(&before, &after).unwrap_err();
    let options = Options {
        force: true,
        ..options()
    };
    let forced = compare_by(&before, &after, &options).unwrap();

    assert!(matches!(&refused, CompareError::Unequal(list) if list.len() == 2));
    let text = refused.to_string();
    assert!(
        text.contains("\n  CPU: neoverse-n1 before, cortex-a72 after\n"),
        "{text}"
    );
    assert!(
        text.contains("\n  base page: 4K before, unknown after\n"),
        "{text}"
    );
    assert_eq!(forced.differences.len(), 2);
    assert!(render::text(&forced).contains("by force"));
}

#[test]
fn results_without_a_host_are_refused_on_both_sides_too() {
    let mut records = vec![record()];
    records[0].host = Host::default();

    assert!(matches!(
        compare(&records, &records),
        Err(CompareError::Unequal(_))
    ));
}

#[test]
fn a_raw_log_against_results_takes_force() {
    let mut log = vec![record()];
    log[0].host = Host::default();
    log[0].engine = page_table_log::ENGINE.to_owned();
    let options = Options {
        force: true,
        ..options()
    };

    assert!(matches!(
        compare(&log, &[record()]),
        Err(CompareError::Unequal(_))
    ));
    assert!(compare_by(&log, &[record()], &options).is_ok());
}

#[test]
fn logs_of_different_tests_take_force() {
    let log = |engine: &str| {
        let mut log = vec![record()];
        log[0].host = Host::default();
        log[0].obtained = None;
        log[0].engine = engine.to_owned();
        log
    };
    let (theirs, ours) = (
        log(page_table_log::ENGINE),
        log(page_table_log::BENCH_ENGINE),
    );

    assert!(compare(&ours, &ours).is_ok());
    let refused = compare(&theirs, &ours).unwrap_err();
    assert!(matches!(refused, CompareError::Unequal(list) if list.len() == 1));
}

#[test]
fn the_kernels_test_and_ours_are_not_mixed() {
    let mut theirs = record();
    theirs.engine = page_table_log::ENGINE.to_owned();
    theirs.ns.0 *= 2;
    let both = [record(), theirs];

    let comparison = compare(&both, &both).unwrap();

    assert_eq!(comparison.configurations.len(), 2);
    assert!(
        comparison
            .configurations
            .iter()
            .all(|c| c.phases[0].time.ratio == Some(1.0))
    );
}

#[test]
fn the_counts_of_a_foreign_test_are_those_of_the_whole() {
    let mut create = record();
    create.counters.clear();
    let mut whole = record();
    whole.phase = Phase::Whole;
    let records = [whole, create];

    let comparison = compare(&records, &records).unwrap();

    let phases = &comparison.configurations[0].phases;
    assert_eq!(
        [&phases[0].phase, &phases[1].phase],
        [&Phase::Create.into(), &Phase::Whole.into()]
    );
    assert!(phases[0].counters.is_empty());
    assert_eq!(phases[1].counters.len(), 2);
}

#[test]
fn what_stands_on_one_side_only_is_named() {
    let mut other = record();
    other.config.vcpus = 4;
    let mut before = runs(&[10], &[20]);
    before.push(other);
    let after = patched(runs(&[10], &[]));

    let comparison = compare(&before, &after).unwrap();

    let wanted = "Only in before, not compared: update of anonymous_hugetlb_2mb, 64M, 16 vCPUs; \
                  anonymous_hugetlb_2mb, 64M, 4 vCPUs.";
    assert!(
        comparison.notes.iter().any(|note| note == wanted),
        "{:?}",
        comparison.notes
    );
}

#[test]
fn nothing_in_common_or_nothing_at_all_is_an_error() {
    let mut other = record();
    other.config.vcpus = 4;

    let error = compare(&[record()], &[other]).unwrap_err();

    assert!(
        error
            .to_string()
            .contains("16 vCPUs. After: anonymous_hugetlb_2mb, 64M, 4 vCPUs")
    );
    assert!(matches!(
        compare(&[], &[record()]),
        Err(CompareError::Empty(_))
    ));
}
