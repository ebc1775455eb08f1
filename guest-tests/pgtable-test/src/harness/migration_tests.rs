// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The migration workload on fake machines: its records, and defects that its checks detect.

use std::time::Duration;

use super::{
    HarnessError, Plan,
    destination::Destination,
    tasks::Tasks,
    tests::{plan, run_fake},
};
use crate::{
    config::Migration,
    fake_machine::{Defect, FakeMachine},
    machine::Machine,
};
use granule_types::{phase::Phase, units::Bytes};

/// Four blocks of sixteen pages.
const BLOCK: Bytes = Bytes::kib(64);
const ROUNDS: u32 = 3;

fn migration(iterations: u32) -> Plan {
    Plan {
        migration: Some(Migration { rounds: ROUNDS, round_time: Duration::from_millis(2) }),
        ..plan(iterations, "create")
    }
}

fn error_of(defect: Defect) -> HarnessError {
    let mut fake = FakeMachine::new(3, BLOCK, defect);
    run_fake(&mut fake, &migration(1)).1.unwrap_err()
}

#[test]
fn rounds_record_the_guests_progress() {
    let mut fake = FakeMachine::new(3, BLOCK, Defect::None);

    let (records, result) = run_fake(&mut fake, &migration(2));

    result.unwrap();
    let steps: Vec<_> = records.iter().map(|r| (r.phase, r.round)).collect();
    let once = [
        (Phase::Create, None),
        (Phase::LoggingOn, None),
        (Phase::Round, Some(1)),
        (Phase::Round, Some(2)),
        (Phase::Round, Some(3)),
        (Phase::Stop, None),
        (Phase::LoggingOff, None),
    ];
    assert_eq!(steps, [once, once].concat());
    assert_eq!(records.len() as u64, migration(2).records());
    for round in records.iter().filter(|r| r.phase == Phase::Round) {
        assert!(round.gauges["round_ns"] >= 2_000_000);
        assert!(round.events.contains_key("guest_writes"));
        assert!(round.events["pages_logged"] <= 64);
    }
}

#[test]
fn a_page_missing_from_the_dirty_bitmap_is_reported_with_round_and_values() {
    let error = error_of(Defect::LosesDirty(5));

    let text = error.to_string();
    let HarnessError::LostWrite { pages, address, source_holds, copied, round, logged_in } = error
    else {
        panic!("{text}");
    };
    // Every vCPU writes the page again after the last round, during the stop.
    assert_eq!((pages, address.0, logged_in), (1, 0x10_5000, 0));
    assert_eq!(round, ROUNDS + 1);
    assert!(source_holds > copied, "{text}");
    assert!(text.contains("in no round"), "{text}");
}

#[test]
fn a_lost_write_is_reported() {
    // The second vCPU's word of the third page.
    let error = error_of(Defect::LosesWrite(0x10_2008));

    assert!(
        matches!(error, HarnessError::Contents { address, found: 0, .. } if address.0 == 0x10_2008),
        "{error}"
    );
}

#[test]
fn a_page_changed_after_its_last_copy_is_reported() {
    let mut fake = FakeMachine::new(1, BLOCK, Defect::None);
    let mut copy = Destination::new(fake.region());
    let all = copy.all_pages();
    copy.copy_pages(&fake, &all).unwrap();
    copy.note(&[0b10], 4);
    fake.state.poke(0x10_1000 + 8 * 300, 7);

    let error = copy.check(fake.migration_ops().unwrap(), &[], &[vec![9]]).unwrap_err();

    let text = error.to_string();
    assert!(text.starts_with("1 pages differ"), "{text}");
    assert!(text.contains("last in round 4"), "{text}");
}

#[test]
fn a_host_failure_kicks_the_running_vcpus() {
    let error = error_of(Defect::RefusesLog);

    assert_eq!(error.to_string(), "the host failed collecting the dirty bitmap");
}

#[test]
fn more_vcpus_than_words_in_a_page_are_refused() {
    let mut fake = FakeMachine::new(513, BLOCK, Defect::None);
    let (_, result) = run_fake(&mut fake, &migration(1));
    assert!(matches!(result, Err(HarnessError::TooManyVcpus { vcpus: 513, most: 512 })));
}

#[test]
fn logged_pages_that_no_vcpu_wrote_are_counted() {
    let fake = FakeMachine::new(1, BLOCK, Defect::None);
    let task = Tasks::new(fake.region(), 1, 0).write_at_random(0);
    let mut copy = Destination::new(fake.region());
    copy.note(&[u64::MAX], 1);

    let by_no_write = copy.unwritten_pages_logged(&[], &[]);
    let by_one_write = copy.unwritten_pages_logged(&[task], &[1]);

    assert_eq!((by_no_write, by_one_write), (64, 63));
}
