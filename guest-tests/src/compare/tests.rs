// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use super::{
    fixture::{patched, record, runs},
    *,
};
use crate::results::Host;

fn compare(before: &[Record], after: &[Record]) -> Result<Comparison, CompareError> {
    Comparison::of(before, after, &Options::default())
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
    let path = format!("{}/src/compare/golden/{name}", env!("CARGO_MANIFEST_DIR"));
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
    assert_eq!(phases[0].phase, Phase::Create);
    let time = phases[0].time;
    assert_eq!(
        time.before.unwrap(),
        Spread {
            median: 42_209_000,
            min: 40_100_000,
            max: 43_000_000,
            runs: 3
        }
    );
    assert_eq!(time.after.unwrap().median, 12_613_000);
    assert!((time.ratio.unwrap() - 0.2988).abs() < 1e-4);
    assert_eq!(comparison.regressions().count(), 1);
}

#[test]
fn it_prints_as_it_always_did() {
    let (before, after) = pair();
    let options = Options {
        labels: ["base".to_owned(), "stage2-fault-path".to_owned()],
        ..Options::default()
    };
    let comparison = Comparison::of(&before, &after, &options).unwrap();

    golden("pair.txt", &render::text(&comparison));
    golden("pair.md", &render::markdown(&comparison));
    golden("pair.json", &render::json(&comparison).unwrap());
}

#[test]
fn one_run_of_a_raw_log_prints_with_its_caveats() {
    let log = include_str!("golden/console.log");
    let before = raw_log::records(&raw_log::read(log).unwrap());
    let faster = log.replace("0.003193280s", "0.001000000s");
    let after = raw_log::records(&raw_log::read(&faster).unwrap());

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
fn a_regression_begins_behind_the_least_effect() {
    for (us, regressions) in [(102_999, 0), (103_000, 0), (103_100, 1), (90_000, 0)] {
        let comparison = compare(&runs(&[100_000], &[]), &patched(runs(&[us], &[]))).unwrap();
        assert_eq!(comparison.regressions().count(), regressions, "{us}");
    }
}

#[test]
fn a_timer_tick_more_under_emulation_is_no_regression() {
    for (us, regressions) in [(75, 0), (79, 0), (81, 1)] {
        let comparison = compare(&runs(&[20], &[]), &patched(runs(&[us], &[]))).unwrap();
        assert_eq!(comparison.regressions().count(), regressions, "{us}");
    }
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
    assert_eq!(phase.counters["TLBI VMALLS12E1IS"].after.unwrap().median, 0);
    assert_eq!(phase.counters["TLBI IPAS2E1IS"].before.unwrap().median, 0);
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
        ..Options::default()
    };
    let forced = Comparison::of(&before, &after, &options).unwrap();

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
    log[0].engine = raw_log::ENGINE.to_owned();
    let options = Options {
        force: true,
        ..Options::default()
    };

    assert!(matches!(
        compare(&log, &[record()]),
        Err(CompareError::Unequal(_))
    ));
    assert!(Comparison::of(&log, &[record()], &options).is_ok());
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
    let (theirs, ours) = (log(raw_log::ENGINE), log(raw_log::BENCH_ENGINE));

    assert!(compare(&ours, &ours).is_ok());
    let refused = compare(&theirs, &ours).unwrap_err();
    assert!(matches!(refused, CompareError::Unequal(list) if list.len() == 1));
}

#[test]
fn the_kernels_test_and_ours_are_not_mixed() {
    let mut theirs = record();
    theirs.engine = raw_log::ENGINE.to_owned();
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
        [phases[0].phase, phases[1].phase],
        [Phase::Create, Phase::Whole]
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
