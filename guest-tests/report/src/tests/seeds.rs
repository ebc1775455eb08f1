// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs of different seeds, and iterations of one.

use granule_types::record::Record;

use super::{compare, runs, two_sides, with_series, without_emulator};
use crate::{Comparison, render, stats::Runs};

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
    let iterations = |times: &[u64]| {
        let mut records = runs(times, &[]);
        for record in &mut records {
            record.config.iteration = u32::try_from(record.config.seed).unwrap();
            record.config.seed = 0;
        }
        records
    };
    let (before, after) =
        (iterations(&[900_000, 100_000, 110_000]), with_series(iterations(&[150_000, 160_000])));

    let emulated = compare(&before, &after).unwrap();
    let real = compare(&without_emulator(before), &without_emulator(after)).unwrap();

    let runs = |comparison: &Comparison| comparison.configurations[0].phases[0].runs.clone();
    let Runs { before, after } = runs(&emulated);
    assert_eq!((before, after), (vec![110_000_000.0], vec![150_000_000.0]), "the medians");
    assert!(render::text(&emulated).contains("One run shows one schedule"));
    assert_eq!(runs(&real).before.len(), 3);
}
