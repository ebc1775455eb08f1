// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use super::{compare, compare_by, options, pair};
use crate::{
    CompareError, Comparison, Options, Verdict,
    fixture::{patched, record, runs},
    render,
};
use granule_types::{phase::Phase, units::Nanoseconds};

#[test]
fn medians_of_each_phase_are_compared() {
    let [before, after] = pair();

    let comparison = compare(&before, &after).unwrap();

    let phases = &comparison.configurations[0].phases;
    assert_eq!(phases[0].phase, Phase::Create.into());
    let time = phases[0].time;
    let before = time.before.unwrap();
    assert_eq!((before.median, before.min, before.max), (42_209e3, 40_100e3, 43_000e3));
    assert_eq!((before.q1, before.runs), (41_154.5e3, 3));
    assert_eq!(time.after.unwrap().median, 12_613e3);
    assert!((time.ratio.unwrap() - 0.2988).abs() < 1e-4);
    assert_eq!(comparison.regressions().count(), 1);
}

#[test]
fn a_regression_is_beyond_the_minimum_effect_and_a_timer_tick() {
    let regressions = |before: u64, after: u64| {
        let comparison = compare(&runs(&[before; 2], &[]), &patched(runs(&[after; 2], &[])));
        comparison.unwrap().regressions().count()
    };
    for (before, after, wanted) in [
        (100_000, 90_000, 0),
        (100_000, 102_999, 0),
        (100_000, 103_000, 0),
        (100_000, 103_100, 1),
        // 60 us may be timer ticks.
        (20, 75, 0),
        (20, 79, 0),
        (20, 81, 1),
    ] {
        assert_eq!(regressions(before, after), wanted, "{before} {after}");
    }
}

#[test]
fn one_run_is_inconclusive() {
    let comparison = compare(&runs(&[100_000], &[]), &patched(runs(&[150_000], &[]))).unwrap();

    assert_eq!(comparison.regressions().count(), 0);
    assert_eq!(comparison.count(Verdict::Inconclusive), 1);
    assert_eq!(comparison.configurations[0].phases[0].time.ratio, Some(1.5));
    assert!(render::text(&comparison).contains("One run shows one schedule"));
}

#[test]
fn a_count_can_be_judged() {
    let [before, after] = pair();
    let by = |metric: &str| Options { metric: Some(metric.to_owned()), ..options() };

    let fewer = compare_by(&before, &after, &by("DC CIVAC")).unwrap();
    let once = compare_by(&after[..1], &before[..1], &by("DC CIVAC")).unwrap();
    let missing = compare_by(&before, &after, &by("DC ZVA")).unwrap_err();

    let verdict = |of: &Comparison, at: usize| of.configurations[0].phases[at].verdict;
    assert_eq!(verdict(&fewer, 0), Some(Verdict::Improvement));
    assert_eq!(verdict(&fewer, 1), Some(Verdict::Regression));
    assert_eq!(verdict(&once, 0), Some(Verdict::Regression), "counts are exact");
    assert!(missing.to_string().contains("expected one of DC CIVAC, TLBI"), "{missing}");
}

#[test]
fn phases_can_be_chosen() {
    let [before, after] = pair();
    let of = |phase: &str| {
        let phases = vec![phase.to_owned()];
        compare_by(&before, &after, &Options { phases, ..options() })
    };
    let comparison = of("create").unwrap();
    assert_eq!(comparison.rows().count(), 1);
    assert_eq!(comparison.regressions().count(), 0);
    let error = of("exec").unwrap_err();
    assert!(error.to_string().starts_with("none of exec of any"), "{error}");
}

#[test]
fn paired_runs_show_more_and_must_be_equally_many() {
    let ramp: Vec<u64> = (1..=8).map(|at| at * 100_000).collect();
    let slower: Vec<u64> = ramp.iter().map(|us| us * 11 / 10 + us % 7).collect();
    let real = |times: &[u64]| {
        let mut records = runs(times, &[]);
        for record in &mut records {
            record.host.emulator = None;
        }
        records
    };
    let by = |paired, slower: &[u64]| {
        let options = Options { paired, ..options() };
        compare_by(&real(&ramp), &patched(real(slower)), &options)
    };

    assert_eq!(by(true, &slower).unwrap().regressions().count(), 1);
    assert_eq!(by(false, &slower).unwrap().count(Verdict::Inconclusive), 1);
    assert!(matches!(by(true, &slower[1..]), Err(CompareError::Unpaired(_))));
}

#[test]
fn single_runs_show_growth_of_virtual_time_only() {
    let report = |emulated: bool| {
        let records = [1, 2, 4].map(|vcpus| {
            let mut record = record();
            record.config.vcpus = vcpus;
            record.ns = Nanoseconds(u64::from(vcpus) * 1_000_000);
            if !emulated {
                record.host.emulator = None;
            }
            record
        });
        render::markdown(&compare(&records, &records).unwrap())
    };

    assert!(report(true).contains("linear, of one schedule"));
    assert!(report(false).contains("inconclusive, one run a point"));
    assert!(!report(false).contains("linear"));
}

#[test]
fn counts_that_occur_are_shown_and_unknown_is_not_0() {
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
fn counts_of_a_foreign_test_belong_to_the_whole() {
    let mut create = record();
    create.counters.clear();
    let mut whole = record();
    whole.phase = Phase::Whole;
    let records = [whole, create];

    let comparison = compare(&records, &records).unwrap();

    let phases = &comparison.configurations[0].phases;
    assert_eq!([&phases[0].phase, &phases[1].phase], [&Phase::Create.into(), &Phase::Whole.into()]);
    assert!(phases[0].counters.is_empty());
    assert_eq!(phases[1].counters.len(), 2);
}
