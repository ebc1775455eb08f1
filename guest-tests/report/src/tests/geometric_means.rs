// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of the rows in geometric means.

use granule_types::{phase::Phase, record::Record};

use super::{compare, compare_with, runs, with_series};
use crate::{Comparison, ComparisonOptions, render};

/// Compares runs of create, update and exec; `update` has times in us, `ticks` returns the count of
/// timer ticks of a run of it.
fn comparison(phases: &[&str], update: &[u64], ticks: impl Fn(&Record) -> u64) -> Comparison {
    let side = |create: &[u64]| {
        let exec = runs(create, &[]).into_iter();
        let exec = exec.map(|record| Record { phase: Phase::Exec, ..record });
        let mut records: Vec<Record> = runs(create, update).into_iter().chain(exec).collect();
        for record in &mut records {
            let ticks = if record.phase == Phase::Update { ticks(record) } else { 4 };
            record.counters.insert("timer_ticks".to_owned(), ticks);
        }
        records
    };
    let phases = phases.iter().map(|&phase| phase.to_owned()).collect();
    let options = ComparisonOptions { phases, ..ComparisonOptions::default() };
    compare_with(&side(&[20_000, 21_000]), &with_series(side(&[10_000, 11_000])), &options).unwrap()
}

/// Returns the number of rows in the mean of all, and the line on omitted rows.
fn rows_and_line(comparison: &Comparison) -> (Option<usize>, Option<String>) {
    let text = render::text(comparison).replace('\n', " ");
    let line = ["In no mean:", "No geometric mean:"].into_iter().find_map(|start| text.find(start));
    let line = line.map(|at| text[at..].split('.').next().unwrap().to_owned());
    (comparison.geomeans.first().map(|mean| mean.rows), line)
}

#[test]
fn a_mean_contains_phases_of_a_tick_and_longer() {
    let found = rows_and_line(&comparison(&[], &[5000, 5100], |_| 1));

    assert_eq!(found, (Some(3), None));
}

#[test]
fn a_phase_shorter_than_a_tick_is_in_no_mean() {
    let line = "In no mean: 1 of 3 ratios, of phases shorter than a timer tick (4 ms), which occurs \
                in some of their runs only";
    for (update, ticks) in [
        // Short in its time, or without a tick in one run.
        (&[3000, 3100][..], 1),
        (&[5000, 5100], 0),
    ] {
        let ticks = |record: &Record| if record.config.seed == 0 { ticks } else { 1 };
        let comparison = comparison(&[], update, ticks);

        assert_eq!(rows_and_line(&comparison), (Some(2), Some(line.to_owned())), "{update:?}");
        let json = serde_json::to_value(&comparison).unwrap();
        let phases = &json["configurations"][0]["phases"];
        assert!(phases[0].get("below_timer_tick").is_none());
        assert_eq!(phases[1]["below_timer_tick"], true);
    }
}

#[test]
fn one_remaining_ratio_has_no_mean() {
    let (mean, line) = rows_and_line(&comparison(&["create", "update"], &[3000, 3100], |_| 1));

    assert_eq!(mean, None);
    assert!(line.unwrap().starts_with("No geometric mean: 1 of 2 ratios of phases shorter"));
}

#[test]
fn without_counts_of_ticks_a_mean_contains_short_phases() {
    let comparison =
        compare(&runs(&[20, 21], &[3000]), &with_series(runs(&[10, 11], &[3000]))).unwrap();

    assert_eq!(rows_and_line(&comparison), (Some(2), None));
}
