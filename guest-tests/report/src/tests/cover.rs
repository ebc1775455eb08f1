// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of the text for cover letters.

use granule_types::{
    phase::Phase,
    record::{Record, Series},
    units::Nanoseconds,
};

use super::{assert_golden, record, with_series};
use crate::{
    CompareError, ComparisonOptions, ComparisonSet, LabelledSide, Metric, render, sample::samples,
};

/// Times (us) and guest aborts of create, logging-off and update.
type Figures = [(u64, u64); 3];

const BASE: Figures = [(9500, 24_000), (40, 0), (44_200, 146_000)];
const PATCH_1: Figures = [(8980, 24_000), (41, 0), (45_500, 131_000)];
const PATCH_2: Figures = [(8970, 24_100), (339, 0), (1110, 16)];

/// Returns three seeds of two vCPU counts.
fn side(label: &str, patches: u32, figures: Figures) -> LabelledSide {
    let mut records = Vec::new();
    let phases = [Phase::Create, Phase::LoggingOff, Phase::Update];
    for (vcpus, seed) in [4, 16].into_iter().flat_map(|vcpus| (0..3).map(move |s| (vcpus, s))) {
        for (phase, (us, aborts)) in phases.into_iter().zip(figures) {
            let mut one = Record { phase, ..record() };
            one.config.vcpus = vcpus;
            one.config.seed = seed;
            one.elapsed_ns = Some(Nanoseconds((us + seed) * 1000));
            one.ns = Nanoseconds((us + seed) * 1000 * u64::from(vcpus));
            let counts =
                [("guest_aborts", aborts), ("TLBI IPAS2E1IS", 20), ("TLBI VMALLE1IS", seed)];
            let counts = counts.map(|(name, count)| (name.to_owned(), count));
            one.counters = counts.into_iter().filter(|(_, count)| *count > 0).collect();
            records.push(one);
        }
    }
    if patches > 0 {
        records = with_series(records);
    }
    for record in &mut records {
        let series = Series { name: "stage2-fault-count".to_owned(), patches };
        record.host.series = Some(vec![series].into_iter().filter(|_| patches > 0).collect());
    }
    LabelledSide { label: label.to_owned(), samples: samples(&records) }
}

fn cover(sides: Vec<LabelledSide>, options: &ComparisonOptions) -> String {
    let command = format!("granule compare --format cover {}", "a/path/to/the/results ".repeat(9));
    render::cover(&ComparisonSet::new(sides, options).unwrap(), &[], &[command])
}

#[track_caller]
fn assert_fits(text: &str) {
    for line in text.lines() {
        assert!(line.len() <= 72 && line.is_ascii(), "{line}");
    }
}

#[test]
fn cover_letters_match_the_golden_files() {
    let base = || side("base", 0, BASE);
    let whole = side("stage2-fault-count", 2, PATCH_2);
    let patches = vec![
        base(),
        side("stage2-fault-count-1", 1, PATCH_1),
        side("stage2-fault-count-2-of-2", 2, PATCH_2),
    ];

    let two = cover(vec![base(), whole], &ComparisonOptions::default());
    let three = cover(patches, &ComparisonOptions::default());

    assert_fits(&two);
    assert_fits(&three);
    assert_golden("cover-series.txt", &two);
    assert_golden("cover-patches.txt", &three);
}

#[test]
fn selected_phases_and_counts_replace_the_default() {
    let sides = || vec![side("base", 0, BASE), side("series", 2, PATCH_1)];
    let options = |phases: &[&str], metrics: &[&str]| ComparisonOptions {
        phases: phases.iter().map(|&phase| phase.to_owned()).collect(),
        metrics: metrics.iter().copied().map(Metric::from).collect(),
        ..ComparisonOptions::default()
    };
    let figures = |options: &ComparisonOptions| -> Vec<String> {
        let text = cover(sides(), options);
        let table = text.split("\n\n").nth(2).unwrap().lines().skip(2);
        let first_words = table.filter(|line| line.starts_with("  "));
        first_words
            .map(|line| line[2..32].split_whitespace().collect::<Vec<_>>().join(" "))
            .collect()
    };

    let differing = figures(&options(&[], &[]));
    let selected = figures(&options(&["logging-off"], &["TLBI IPAS2E1IS"]));

    let times = |phase: &str| [format!("{phase} elapsed"), "work".to_owned()];
    let of_create = times("create").into_iter().chain(["guest_aborts", "TLBI"].map(str::to_owned));
    let of_update = times("update").into_iter().chain(["guest_aborts", "TLBI"].map(str::to_owned));
    assert_eq!(differing, of_create.chain(of_update).collect::<Vec<_>>());
    assert_eq!(selected, ["logging-off elapsed", "work", "TLBI IPAS2E1IS"]);
}

#[test]
fn counts_are_those_of_the_compared_iterations() {
    let with_iterations = |mut one: LabelledSide| {
        let further = one.samples.clone().into_iter().map(|mut sample| {
            sample.iteration = 1;
            sample.elapsed_ns = sample.elapsed_ns.map(|elapsed| 2.0 * elapsed);
            sample.counters.insert("guest_aborts".to_owned(), 999_999);
            sample
        });
        one.samples.extend(further.collect::<Vec<_>>());
        one
    };
    let two = || vec![side("base", 0, BASE), side("series", 2, PATCH_2)];
    let three = || [two(), vec![side("series-1", 1, PATCH_1)]].concat();

    for sides in [two(), three()] {
        let single = cover(sides.clone(), &ComparisonOptions::default());
        let sides = sides.into_iter().map(with_iterations).collect();
        let repeated = cover(sides, &ComparisonOptions::default());

        let figures = |text: &str| text.split("\nFigures are").next().map(str::to_owned);
        assert_eq!(figures(&repeated), figures(&single), "{repeated}");
    }
}

#[test]
fn sides_that_do_not_differ_have_all_phases_and_no_regression() {
    let text = cover(
        vec![side("base", 0, BASE), side("base again", 1, BASE)],
        &ComparisonOptions::default(),
    );

    for expected in ["\n  create ", "\n  logging-off ", "\n  update ", "\nNo regression.\n"] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn real_times_are_not_virtual() {
    let of = |figures| {
        let side = side("a label", 0, figures);
        let mut samples = side.samples;
        for sample in &mut samples {
            sample.host.emulator = None;
        }
        LabelledSide { samples, ..side }
    };

    let text = cover(vec![of(BASE), of(PATCH_1)], &ComparisonOptions::default());

    assert!(text.starts_with("Measured on neoverse-n1 with 4K pages.\n"), "{text}");
    assert!(!text.contains("virtual") && !text.contains("elapsed"), "{text}");
}

#[test]
fn long_names_and_other_characters_fit() {
    let sides = || -> Vec<LabelledSide> {
        let label = |label: &str| format!("{label} \u{e9} {}", "of/a/long/path/".repeat(6));
        let mut sides = vec![
            side(&label("base"), 0, BASE),
            side(&label("one"), 1, PATCH_1),
            side(&label("two"), 2, PATCH_2),
        ];
        for sample in sides.iter_mut().flat_map(|side| &mut side.samples) {
            sample.counters.insert("a_long_name_of_a_count".repeat(4), sample.seed + 1);
            sample.host.cpu = Some("caf\u{e9}".to_owned());
        }
        sides
    };
    let options = ComparisonOptions {
        metrics: vec!["time".into(), "a_long_name_of_a_count".repeat(4).as_str().into()],
        ..ComparisonOptions::default()
    };

    assert_fits(&cover(sides(), &options));
    assert_fits(&cover(sides().split_off(1), &options));
}

#[test]
fn the_subjects_of_the_sides_come_first() {
    let sides = vec![side("base", 0, BASE), side("patch", 1, PATCH_1)];
    let set = ComparisonSet::new(sides, &ComparisonOptions::default()).unwrap();
    let titles = [("patch".to_owned(), "KVM: arm64: Avoid a caf\u{e9} ".repeat(4))];

    let text = render::cover(&set, &titles, &[]);

    assert_fits(&text);
    assert!(text.starts_with("patch: KVM: arm64: Avoid a caf?"), "{text}");
}

#[test]
fn one_side_is_no_comparison() {
    let sides = vec![side("base", 0, BASE)];

    let refused = ComparisonSet::new(sides, &ComparisonOptions::default());

    assert!(matches!(refused, Err(CompareError::SingleSide)));
}
