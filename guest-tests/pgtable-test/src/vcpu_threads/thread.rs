// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One vCPU's thread: binds the vCPU, then for each task waits at the gate, runs it and stores the
//! completion.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    thread::{Builder, JoinHandle},
};

use super::{
    VcpuThreadsError,
    gate::{Gate, spin},
};
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

    /// Returns a vCPU's completion, if it is stored.
    pub(super) fn completion(&self, vcpu: usize) -> MutexGuard<'_, Option<Completion>> {
        let completion = self.completions[vcpu].lock();
        completion.unwrap_or_else(PoisonError::into_inner)
    }
}

/// A started thread, as the harness uses it.
pub(super) struct VcpuThread {
    pub(super) assignments: Sender<Assignment>,
    pub(super) kick: Box<dyn Kick>,
    /// `None` for a thread that is left behind.
    pub(super) handle: Option<JoinHandle<()>>,
}

impl VcpuThread {
    /// Starts the thread and binds the vCPU to it.
    pub(super) fn start(
        index: usize,
        vcpu: Box<dyn Vcpu>,
        shared: &Arc<SharedState>,
        events: Sender<ThreadEvent>,
    ) -> Result<Self, VcpuThreadsError> {
        let (assignments, received) = mpsc::channel();
        let (bound, kick) = mpsc::channel();
        let shared = shared.clone();
        let handle = Builder::new()
            .name(format!("vcpu {index}"))
            .spawn(move || serve(index, vcpu, &shared, bound, received, events))
            .map_err(|error| VcpuThreadsError::Spawn(index, error))?;
        match kick.recv() {
            Ok(Ok(kick)) => Ok(Self { assignments, kick, handle: Some(handle) }),
            Ok(Err(error)) => Err(VcpuThreadsError::Bind(index, error)),
            Err(_) => {
                let message = "while it was bound".to_owned();
                Err(VcpuThreadsError::Panicked(index, message))
            }
        }
    }
}

/// Runs a vCPU's thread until the assignments' sender is dropped or the gate is closed.
///
/// A failed `send` means that the harness is gone; the next `recv` then ends the thread.
fn serve(
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
        spin(assignment.delay);
        let start = clock::now();
        let result = catch_unwind(AssertUnwindSafe(|| vcpu.run(&assignment.task)));
        let end = clock::now();
        let result = match result {
            Ok(result) => result.map_err(TaskError::Vcpu),
            Err(panic) => Err(TaskError::Panic(message_of(panic.as_ref()))),
        };
        let failed = result.is_err();
        *shared.completion(index) = Some(Completion { start, end, result });
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
