// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The outcome of a run, and the error type of building and running a VM.

use std::error::Error;

use granule_types::host::FactsError;

use crate::{arch::guest::BootError, devices::BusError, kvm::KvmError, memory::MemoryError};

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

/// Error returned when a VM cannot be built or run.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// The boot data cannot be prepared.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// A KVM call failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// Guest memory is not available as requested.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The bus refuses the registers of a device.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// The host's description cannot be read.
    #[error(transparent)]
    Facts(#[from] FactsError),
    /// An option is not valid, or the host does not allow the VM.
    #[error("{0}")]
    Refused(String),
    /// An operation failed, or the object that an option names cannot be used.
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
