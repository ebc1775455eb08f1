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
//! [`ArmedTasks::open`] opens the gate without waiting, so that the harness can work while the vCPUs
//! run; `release` then waits for them.
//!
//! Dropping [`VcpuThreads`] ends and joins every thread, except those of vCPUs that stay in the
//! guest although kicked: a join would never return, so the error names them and they are left
//! behind.

mod delay;
mod error;
mod gate;
#[cfg(test)]
mod tests;
mod thread;
mod threads;

pub use error::{UnfinishedVcpu, VcpuThreadsError};
pub use threads::{ArmedTasks, VcpuThreads};
