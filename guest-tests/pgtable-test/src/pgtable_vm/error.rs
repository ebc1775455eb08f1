// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Errors of the test's VM: failed calls, and crashes of the guest.

use std::error::Error;

use crate::machine::MachineError;

/// What the architecture makes of an exception.
#[derive(Debug)]
pub struct Crash {
    /// Whether there is an address at fault.
    pub has_address: bool,
    /// What happened, for people.
    pub detail: String,
}

/// Turns an error into the machine's, telling what was being done.
pub fn doing<E: Error + Send + Sync + 'static>(what: &'static str) -> impl Fn(E) -> MachineError {
    move |error| MachineError::new(what, error)
}
