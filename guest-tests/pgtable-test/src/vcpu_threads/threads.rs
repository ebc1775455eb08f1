// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The threads, and the harness's side of them: start, arm, release, failure handling.
//!
//! Each thread binds its vCPU. For each task it waits at the gate, then stores the completion.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    thread::{Builder, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    TaskThreadsError,
    gate::{Gate, gate_delay, spin, vcpu_delay},
};
use crate::{
    clock,
    machine::{Kick, MachineError, Vcpu},
    task::Task,
};
use granule_types::units::Nanoseconds;

/// One thread's task for one generation of the gate.
#[derive(Debug)]
struct Assignment {
    task: Task,
    generation: u32,
    /// Loop iterations between gate and guest entry.
    delay: u64,
}

/// Times and result of one task.
#[derive(Debug)]
struct Completion {
    start: Nanoseconds,
    end: Nanoseconds,
    result: Result<(), TaskThreadsError>,
}

/// An event that wakes the harness.
#[derive(Debug)]
enum ThreadEvent {
    /// The last thread waits at the gate.
    AllArmed,
    /// The last completion is stored.
    AllCompleted,
    /// The task of this vCPU failed.
    Failed(usize),
}

/// State shared by the threads and the harness.
#[derive(Debug, Default)]
struct SharedState {
    gate: Gate,
    /// Number of threads that have not yet reached the gate.
    unarmed: AtomicUsize,
    /// Number of completions not yet stored.
    running: AtomicUsize,
    completions: Vec<Mutex<Option<Completion>>>,
}

impl SharedState {
    /// Returns a vCPU's completion, if it is stored.
    fn completion(&self, vcpu: usize) -> MutexGuard<'_, Option<Completion>> {
        let completion = self.completions[vcpu].lock();
        completion.unwrap_or_else(PoisonError::into_inner)
    }
}

/// A started thread, as the harness uses it.
#[derive(Debug)]
pub(super) struct VcpuThread {
    assignments: Sender<Assignment>,
    kick: Box<dyn Kick>,
    /// `None` for a thread that is left behind.
    pub(super) handle: Option<JoinHandle<()>>,
}

impl VcpuThread {
    /// Starts the thread and binds the vCPU to it.
    fn start(
        index: usize,
        vcpu: Box<dyn Vcpu>,
        shared: &Arc<SharedState>,
        events: Sender<ThreadEvent>,
    ) -> Result<Self, TaskThreadsError> {
        let (assignments, received) = mpsc::channel();
        let (bound, kick) = mpsc::channel();
        let shared = shared.clone();
        let handle = Builder::new()
            .name(format!("vcpu {index}"))
            .spawn(move || serve(index, vcpu, &shared, bound, received, events))
            .map_err(|error| TaskThreadsError::Spawn(index, error))?;
        match kick.recv() {
            Ok(Ok(kick)) => Ok(Self { assignments, kick, handle: Some(handle) }),
            Ok(Err(error)) => Err(TaskThreadsError::Bind(index, error)),
            Err(_) => {
                let message = "while it was bound".to_owned();
                Err(TaskThreadsError::Panicked(index, message))
            }
        }
    }
}

/// Runs a vCPU's thread until the assignments' sender is dropped or the gate is closed.
///
/// A failed `send` means that the harness has been dropped; the next `recv` then ends the thread.
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
            Ok(result) => result.map_err(|failure| TaskThreadsError::Failed(Box::new(failure))),
            Err(panic) => Err(TaskThreadsError::Panicked(index, message_of(panic.as_ref()))),
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

/// Time that a kicked vCPU has to leave the guest.
pub(super) const KICK_TIMEOUT: Duration = Duration::from_secs(10);

/// The threads of all vCPUs; see the [module](super) for their protocol.
#[derive(Debug)]
pub struct TaskThreads {
    pub(super) threads: Vec<VcpuThread>,
    shared: Arc<SharedState>,
    events: Receiver<ThreadEvent>,
    deadline: Duration,
    stopped: bool,
}

impl TaskThreads {
    /// Starts a thread named `vcpu N` for each vCPU and binds the vCPU to it. The tasks of one
    /// phase may take up to `deadline` from the opening of the gate.
    ///
    /// # Errors
    /// A thread cannot be started or a vCPU cannot be bound; the threads started before it end.
    pub fn start(vcpus: Vec<Box<dyn Vcpu>>, deadline: Duration) -> Result<Self, TaskThreadsError> {
        let (sender, events) = mpsc::channel();
        let mut all = Self {
            threads: Vec::with_capacity(vcpus.len()),
            shared: Arc::new(SharedState {
                completions: vcpus.iter().map(|_| Mutex::default()).collect(),
                ..SharedState::default()
            }),
            events,
            deadline,
            stopped: false,
        };
        for (index, vcpu) in vcpus.into_iter().enumerate() {
            let thread = VcpuThread::start(index, vcpu, &all.shared, sender.clone())?;
            all.threads.push(thread);
        }
        Ok(all)
    }

    /// Returns the number of vCPUs.
    pub fn vcpus(&self) -> usize {
        self.threads.len()
    }

    /// Sends each vCPU its task, in order, and waits until all threads wait at the gate. `seed`
    /// delays their starts; 0 does not.
    ///
    /// # Errors
    /// The threads have ended.
    ///
    /// # Panics
    /// The number of tasks differs from the number of vCPUs.
    pub fn arm(&mut self, tasks: &[Task], seed: u64) -> Result<ArmedTasks<'_>, TaskThreadsError> {
        assert_eq!(tasks.len(), self.threads.len(), "one task for each vCPU");
        if self.stopped {
            return Err(TaskThreadsError::Stopped);
        }
        let generation = self.shared.gate.generation();
        self.shared.unarmed.store(tasks.len(), Ordering::Release);
        self.shared.running.store(tasks.len(), Ordering::Release);
        let armed = ArmedTasks { all: self, opened: None, released: false };
        for (vcpu, (thread, task)) in armed.all.threads.iter().zip(tasks).enumerate() {
            let assignment =
                Assignment { task: *task, generation, delay: vcpu_delay(seed, generation, vcpu) };
            thread.assignments.send(assignment).map_err(|_| TaskThreadsError::Stopped)?;
        }
        // Between its assignment and the gate a thread makes no fallible or long call.
        match armed.all.events.recv() {
            Ok(ThreadEvent::AllArmed) => {}
            _ => return Err(TaskThreadsError::Stopped),
        }
        spin(gate_delay(seed, generation));
        Ok(armed)
    }

    /// Waits until every task is complete, one fails, or the deadline passes. After a failure or
    /// the deadline, kicks the vCPUs that still run and waits for them.
    fn wait_for_completion(&mut self, opened: Nanoseconds) -> Result<TaskTimes, TaskThreadsError> {
        let failed = match self.events.recv_timeout(self.deadline) {
            Ok(ThreadEvent::AllCompleted | ThreadEvent::AllArmed) => {
                return Ok(self.times(opened));
            }
            Ok(ThreadEvent::Failed(vcpu)) => Some(vcpu),
            Err(_) => None,
        };
        let running = self.running();
        self.stopped = true;
        for &vcpu in &self.running() {
            self.threads[vcpu].kick.kick();
        }
        let end = Instant::now() + KICK_TIMEOUT;
        let left = || end.saturating_duration_since(Instant::now());
        while let Ok(ThreadEvent::Failed(_)) = self.events.recv_timeout(left()) {}
        let stuck = self.running();
        for &vcpu in &stuck {
            drop(self.threads[vcpu].handle.take());
        }
        let error = match failed {
            Some(vcpu) => self.take_failure(vcpu).unwrap_or(TaskThreadsError::Stopped),
            None => self.deadline_passed(running),
        };
        if stuck.is_empty() {
            return Err(error);
        }
        Err(TaskThreadsError::Stuck(stuck, Box::new(error)))
    }

    /// Returns the vCPUs whose completion is not stored.
    fn running(&self) -> Vec<usize> {
        (0..self.threads.len()).filter(|vcpu| self.shared.completion(*vcpu).is_none()).collect()
    }

    fn times(&self, opened: Nanoseconds) -> TaskTimes {
        let completions: Vec<Completion> = (0..self.threads.len())
            .filter_map(|vcpu| self.shared.completion(vcpu).take())
            .collect();
        let last = completions.iter().map(|c| c.end).max().unwrap_or(opened);
        TaskTimes {
            total: clock::between(opened, last),
            vcpus: completions.iter().map(|c| clock::between(c.start, c.end)).collect(),
        }
    }

    /// Takes the failure of a vCPU's task, if the task failed.
    fn take_failure(&self, vcpu: usize) -> Option<TaskThreadsError> {
        self.shared.completion(vcpu).take()?.result.err()
    }

    fn deadline_passed(&self, unfinished: Vec<usize>) -> TaskThreadsError {
        let state = |vcpu| match self.take_failure(vcpu) {
            Some(TaskThreadsError::Failed(failure)) => (vcpu, Some(*failure)),
            _ => (vcpu, None),
        };
        TaskThreadsError::Deadline {
            deadline: self.deadline,
            vcpus: self.threads.len(),
            unfinished: unfinished.into_iter().map(state).collect(),
        }
    }
}

/// Times of the tasks that all vCPUs execute together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskTimes {
    /// From the common start to the end of the last vCPU.
    pub total: Nanoseconds,
    /// Each vCPU's own time, from before its guest entry to after its exit. Empty where only the
    /// host works.
    pub vcpus: Vec<Nanoseconds>,
}

/// The vCPU threads, waiting at the gate. Dropping this value without [`ArmedTasks::release`] ends
/// the threads; where the gate is open, their vCPUs are kicked first.
#[derive(Debug)]
#[must_use = "the vCPU threads wait at the gate"]
pub struct ArmedTasks<'a> {
    all: &'a mut TaskThreads,
    opened: Option<Nanoseconds>,
    released: bool,
}

impl ArmedTasks<'_> {
    /// Opens the gate, unless it is open, and returns the time of its opening.
    pub fn open(&mut self) -> Nanoseconds {
        *self.opened.get_or_insert_with(|| {
            let now = clock::now();
            self.all.shared.gate.open();
            now
        })
    }

    /// Opens the gate, unless it is open, and waits until every vCPU is done. The deadline counts
    /// from this call.
    ///
    /// # Errors
    /// The first failure of a vCPU, or the vCPUs that did not finish within the deadline.
    pub fn release(mut self) -> Result<TaskTimes, TaskThreadsError> {
        let opened = self.open();
        self.released = true;
        self.all.wait_for_completion(opened)
    }
}

impl Drop for ArmedTasks<'_> {
    fn drop(&mut self) {
        if self.released {
            return;
        }
        self.all.stopped = true;
        if self.opened.is_none() {
            self.all.shared.gate.close();
        } else {
            self.all.threads.iter().for_each(|thread| thread.kick.kick());
        }
    }
}

impl Drop for TaskThreads {
    fn drop(&mut self) {
        for thread in self.threads.drain(..) {
            drop(thread.assignments);
            if let Some(handle) = thread.handle {
                // A panic outside a task has already been printed by the panic hook.
                let _ = handle.join();
            }
        }
    }
}
