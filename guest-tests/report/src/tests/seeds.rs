// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs of different seeds, and iterations of one.

use granule_types::{record::Record, units::Nanoseconds};

use super::{compare, compare_with, options, runs, two_sides, with_series, without_emulator};
use crate::{Comparison, ComparisonOptions, render, sample::samples, stats::Runs};

#[test]
fn different_seeds_are_noted_for_configurations_on_both_sides_only() {
    let [before, after] = two_sides();
    let on_one_side = |seed| {
        let mut record: Record = before[0].clone();
        (record.config.vcpus, record.config.seed) = (4, seed);
        record
    };
    let is_noted = |before: &[Record], after: &[Record]| {
        let comparison = compare(before, after).unwrap();
        render::text(&comparison).contains("different seeds")
    };
    let with = |records: &[Record], record: Record| [records, &[record]].concat();

    assert!(!is_noted(&with(&before, on_one_side(7)), &after), "a configuration of one side");
    assert!(is_noted(
        &with(&before, on_one_side(7)),
        &with(&after, with_series(vec![on_one_side(8)]).remove(0))
    ));
    let without_seed_0: Vec<_> =
        before.iter().filter(|record| record.config.seed > 0).cloned().collect();
    assert!(is_noted(&without_seed_0, &after));
}

#[test]
fn iterations_of_an_emulated_schedule_are_one_run() {
    let before = iterations_of_seeds(&[&[900_000, 100_000, 110_000]]);
    let after = with_series(iterations_of_seeds(&[&[150_000, 160_000]]));

    let emulated = compare(&before, &after).unwrap();
    let real = compare(&without_emulator(before), &without_emulator(after)).unwrap();

    let runs = |comparison: &Comparison| comparison.configurations[0].phases[0].runs.clone();
    let Runs { before, after } = runs(&emulated);
    assert_eq!((before, after), (vec![110_000_000.0], vec![150_000_000.0]), "the medians");
    assert!(render::text(&emulated).contains("One run shows one schedule"));
    assert_eq!(runs(&real).before.len(), 3);
}

/// Returns iterations of seeds: the times of each seed in microseconds.
fn iterations_of_seeds(times: &[&[u64]]) -> Vec<Record> {
    let seeds = times.iter().zip(0..).flat_map(|(times, seed)| {
        let mut records = runs(times, &[]);
        for record in &mut records {
            record.config.iteration = u32::try_from(record.config.seed).unwrap();
            record.config.seed = seed;
        }
        records
    });
    seeds.collect()
}

fn is_omission_noted(comparison: &Comparison) -> bool {
    comparison.notes.iter().any(|note| note.contains("only the one with the median time"))
}

#[test]
fn schedules_are_paired_by_seed_if_other_iterations_have_the_median_time() {
    let before: [&[u64]; 4] =
        [&[100_000, 110_000, 90_000], &[300_000, 200_000, 250_000], &[400_000; 3], &[500_000; 3]];
    let after: [&[u64]; 4] =
        [&[120_000, 130_000, 125_000], &[400_000, 350_000, 360_000], &[480_000; 3], &[610_000; 3]];
    let [before, after] = [before, after].map(|times| iterations_of_seeds(&times));
    let options = ComparisonOptions { is_paired: true, ..options() };

    let comparison = compare_with(&before, &with_series(after), &options).unwrap();

    let Runs { before, after } = comparison.configurations[0].phases[0].runs.clone();
    assert_eq!(before, [100e6, 250e6, 400e6, 500e6]);
    assert_eq!(after, [125e6, 360e6, 480e6, 610e6]);
    assert!(is_omission_noted(&comparison));
}

#[test]
fn the_iteration_of_a_schedule_has_the_median_of_the_judged_time() {
    let mut records = iterations_of_seeds(&[&[100, 200, 300]]);
    for (record, elapsed) in records.iter_mut().zip([60, 90, 70]) {
        record.elapsed_ns = Some(Nanoseconds(elapsed * 1000));
    }

    let comparison = compare(&records, &records).unwrap();

    assert_eq!(comparison.configurations[0].phases[0].runs.before, [70_000.0]);
}

#[test]
fn runs_of_one_seed_in_several_invocations_are_compared() {
    let side = |times: &[u64]| {
        let mut samples = samples(&iterations_of_seeds(&[times]));
        for sample in &mut samples {
            sample.invocation = sample.iteration;
        }
        samples
    };

    let comparison =
        Comparison::new(&side(&[100, 110, 120]), &side(&[130, 140, 150]), &options()).unwrap();

    assert_eq!(comparison.configurations[0].phases[0].runs.before.len(), 3);
    assert!(!is_omission_noted(&comparison));
}
