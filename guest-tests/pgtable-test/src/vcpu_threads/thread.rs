// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One vCPU's thread: binds the vCPU, then for each task waits at the gate, runs it and stores the
//! completion.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, Sender},
    },
};

use super::{delay, gate::Gate};
use crate::{
    clock,
    machine::{Kick, MachineError, Vcpu, VcpuFailure},
    task::Task,
};
use granule_types::units::Nanoseconds;

/// One thread's task for one generation of the gate.
#[derive(Debug)]
pub(super) struct Assignment {
    pub(super) task: Task,
    pub(super) generation: u32,
    /// Loop iterations between gate and guest entry.
    pub(super) delay: u64,
}

/// Times and result of one task.
#[derive(Debug)]
pub(super) struct Completion {
    pub(super) start: Nanoseconds,
    pub(super) end: Nanoseconds,
    pub(super) result: Result<(), TaskError>,
}

/// Failure of one task.
#[derive(Debug)]
pub(super) enum TaskError {
    Vcpu(VcpuFailure),
    Panic(String),
}

/// An event that wakes the harness.
#[derive(Debug)]
pub(super) enum ThreadEvent {
    /// The last thread waits at the gate.
    AllArmed,
    /// The last completion is stored.
    AllCompleted,
    /// The task of this vCPU failed.
    Failed(usize),
}

/// State shared by the threads and the harness.
#[derive(Debug)]
pub(super) struct SharedState {
    pub(super) gate: Gate,
    /// Number of threads that have not yet reached the gate.
    pub(super) unarmed: AtomicUsize,
    /// Number of completions not yet stored.
    pub(super) running: AtomicUsize,
    completions: Vec<Mutex<Option<Completion>>>,
}

impl SharedState {
    pub(super) fn new(vcpus: usize) -> Self {
        Self {
            gate: Gate::default(),
            unarmed: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            completions: (0..vcpus).map(|_| Mutex::new(None)).collect(),
        }
    }

    /// Removes and returns a vCPU's completion.
    pub(super) fn take_completion(&self, vcpu: usize) -> Option<Completion> {
        self.completions[vcpu]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    /// Returns whether a vCPU's completion is stored.
    pub(super) fn is_completed(&self, vcpu: usize) -> bool {
        self.completions[vcpu]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    fn store_completion(&self, vcpu: usize, completion: Completion) {
        *self.completions[vcpu]
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(completion);
    }
}

/// Runs a vCPU's thread until the assignments' sender is dropped or the gate is closed.
///
/// A failed `send` means that the harness is gone; the next `recv` then ends the thread.
pub(super) fn serve(
    index: usize,
    mut vcpu: Box<dyn Vcpu>,
    shared: &SharedState,
    bound: Sender<Result<Box<dyn Kick>, MachineError>>,
    assignments: Receiver<Assignment>,
    events: Sender<ThreadEvent>,
) {
    let kick = vcpu.bind();
    let usable = kick.is_ok();
    let _ = bound.send(kick);
    drop(bound);
    if !usable {
        return;
    }
    while let Ok(assignment) = assignments.recv() {
        if shared.unarmed.fetch_sub(1, Ordering::AcqRel) == 1 {
            let _ = events.send(ThreadEvent::AllArmed);
        }
        if !shared.gate.pass(assignment.generation) {
            return;
        }
        delay::spin(assignment.delay);
        let start = clock::now();
        let result = catch_unwind(AssertUnwindSafe(|| vcpu.run(&assignment.task)));
        let end = clock::now();
        let result = match result {
            Ok(result) => result.map_err(TaskError::Vcpu),
            Err(panic) => Err(TaskError::Panic(message_of(panic.as_ref()))),
        };
        let failed = result.is_err();
        shared.store_completion(index, Completion { start, end, result });
        if failed {
            let _ = events.send(ThreadEvent::Failed(index));
        }
        if shared.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            let _ = events.send(ThreadEvent::AllCompleted);
        }
    }
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}
