// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Threads that run the vCPUs, one for each. They start a phase together and have a deadline.
//!
//! The vCPUs execute tasks in three steps:
//!
//! 1. [`TaskThreads::arm`] sends a task to every thread, which then waits at the gate. `arm`
//!    returns when all threads wait and the seed's delay is over, so no measured time includes the
//!    wake-up of threads.
//! 2. [`ArmedTasks::release`] opens the gate, which wakes all threads with one system call. Each
//!    thread spins for its seeded delay, reads the clock, runs its task, reads the clock again and
//!    stores its completion. Only the last thread, or one that fails, wakes the harness.
//! 3. `release` returns the time from the opening of the gate to the last completion, and each
//!    vCPU's time without its seeded delay.
//!
//! Each thread has its own channel of tasks, so no thread runs another's task or its own twice.
//! When a vCPU fails or the deadline passes, the harness kicks the vCPUs still in the guest. The
//! error then holds the first failure or the state of each late vCPU, and the threads accept no
//! more tasks.
//!
//! [`ArmedTasks::open`] opens the gate without waiting, so that the harness can work while the
//! vCPUs run; `release` then waits for them.
//!
//! Dropping [`TaskThreads`] ends and joins the threads, except those whose vCPU stays in the guest
//! although kicked: a join would not return. An error of `release` names these vCPUs.

mod gate;
mod threads;

use std::{fmt, io, time::Duration};

use thiserror::Error;

use crate::machine::{MachineError, VcpuFailure};

pub use threads::{ArmedTasks, TaskThreads, TaskTimes};

/// Error of the vCPU threads, which then accept no more tasks.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "each message describes its variant")]
pub enum TaskThreadsError {
    #[error("cannot start the thread of vCPU {0}")]
    Spawn(usize, #[source] io::Error),
    #[error("cannot bind vCPU {0} to its thread")]
    Bind(usize, #[source] MachineError),
    #[error("{0}")]
    Failed(Box<VcpuFailure>),
    #[error("the thread of vCPU {0} panicked: {1}")]
    Panicked(usize, String),
    #[error(
        "{} of {vcpus} vCPUs did not finish within {deadline:?}:{}",
        unfinished_vcpus.len(),
        UnfinishedVcpus(unfinished_vcpus)
    )]
    Deadline {
        deadline: Duration,
        vcpus: usize,
        /// The vCPUs that did not finish, in order, each with its state when it was kicked, or
        /// `None` if it then finished or stayed in the guest ([`TaskThreadsError::Stuck`]).
        unfinished_vcpus: Vec<(usize, Option<VcpuFailure>)>,
    },
    /// Error returned when vCPUs, kicked after a failure (the source), stay in the guest.
    #[error("vCPUs {0:?} stay in the guest although kicked; their threads are not joined")]
    Stuck(Vec<usize>, #[source] Box<TaskThreadsError>),
    /// Error returned once the threads have ended, after a failure or a drop of armed tasks.
    #[error("the vCPU threads have ended; create a new machine")]
    Stopped,
}

struct UnfinishedVcpus<'a>(&'a [(usize, Option<VcpuFailure>)]);

impl fmt::Display for UnfinishedVcpus<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (vcpu, failure) in self.0 {
            match failure {
                Some(failure) => write!(f, "\n  {failure}")?,
                None => write!(f, "\n  vCPU {vcpu}: state unknown")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    //! Tests of the vCPU threads on fake vCPUs that hang, fail and panic.

    use std::{
        collections::BTreeSet,
        sync::Arc,
        time::{Duration, Instant},
    };

    use super::{TaskThreads, TaskThreadsError, TaskTimes, threads::KICK_TIMEOUT};
    use crate::{
        fake_machine::{Defect, FakeMachine},
        machine::Machine,
        task::{Task, TaskAccess},
    };
    use granule_types::units::{Bytes, GuestAddress};

    const SHORT_DEADLINE: Duration = Duration::from_secs(2);
    const LONG_DEADLINE: Duration = Duration::from_secs(60);

    fn start(vcpus: usize, defect: Defect) -> Result<(TaskThreads, FakeMachine), TaskThreadsError> {
        let mut machine = FakeMachine::new(vcpus, Bytes::kib(64), defect);
        // Other tests would exceed a short deadline on a busy machine.
        let deadline = match defect {
            Defect::Hangs(_) => SHORT_DEADLINE,
            _ => LONG_DEADLINE,
        };
        let threads = TaskThreads::start(machine.take_vcpus(), deadline)?;
        Ok((threads, machine))
    }

    fn task() -> Task {
        Task::new(TaskAccess::Nothing, GuestAddress(0), 0, Bytes(0))
    }

    fn run(threads: &mut TaskThreads, seed: u64) -> Result<TaskTimes, TaskThreadsError> {
        let tasks = vec![task(); threads.vcpus()];
        threads.arm(&tasks, seed)?.release()
    }

    #[test]
    fn every_vcpu_runs_its_own_task_once() {
        let (mut threads, machine) = start(8, Defect::None).unwrap();
        for number in 0..50_u64 {
            let tasks: Vec<_> =
                (0..8).map(|vcpu| Task { seed: number * 8 + vcpu, ..task() }).collect();

            let times = threads.arm(&tasks, number).unwrap().release().unwrap();

            assert_eq!(times.vcpus.len(), 8);
            assert!(times.vcpus.iter().all(|own| *own <= times.total));
        }

        let log = &machine.state.memory().tasks;
        let seen: BTreeSet<_> = log.iter().map(|(vcpu, task)| (task.seed, *vcpu)).collect();
        assert_eq!(log.len(), 400, "no task ran twice");
        assert!(seen.iter().all(|(seed, vcpu)| *seed % 8 == *vcpu as u64));
    }

    #[test]
    fn threads_have_their_vcpus_names_and_are_joined_on_drop() {
        let (mut threads, machine) = start(3, Defect::None).unwrap();
        run(&mut threads, 0).unwrap();
        let handles = threads.threads.iter().map(|t| t.handle.as_ref().unwrap());
        let names: Vec<_> = handles.map(|h| h.thread().name().unwrap().to_owned()).collect();
        assert_eq!(names, ["vcpu 0", "vcpu 1", "vcpu 2"]);
        assert!(Arc::strong_count(&machine.state) > 1);

        drop(threads);

        assert_eq!(Arc::strong_count(&machine.state), 1, "all threads have ended");
    }

    #[test]
    fn a_hanging_vcpu_is_reported_with_its_program_counter_after_the_deadline() {
        let (mut threads, _machine) = start(4, Defect::Hangs(2)).unwrap();

        let error = run(&mut threads, 0).unwrap_err();

        let text = error.to_string();
        let TaskThreadsError::Deadline { unfinished_vcpus, vcpus: 4, .. } = error else {
            panic!("{text}");
        };
        assert_eq!(unfinished_vcpus.len(), 1);
        assert_eq!(unfinished_vcpus[0].1.as_ref().unwrap().pc, Some(0x1002));
        assert!(text.starts_with("1 of 4 vCPUs did not finish within 2s"), "{text}");
        assert!(text.contains("vCPU 2 failed: KICKED, PC 0x1002"), "{text}");
    }

    #[test]
    fn the_first_failure_is_reported_and_the_other_vcpus_are_kicked() {
        let (mut threads, _machine) = start(4, Defect::Fails(1)).unwrap();
        let began = Instant::now();

        let error = run(&mut threads, 0).unwrap_err();

        assert!(began.elapsed() < KICK_TIMEOUT, "no kicked vCPU is stuck");
        let TaskThreadsError::Failed(failure) = error else {
            panic!("{error}");
        };
        assert_eq!((failure.vcpu, failure.exit.as_str()), (1, "FAILED"));
    }

    #[test]
    fn a_panic_on_a_vcpu_thread_is_an_error() {
        let (mut threads, _machine) = start(2, Defect::Panics(1)).unwrap();

        let error = run(&mut threads, 0).unwrap_err();

        assert!(matches!(error, TaskThreadsError::Panicked(1, _)), "{error}");
        assert!(error.to_string().contains("injected defect"));
    }

    #[test]
    fn threads_accept_no_tasks_after_a_failure() {
        let (mut threads, _machine) = start(2, Defect::Fails(0)).unwrap();
        run(&mut threads, 0).unwrap_err();

        assert!(matches!(run(&mut threads, 0), Err(TaskThreadsError::Stopped)));
    }

    #[test]
    fn a_vcpu_that_cannot_be_bound_ends_the_other_threads() {
        let error = start(3, Defect::CannotBind(1)).unwrap_err();

        assert!(matches!(error, TaskThreadsError::Bind(1, _)), "{error}");
    }

    #[test]
    fn open_tasks_that_are_dropped_leave_a_stuck_vcpu_to_its_thread() {
        let (mut threads, machine) = start(3, Defect::IgnoresKicks(1)).unwrap();
        let mut armed = threads.arm(&[task(); 3], 0).unwrap();
        armed.open();

        drop(armed);

        let is_joinable: Vec<_> = threads.threads.iter().map(|t| t.handle.is_some()).collect();
        assert_eq!(is_joinable, [true, false, true]);
        drop(threads);
        assert!(Arc::strong_count(&machine.state) > 1, "the stuck vCPU's thread runs");
    }

    #[test]
    fn armed_tasks_that_are_dropped_run_nothing() {
        let (mut threads, machine) = start(3, Defect::None).unwrap();

        drop(threads.arm(&[task(); 3], 0).unwrap());

        assert!(matches!(run(&mut threads, 0), Err(TaskThreadsError::Stopped)));
        drop(threads);
        assert!(machine.state.memory().tasks.is_empty());
    }
}
