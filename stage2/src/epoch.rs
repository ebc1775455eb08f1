// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Deferred frees of tables that shared walkers may still access.
//!
//! Each walk records the epoch in which it began; each deferred table begins a new epoch. A table
//! is freed once no active walk began in an epoch older than the table's. The SeqCst fences order
//! "unlink, then read the walkers" against "record the walk, then read the tables" (store
//! buffering), so that at least one side observes the other.

use alloc::{boxed::Box, vec::Vec};
use std::sync::PoisonError;

use lock_api::RawRwLock;

use crate::{
    fault::Mmu,
    operations::{Operations, Unlinked},
    sync::{AtomicU64, AtomicUsize, Mutex, Ordering, fence},
};

/// Deferred tables, and the walks that may still access them.
#[derive(Debug)]
pub struct EpochReclaim {
    epoch: AtomicU64,
    walkers: Box<[CpuEpoch]>,
    waiting: Mutex<Vec<(u64, Unlinked)>>,
    count: AtomicUsize,
}

#[derive(Debug)]
struct CpuEpoch {
    /// Epoch at which the outermost walk began, plus 1; 0 outside walks.
    since: AtomicU64,
    /// Depth of nested walks; only this CPU accesses it.
    depth: AtomicUsize,
}

impl CpuEpoch {
    // loom's atomics do not implement `Default`.
    fn new() -> Self {
        Self { since: AtomicU64::new(0), depth: AtomicUsize::new(0) }
    }
}

impl EpochReclaim {
    /// Creates the state for `cpus` CPUs.
    pub fn new(cpus: usize) -> Self {
        Self {
            epoch: AtomicU64::new(0),
            walkers: (0..cpus).map(|_| CpuEpoch::new()).collect(),
            waiting: Mutex::new(Vec::new()),
            count: AtomicUsize::new(0),
        }
    }

    /// Begins a walk of a CPU. Walks of one CPU may nest.
    pub fn begin(&self, cpu: usize) {
        let CpuEpoch { since, depth } = &self.walkers[cpu];
        let outer = depth.load(Ordering::Relaxed);
        depth.store(outer + 1, Ordering::Relaxed);
        if outer > 0 {
            return;
        }
        let epoch = self.epoch.load(Ordering::Acquire);
        // Release: a thread that reads this value also observes the end of the CPU's previous walk.
        since.store(epoch + 1, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Ends the CPU's innermost walk.
    pub fn end(&self, cpu: usize) {
        let CpuEpoch { since, depth } = &self.walkers[cpu];
        let outer = depth.load(Ordering::Relaxed).saturating_sub(1);
        depth.store(outer, Ordering::Relaxed);
        if outer == 0 {
            since.store(0, Ordering::Release);
        }
    }

    /// Defers the free of a table.
    pub fn defer(&self, unlinked: Unlinked) {
        let epoch = self.epoch.fetch_add(1, Ordering::AcqRel) + 1;
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.push((epoch, unlinked));
        self.count.store(waiting.len(), Ordering::Release);
    }

    /// Returns whether any table is deferred.
    pub fn is_waiting(&self) -> bool {
        self.count.load(Ordering::Acquire) != 0
    }

    /// Removes and returns a table that no walk can access.
    pub fn take(&self) -> Option<Unlinked> {
        if !self.is_waiting() {
            return None;
        }
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        fence(Ordering::SeqCst);
        let oldest = self
            .walkers
            .iter()
            .filter_map(|walker| walker.since.load(Ordering::Acquire).checked_sub(1))
            .min()
            .unwrap_or(u64::MAX);
        let at = waiting.iter().position(|(epoch, _)| *epoch <= oldest)?;
        let (_, unlinked) = waiting.swap_remove(at);
        self.count.store(waiting.len(), Ordering::Release);
        Some(unlinked)
    }

    /// Frees every table that no walk can access.
    pub fn drain<R: RawRwLock, O: Operations>(&self, mmu: &Mmu<R>, ops: &O) {
        while let Some(unlinked) = self.take() {
            mmu.shared(ops, |table| table.free_unlinked(ops, unlinked));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TableAddress, geometry::Level};

    const UNLINKED: Unlinked = Unlinked { table: TableAddress(0x1000), level: Level::PAGE };

    #[test]
    fn a_table_waits_for_walks_that_began_before_it_and_no_others() {
        let epochs = EpochReclaim::new(2);
        epochs.begin(0);
        epochs.defer(UNLINKED);
        epochs.begin(1);

        assert_eq!(epochs.take(), None);
        epochs.end(0);
        assert_eq!(epochs.take(), Some(UNLINKED));
        assert!(!epochs.is_waiting());
    }
}
