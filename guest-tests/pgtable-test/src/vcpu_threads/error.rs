// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Errors of the vCPU threads.

use std::{fmt, io, time::Duration};

use thiserror::Error;

use crate::machine::{MachineError, VcpuFailure};

/// Error of the vCPU threads. After any of these they accept no more tasks.
#[derive(Debug, Error)]
pub enum VcpuThreadsError {
    /// A thread cannot be started.
    #[error("cannot start the thread of vCPU {vcpu}")]
    Spawn {
        /// Index of the vCPU.
        vcpu: usize,
        /// The host's error.
        #[source]
        source: io::Error,
    },
    /// A vCPU cannot be bound to its thread.
    #[error("cannot bind vCPU {vcpu} to its thread")]
    Bind {
        /// Index of the vCPU.
        vcpu: usize,
        /// The machine's error.
        #[source]
        source: MachineError,
    },
    /// A vCPU failed first; the others were kicked.
    #[error("{0}")]
    Failed(Box<VcpuFailure>),
    /// The thread of a vCPU panicked, which is a defect of the machine.
    #[error("the thread of vCPU {vcpu} panicked: {message}")]
    Panicked {
        /// Index of the vCPU.
        vcpu: usize,
        /// The panic's message.
        message: String,
    },
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
        /// The vCPUs that did not finish, in order.
        unfinished: Vec<UnfinishedVcpu>,
    },
    /// Some vCPUs stayed in the guest although they were kicked after a failure.
    #[error("vCPUs {vcpus:?} stay in the guest although kicked; their threads are left behind")]
    Stuck {
        /// Indices of the vCPUs.
        vcpus: Vec<usize>,
        /// The failure after which they were kicked.
        #[source]
        source: Box<VcpuThreadsError>,
    },
    /// The threads have ended, after a failure or because armed tasks were dropped.
    #[error("the vCPU threads have ended; create a new machine")]
    Stopped,
}

/// A vCPU that did not finish in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnfinishedVcpu {
    /// Index of the vCPU.
    pub vcpu: usize,
    /// State of the vCPU when it was kicked; `None` where it finished meanwhile, or stayed in the
    /// guest ([`VcpuThreadsError::Stuck`]).
    pub failure: Option<VcpuFailure>,
}

struct Lines<'a>(&'a [UnfinishedVcpu]);

impl fmt::Display for Lines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for unfinished in self.0 {
            match &unfinished.failure {
                Some(failure) => write!(f, "\n  {failure}")?,
                None => write!(f, "\n  vCPU {}: state unknown", unfinished.vcpu)?,
            }
        }
        Ok(())
    }
}
