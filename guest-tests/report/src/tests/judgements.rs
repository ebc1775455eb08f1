// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of the judged metrics and phases, and of the verdicts on which a comparison fails.

use granule_types::{phase::Phase, record::Record};

use super::{compare, compare_with, options, two_sides, with_series};
use crate::{Comparison, ComparisonOptions, FailOn, Metric, Verdict, render};

fn verdicts(comparison: &Comparison) -> Vec<Verdict> {
    comparison.judgements().map(|judgement| judgement.verdict).collect()
}

#[test]
fn a_count_can_be_judged() {
    let [before, after] = two_sides();
    let by = |metric: &str| ComparisonOptions { metrics: vec![metric.into()], ..options() };

    let fewer = compare_with(&before, &after, &by("DC CIVAC")).unwrap();
    let once = compare_with(&after[..1], &before[..1], &by("DC CIVAC")).unwrap();
    let missing = compare_with(&before, &after, &by("guest_abort")).unwrap_err();
    let unused = compare_with(&before, &after, &by("DC ZVA")).unwrap();

    assert_eq!(verdicts(&fewer), [Verdict::Improvement, Verdict::Regression]);
    assert_eq!(verdicts(&once), [Verdict::Regression], "counts are exact");
    assert!(missing.to_string().contains("expected one of DC CIVAC, TLBI"), "{missing}");
    assert!(verdicts(&unused).is_empty());
    let text = render::text(&unused);
    assert!(text.contains("No regression: no phase of either side has DC ZVA."), "{text}");
}

#[test]
fn a_phase_without_any_counter_has_the_count_0() {
    let [before, mut after] = two_sides();
    let mut without = before.clone();
    for record in without.iter_mut().chain(&mut after) {
        if record.phase == Phase::Update {
            record.counters.clear();
        }
    }
    for record in after.iter_mut().filter(|record| record.phase == Phase::Update) {
        record.counters.insert("TLBI IPAS2E1IS".to_owned(), 7);
    }
    let metrics = vec!["TLBI".into()];

    let comparison =
        compare_with(&without, &after, &ComparisonOptions { metrics, ..options() }).unwrap();

    assert_eq!(verdicts(&comparison), [Verdict::NoRegression, Verdict::Regression]);
}

#[test]
fn a_phase_in_which_a_run_lacks_the_count_is_noted() {
    let [before, mut after] = two_sides();
    after[1].events.clear();
    let judged = |after: &[Record]| {
        let metrics = vec!["kvm_guest_fault".into()];
        compare_with(&before, after, &ComparisonOptions { metrics, ..options() }).unwrap()
    };

    let comparison = judged(&after);
    after[4].events.clear();
    let unjudged = judged(&after);
    let text = render::text(&unjudged);

    assert!(text.contains("Inconclusive: no phase has kvm_guest_fault in all runs."), "{text}");
    assert!(unjudged.has_unjudged_metric() && !comparison.has_unjudged_metric());
    assert_eq!(verdicts(&comparison).len(), 1, "update");
    let expected = "kvm_guest_fault is not judged where some runs lack it: create of \
                    anonymous_hugetlb_2mb, 64M, 16 vCPUs.";
    assert!(comparison.notes.iter().any(|note| note == expected), "{:?}", comparison.notes);
}

#[test]
fn each_metric_is_judged() {
    use Verdict::{Improvement, NoRegression, Regression};
    let [before, mut after] = two_sides();
    for record in after.iter_mut().filter(|record| record.phase == Phase::Create) {
        record.counters.insert("TLBI IPAS2E1IS".to_owned(), 7);
    }
    let metrics = ["time", "DC CIVAC", "TLBI", "elapsed"].map(Metric::from).to_vec();

    let comparison =
        compare_with(&before, &after, &ComparisonOptions { metrics, ..options() }).unwrap();

    let found = verdicts(&comparison);
    assert_eq!(
        found,
        [Improvement, Improvement, Regression, Regression, Regression, NoRegression],
        "time, DC CIVAC and TLBI of create, then of update"
    );
    let text = render::text(&comparison);
    for expected in [
        "    TLBI                               33             40   1.212   -21.2% !\n",
        "\nRegression: 1 of 2 phases higher in DC CIVAC by more than 3%, marked",
        "\nRegression: 1 of 2 phases higher in TLBI by more than 3%, marked",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let json = serde_json::to_value(&comparison).unwrap();
    let create = &json["configurations"][0]["phases"][0];
    assert_eq!([&json["metric"], &json["further_metrics"][1]], ["time", "TLBI"]);
    assert_eq!(
        [&create["verdict"], &create["further_judgements"][1]["metric"]],
        ["improvement", "TLBI"]
    );
    let ktap = render::ktap(&comparison);
    assert!(ktap.contains("\nnot ok 3 anonymous_hugetlb_2mb 64M 16 vCPUs create TLBI\n"), "{ktap}");
    assert_eq!(render::benchstat(&comparison).matches(" TLBI/op\n").count(), 12);
}

#[test]
fn a_comparison_fails_on_the_chosen_verdicts() {
    let [before, after] = two_sides();
    let failures = |phases: &[&str]| {
        let phases = phases.iter().map(|&phase| phase.to_owned()).collect();
        let comparison =
            compare_with(&before, &after, &ComparisonOptions { phases, ..options() }).unwrap();
        [FailOn::Regression, FailOn::Difference, FailOn::Never].map(|on| on.is_failure(&comparison))
    };
    let same = compare(&before, &with_series(before.clone())).unwrap();

    assert_eq!(failures(&["create"]), [false, true, false], "an improvement");
    assert_eq!(failures(&["update"]), [true, true, false], "a regression");
    assert!(!FailOn::Difference.is_failure(&same));
}

#[test]
fn phases_can_be_chosen() {
    let [before, after] = two_sides();
    let of = |phases: &str| {
        let phases = phases.split(',').map(str::to_owned).collect();
        compare_with(&before, &after, &ComparisonOptions { phases, ..options() })
    };
    let comparison = of("create").unwrap();
    assert_eq!(comparison.rows().count(), 1);
    assert_eq!(comparison.count(Verdict::Regression), 0);
    let error = of("create,exec").unwrap_err().to_string();
    assert_eq!(error, "--phase 'exec' is on neither side: expected one of create, update");
}

#[test]
fn calls_that_one_side_does_not_count_are_not_compared_as_zero() {
    let [mut before, after] = two_sides();
    for record in &mut before {
        record.counters.insert("guest_aborts".to_owned(), 9);
    }
    let metrics = vec!["guest_aborts".into()];

    let judged = compare_with(&before, &after, &ComparisonOptions { metrics, ..options() });
    let shown = render::text(&compare(&before, &after).unwrap());

    let error = judged.unwrap_err().to_string();
    assert!(error.starts_with("--metric 'guest_aborts' is not counted on both sides"), "{error}");
    let line = shown.lines().find(|line| line.contains("guest_aborts")).unwrap();
    assert_eq!(
        line.split_whitespace().collect::<Vec<_>>(),
        ["guest_aborts", "9", "-", "-", "-"],
        "{shown}"
    );
}

#[test]
fn a_count_of_0_in_all_runs_is_no_error() {
    let [mut before, mut after] = two_sides();
    for record in before.iter_mut().chain(&mut after) {
        record.events.insert("notifier_unmaps".to_owned(), 0);
    }
    let metrics = vec!["notifier_unmaps".into()];

    let comparison =
        compare_with(&before, &after, &ComparisonOptions { metrics, ..options() }).unwrap();

    let text = render::text(&comparison);
    assert!(text.contains("No regression: no phase of either side has notifier_unmaps."), "{text}");
}
