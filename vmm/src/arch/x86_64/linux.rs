// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Linux guests, of which there are none here yet: that is said before anything is begun.

use thiserror::Error;

use crate::vm::{
    build::{BuildError, Ends, Machine},
    config::VmConfig,
    open_files::Opened,
};

/// There is no guest.
#[derive(Debug, Error)]
#[error(
    "`granule run` starts arm64 guests and needs an arm64 host with KVM; `granule lab --guest` runs \
     it in an emulated one"
)]
pub struct GuestError;

/// An interrupt controller: none.
#[derive(Debug)]
pub enum Controller {}

/// Whether there are Linux guests for this architecture: no.
///
/// # Errors
/// Always.
pub const fn check() -> Result<(), GuestError> {
    Err(GuestError)
}

/// Builds no machine.
///
/// # Errors
/// Always.
pub fn build(_: &VmConfig, _: &Opened, _: Ends) -> Result<Machine, BuildError> {
    Err(GuestError.into())
}
