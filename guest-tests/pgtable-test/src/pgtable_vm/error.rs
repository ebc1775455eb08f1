// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Errors of the machine on KVM: failed calls, and crashes of the guest.

use std::error::Error;

use crate::machine::MachineError;

/// Description of a guest exception.
#[derive(Debug)]
pub struct Crash {
    /// `true` if the exception has a fault address.
    pub has_address: bool,
    /// The exception in words.
    pub detail: String,
}

/// Returns the conversion of an error that occurred while doing `what`.
pub fn doing<E: Error + Send + Sync + 'static>(what: &'static str) -> impl Fn(E) -> MachineError {
    move |error| MachineError::new(what, error)
}
