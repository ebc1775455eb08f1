// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a crew comes to a bad end.

use std::{fmt, io, time::Duration};

use thiserror::Error;

use crate::machine::{MachineError, VcpuFailure};

/// Why the crew could not do its work. After any of these it does no more.
#[derive(Debug, Error)]
pub enum CrewError {
    /// A thread could not be started.
    #[error("cannot start the thread of vCPU {vcpu}")]
    Spawn {
        /// Whose.
        vcpu: usize,
        /// What the host says to it.
        #[source]
        source: io::Error,
    },
    /// A vCPU could not be bound to its thread.
    #[error("cannot bind vCPU {vcpu} to its thread")]
    Bind {
        /// Which.
        vcpu: usize,
        /// What the machine says to it.
        #[source]
        source: MachineError,
    },
    /// A vCPU failed; it was the first. The others were kicked out.
    #[error("{0}")]
    Failed(Box<VcpuFailure>),
    /// A vCPU's thread panicked: a defect of the machine.
    #[error("the thread of vCPU {vcpu} panicked: {message}")]
    Panicked {
        /// Which.
        vcpu: usize,
        /// With what.
        message: String,
    },
    /// Not every vCPU was done in time. Those late were kicked out.
    #[error("{} of {vcpus} vCPUs were not done after {deadline:?}:{}", late.len(), Lines(late))]
    Deadline {
        /// How long the phase was given.
        deadline: Duration,
        /// How many vCPUs there are.
        vcpus: usize,
        /// Those that were not done, in order.
        late: Vec<Late>,
    },
    /// After a failure some vCPUs did not even come out when kicked.
    #[error("vCPUs {vcpus:?} did not come out when kicked; their threads are left behind")]
    Lost {
        /// Which.
        vcpus: Vec<usize>,
        /// Why they were kicked.
        #[source]
        source: Box<CrewError>,
    },
    /// The crew failed before, or was sent home from behind the gate.
    #[error("the vCPUs have come to an end before; make a new machine")]
    Spent,
}

/// A vCPU that was not done in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Late {
    /// Which.
    pub vcpu: usize,
    /// Where it was when it was kicked out; `None`: it ended by itself after all, or it never came
    /// out (then it is among [`CrewError::Lost`]).
    pub failure: Option<VcpuFailure>,
}

struct Lines<'a>(&'a [Late]);

impl fmt::Display for Lines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for late in self.0 {
            match &late.failure {
                Some(failure) => write!(f, "\n  {failure}")?,
                None => write!(f, "\n  vCPU {}: where it was is not known", late.vcpu)?,
            }
        }
        Ok(())
    }
}
