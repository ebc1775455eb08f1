// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tasks: the work of one vCPU in one phase, independent of the machine that executes it.

use granule_types::units::{Bytes, GuestAddress};

/// The operation that a vCPU performs at each address of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskAccess {
    /// Performs no access; shows that the vCPU enters and exits the guest.
    Nothing,
    /// Reads 8 bytes.
    Read,
    /// Writes [`Task::value_at`] as 8 bytes.
    Write,
    /// Writes as [`TaskAccess::Write`], then reads at [`Task::read_count`] higher addresses.
    WriteThenRead,
    /// Writes a "return" instruction 8 bytes after the address, and makes it visible to instruction
    /// fetch. Not timed.
    InstallReturn,
    /// Calls the installed instruction.
    Execute,
    /// Reads 8 bytes and compares them with [`Task::value_at`]; a mismatch fails the task.
    Verify,
    /// Writes at the addresses that a [`RandomWalk`] of [`Task::seed`] and [`Task::count`] selects.
    /// Each write stores its number, from 1. [`MigrationOps::set_stop_request`] ends the task.
    ///
    /// [`MigrationOps::set_stop_request`]: crate::machine::MigrationOps::set_stop_request
    WriteAtRandom,
}

/// Work of one vCPU in one phase: accesses at `count` addresses from `start`, `stride` apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Task {
    /// The operation at each address.
    pub access: TaskAccess,
    /// The first address.
    pub start: GuestAddress,
    /// The number of addresses.
    pub count: u64,
    /// The distance between addresses.
    pub stride: Bytes,
    /// [`TaskAccess::WriteThenRead`]: distance from the write to the first read.
    pub read_offset: Bytes,
    /// [`TaskAccess::WriteThenRead`]: number of reads after each write.
    pub read_count: u64,
    /// [`TaskAccess::WriteThenRead`]: distance between those reads.
    pub read_stride: Bytes,
    /// Seed of the written values or of the random walk.
    pub seed: u64,
}

impl Task {
    /// Returns a task with seed 0 and no reads after a write.
    pub const fn new(access: TaskAccess, start: GuestAddress, count: u64, stride: Bytes) -> Self {
        Self {
            access,
            start,
            count,
            stride,
            read_offset: Bytes(0),
            read_count: 0,
            read_stride: Bytes(0),
            seed: 0,
        }
    }

    /// Returns the addresses, without those of the reads after a write.
    pub fn addresses(self) -> impl Iterator<Item = GuestAddress> {
        (0..self.count).map(move |n| GuestAddress(self.start.0 + n * self.stride.0))
    }

    /// Returns the value that a task with `seed` writes or expects at an address.
    pub const fn value_at(seed: u64, address: GuestAddress) -> u64 {
        seed ^ address.0
    }
}

/// Infinite pseudo-random sequence of page numbers below `count`, to which
/// [`TaskAccess::WriteAtRandom`] writes.
///
/// A 64-bit xorshift generator (Marsaglia 2003, shifts 13, 7, 17) yields one number for each write;
/// the page is the upper half of the product of that number and `count`. The guest programs
/// implement the same generator, so the host can compute which pages a vCPU wrote, and in which
/// order.
#[derive(Debug, Clone)]
pub struct RandomWalk {
    state: u64,
    count: u64,
}

impl RandomWalk {
    /// Returns the sequence of page numbers below `count` for a seed.
    pub const fn new(seed: u64, count: u64) -> Self {
        Self { state: initial_state(seed), count }
    }
}

/// Returns the generator's initial state, which must not be 0: xorshift maps 0 to 0.
pub const fn initial_state(seed: u64) -> u64 {
    if seed == 0 { 1 } else { seed }
}

impl Iterator for RandomWalk {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        let product = u128::from(self.state) * u128::from(self.count);
        u64::try_from(product >> 64).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pages_are_visited_about_equally_often() {
        let mut visits = [0; 48];

        for page in RandomWalk::new(0, 48).take(48_000) {
            visits[usize::try_from(page).unwrap()] += 1;
        }

        assert!(visits.iter().all(|n| (800..1200).contains(n)), "{visits:?}");
    }

    #[test]
    fn a_sequence_repeats_for_its_seed_and_differs_between_seeds() {
        let of = |seed| -> Vec<u64> { RandomWalk::new(seed, 1000).take(20).collect() };

        assert_eq!(of(7), of(7));
        assert_ne!(of(7), of(8));
    }
}
