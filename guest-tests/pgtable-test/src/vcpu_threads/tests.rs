// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The crew against toy vCPUs that hang, fail and panic.

use std::{collections::BTreeSet, sync::Arc};

use super::*;
use crate::{
    fake_machine::{Defect, Toy},
    machine::{Access, Machine},
};
use granule_types::units::{Bytes, GuestAddress};

const SOON: Duration = Duration::from_millis(200);
const LATE: Duration = Duration::from_secs(60);

fn crew(vcpus: usize, defect: Defect) -> Result<(Crew, Toy), CrewError> {
    let mut toy = Toy::new(vcpus, Bytes::kib(64), defect);
    // Only who waits in vain should have to; a busy machine makes anyone late.
    let deadline = match defect {
        Defect::Hangs(_) => SOON,
        _ => LATE,
    };
    let crew = Crew::start(toy.take_vcpus(), deadline)?;
    Ok((crew, toy))
}

fn task() -> Task {
    Task {
        access: Access::Nothing,
        start: GuestAddress(0),
        count: 0,
        stride: Bytes(0),
        inner_first: Bytes(0),
        inner_count: 0,
        inner_stride: Bytes(0),
        seed: 0,
    }
}

fn round(crew: &mut Crew, seed: u64) -> Result<RoundTimes, CrewError> {
    let tasks = vec![task(); crew.vcpus()];
    crew.muster(&tasks, seed)?.release()
}

#[test]
fn every_vcpu_runs_its_own_task_once_a_round() {
    let (mut crew, toy) = crew(8, Defect::None).unwrap();
    for number in 0..50_u64 {
        let tasks: Vec<_> = (0..8)
            .map(|vcpu| Task {
                seed: number * 8 + vcpu,
                ..task()
            })
            .collect();

        let times = crew.muster(&tasks, number).unwrap().release().unwrap();

        assert_eq!(times.vcpus.len(), 8);
        assert!(times.vcpus.iter().all(|own| *own <= times.total));
    }

    let log = toy.shared.log.lock().unwrap();
    let seen: BTreeSet<_> = log.iter().map(|(vcpu, task)| (task.seed, *vcpu)).collect();
    assert_eq!(log.len(), 400, "nobody ran twice");
    assert!(seen.iter().all(|(seed, vcpu)| *seed % 8 == *vcpu as u64));
}

#[test]
fn threads_are_named_after_their_vcpu_and_joined_on_drop() {
    let (mut crew, toy) = crew(3, Defect::None).unwrap();
    round(&mut crew, 0).unwrap();
    let names: Vec<_> = crew
        .members
        .iter()
        .map(|m| {
            m.thread
                .as_ref()
                .unwrap()
                .thread()
                .name()
                .unwrap()
                .to_owned()
        })
        .collect();
    assert_eq!(names, ["vcpu 0", "vcpu 1", "vcpu 2"]);
    assert!(Arc::strong_count(&toy.shared) > 1);

    drop(crew);

    assert_eq!(
        Arc::strong_count(&toy.shared),
        1,
        "the threads' parts are gone"
    );
}

#[test]
fn a_vcpu_that_hangs_is_named_with_its_place_when_the_deadline_passes() {
    let (mut crew, _toy) = crew(4, Defect::Hangs(2)).unwrap();

    let error = round(&mut crew, 0).unwrap_err();

    let text = error.to_string();
    let CrewError::Deadline { late, vcpus: 4, .. } = error else {
        panic!("{text}");
    };
    assert_eq!(late.len(), 1);
    assert_eq!(late[0].failure.as_ref().unwrap().pc, Some(0x1002));
    assert!(
        text.starts_with("1 of 4 vCPUs were not done after 200ms"),
        "{text}"
    );
    assert!(
        text.contains("vCPU 2 ended with KICKED, PC 0x1002"),
        "{text}"
    );
}

#[test]
fn the_first_failure_is_reported_and_the_others_are_kicked() {
    let (mut crew, _toy) = crew(4, Defect::Fails(1)).unwrap();
    let began = Instant::now();

    let error = round(&mut crew, 0).unwrap_err();

    assert!(began.elapsed() < GRACE, "nobody was waited for in vain");
    let CrewError::Failed(failure) = error else {
        panic!("{error}");
    };
    assert_eq!((failure.vcpu, failure.exit.as_str()), (1, "FAILED"));
}

#[test]
fn a_panic_on_a_vcpus_thread_is_an_error() {
    let (mut crew, _toy) = crew(2, Defect::Panics(1)).unwrap();

    let error = round(&mut crew, 0).unwrap_err();

    assert!(
        matches!(error, CrewError::Panicked { vcpu: 1, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("as the test asked"));
}

#[test]
fn a_crew_that_failed_takes_no_more_orders() {
    let (mut crew, _toy) = crew(2, Defect::Fails(0)).unwrap();
    round(&mut crew, 0).unwrap_err();

    assert!(matches!(round(&mut crew, 0), Err(CrewError::Spent)));
}

#[test]
fn a_vcpu_that_cannot_be_bound_is_an_error_and_the_others_end() {
    let error = crew(3, Defect::CannotBind(1)).unwrap_err();

    assert!(matches!(error, CrewError::Bind { vcpu: 1, .. }), "{error}");
}

#[test]
fn a_muster_that_is_not_released_runs_nothing() {
    let (mut crew, toy) = crew(3, Defect::None).unwrap();

    drop(crew.muster(&[task(); 3], 0).unwrap());

    assert!(matches!(round(&mut crew, 0), Err(CrewError::Spent)));
    drop(crew);
    assert!(toy.shared.log.lock().unwrap().is_empty());
}
