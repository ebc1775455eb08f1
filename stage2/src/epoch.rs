// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A grace period for tables that shared walkers may still be below.
//!
//! Every walk notes the epoch it began in; every table that is put here begins a new one. A table is
//! free to go once no walk is under way that began in an epoch before its own. The fences make
//! "unlink, then look at the walkers" and "announce the walk, then read the tables" exclude each
//! other's oversight (the store-buffering pattern).

use alloc::{boxed::Box, vec::Vec};
use std::sync::PoisonError;

use lock_api::RawRwLock;

use crate::{
    fault::Mmu,
    operations::{Operations, Unlinked},
    sync::{AtomicU64, AtomicUsize, Mutex, Ordering, fence},
};

/// Tables that wait, and who may still walk them.
#[derive(Debug)]
pub struct EpochReclaim {
    epoch: AtomicU64,
    walkers: Box<[Walker]>,
    waiting: Mutex<Vec<(u64, Unlinked)>>,
    count: AtomicUsize,
}

#[derive(Debug)]
struct Walker {
    /// The epoch its outermost walk began in and 1; 0 while it does not walk.
    since: AtomicU64,
    /// Walks of this CPU inside one another; nobody else looks.
    depth: AtomicUsize,
}

impl Walker {
    // Not `Default`: loom's atomics have no constant ones.
    fn new() -> Self {
        Self {
            since: AtomicU64::new(0),
            depth: AtomicUsize::new(0),
        }
    }
}

impl EpochReclaim {
    /// For this many CPUs.
    pub fn new(cpus: usize) -> Self {
        Self {
            epoch: AtomicU64::new(0),
            walkers: (0..cpus).map(|_| Walker::new()).collect(),
            waiting: Mutex::new(Vec::new()),
            count: AtomicUsize::new(0),
        }
    }

    /// A CPU begins a walk, inside another of its own or not.
    pub fn begin(&self, cpu: usize) {
        let Walker { since, depth } = &self.walkers[cpu];
        let outer = depth.load(Ordering::Relaxed);
        depth.store(outer + 1, Ordering::Relaxed);
        if outer > 0 {
            return;
        }
        let epoch = self.epoch.load(Ordering::Acquire);
        // A release as the end of the walk before is: who reads this has that behind it.
        since.store(epoch + 1, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// It ends the one that began last.
    pub fn end(&self, cpu: usize) {
        let Walker { since, depth } = &self.walkers[cpu];
        let outer = depth.load(Ordering::Relaxed).saturating_sub(1);
        depth.store(outer, Ordering::Relaxed);
        if outer == 0 {
            since.store(0, Ordering::Release);
        }
    }

    /// Has a table wait.
    pub fn defer(&self, unlinked: Unlinked) {
        let epoch = self.epoch.fetch_add(1, Ordering::AcqRel) + 1;
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.push((epoch, unlinked));
        self.count.store(waiting.len(), Ordering::Release);
    }

    /// Whether tables wait.
    pub fn is_waiting(&self) -> bool {
        self.count.load(Ordering::Acquire) != 0
    }

    /// A table whose time has come.
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

    /// Frees every table whose time has come.
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

    #[test]
    fn a_table_waits_for_walks_that_began_before_it_and_no_others() {
        let epochs = EpochReclaim::new(2);
        let unlinked = Unlinked {
            table: TableAddress(0x1000),
            level: Level::PAGE,
        };
        epochs.begin(0);
        epochs.defer(unlinked);
        epochs.begin(1);

        let early = epochs.take();
        epochs.end(0);
        let late = epochs.take();

        assert_eq!(early, None);
        assert_eq!(late, Some(unlinked));
        assert!(!epochs.is_waiting());
    }

    #[test]
    fn a_walk_inside_another_does_not_end_it() {
        let epochs = EpochReclaim::new(1);
        let unlinked = Unlinked {
            table: TableAddress(0x1000),
            level: Level::PAGE,
        };
        epochs.begin(0);
        epochs.begin(0);
        epochs.defer(unlinked);
        epochs.end(0);

        let inside = epochs.take();
        epochs.end(0);

        assert_eq!(inside, None);
        assert_eq!(epochs.take(), Some(unlinked));
    }
}
