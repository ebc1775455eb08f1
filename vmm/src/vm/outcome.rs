// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Outcome of a run, and the error type for building and running a VM.

use std::error::Error;

use granule_types::host::FactsError;

use crate::{arch::guest::BootError, devices::BusError, kvm::KvmError, memory::MemoryError};

/// Outcome of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmOutcome {
    /// Power-off by the guest.
    PowerOff,
    /// Reset by the guest.
    Reset,
    /// Stop of the VM by a signal, the escape key or a client.
    Stopped(&'static str),
    /// Crash of the guest, or a vCPU that cannot continue.
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

/// Error returned when a VM cannot be built or run.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// Error returned when the boot data cannot be prepared.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// Error of a KVM call.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// Error returned when guest memory is not available as requested.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Error returned when the bus refuses the register range of a device.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// Error returned when the host's description cannot be read.
    #[error(transparent)]
    Facts(#[from] FactsError),
    /// Error returned for an invalid option, or when the host cannot run the VM.
    #[error("{0}")]
    Refused(String),
    /// Error of an operation, or of using the object that an option names.
    #[error("{object}")]
    Failed {
        /// The operation, or the option and its value.
        object: String,
        /// The error.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
}

/// Returns a function that wraps an error in a [`VmError::Failed`] with `object`.
pub(super) fn failed<E: Into<Box<dyn Error + Send + Sync>>>(
    object: impl Into<String>,
) -> impl FnOnce(E) -> VmError {
    move |error| VmError::Failed { object: object.into(), source: error.into() }
}
