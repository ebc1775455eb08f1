// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of the growth of times with a parameter.

use granule_types::{record::Record, units::Nanoseconds};

use super::{compare, record, without_emulator};
use crate::render;

#[test]
fn single_runs_show_growth_of_virtual_time_only() {
    let records = [1, 2, 4].map(|vcpus| {
        let mut record = record();
        record.config.vcpus = vcpus;
        record.ns = Nanoseconds(u64::from(vcpus) * 1_000_000);
        record
    });
    let report = |records: &[Record]| render::markdown(&compare(records, records).unwrap());
    let (emulated, real) = (report(&records), report(&without_emulator(records.to_vec())));
    let on_software = without_emulator(records.to_vec()).into_iter();
    let on_software: Vec<_> =
        on_software.map(|record| Record { engine: "model".to_owned(), ..record }).collect();

    assert!(emulated.contains("linear, of one schedule"), "{emulated}");
    for real in [real, report(&on_software)] {
        let is_inconclusive = real.contains("inconclusive, one run a point");
        assert!(is_inconclusive && !real.contains("linear"), "{real}");
    }
}
