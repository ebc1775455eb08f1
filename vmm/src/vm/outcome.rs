// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The outcome of a run, and the error of a run that failed.

use std::io;

use granule_types::host::FactsError;
use thiserror::Error;

use super::{
    builder::BuildError, event_loop::LoopEnd, open_files::OpenError, privileges::PrivilegeError,
    sandbox::SandboxError, vcpu_control::GuestExit,
};
use crate::arch::guest::GuestError;

/// Error returned when a VM cannot be run.
#[derive(Debug, Error)]
pub enum RunError {
    /// Linux guests are not supported on this architecture.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// A file or device cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The VM cannot be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The process cannot be confined.
    #[error("the process cannot be confined")]
    Sandbox(#[from] SandboxError),
    /// The privileges cannot be dropped.
    #[error("privileges cannot be dropped")]
    Privileges(#[from] PrivilegeError),
    /// An operation of the main thread failed.
    #[error("{operation} failed")]
    Io {
        /// The operation.
        operation: &'static str,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// The host's description cannot be read.
    #[error(transparent)]
    Facts(#[from] FactsError),
}

/// Returns a conversion of the error of a failed operation.
pub(super) fn io_error(operation: &'static str) -> impl Fn(io::Error) -> RunError {
    move |source| RunError::Io { operation, source }
}

/// The outcome of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmOutcome {
    /// The guest powered itself off.
    PowerOff,
    /// The guest reset itself, and the VM is not rebooted.
    Reset,
    /// A signal, the escape key or a client stopped the VM.
    Stopped(&'static str),
    /// The guest crashed or a vCPU cannot continue.
    Failed(String),
}

impl VmOutcome {
    /// Returns the name in the statistics file.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::PowerOff => "off",
            Self::Reset => "reset",
            Self::Stopped(_) => "stopped",
            Self::Failed(_) => "failed",
        }
    }
}

impl From<LoopEnd> for VmOutcome {
    fn from(end: LoopEnd) -> Self {
        match end {
            LoopEnd::Guest(GuestExit::PowerOff) => Self::PowerOff,
            LoopEnd::Guest(GuestExit::Reset) => Self::Reset,
            LoopEnd::Guest(GuestExit::Crash) => Self::Failed("the guest crashed".to_owned()),
            LoopEnd::Guest(GuestExit::VcpuFailed(reason)) => Self::Failed(reason),
            LoopEnd::Stopped(by) => Self::Stopped(by),
        }
    }
}
