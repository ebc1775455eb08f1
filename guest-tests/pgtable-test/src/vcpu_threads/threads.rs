// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! vCPU threads, and their control by the harness: start, arm, release, failure handling.

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
    machine::{Kick, MachineError, TestVcpu},
    task::Task,
};
use granule_types::units::Nanoseconds;

/// A task for one thread and one generation of the gate.
#[derive(Debug)]
struct Assignment {
    task: Task,
    generation: u32,
    /// Delay between gate and guest entry, in loop iterations.
    delay: u64,
}

/// Times and result of one task.
#[derive(Debug)]
struct Completion {
    start: Nanoseconds,
    end: Nanoseconds,
    result: Result<(), TaskThreadsError>,
}

/// Event that wakes the harness.
#[derive(Debug)]
enum ThreadEvent {
    /// Arrival of the last thread at the gate.
    AllArmed,
    /// Storing of the last completion.
    AllCompleted,
    /// Failure of the task of this vCPU.
    Failed(usize),
}

/// State shared by the threads and the harness.
#[derive(Debug, Default)]
struct SharedState {
    gate: Gate,
    /// Number of threads that have not yet reached the gate.
    unarmed_thread_count: AtomicUsize,
    /// Number of completions not yet stored.
    running_task_count: AtomicUsize,
    completions: Vec<Mutex<Option<Completion>>>,
}

impl SharedState {
    fn completion(&self, vcpu: usize) -> MutexGuard<'_, Option<Completion>> {
        let completion = self.completions[vcpu].lock();
        completion.unwrap_or_else(PoisonError::into_inner)
    }
}

/// The harness's handle of a vCPU thread.
#[derive(Debug)]
pub(super) struct VcpuThread {
    assignments: Sender<Assignment>,
    kick: Box<dyn Kick>,
    /// Handle to join the thread; `None` if its vCPU is stuck in the guest.
    pub(super) handle: Option<JoinHandle<()>>,
}

impl VcpuThread {
    fn start(
        index: usize,
        vcpu: Box<dyn TestVcpu>,
        shared: &Arc<SharedState>,
        events: Sender<ThreadEvent>,
    ) -> Result<Self, TaskThreadsError> {
        let (assignments, received) = mpsc::channel();
        let (kick_sender, kick) = mpsc::channel();
        let shared = shared.clone();
        let handle = Builder::new()
            .name(format!("vcpu {index}"))
            .spawn(move || run_vcpu_thread(index, vcpu, &shared, kick_sender, received, events))
            .map_err(|error| TaskThreadsError::Spawn(index, error))?;
        match kick.recv() {
            Ok(Ok(kick)) => Ok(Self { assignments, kick, handle: Some(handle) }),
            Ok(Err(error)) => Err(TaskThreadsError::Bind(index, error)),
            Err(_) => {
                let message = "while the vCPU was bound".to_owned();
                Err(TaskThreadsError::Panicked(index, message))
            }
        }
    }
}

/// Runs a vCPU's thread until the sender of assignments is dropped or the gate is closed.
///
/// A `send` fails if the receiver has been dropped; the next `recv` then ends the thread.
fn run_vcpu_thread(
    index: usize,
    mut vcpu: Box<dyn TestVcpu>,
    shared: &SharedState,
    kick_sender: Sender<Result<Box<dyn Kick>, MachineError>>,
    assignments: Receiver<Assignment>,
    events: Sender<ThreadEvent>,
) {
    let kick = vcpu.bind();
    let usable = kick.is_ok();
    let _ = kick_sender.send(kick);
    drop(kick_sender);
    if !usable {
        return;
    }
    while let Ok(assignment) = assignments.recv() {
        if shared.unarmed_thread_count.fetch_sub(1, Ordering::AcqRel) == 1 {
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
            Err(panic) => Err(TaskThreadsError::Panicked(index, panic_message(panic.as_ref()))),
        };
        let failed = result.is_err();
        *shared.completion(index) = Some(Completion { start, end, result });
        if failed {
            let _ = events.send(ThreadEvent::Failed(index));
        }
        if shared.running_task_count.fetch_sub(1, Ordering::AcqRel) == 1 {
            let _ = events.send(ThreadEvent::AllCompleted);
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

/// Time limit for a kicked vCPU to leave the guest.
pub(super) const KICK_TIMEOUT: Duration = Duration::from_secs(10);

/// Threads of all vCPUs; the [module](super) describes their protocol.
#[derive(Debug)]
pub struct TaskThreads {
    pub(super) threads: Vec<VcpuThread>,
    shared_state: Arc<SharedState>,
    events: Receiver<ThreadEvent>,
    deadline: Duration,
    is_stopped: bool,
}

impl TaskThreads {
    /// Starts a thread named `vcpu N` for each vCPU and binds the vCPU to it. The tasks of one
    /// phase may take up to `deadline` from the opening of the gate.
    ///
    /// # Errors
    /// A thread cannot be started or a vCPU cannot be bound; all started threads end.
    pub fn start(
        vcpus: Vec<Box<dyn TestVcpu>>,
        deadline: Duration,
    ) -> Result<Self, TaskThreadsError> {
        let (sender, events) = mpsc::channel();
        let mut started = Self {
            threads: Vec::with_capacity(vcpus.len()),
            shared_state: Arc::new(SharedState {
                completions: vcpus.iter().map(|_| Mutex::default()).collect(),
                ..SharedState::default()
            }),
            events,
            deadline,
            is_stopped: false,
        };
        for (index, vcpu) in vcpus.into_iter().enumerate() {
            let thread = VcpuThread::start(index, vcpu, &started.shared_state, sender.clone())?;
            started.threads.push(thread);
        }
        Ok(started)
    }

    /// Returns the number of vCPUs.
    pub fn vcpus(&self) -> usize {
        self.threads.len()
    }

    /// Sends each vCPU its task, in order, and waits until all threads wait at the gate. `seed`
    /// determines the delays; 0 causes none.
    ///
    /// # Errors
    /// The threads have ended.
    ///
    /// # Panics
    /// The number of tasks differs from the number of vCPUs.
    pub fn arm(&mut self, tasks: &[Task], seed: u64) -> Result<ArmedTasks<'_>, TaskThreadsError> {
        assert_eq!(tasks.len(), self.threads.len(), "one task for each vCPU");
        if self.is_stopped {
            return Err(TaskThreadsError::Stopped);
        }
        let generation = self.shared_state.gate.generation();
        self.shared_state.unarmed_thread_count.store(tasks.len(), Ordering::Release);
        self.shared_state.running_task_count.store(tasks.len(), Ordering::Release);
        let armed = ArmedTasks { owner: self, open_time: None, is_released: false };
        for (vcpu, (thread, task)) in armed.owner.threads.iter().zip(tasks).enumerate() {
            let assignment =
                Assignment { task: *task, generation, delay: vcpu_delay(seed, generation, vcpu) };
            thread.assignments.send(assignment).map_err(|_| TaskThreadsError::Stopped)?;
        }
        // A thread makes no fallible or long call between its assignment and the gate.
        match armed.owner.events.recv() {
            Ok(ThreadEvent::AllArmed) => {}
            _ => return Err(TaskThreadsError::Stopped),
        }
        spin(gate_delay(seed, generation));
        Ok(armed)
    }

    /// Waits until every task is complete, one fails, or the deadline passes. After a failure or
    /// the deadline, kicks the vCPUs that still run and waits for them.
    fn wait_for_completion(&mut self, start: Nanoseconds) -> Result<TaskTimes, TaskThreadsError> {
        let failed = match self.events.recv_timeout(self.deadline) {
            Ok(ThreadEvent::AllCompleted | ThreadEvent::AllArmed) => {
                return Ok(self.task_times(start));
            }
            Ok(ThreadEvent::Failed(vcpu)) => Some(vcpu),
            Err(_) => None,
        };
        let running = self.running_vcpus();
        let stuck = self.stop_running_vcpus();
        let error = match failed {
            Some(vcpu) => self.take_failure(vcpu).unwrap_or(TaskThreadsError::Stopped),
            None => self.deadline_error(running),
        };
        if stuck.is_empty() {
            return Err(error);
        }
        Err(TaskThreadsError::Stuck(stuck, Box::new(error)))
    }

    /// Kicks the vCPUs that still run and waits for them. Returns those that stay in the guest, whose
    /// threads are not joined.
    fn stop_running_vcpus(&mut self) -> Vec<usize> {
        self.is_stopped = true;
        for vcpu in self.running_vcpus() {
            self.threads[vcpu].kick.kick();
        }
        let end = Instant::now() + KICK_TIMEOUT;
        let remaining = || end.saturating_duration_since(Instant::now());
        while let Ok(ThreadEvent::Failed(_)) = self.events.recv_timeout(remaining()) {}
        let stuck = self.running_vcpus();
        for &vcpu in &stuck {
            drop(self.threads[vcpu].handle.take());
        }
        stuck
    }

    /// Returns the vCPUs whose completion is not stored.
    fn running_vcpus(&self) -> Vec<usize> {
        (0..self.threads.len())
            .filter(|vcpu| self.shared_state.completion(*vcpu).is_none())
            .collect()
    }

    fn task_times(&self, start: Nanoseconds) -> TaskTimes {
        let completions: Vec<Completion> = (0..self.threads.len())
            .filter_map(|vcpu| self.shared_state.completion(vcpu).take())
            .collect();
        let last = completions.iter().map(|c| c.end).max().unwrap_or(start);
        TaskTimes {
            total: clock::elapsed(start, last),
            vcpus: completions.iter().map(|c| clock::elapsed(c.start, c.end)).collect(),
        }
    }

    /// Removes and returns the failure of a vCPU's task, if the task failed.
    fn take_failure(&self, vcpu: usize) -> Option<TaskThreadsError> {
        self.shared_state.completion(vcpu).take()?.result.err()
    }

    fn deadline_error(&self, unfinished_vcpus: Vec<usize>) -> TaskThreadsError {
        let state = |vcpu| match self.take_failure(vcpu) {
            Some(TaskThreadsError::Failed(failure)) => (vcpu, Some(*failure)),
            _ => (vcpu, None),
        };
        TaskThreadsError::Deadline {
            deadline: self.deadline,
            vcpus: self.threads.len(),
            unfinished_vcpus: unfinished_vcpus.into_iter().map(state).collect(),
        }
    }
}

/// Times of the tasks that all vCPUs execute together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskTimes {
    /// Time from the opening of the gate until the last vCPU finishes.
    pub total: Nanoseconds,
    /// Time of each vCPU, from before its guest entry to after its exit; empty in host phases.
    pub vcpus: Vec<Nanoseconds>,
}

/// Tasks of vCPU threads that wait at the gate. Dropping this value without [`ArmedTasks::release`]
/// ends the threads; if the gate is open, the vCPUs are kicked first, and those that stay in the guest are
/// left to their threads.
#[derive(Debug)]
#[must_use = "the vCPU threads wait at the gate"]
pub struct ArmedTasks<'a> {
    owner: &'a mut TaskThreads,
    open_time: Option<Nanoseconds>,
    is_released: bool,
}

impl ArmedTasks<'_> {
    /// Opens the gate, unless it is open, and returns the time at which it opened.
    pub fn open(&mut self) -> Nanoseconds {
        *self.open_time.get_or_insert_with(|| {
            let now = clock::now();
            self.owner.shared_state.gate.open();
            now
        })
    }

    /// Opens the gate, unless it is open, and waits until every vCPU is done. The deadline starts
    /// with this call.
    ///
    /// # Errors
    /// The first failure of a vCPU, or the vCPUs that did not finish within the deadline.
    pub fn release(mut self) -> Result<TaskTimes, TaskThreadsError> {
        let open_time = self.open();
        self.is_released = true;
        self.owner.wait_for_completion(open_time)
    }
}

impl Drop for ArmedTasks<'_> {
    fn drop(&mut self) {
        if self.is_released {
            return;
        }
        if self.open_time.is_none() {
            self.owner.is_stopped = true;
            self.owner.shared_state.gate.close();
        } else {
            self.owner.stop_running_vcpus();
        }
    }
}

impl Drop for TaskThreads {
    fn drop(&mut self) {
        for thread in self.threads.drain(..) {
            drop(thread.assignments);
            if let Some(handle) = thread.handle {
                // The panic hook has already printed a panic outside a task.
                let _ = handle.join();
            }
        }
    }
}
