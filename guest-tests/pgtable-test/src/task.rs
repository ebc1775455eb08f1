// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One vCPU's work in one phase, independent of the machine that executes it.

use granule_types::units::{Bytes, GuestAddress};

/// The operation that a vCPU performs at each address it visits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Returns at once: shows that the vCPU runs.
    Nothing,
    /// Reads 8 bytes.
    Read,
    /// Writes [`Task::value_at`] as 8 bytes.
    Write,
    /// Writes as [`Access::Write`], then reads at [`Task::inner_count`] addresses after it.
    WriteThenRead,
    /// Writes a "return" instruction 8 bytes after the address, which keeps its own 8 bytes, and
    /// makes it visible to instruction fetch. Not timed.
    Plant,
    /// Calls the planted instruction.
    Execute,
    /// Reads and compares with [`Task::value_at`]; the first difference fails the task.
    Verify,
    /// Writes at the addresses that a [`RandomWalk`](crate::guest::random_walk::RandomWalk) of
    /// [`Task::seed`] and [`Task::count`] selects. Each write stores the number of writes so far,
    /// from 1. Ends when [`MigrationOps::set_stopping`] asks for it; requires a machine with
    /// [`MigrationOps`].
    ///
    /// [`MigrationOps`]: crate::machine::MigrationOps
    /// [`MigrationOps::set_stopping`]: crate::machine::MigrationOps::set_stopping
    WriteAtRandom,
}

/// One vCPU's work in one phase: an access at `count` addresses, `stride` apart, from `start` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Task {
    /// The operation at each address.
    pub access: Access,
    /// The first address.
    pub start: GuestAddress,
    /// The number of addresses.
    pub count: u64,
    /// The distance between addresses.
    pub stride: Bytes,
    /// [`Access::WriteThenRead`]: distance from the write to the first read.
    pub inner_first: Bytes,
    /// [`Access::WriteThenRead`]: number of reads after each write.
    pub inner_count: u64,
    /// [`Access::WriteThenRead`]: distance between those reads.
    pub inner_stride: Bytes,
    /// Seed of the written values, or of the random walk.
    pub seed: u64,
}

impl Task {
    /// Returns a task that visits `count` addresses, `stride` apart, with seed 0 and no reads
    /// after a write.
    pub const fn new(access: Access, start: GuestAddress, count: u64, stride: Bytes) -> Self {
        Self {
            access,
            start,
            count,
            stride,
            inner_first: Bytes(0),
            inner_count: 0,
            inner_stride: Bytes(0),
            seed: 0,
        }
    }

    /// Returns the value that a task with `seed` writes to, and expects at, an address:
    /// `seed ^ address`.
    pub const fn value_at(seed: u64, address: GuestAddress) -> u64 {
        seed ^ address.0
    }
}
