// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of comparisons of the configurations of one kernel.

use granule_types::{
    record::{Record, ResidentPages},
    units::Bytes,
};

use super::{runs, without_emulator};
use crate::{
    CompareError, Comparison, ComparisonOptions, ComparisonSet, SetupField, Verdict, input, render,
    sample::{Sample, samples},
};

/// Returns runs (us) of create with a backing and a number of vCPUs, which the emulator's options
/// contain.
fn create(backing: &str, vcpus: u32, times: &[u64]) -> Vec<Record> {
    let mut records = runs(times, &[]);
    for record in &mut records {
        record.config.backing = backing.parse().unwrap();
        record.config.vcpus = vcpus;
        record.host.emulator = Some(format!("QEMU 7.2 -smp {vcpus} -m 2G -icount shift=0"));
    }
    records
}

/// Returns two vCPU counts of three backings; 2M pages are faster, THP slower than 4K pages.
fn three_backings() -> Vec<Sample> {
    let records = [4, 8].into_iter().flat_map(|vcpus| {
        let mut huge = create("anonymous_hugetlb_2mb", vcpus, &[10_000, 10_100, 10_200]);
        for record in &mut huge {
            record.resident_pages = Some(ResidentPages { resident_bytes: [(2 << 20, 1)].into() });
        }
        let mut small = create("anonymous", vcpus, &[50_000, 50_100, 50_200]);
        for record in &mut small {
            record.resident_pages = Some(ResidentPages { resident_bytes: [(4096, 1)].into() });
        }
        [small, huge, create("anonymous_thp", vcpus, &[60_000, 60_100, 60_200])].concat()
    });
    samples(&records.collect::<Vec<_>>())
}

fn by(samples: &[Sample], field: SetupField) -> Result<ComparisonSet, CompareError> {
    ComparisonSet::by(samples, field, &ComparisonOptions::default())
}

#[test]
fn each_backing_is_compared_with_the_first() {
    let set = by(&three_backings(), SetupField::Backing).unwrap();

    let figures = |comparison: &Comparison| {
        let labels = [&comparison.before.label, &comparison.after.label];
        let setups = comparison.configurations.iter().map(|one| one.setup.name());
        let verdicts = [Verdict::Regression, Verdict::Improvement].map(|v| comparison.count(v));
        (labels.map(String::clone).join(" "), setups.collect::<Vec<_>>(), verdicts)
    };
    let found: Vec<_> = set.comparisons().iter().map(figures).collect();
    let setups = || vec!["64M, 4 vCPUs".to_owned(), "64M, 8 vCPUs".to_owned()];
    assert_eq!(
        found,
        [
            ("anonymous anonymous_hugetlb_2mb".to_owned(), setups(), [0, 2]),
            ("anonymous anonymous_thp".to_owned(), setups(), [2, 0]),
        ]
    );
    let pages = "Pages that back the memory: anonymous: 4K pages; anonymous_hugetlb_2mb: 2M pages.";
    assert_eq!(set.comparisons()[0].notes, [pages]);
}

#[test]
fn vcpus_are_compared_although_the_emulated_machines_have_different_sizes() {
    let set = by(&three_backings(), SetupField::Vcpus).unwrap();

    let [comparison] = set.comparisons() else {
        panic!("{set:?}");
    };
    assert_eq!([&comparison.before.label, &comparison.after.label], ["4 vCPUs", "8 vCPUs"]);
    assert_eq!(comparison.configurations.len(), 3);
    assert_eq!(comparison.before.emulator.as_deref(), Some("QEMU 7.2 -icount shift=0"));
}

#[test]
fn configurations_of_different_hosts_are_refused() {
    type Edit = fn(&mut Sample);
    let edits: [(&str, Edit); 3] = [
        ("kernel version", |sample| sample.host.kernel = "6.12.1".to_owned()),
        ("emulator", |sample| sample.host.emulator = Some("QEMU 10.0 -smp 4".to_owned())),
        ("base page", |sample| sample.host.page_size = Some(Bytes::kib(64))),
    ];
    for (field, edit) in edits {
        let mut samples = three_backings();
        edit(samples.last_mut().unwrap());

        let error = by(&samples, SetupField::Vcpus).unwrap_err();

        assert!(
            matches!(&error, CompareError::ProvenanceDiffers(found) if found[0].field == field),
            "{error}"
        );
    }
}

#[test]
fn a_single_or_unknown_value_is_refused() {
    let one = samples(&create("anonymous", 4, &[10]));
    let log = include_str!("../../golden/perf.log");

    let [single, unknown] =
        [(one, SetupField::Memory), (input::parse(log).unwrap(), SetupField::Vcpus)]
            .map(|(samples, field)| by(&samples, field).unwrap_err().to_string());

    assert!(single.starts_with("--by memory: every result has the same value, 64M:"), "{single}");
    assert!(unknown.starts_with("--by vcpus: a result does not state its vcpus:"), "{unknown}");
}

#[test]
fn runs_of_two_files_are_paired() {
    let file = |backing: &str, first: u32, times: &[u64]| {
        let mut records = without_emulator(create(backing, 4, times));
        for (iteration, record) in (first..).zip(&mut records) {
            (record.config.seed, record.config.iteration) = (0, iteration);
        }
        records
    };
    let slower: Vec<u64> = (1..=8).map(|us| us * 110_000).collect();
    let times: Vec<u64> = (1..=8).map(|us| us * 100_000).collect();
    let both = [file("anonymous", 0, &times), file("anonymous_thp", 8, &slower)].concat();
    let options = ComparisonOptions { is_paired: true, ..ComparisonOptions::default() };

    let set = ComparisonSet::by(&samples(&both), SetupField::Backing, &options).unwrap();

    assert_eq!(set.comparisons()[0].count(Verdict::Regression), 1);
}

#[test]
fn formats_for_programs_contain_each_comparison_with_its_labels() {
    let set = by(&three_backings(), SetupField::Backing).unwrap();

    let csv = render::csv_set(&set);
    let json: serde_json::Value = serde_json::from_str(&render::json_set(&set).unwrap()).unwrap();
    let html = render::html_set(&set);

    let lines = csv.lines().map(|line| line.split(',').next().unwrap().to_owned());
    assert_eq!(lines.clone().next().unwrap(), "before_label");
    assert!(lines.clone().count() > 4 && lines.skip(1).all(|label| label == "anonymous"));
    assert!(csv.contains("\nanonymous,anonymous_thp,kvm,"), "{csv}");
    let labels = [0, 1].map(|at| &json[at]["after"]["label"]);
    assert_eq!(labels, ["anonymous_hugetlb_2mb", "anonymous_thp"]);
    assert_eq!(json[0]["schema"], "granule.comparison/2");
    for heading in ["anonymous_hugetlb_2mb against anonymous", "anonymous_thp against anonymous"] {
        assert_eq!(html.matches(&format!("<h1>{heading}</h1>")).count(), 1, "{heading}");
    }
}

#[test]
fn a_cover_letter_has_a_row_for_each_backing() {
    let text = render::cover(&by(&three_backings(), SetupField::Backing).unwrap(), &[], &[]);

    for expected in [
        "\n  anonymous                  50.1  40,080,000 ",
        "\n  anonymous_thp              60.1  48,080,000 ",
        "\nanonymous_hugetlb_2mb: No regression. Improvement: create.\n",
        "\nanonymous_thp: Regression: create.\n",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
}
