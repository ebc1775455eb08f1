// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One thread for each vCPU, released together, watched against a deadline.
//!
//! The vCPUs execute tasks in three steps:
//!
//! 1. [`VcpuThreads::arm`] sends every thread its own task. Each thread takes it and waits at the
//!    gate. `arm` returns when all threads wait there and the seed's delay is over, so no measured
//!    time contains the wake-up of threads.
//! 2. [`ArmedTasks::release`] opens the gate, which wakes all threads with one system call. Each
//!    thread spins for its seeded delay, reads the clock, runs its task, reads the clock again and
//!    stores its own completion. Only the last one, or one that fails, wakes the harness.
//! 3. `release` returns the time from the opening of the gate to the end of the last vCPU, and each
//!    vCPU's own time without its seeded delay.
//!
//! Tasks are not taken from a common queue, so no thread can run another's task or its own twice.
//! When a vCPU fails or the deadline passes, the vCPUs still in the guest are kicked, and the error
//! holds the first failure, or the state of each late vCPU. After a failure the threads accept no
//! more tasks.
//!
//! [`ArmedTasks::open`] opens the gate without waiting, so that the harness can work while the
//! vCPUs run; `release` then waits for them.
//!
//! Dropping [`VcpuThreads`] ends and joins every thread, except those of vCPUs that stay in the
//! guest although kicked: a join would never return, so the error names them and they are left
//! behind.

mod gate;
#[cfg(test)]
mod tests;
mod threads;

use std::{fmt, io, time::Duration};

use thiserror::Error;

use crate::machine::{MachineError, VcpuFailure};

pub use threads::{ArmedTasks, VcpuThreads};

/// Error of the vCPU threads. After any of these they accept no more tasks.
#[derive(Debug, Error)]
pub enum VcpuThreadsError {
    /// A thread cannot be started.
    #[error("cannot start the thread of vCPU {0}")]
    Spawn(usize, #[source] io::Error),
    /// A vCPU cannot be bound to its thread.
    #[error("cannot bind vCPU {0} to its thread")]
    Bind(usize, #[source] MachineError),
    /// A vCPU failed first; the others were kicked.
    #[error("{0}")]
    Failed(Box<VcpuFailure>),
    /// The thread of a vCPU panicked, which is a defect of the machine.
    #[error("the thread of vCPU {0} panicked: {1}")]
    Panicked(usize, String),
    /// Some vCPUs did not finish in time and were kicked.
    #[error(
        "{} of {vcpus} vCPUs did not finish within {deadline:?}:{}",
        unfinished.len(),
        Lines(unfinished)
    )]
    Deadline {
        /// The limit of one phase.
        deadline: Duration,
        /// Number of vCPUs.
        vcpus: usize,
        /// The vCPUs that did not finish, in order, each with its state when it was kicked: `None`
        /// where it finished meanwhile, or stayed in the guest ([`VcpuThreadsError::Stuck`]).
        unfinished: Vec<(usize, Option<VcpuFailure>)>,
    },
    /// Some vCPUs stayed in the guest although they were kicked after a failure, the source.
    #[error("vCPUs {0:?} stay in the guest although kicked; their threads are left behind")]
    Stuck(Vec<usize>, #[source] Box<VcpuThreadsError>),
    /// The threads have ended, after a failure or because armed tasks were dropped.
    #[error("the vCPU threads have ended; create a new machine")]
    Stopped,
}

struct Lines<'a>(&'a [(usize, Option<VcpuFailure>)]);

impl fmt::Display for Lines<'_> {
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
