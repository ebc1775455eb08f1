// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! x86_64: no machine yet.

use granule_guest_tests::machine::MachineError;

use crate::machine::{KvmConfig, Parts};

/// Refuses.
///
/// # Errors
/// Always.
pub(crate) fn build(_config: &KvmConfig) -> Result<Parts, MachineError> {
    Err(MachineError::new(
        "making a KVM machine",
        "not yet for this architecture: the page-table test runs on arm64 hosts, and \
         `granule lab` emulates one",
    ))
}
