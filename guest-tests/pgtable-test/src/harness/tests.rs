// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of the harness on fake machines with and without defects.

use std::{error::Error, time::Duration};

use super::{
    HarnessError, RunEvent, RunPlan, check_contents, migration::MigrationDestination, run,
    tasks::Tasks,
};
use crate::{
    config::Migration,
    fake_machine::{Defect, FakeMachine},
    machine::Machine,
    task::TaskAccess,
};
use granule_types::{backing::Backing, phase::Phase, record::Record, units::Bytes};

/// Backing page of 16 small pages; the region has four.
const BLOCK: Bytes = Bytes::kib(64);
const ALL_PHASES: &str = "create,logging-on,update,logging-off,rebuild,exec,unmap";
const ROUNDS: u32 = 3;

fn plan(iterations: u32, phases: &str) -> RunPlan {
    let mut plan = RunPlan::new("fake".to_owned(), Backing::AnonymousThp, Bytes::kib(256), 4);
    plan.config.seed = 5;
    RunPlan { iterations, phases: phases.parse().unwrap(), ..plan }
}

fn migration_plan(iterations: u32) -> RunPlan {
    RunPlan {
        migration: Some(Migration { rounds: ROUNDS, round_time: Duration::from_millis(2) }),
        ..plan(iterations, "create")
    }
}

fn run_fake(fake: &mut FakeMachine, plan: &RunPlan) -> (Vec<Record>, Result<(), HarnessError>) {
    let mut records = Vec::new();
    let result = run(fake, plan, &mut |progress| {
        if let RunEvent::PhaseComplete(record) = progress {
            records.push(record.clone());
        }
        Ok(())
    });
    (records, result)
}

/// Runs a plan on a machine without a defect.
fn run_without_defect(plan: &RunPlan) -> (FakeMachine, Vec<Record>) {
    let mut fake = FakeMachine::new(4, BLOCK, Defect::None);
    let (records, result) = run_fake(&mut fake, plan);
    result.unwrap();
    (fake, records)
}

/// Returns the error of a run on a machine with a defect.
fn error_with_defect(plan: &RunPlan, defect: Defect, backing_page_size: Bytes) -> HarnessError {
    let mut fake = FakeMachine::new(4, backing_page_size, defect);
    run_fake(&mut fake, plan).1.unwrap_err()
}

#[test]
fn an_iteration_yields_a_record_of_every_phase_in_order() {
    let (_, records) = run_without_defect(&plan(3, ALL_PHASES));

    assert_eq!(records.len(), 3 * Phase::ALL.len());
    for (index, record) in records.iter().enumerate() {
        assert_eq!(record.phase, Phase::ALL[index % 7]);
        assert_eq!(record.config.iteration as usize, index / 7);
        let vcpus = if record.phase.runs_vcpus() { 4 } else { 0 };
        assert_eq!(record.vcpu_ns.len(), vcpus, "{}", record.phase);
        assert!(record.resident_pages.is_some());
    }
}

#[test]
fn the_plan_computes_the_number_of_records() {
    for phases in [ALL_PHASES, "create", "update", "rebuild,unmap", "exec"] {
        let plan = plan(2, phases);

        let (_, records) = run_without_defect(&plan);

        assert_eq!(records.len() as u64, plan.record_count(), "{phases}");
    }
}

#[test]
fn a_record_holds_the_events_of_its_phase_only() {
    let (_, records) = run_without_defect(&plan(2, ALL_PHASES));

    // Two vCPUs write four blocks each in create, all four vCPUs in update.
    let writes: Vec<_> = records.iter().map(|r| r.events["writes"]).collect();
    assert_eq!(writes[..7], [8, 0, 16, 0, 0, 0, 0]);
    assert_eq!(writes[..7], writes[7..]);
}

#[test]
fn clean_up_runs_even_if_it_is_not_selected() {
    let (fake, records) = run_without_defect(&plan(2, "update"));

    let phases: Vec<_> = records.iter().map(|record| record.phase.name()).collect();
    assert_eq!(phases[..3], ["create", "logging-on", "update"]);
    assert_eq!(
        fake.state.memory().host_calls,
        ["log on", "log off", "drop", "restore", "log on", "log off"]
    );
}

#[test]
fn the_backing_of_untouched_memory_is_read_after_update() {
    let mut logging = plan(1, "update,rebuild");
    logging.phases = logging.phases.without_create().unwrap();

    let (_, records) = run_without_defect(&logging);

    let known: Vec<_> = records
        .iter()
        .map(|record| (record.phase.name(), record.resident_pages.is_some()))
        .collect();
    let expected =
        [("logging-on", false), ("update", true), ("logging-off", true), ("rebuild", true)];
    assert_eq!(known, expected);
}

#[test]
fn only_vcpu_0_installs_returns_and_verifies() {
    let (fake, _) = run_without_defect(&plan(1, ALL_PHASES));

    let log = &fake.state.memory().tasks;
    let vcpus = |access| -> Vec<usize> {
        let matches = log.iter().filter(|(_, task)| task.access == access);
        matches.map(|(vcpu, _)| *vcpu).collect()
    };
    assert_eq!(vcpus(TaskAccess::InstallReturn), [0]);
    assert_eq!(vcpus(TaskAccess::Verify), [0]);
    assert_eq!(vcpus(TaskAccess::Execute).len(), 4);
}

#[test]
fn each_defect_is_reported_with_its_location_and_cause() {
    let all = plan(1, ALL_PHASES);
    let short = RunPlan { deadline: Duration::from_millis(300), ..plan(1, ALL_PHASES) };
    let (migration, small) = (migration_plan(1), Bytes::kib(4));
    for (plan, defect, backing_page_size, expected) in [
        (&all, Defect::CannotBind(2), BLOCK, "cannot start the vCPUs: cannot bind vCPU 2 to"),
        (&short, Defect::Hangs(3), BLOCK, "the vCPUs failed entering the guest: "),
        (&short, Defect::Hangs(3), BLOCK, "vCPU 3 failed: KICKED, PC 0x1003"),
        (
            &all,
            Defect::LosesWrite(0x11_0000),
            BLOCK,
            "the vCPUs failed verifying contents: vCPU 0 failed: VERIFY",
        ),
        (&all, Defect::LosesDirtyBit(32), BLOCK, "misses 1 of 4 pages"),
        (&all, Defect::LosesDirtyBit(32), BLOCK, "first at guest address 0x120000"),
        (&all, Defect::LosesDirtyBit(2), small, "misses 1 of 4 pages"),
        (&all, Defect::LosesDirtyBit(2), small, "first at guest address 0x102000"),
        (&migration, Defect::FailsCollection, BLOCK, "the host failed collecting the dirty bitmap"),
        // The word of vCPU 1 in the third page.
        (&migration, Defect::LosesWrite(0x10_2008), BLOCK, "guest address 0x102008 holds 0x0,"),
        (&migration, Defect::LosesDirtyBit(5), BLOCK, "1 pages differ"),
        (&migration, Defect::LosesDirtyBit(5), BLOCK, "first at guest address 0x105000"),
        // Every vCPU writes the page again after the last round, during the stop.
        (&migration, Defect::LosesDirtyBit(5), BLOCK, "written in round 4, the destination"),
        (&migration, Defect::LosesDirtyBit(5), BLOCK, "contained the page in no round"),
    ] {
        let error = error_with_defect(plan, defect, backing_page_size);

        let cause = error.source().map(ToString::to_string).unwrap_or_default();
        let text = format!("{error}: {cause}");
        assert!(text.contains(expected), "{defect:?}: {text}");
    }
}

#[test]
fn contents_that_differ_from_the_written_values_are_an_error() {
    let fake = FakeMachine::new(1, BLOCK, Defect::None);
    let written = Tasks::new(fake.region(), 0, 0).writes_of(Phase::Create);

    let error = check_contents(&fake, written).unwrap_err();

    assert!(matches!(error, HarnessError::WrongContents { found: 0, .. }), "{error}");
}

#[test]
fn a_fallback_to_small_pages_is_an_error_unless_accepted() {
    let error = error_with_defect(&plan(1, ALL_PHASES), Defect::UsesSmallPages(64 << 10), BLOCK);
    let mut fake = FakeMachine::new(4, BLOCK, Defect::UsesSmallPages(64 << 10));
    let accepting = RunPlan { accepts_fallback: true, ..plan(1, ALL_PHASES) };
    let (records, result) = run_fake(&mut fake, &accepting);

    let text = error.to_string();
    assert!(text.contains("64K in pages of 4K and 192K in pages of 64K"), "{text}");
    result.unwrap();
    assert_eq!(records[0].resident_pages.as_ref().unwrap().resident_bytes.len(), 2);
}

#[test]
fn a_failing_observer_ends_the_run() {
    let mut fake = FakeMachine::new(2, BLOCK, Defect::None);

    let result = run(&mut fake, &plan(1, ALL_PHASES), &mut |_| Err("the disk is full".into()));

    assert!(matches!(result, Err(HarnessError::Observer(_))));
}

#[test]
fn each_round_records_guest_writes_and_logged_pages() {
    let (_, records) = run_without_defect(&migration_plan(2));

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
    assert_eq!(records.len() as u64, migration_plan(2).record_count());
    for round in records.iter().filter(|r| r.phase == Phase::Round) {
        assert!(round.gauges["round_ns"] >= 2_000_000);
        assert!(round.events.contains_key("guest_writes"));
        assert!(round.events["pages_logged"] <= 64);
    }
}

#[test]
fn a_page_changed_after_its_last_copy_is_reported() {
    let mut fake = FakeMachine::new(1, BLOCK, Defect::None);
    let mut copy = MigrationDestination::new(fake.region());
    let all = copy.all_pages();
    copy.copy_pages(&fake, &all).unwrap();
    copy.record_bitmap(&[0b10], 4);
    fake.state.memory().write_untracked(0x10_1000 + 8 * 300, 7);

    let error = copy.check(fake.migration_ops().unwrap(), &[], &[vec![9]]).unwrap_err();

    let text = error.to_string();
    for expected in ["1 pages differ", "source holds 0x7,", "destination 0x0;", "last in round 4"] {
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn more_vcpus_than_words_in_a_page_are_refused() {
    let mut fake = FakeMachine::new(513, BLOCK, Defect::None);
    let (_, result) = run_fake(&mut fake, &migration_plan(1));
    assert!(matches!(result, Err(HarnessError::TooManyVcpus(513, 512))));
}

#[test]
fn clean_pages_that_the_dirty_bitmap_reports_are_counted() {
    let fake = FakeMachine::new(1, BLOCK, Defect::None);
    let task = Tasks::new(fake.region(), 1, 0).write_at_random(0);
    let mut copy = MigrationDestination::new(fake.region());
    copy.record_bitmap(&[u64::MAX], 1);

    let by_no_write = copy.clean_pages_logged(&[], &[]);
    let by_one_write = copy.clean_pages_logged(&[task], &[1]);

    assert_eq!((by_no_write, by_one_write), (64, 63));
}
