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
    operations::{Operations, UnlinkedTable},
    sync::{AtomicU64, AtomicUsize, Mutex, Ordering, fence},
};

/// Deferred tables, and the walks that may still access them.
#[derive(Debug)]
pub struct EpochReclaim {
    epoch: AtomicU64,
    walkers: Box<[CpuEpoch]>,
    deferred_tables: Mutex<Vec<(u64, UnlinkedTable)>>,
    deferred_count: AtomicUsize,
}

#[derive(Debug)]
struct CpuEpoch {
    /// Epoch at which the outermost walk began, plus 1; 0 outside walks.
    walk_epoch: AtomicU64,
    /// Depth of nested walks; only this CPU accesses it.
    depth: AtomicUsize,
}

impl CpuEpoch {
    // loom's atomics do not implement `Default`.
    fn new() -> Self {
        Self { walk_epoch: AtomicU64::new(0), depth: AtomicUsize::new(0) }
    }
}

impl EpochReclaim {
    /// Creates the state for `cpus` CPUs.
    pub fn new(cpus: usize) -> Self {
        Self {
            epoch: AtomicU64::new(0),
            walkers: (0..cpus).map(|_| CpuEpoch::new()).collect(),
            deferred_tables: Mutex::new(Vec::new()),
            deferred_count: AtomicUsize::new(0),
        }
    }

    /// Begins a walk of a CPU, counted from 0. Walks of one CPU may nest.
    ///
    /// # Panics
    /// Panics if `cpu` is not below the number of CPUs.
    pub fn begin_walk(&self, cpu: usize) {
        let CpuEpoch { walk_epoch, depth } = &self.walkers[cpu];
        let outer = depth.load(Ordering::Relaxed);
        depth.store(outer + 1, Ordering::Relaxed);
        if outer > 0 {
            return;
        }
        let epoch = self.epoch.load(Ordering::Acquire);
        // Release: a thread that reads this value also observes the end of the CPU's previous walk.
        walk_epoch.store(epoch + 1, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Ends the CPU's innermost walk.
    ///
    /// # Panics
    /// Panics if `cpu` is not below the number of CPUs.
    pub fn end_walk(&self, cpu: usize) {
        let CpuEpoch { walk_epoch, depth } = &self.walkers[cpu];
        let outer = depth.load(Ordering::Relaxed).saturating_sub(1);
        depth.store(outer, Ordering::Relaxed);
        if outer == 0 {
            walk_epoch.store(0, Ordering::Release);
        }
    }

    /// Defers the free of a table.
    pub fn defer_free(&self, unlinked: UnlinkedTable) {
        let epoch = self.epoch.fetch_add(1, Ordering::AcqRel) + 1;
        let mut deferred = self.deferred_tables.lock().unwrap_or_else(PoisonError::into_inner);
        deferred.push((epoch, unlinked));
        self.deferred_count.store(deferred.len(), Ordering::Release);
    }

    /// Returns whether any table is deferred.
    pub fn has_deferred(&self) -> bool {
        self.deferred_count.load(Ordering::Acquire) != 0
    }

    /// Removes and returns a table that no walk can access.
    pub fn take_unreachable_table(&self) -> Option<UnlinkedTable> {
        if !self.has_deferred() {
            return None;
        }
        let mut deferred = self.deferred_tables.lock().unwrap_or_else(PoisonError::into_inner);
        fence(Ordering::SeqCst);
        let oldest = self
            .walkers
            .iter()
            .filter_map(|walker| walker.walk_epoch.load(Ordering::Acquire).checked_sub(1))
            .min()
            .unwrap_or(u64::MAX);
        let at = deferred.iter().position(|(epoch, _)| *epoch <= oldest)?;
        let (_, unlinked) = deferred.swap_remove(at);
        self.deferred_count.store(deferred.len(), Ordering::Release);
        Some(unlinked)
    }

    /// Frees every table that no walk can access.
    pub fn drain<R: RawRwLock, O: Operations>(&self, mmu: &Mmu<R>, ops: &O) {
        while let Some(unlinked) = self.take_unreachable_table() {
            mmu.with_shared(ops, |table| table.free_unlinked(ops, unlinked));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TableAddress, geometry::Level};

    const UNLINKED_TABLE: UnlinkedTable =
        UnlinkedTable { table: TableAddress(0x1000), level: Level::PAGE };

    #[test]
    fn a_deferred_table_waits_only_for_earlier_walks() {
        let epochs = EpochReclaim::new(2);
        epochs.begin_walk(0);
        epochs.defer_free(UNLINKED_TABLE);
        epochs.begin_walk(1);

        assert_eq!(epochs.take_unreachable_table(), None);
        epochs.end_walk(0);
        assert_eq!(epochs.take_unreachable_table(), Some(UNLINKED_TABLE));
        assert!(!epochs.has_deferred());
    }
}
