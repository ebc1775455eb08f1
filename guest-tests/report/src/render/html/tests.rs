// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Pages as text, and in Chromium.

use super::{
    browser::{look_at, probed},
    html, single,
};
use crate::{
    Comparison, Options,
    fixture::{patched, record, runs},
    samples,
};
use granule_types::{phase::Phase, record::Record, units::Nanoseconds};

/// Returns two backings, four numbers of vCPUs, two sizes, all phases and ten runs: times from
/// nanoseconds to minutes, counts from 0 to billions, and names that are longer than a chart.
fn matrix(factor: u64) -> Vec<Record> {
    let mut records = Vec::new();
    for (at, backing) in ["anonymous", "anonymous_hugetlb_2mb"].into_iter().enumerate() {
        for vcpus in [1, 2, 8, 80] {
            for (step, phase) in (0..).zip(Phase::ALL) {
                for run in 0..10 {
                    let mut one = record();
                    one.host.emulator = None;
                    one.config.backing = backing.parse().unwrap();
                    one.config.vcpus = vcpus;
                    one.config.iteration = run;
                    if at == 1 {
                        one.config.memory.0 <<= vcpus % 2;
                        let option = "a value that goes on for longer than any chart".to_owned();
                        one.config.options.insert("dirty-log".to_owned(), option);
                    }
                    one.phase = phase;
                    let ns =
                        7_u64.pow(step * 2) * u64::from(vcpus) * factor + u64::from(run * 3 % 7);
                    one.ns = Nanoseconds(ns);
                    if phase.is_guest_work() {
                        let of = |vcpu| Nanoseconds(ns * (100 - u64::from(vcpu) % 31) / 100);
                        one.vcpu_ns = (0..vcpus).map(of).collect();
                    }
                    one.counters.insert("DC CIVAC".to_owned(), ns * 3);
                    one.gauges.insert("pages_2m".to_owned(), 32 * factor);
                    if at == 0 {
                        let mut larger = one.clone();
                        larger.config.memory.0 *= 4;
                        larger.ns.0 *= 4;
                        records.push(larger);
                    }
                    records.push(one);
                }
            }
        }
    }
    records
}

fn page() -> String {
    let options = Options {
        labels: ["before <&>".to_owned(), "a/quite/long/path/that/must/break/somewhere/".repeat(3)],
        command: Some("granule compare \"<before>\" after".to_owned()),
        ..Options::default()
    };
    let (before, after) = (samples(&matrix(10)), samples(&patched(matrix(7))));
    html(&Comparison::of(&before, &after, &options).unwrap())
}

#[test]
fn the_page_is_one_file_and_escapes_text() {
    let page = page();
    for unwanted in ["<script", "http:", "https:", "src=", "@import", "url("] {
        assert!(!page.contains(unwanted), "{unwanted}");
    }
    assert!(page.contains("before &lt;&amp;&gt;") && !page.contains("before <&>"));
    assert!(page.contains("granule compare &quot;&lt;before&gt;&quot; after"));
    for wanted in [
        "create, by configuration",
        "create, by vCPUs",
        "rebuild, by size",
        "create, time of each vCPU",
        "prefers-color-scheme: dark",
        "Every figure",
    ] {
        assert!(page.contains(wanted), "{wanted}");
    }
}

#[test]
fn one_run_of_one_phase_makes_a_page() {
    let (before, after) = (samples(&runs(&[10], &[])), samples(&runs(&[10], &[])));
    let page = html(&Comparison::of(&before, &after, &Options::default()).unwrap());
    assert!(page.contains("inconclusive") || page.contains("no regression"));
    assert!(page.contains("data-marks=\"2\""));
}

#[test]
fn charts_and_tables_show_the_same_range() {
    let page = |runs_a_side: &[u64]| {
        let [before, after] = [runs(runs_a_side, &[]), patched(runs(runs_a_side, &[]))];
        html(&Comparison::of(&samples(&before), &samples(&after), &Options::default()).unwrap())
    };
    let (few, enough) = (page(&[10, 20, 60]), page(&[10, 20, 60, 70]));

    assert!(few.contains("before: 20.000 us, all from 10.000 us to 60.000 us, 3 runs"), "{few}");
    assert!(
        few.contains("; median, least and greatest") && !few.contains("; median and quartiles")
    );
    assert!(enough.contains(", quartiles 17.500 us to 62.500 us, 4 runs"), "{enough}");
    assert!(enough.contains("; median and quartiles"));
}

#[test]
#[ignore = "needs Chromium; scripts/test runs it where it is installed"]
fn in_chromium_charts_are_complete_and_do_not_overlap() {
    let folder = tempfile::tempdir().unwrap();
    let spoilt = page().replace("y=\"12.0\"", "y=\"25.0\"");
    assert!(probed(folder.path(), &spoilt, 0).contains("lies upon"), "the probe finds nothing");
    look_at(&page(), 30);
}

#[test]
#[ignore = "needs Chromium; scripts/test runs it where it is installed"]
fn in_chromium_a_page_of_one_kernel_is_legible() {
    look_at(&single(&samples(&matrix(7)), "a series", Some("granule lab")), 8);
}
