// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The harness's side of the vCPU threads: start, arm, release, failure handling.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{self, Receiver},
    },
    time::{Duration, Instant},
};

use super::{
    UnfinishedVcpu, VcpuThreadsError,
    gate::{gate_delay, spin, vcpu_delay},
    thread::{Assignment, Completion, SharedState, TaskError, ThreadEvent, VcpuThread},
};
use crate::{
    clock,
    machine::{TaskTimes, Vcpu},
    task::Task,
};
use granule_types::units::Nanoseconds;

/// Time that a kicked vCPU has to leave the guest.
pub(super) const KICK_TIMEOUT: Duration = Duration::from_secs(10);

/// The threads of all vCPUs; see the [module](super) for their protocol.
pub struct VcpuThreads {
    pub(super) threads: Vec<VcpuThread>,
    shared: Arc<SharedState>,
    events: Receiver<ThreadEvent>,
    deadline: Duration,
    stopped: bool,
}

impl fmt::Debug for VcpuThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VcpuThreads")
            .field("vcpus", &self.threads.len())
            .field("deadline", &self.deadline)
            .field("stopped", &self.stopped)
            .finish_non_exhaustive()
    }
}

impl VcpuThreads {
    /// Starts a thread named `vcpu N` for each vCPU and binds the vCPU to it. The tasks of one phase
    /// may take up to `deadline` from the opening of the gate.
    ///
    /// # Errors
    /// A thread cannot be started or a vCPU cannot be bound; the threads started before it end.
    pub fn start(vcpus: Vec<Box<dyn Vcpu>>, deadline: Duration) -> Result<Self, VcpuThreadsError> {
        let (sender, events) = mpsc::channel();
        let mut all = Self {
            threads: Vec::with_capacity(vcpus.len()),
            shared: Arc::new(SharedState::new(vcpus.len())),
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
    pub fn arm(&mut self, tasks: &[Task], seed: u64) -> Result<ArmedTasks<'_>, VcpuThreadsError> {
        assert_eq!(tasks.len(), self.threads.len(), "one task for each vCPU");
        if self.stopped {
            return Err(VcpuThreadsError::Stopped);
        }
        let generation = self.shared.gate.generation();
        self.shared.unarmed.store(tasks.len(), Ordering::Release);
        self.shared.running.store(tasks.len(), Ordering::Release);
        let armed = ArmedTasks { all: self, opened: None, released: false };
        for (vcpu, (thread, task)) in armed.all.threads.iter().zip(tasks).enumerate() {
            let assignment =
                Assignment { task: *task, generation, delay: vcpu_delay(seed, generation, vcpu) };
            thread.assignments.send(assignment).map_err(|_| VcpuThreadsError::Stopped)?;
        }
        // Between its assignment and the gate a thread does nothing that fails or takes long.
        match armed.all.events.recv() {
            Ok(ThreadEvent::AllArmed) => {}
            _ => return Err(VcpuThreadsError::Stopped),
        }
        spin(gate_delay(seed, generation));
        Ok(armed)
    }

    /// Waits until every task is complete, one fails, or the deadline passes. After a failure or
    /// the deadline, kicks the vCPUs that still run and waits for them.
    fn wait_for_completion(&mut self, opened: Nanoseconds) -> Result<TaskTimes, VcpuThreadsError> {
        let failed = match self.wait_for_event(self.deadline) {
            Some(ThreadEvent::AllCompleted | ThreadEvent::AllArmed) => {
                return Ok(self.times(opened));
            }
            Some(ThreadEvent::Failed(vcpu)) => Some(vcpu),
            None => None,
        };
        let running = self.running();
        self.stopped = true;
        for &vcpu in &self.running() {
            self.threads[vcpu].kick.kick();
        }
        let end = Instant::now() + KICK_TIMEOUT;
        let left = || end.saturating_duration_since(Instant::now());
        while let Some(ThreadEvent::Failed(_)) = self.wait_for_event(left()) {}
        let stuck = self.running();
        for &vcpu in &stuck {
            drop(self.threads[vcpu].handle.take());
        }
        let error = match failed {
            Some(vcpu) => self.failure_of(vcpu),
            None => self.deadline_passed(running),
        };
        if stuck.is_empty() {
            return Err(error);
        }
        Err(VcpuThreadsError::Stuck(stuck, Box::new(error)))
    }

    /// Returns the next event, or `None` when `timeout` passes first.
    fn wait_for_event(&self, timeout: Duration) -> Option<ThreadEvent> {
        self.events.recv_timeout(timeout).ok()
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

    fn failure_of(&self, vcpu: usize) -> VcpuThreadsError {
        match self.shared.completion(vcpu).take().map(|c| c.result) {
            Some(Err(TaskError::Vcpu(failure))) => VcpuThreadsError::Failed(Box::new(failure)),
            Some(Err(TaskError::Panic(message))) => VcpuThreadsError::Panicked(vcpu, message),
            Some(Ok(())) | None => VcpuThreadsError::Stopped,
        }
    }

    fn deadline_passed(&self, unfinished: Vec<usize>) -> VcpuThreadsError {
        let state = |vcpu| UnfinishedVcpu {
            vcpu,
            failure: match self.shared.completion(vcpu).take().map(|c| c.result) {
                Some(Err(TaskError::Vcpu(failure))) => Some(failure),
                _ => None,
            },
        };
        VcpuThreadsError::Deadline {
            deadline: self.deadline,
            vcpus: self.threads.len(),
            unfinished: unfinished.into_iter().map(state).collect(),
        }
    }
}

/// The vCPU threads, waiting at the gate. Dropping this value without [`ArmedTasks::release`] ends
/// the threads; where the gate is open, their vCPUs are kicked first.
#[derive(Debug)]
#[must_use = "the vCPU threads wait at the gate"]
pub struct ArmedTasks<'a> {
    all: &'a mut VcpuThreads,
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
    pub fn release(mut self) -> Result<TaskTimes, VcpuThreadsError> {
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

impl Drop for VcpuThreads {
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
