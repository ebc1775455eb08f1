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
pub struct Grace {
    epoch: AtomicU64,
    /// For each CPU the epoch its walk began in and 1; 0 while it does not walk.
    walkers: Box<[AtomicU64]>,
    waiting: Mutex<Vec<(u64, Unlinked)>>,
    count: AtomicUsize,
}

impl Grace {
    /// For this many CPUs.
    pub fn new(cpus: usize) -> Self {
        Self {
            epoch: AtomicU64::new(0),
            walkers: (0..cpus).map(|_| AtomicU64::new(0)).collect(),
            waiting: Mutex::new(Vec::new()),
            count: AtomicUsize::new(0),
        }
    }

    /// A CPU begins a walk.
    pub fn begin(&self, cpu: usize) {
        let epoch = self.epoch.load(Ordering::Acquire);
        self.walkers[cpu].store(epoch + 1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// It ends it.
    pub fn end(&self, cpu: usize) {
        self.walkers[cpu].store(0, Ordering::Release);
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
            .filter_map(|walker| walker.load(Ordering::Acquire).checked_sub(1))
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
    use crate::{geometry::Level, operations::TableAddress};

    #[test]
    fn a_table_waits_for_walks_that_began_before_it_and_no_others() {
        let grace = Grace::new(2);
        let unlinked = Unlinked {
            table: TableAddress(0x1000),
            level: Level::PAGE,
        };
        grace.begin(0);
        grace.defer(unlinked);
        grace.begin(1);

        let early = grace.take();
        grace.end(0);
        let late = grace.take();

        assert_eq!(early, None);
        assert_eq!(late, Some(unlinked));
        assert!(!grace.is_waiting());
    }
}
