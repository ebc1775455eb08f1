// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use std::slice;

use super::{compare, compare_by, options};
use crate::{
    CompareError, Options,
    fixture::{patched, record, runs},
    render,
    sample::engine,
};
use granule_types::record::{Host, Record};

/// Returns the record of a test whose log does not name its host.
fn log(engine: &str) -> Record {
    let mut log = record();
    log.host = Host::default();
    log.obtained = None;
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
    let force = Options { force: true, ..options() };
    let forced = compare_by(&before, &after, &force).unwrap();

    assert!(matches!(&refused, CompareError::Unequal(list) if list.len() == 2));
    let text = refused.to_string();
    for wanted in [
        "\n  CPU: neoverse-n1 before, cortex-a72 after\n",
        "\n  base page: 4K before, unknown after\n",
    ] {
        assert!(text.contains(wanted), "{text}");
    }
    assert_eq!(forced.differences.len(), 2);
    assert!(render::text(&forced).contains("Compared with --force"));
}

#[test]
fn logs_compare_with_logs_of_the_same_test_only() {
    let mut without_host = record();
    without_host.host = Host::default();
    let (kernel_test, bench) = (log(engine::PAGE_TABLE_TEST), log(engine::BENCH_LINES));
    for (before, after, compares) in [
        (&bench, &bench, true),
        (&kernel_test, &bench, false),
        (&kernel_test, &record(), false),
        // Results must name their host.
        (&without_host, &without_host, false),
    ] {
        let (before, after) = (slice::from_ref(before), slice::from_ref(after));
        let found = compare(before, after);
        assert_eq!(found.is_ok(), compares, "{found:?}");
        let force = Options { force: true, ..options() };
        assert!(compares || matches!(found, Err(CompareError::Unequal(_))));
        assert!(compare_by(before, after, &force).is_ok());
    }
    let refused = compare(&[kernel_test], &[bench]);
    assert!(matches!(refused, Err(CompareError::Unequal(list)) if list.len() == 1));
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

    let comparison = compare(&before, &patched(runs(&[10], &[]))).unwrap();

    let wanted = "Only in before, not compared: update of anonymous_hugetlb_2mb, 64M, 16 vCPUs; \
                  anonymous_hugetlb_2mb, 64M, 4 vCPUs.";
    assert!(comparison.notes.iter().any(|note| note == wanted), "{:?}", comparison.notes);
}

#[test]
fn sides_without_a_common_configuration_are_refused() {
    let mut other = record();
    other.config.vcpus = 4;

    let error = compare(&[record()], &[other]).unwrap_err().to_string();

    assert!(error.contains("16 vCPUs. After: anonymous_hugetlb_2mb, 64M, 4 vCPUs"), "{error}");
    assert!(matches!(compare(&[], &[record()]), Err(CompareError::Empty(_))));
}
