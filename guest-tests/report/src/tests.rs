// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of whole comparisons (verdicts, provenance, formats), and the results that tests share.

mod cover;
mod geometric_means;
mod growth;
mod judgements;
mod programs;
mod seeds;
mod setup_fields;

use std::slice;

use granule_types::{
    phase::Phase,
    record::{HostInfo, Record, ResidentPages, RunConfig, SCHEMA, Series},
    units::{Bytes, Nanoseconds},
};

use crate::{
    CompareError, Comparison, ComparisonOptions, Verdict, input, render,
    sample::{engine, samples},
};

/// Returns a record of `create`: 64M of 2M pages, 16 vCPUs, emulated Linux 5.10 without a series.
pub fn record() -> Record {
    Record {
        schema: SCHEMA.to_owned(),
        host: HostInfo {
            arch: "aarch64".to_owned(),
            kernel: "5.10.262".to_owned(),
            series: Some(vec![]),
            commit: None,
            compiler: None,
            image_sha256: Some("0a1b2c3d4e5f60718293a4b5c6d7e8f9".repeat(2)),
            cpu: Some("neoverse-n1".to_owned()),
            features: [("fwb".to_owned(), 0), ("dic".to_owned(), 0)].into(),
            page_size: Some(Bytes::kib(4)),
            emulator: Some("QEMU 7.2.22 -icount shift=0,sleep=off".to_owned()),
        },
        engine: "kvm".to_owned(),
        config: RunConfig {
            mode: "PA-bits:48,  VA-bits:48,  4K pages".to_owned(),
            backing: "anonymous_hugetlb_2mb".parse().unwrap(),
            memory: Bytes::mib(64),
            vcpus: 16,
            ..RunConfig::default()
        },
        resident_pages: Some(ResidentPages { resident_bytes: [(2 << 20, 64 << 20)].into() }),
        phase: Phase::Create,
        ns: Nanoseconds(42_209_280),
        counters: [
            ("DC CIVAC".to_owned(), 34_625_989),
            ("TLBI VMALLS12E1IS".to_owned(), 33),
            ("IC IVAU".to_owned(), 0),
        ]
        .into(),
        events: [("kvm_guest_fault".to_owned(), 132_847)].into(),
        ..Record::default()
    }
}

/// Returns [`record`] in two phases, with one seed for each time (in microseconds).
pub fn runs(create: &[u64], update: &[u64]) -> Vec<Record> {
    let run = |phase, seed: usize, us: u64| {
        let mut record = record();
        record.phase = phase;
        record.config.seed = seed as u64;
        record.ns = Nanoseconds(us * 1000);
        record.counters.insert("DC CIVAC".to_owned(), us * 800);
        record
    };
    let of = |phase, times: &[u64]| -> Vec<Record> {
        let runs = times.iter().enumerate();
        runs.map(|(seed, &us)| run(phase, seed, us)).collect()
    };
    [of(Phase::Create, create), of(Phase::Update, update)].concat()
}

/// Changes the kernel of the records to one with the series.
pub fn with_series(mut records: Vec<Record>) -> Vec<Record> {
    for record in &mut records {
        record.host.kernel = "5.10.262-granule".to_owned();
        record.host.image_sha256 = Some("f".repeat(64));
        record.host.series =
            Some(vec![Series { name: "stage2-fault-path".to_owned(), patches: 6 }]);
    }
    records
}

fn options() -> ComparisonOptions {
    ComparisonOptions { min_effect: Some(0.03), ..ComparisonOptions::default() }
}

pub fn compare_with(
    before: &[Record],
    after: &[Record],
    options: &ComparisonOptions,
) -> Result<Comparison, CompareError> {
    Comparison::new(&samples(before), &samples(after), options)
}

fn compare(before: &[Record], after: &[Record]) -> Result<Comparison, CompareError> {
    compare_with(before, after, &options())
}

/// Removes the emulator from the hosts of the records.
pub fn without_emulator(mut records: Vec<Record>) -> Vec<Record> {
    records.iter_mut().for_each(|record| record.host.emulator = None);
    records
}

/// Returns two sides of three seeds: create improves, update regresses.
fn two_sides() -> [Vec<Record>; 2] {
    let after = runs(&[12_613, 11_900, 13_000], &[560_000, 559_000, 571_500]);
    [runs(&[42_209, 40_100, 43_000], &[522_255, 519_000, 530_000]), with_series(after)]
}

#[test]
fn one_run_is_inconclusive() {
    let comparison = compare(&runs(&[100_000], &[]), &with_series(runs(&[150_000], &[]))).unwrap();

    assert_eq!(comparison.count(Verdict::Regression), 0);
    assert_eq!(comparison.count(Verdict::Inconclusive), 1);
    assert_eq!(comparison.configurations[0].phases[0].time.ratio, Some(1.5));
    assert!(render::text(&comparison).contains("One run shows one schedule"));
}

#[test]
fn paired_runs_detect_more_and_must_be_equal_in_number() {
    let ramp: Vec<u64> = (1..=8).map(|at| at * 100_000).collect();
    let slower: Vec<u64> = ramp.iter().map(|us| us * 11 / 10 + us % 7).collect();
    let real = |times: &[u64]| without_emulator(runs(times, &[]));
    let by = |paired, slower: &[u64]| {
        let options = ComparisonOptions { is_paired: paired, ..options() };
        compare_with(&real(&ramp), &with_series(real(slower)), &options)
    };

    assert_eq!(by(true, &slower).unwrap().count(Verdict::Regression), 1);
    assert_eq!(by(false, &slower).unwrap().count(Verdict::Inconclusive), 1);
    assert!(matches!(by(true, &slower[1..]), Err(CompareError::UnpairedRuns(_))));
}

#[test]
fn elapsed_times_are_judged_where_both_sides_have_them() {
    let [mut before, mut after] = two_sides();
    let set = |records: &mut [Record], divisor: u64| {
        for record in records {
            record.elapsed_ns = Some(Nanoseconds(record.ns.0 / divisor));
        }
    };
    set(&mut before, 8);
    set(&mut after, 1);

    let elapsed = compare(&before, &after).unwrap();
    before[0].elapsed_ns = None;
    let work = compare(&before, &after).unwrap();

    assert_eq!(elapsed.count(Verdict::Regression), 2, "both phases take longer");
    assert_eq!(work.count(Verdict::Regression), 1, "the work of create falls");
    let phase = &elapsed.configurations[0].phases[0];
    assert_eq!(phase.work.as_ref().unwrap().ratio, work.configurations[0].phases[0].time.ratio);
    let text = render::text(&elapsed);
    assert!(text.contains("side by side") && text.contains("    work "), "{text}");
    assert!(!render::text(&work).contains("    work "));
}

#[test]
fn nonzero_counts_are_shown_and_unknown_counts_are_not_0() {
    let before = vec![record()];
    let mut after = vec![record()];
    after[0].counters.remove("TLBI VMALLS12E1IS");
    after[0].counters.insert("TLBI IPAS2E1IS".to_owned(), 5);
    after[0].events.clear();

    let comparison = compare(&before, &after).unwrap();

    let phase = &comparison.configurations[0].phases[0];
    let names: Vec<_> = phase.counters.keys().collect();
    assert_eq!(names, ["DC CIVAC", "TLBI IPAS2E1IS", "TLBI VMALLS12E1IS"]);
    assert_eq!(phase.counters["TLBI VMALLS12E1IS"].after.unwrap().median, 0.0);
    assert_eq!(phase.counters["TLBI IPAS2E1IS"].before.unwrap().median, 0.0);
    assert_eq!(phase.events["kvm_guest_fault"].after, None);
}

#[test]
fn counts_of_another_test_are_in_phase_whole() {
    let mut create = record();
    create.counters.clear();
    let mut whole = record();
    whole.phase = Phase::WholeRun;
    let records = [whole, create];

    let comparison = compare(&records, &records).unwrap();

    let phases = &comparison.configurations[0].phases;
    assert_eq!(
        [&phases[0].phase, &phases[1].phase],
        [&Phase::Create.into(), &Phase::WholeRun.into()]
    );
    assert!(phases[0].counters.is_empty());
    assert_eq!(phases[1].counters.len(), 2);
}

#[test]
fn the_counts_of_a_program_are_those_of_its_whole_run() {
    let counts = |phase, round, iteration, count| {
        let mut record = record();
        (record.phase, record.round, record.config.iteration) = (phase, round, iteration);
        record.counters = [("DC CIVAC".to_owned(), count)].into();
        record.events.clear();
        record
    };
    // A program that repeats its first step.
    let records = |whole| {
        [
            counts(Phase::Step, Some(1), 0, 10),
            counts(Phase::Step, Some(1), 1, 30),
            counts(Phase::WholeRun, None, 0, whole),
        ]
    };

    let comparison = compare(&records(63), &records(126)).unwrap();

    let page = render::html(&comparison);
    assert!(page.contains("63 → 126"), "{page}");
}

/// Returns a record from a log, which does not describe its host.
fn log_record(engine: &str) -> Record {
    let mut log = record();
    log.host = HostInfo::default();
    log.resident_pages = None;
    log.engine = engine.to_owned();
    log
}

#[test]
fn unequal_provenance_is_refused_unless_forced() {
    let before = vec![record()];
    let mut after = vec![record()];
    after[0].host.cpu = Some("cortex-a72".to_owned());
    after[0].host.page_size = None;

    let refused = compare(&before, &after).unwrap_err();
    let force = ComparisonOptions { is_forced: true, ..options() };
    let forced = compare_with(&before, &after, &force).unwrap();

    assert!(matches!(&refused, CompareError::ProvenanceDiffers(list) if list.len() == 2));
    let text = refused.to_string();
    for expected in [
        "\n  CPU: neoverse-n1 before, cortex-a72 after\n",
        "\n  base page: 4K before, unknown after\n",
    ] {
        assert!(text.contains(expected), "{text}");
    }
    assert_eq!(forced.differences.len(), 2);
    assert!(render::text(&forced).contains("Compared with --force"));
}

#[test]
fn logs_compare_with_logs_of_the_same_test_only() {
    let mut without_host = record();
    without_host.host = HostInfo::default();
    let (kernel_test, bench) =
        (log_record(engine::PAGE_TABLE_TEST), log_record(engine::BENCH_LINES));
    for (before, after, compares) in [
        (&bench, &bench, true),
        (&kernel_test, &bench, false),
        (&kernel_test, &record(), false),
        // Results must describe their host.
        (&without_host, &without_host, false),
    ] {
        let (before, after) = (slice::from_ref(before), slice::from_ref(after));
        let found = compare(before, after);
        assert_eq!(found.is_ok(), compares, "{found:?}");
        let force = ComparisonOptions { is_forced: true, ..options() };
        assert!(compares || matches!(found, Err(CompareError::ProvenanceDiffers(_))));
        assert!(compare_with(before, after, &force).is_ok());
    }
    let refused = compare(&[kernel_test], &[bench]);
    assert!(matches!(refused, Err(CompareError::ProvenanceDiffers(list)) if list.len() == 1));
}

#[test]
fn engines_on_both_sides_are_not_mixed() {
    let mut kernel_test = record();
    kernel_test.engine = engine::PAGE_TABLE_TEST.to_owned();
    kernel_test.ns.0 *= 2;
    let both = [record(), kernel_test];

    let comparison = compare(&both, &both).unwrap();

    assert_eq!(comparison.configurations.len(), 2);
    assert!(comparison.rows().all(|(_, phase)| phase.time.ratio == Some(1.0)));
}

#[test]
fn phases_and_configurations_of_one_side_are_named() {
    let mut other = record();
    other.config.vcpus = 4;
    let mut before = runs(&[10], &[20]);
    before.push(other);

    let comparison = compare(&before, &with_series(runs(&[10], &[]))).unwrap();

    let expected = "Only in before, not compared: update of anonymous_hugetlb_2mb, 64M, 16 vCPUs; \
                  anonymous_hugetlb_2mb, 64M, 4 vCPUs.";
    assert!(comparison.notes.iter().any(|note| note == expected), "{:?}", comparison.notes);
}

#[test]
fn sides_without_a_common_configuration_are_refused() {
    let mut other = record();
    other.config.vcpus = 4;

    let error = compare(&[record()], &[other]).unwrap_err().to_string();

    assert!(error.contains("16 vCPUs. After: anonymous_hugetlb_2mb, 64M, 4 vCPUs"), "{error}");
    assert!(matches!(compare(&[], &[record()]), Err(CompareError::EmptySide(_))));
}

/// Compares a text with a golden file.
fn assert_golden(name: &str, text: &str) {
    let path = format!("{}/golden/{name}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("GRANULE_GOLDEN").is_some_and(|v| v == "write") {
        std::fs::write(&path, text).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap();
    let command = "GRANULE_GOLDEN=write cargo test -p granule-report";
    assert!(text == expected, "golden/{name} differs; `{command}` rewrites it:\n{text}");
}

#[test]
fn text_markdown_and_json_match_the_golden_files() {
    let [mut before, mut after] = two_sides();
    let rebuild = |times: &[u64]| {
        let create = runs(times, &[]).into_iter();
        create.map(|record| Record { phase: Phase::Rebuild, counters: [].into(), ..record })
    };
    before.extend(rebuild(&[100_000, 200_000, 300_000]));
    after.extend(with_series(rebuild(&[150_000, 250_000, 350_000]).collect()));
    for record in before.iter_mut().chain(&mut after).filter(|r| r.phase == Phase::Create) {
        record.counters.remove("TLBI VMALLS12E1IS");
    }
    after.iter_mut().for_each(|record| record.events.clear());
    let labels = Some(["base".to_owned(), "stage2-fault-path".to_owned()]);
    let of = |phases| {
        let options = ComparisonOptions { labels: labels.clone(), phases, ..options() };
        compare_with(&before, &after, &options).unwrap()
    };
    let comparison = of(vec![]);

    assert_golden("pair.txt", &render::text(&comparison));
    assert_golden("pair.md", &render::markdown(&comparison));
    assert_golden("pair.json", &render::json(&of(vec!["create".to_owned()])).unwrap());
    let json = serde_json::to_value(&comparison).unwrap();
    let verdicts = [0, 1, 2].map(|at| &json["configurations"][0]["phases"][at]["verdict"]);
    assert_eq!(verdicts, ["improvement", "regression", "inconclusive"]);
    let geomean = &json["geomeans"][0];
    assert!(geomean["phase"].is_null() && geomean["rows"] == 3, "{geomean}");
    assert!(geomean["ratio"].is_f64() && geomean["interval"][1].is_f64(), "{geomean}");
}

#[test]
fn one_run_of_a_log_prints_with_its_notes() {
    let log = include_str!("../golden/console.log");
    let faster = log.replace("0.003193280s", "0.001000000s");
    let [before, after] = [log, &faster].map(|log| input::parse(log).unwrap());

    let comparison = Comparison::new(&before, &after, &options()).unwrap();

    assert_golden("raw.txt", &render::text(&comparison));
}

/// Returns nine rounds for two vCPU counts, whose options, counts and emulator have long names.
fn nine_rounds(records: &[Record]) -> Vec<Record> {
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
            record.counters.insert("TLBI RVAALE1ISNXS and then some".to_owned(), 7);
            record.host.emulator = Some("QEMU 7.2.22 ".to_owned() + &"-option value ".repeat(20));
            rounds.push(record);
        }
    }
    rounds
}

#[test]
fn text_with_many_phases_and_long_names_fits_into_a_mail() {
    let [before, after] = two_sides().map(|records| nine_rounds(&records));
    let options = ComparisonOptions {
        labels: Some(["/a/path/of/one/word".repeat(9), "b".to_owned()]),
        ..ComparisonOptions::default()
    };
    let text = render::text(&compare_with(&before, &after, &options).unwrap());

    for line in text.lines() {
        assert!(line.len() <= 75, "{line}");
    }
    let (_, overview) = text.split_once("Ratio of virtual times, after to before:").unwrap();
    for round in 1..=9 {
        let ends = ["\n", " "].map(|end| format!(" round-{round}{end}"));
        let found: usize = ends.iter().map(|end| overview.matches(end).count()).sum();
        assert_eq!(found, 1, "{text}");
    }
}

/// Compares two sides in which every text field contains `text`.
fn comparison_with_text(text: &str) -> Comparison {
    let mut sides = two_sides();
    for record in sides.iter_mut().flatten() {
        let host = &mut record.host;
        for field in [&mut host.cpu, &mut host.emulator] {
            *field = Some(text.to_owned());
        }
        host.kernel += text;
        host.arch = text.to_owned();
        host.features = [(text.to_owned(), 1)].into();
        record.engine = text.to_owned();
        record.config.mode = text.to_owned();
        record.config.options = [(text.to_owned(), text.to_owned())].into();
        for counts in [&mut record.counters, &mut record.events, &mut record.gauges] {
            counts.insert(text.to_owned(), 7);
        }
    }
    let options = ComparisonOptions {
        labels: Some([text.to_owned(), text.to_owned()]),
        ..ComparisonOptions::default()
    };
    let [before, after] = sides;
    compare_with(&before, &after, &options).unwrap()
}

#[test]
fn text_in_results_does_not_control_terminals_tables_or_test_runners() {
    let hostile = "x\u{1b}[31m\r\nnot ok 7 forged\n| a | b &lt; ~~c~~ \u{202e}\u{85}\0";
    let comparison = comparison_with_text(hostile);

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
        assert!(!text.contains("\nnot ok 7") && !text.contains("\n| a"), "{text}");
    }
    assert!(markdown.contains("\\&lt; \\~\\~c"), "{markdown}");
}

#[test]
fn csv_and_ktap_agree() {
    let [before, after] = two_sides();
    let comparison = compare(&before, &after).unwrap();

    let csv = render::csv(&comparison);
    let ktap = render::ktap(&comparison);

    let columns: Vec<usize> = csv.lines().map(|line| line.split(',').count()).collect();
    let is_whole = |&count: &usize| count == columns[0] + 2;
    assert!(columns[1..].iter().all(is_whole), "the mode has two commas");
    assert!(csv.contains("create,time,42209000,"), "{csv}");
    let mut lines = csv.lines();
    assert!(lines.any(|line| line.contains("update,time") && line.contains(",regression")));
    for expected in [
        "KTAP version 1\n1..2\n",
        "\nok 1 anonymous_hugetlb_2mb 64M 16 vCPUs create\n",
        "\nnot ok 2 anonymous_hugetlb_2mb 64M 16 vCPUs update\n",
    ] {
        assert!(ktap.contains(expected), "{ktap}");
    }
}
