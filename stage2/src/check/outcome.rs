// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The outcomes that the architecture allows for an access of the guest.

/// A possible outcome of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// The data that was written last.
    RightData,
    /// Data that the host has not cleaned, or an older instruction.
    StaleData,
    /// The mapping or the permission of an entry that was removed.
    StaleTranslation,
    /// A TLB conflict abort: two entries of different size translate the address.
    ConflictAbort,
    /// A stage-2 fault.
    Fault,
}
