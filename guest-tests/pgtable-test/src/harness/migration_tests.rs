// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The load like migration's on toy machines: what it measures, and that its checks can fail.

use std::time::Duration;

use super::{
    HarnessError, Plan,
    destination::Destination,
    tasks::Tasks,
    tests::{plan, run_toy},
};
use crate::{
    config::Migration,
    fake_machine::{Defect, Toy},
    machine::Machine,
};
use granule_types::{phase::Phase, units::Bytes};

/// Four blocks of sixteen pages.
const BLOCK: Bytes = Bytes::kib(64);
const ROUNDS: u32 = 3;

fn migration(iterations: u32) -> Plan {
    Plan {
        migration: Some(Migration {
            rounds: ROUNDS,
            round_time: Duration::from_millis(2),
        }),
        ..plan(iterations, "create")
    }
}

fn error_of(defect: Defect) -> HarnessError {
    let mut toy = Toy::new(3, BLOCK, defect);
    run_toy(&mut toy, &migration(1)).1.unwrap_err()
}

#[test]
fn rounds_tell_what_the_guest_did_and_both_sides_are_equal() {
    let mut toy = Toy::new(3, BLOCK, Defect::None);

    let (records, result) = run_toy(&mut toy, &migration(2));

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
fn a_page_that_the_log_misses_is_named_with_its_round_and_both_values() {
    let error = error_of(Defect::LosesDirty(5));

    let text = error.to_string();
    let HarnessError::LostWrite {
        pages,
        address,
        source_holds,
        copied,
        round,
        logged_in,
    } = error
    else {
        panic!("{text}");
    };
    // Every vCPU writes there once more after the last round, in the stop.
    assert_eq!((pages, address.0, logged_in), (1, 0x10_5000, 0));
    assert_eq!(round, ROUNDS + 1);
    assert!(source_holds > copied, "{text}");
    assert!(text.contains("in no round"), "{text}");
}

#[test]
fn a_write_that_never_came_to_memory_is_found() {
    // The second vCPU's word of the third page.
    let error = error_of(Defect::LosesWrite(0x10_2008));

    assert!(
        matches!(error, HarnessError::Contents { address, found: 0, .. } if address.0 == 0x10_2008),
        "{error}"
    );
}

#[test]
fn a_page_that_changed_behind_the_last_copy_is_found() {
    let mut toy = Toy::new(1, BLOCK, Defect::None);
    let mut copy = Destination::new(toy.region());
    let all = copy.everything();
    copy.pages(&toy, &all).unwrap();
    copy.note(&[0b10], 4);
    toy.shared.poke(0x10_1000 + 8 * 300, 7);

    let error = copy
        .check(toy.live().unwrap(), &[], &[vec![9]])
        .unwrap_err();

    let text = error.to_string();
    assert!(text.starts_with("1 pages differ"), "{text}");
    assert!(text.contains("last in round 4"), "{text}");
}

#[test]
fn a_host_that_fails_while_the_vcpus_run_gets_them_out_of_the_guest() {
    let error = error_of(Defect::RefusesLog);

    assert_eq!(
        error.to_string(),
        "the host failed collecting the dirty log"
    );
}

#[test]
fn more_vcpus_than_words_in_a_page_are_refused() {
    let mut toy = Toy::new(513, BLOCK, Defect::None);
    let (_, result) = run_toy(&mut toy, &migration(1));
    assert!(matches!(
        result,
        Err(HarnessError::Crowded {
            vcpus: 513,
            most: 512
        })
    ));
}

#[test]
fn pages_that_a_log_names_and_nobody_wrote_are_counted() {
    let toy = Toy::new(1, BLOCK, Defect::None);
    let task = Tasks::new(toy.region(), 1, 0).write_at_random(0);
    let mut copy = Destination::new(toy.region());
    copy.note(&[u64::MAX], 1);

    let by_nobody = copy.named_in_vain(&[], &[]);
    let by_one_write = copy.named_in_vain(&[task], &[1]);

    assert_eq!((by_nobody, by_one_write), (64, 63));
}
