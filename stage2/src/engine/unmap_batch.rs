// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Broken entries of an unmap: invalidate → clean and invalidate to PoC → free, all of a batch together.
//!
//! A batch is completed when it is full and at the end of the walk. One invalidation covers its entries, and
//! no CPU can then reach anything below them. Their memory is cleaned and invalidated, as a cached line
//! must not hide bytes that the guest wrote with the caches bypassed, and their tables are freed.

use arrayvec::ArrayVec;

use super::{
    Stage2,
    cmo::DeferredClean,
    walk::{ExclusiveWalk, Walk},
};
use crate::{
    address::Ipa,
    descriptor::{Descriptor, EntryKind},
    geometry::Level,
    memcache::TableFreeBatch,
    operations::{Operations, Scope, UnlinkedTable},
    policy::UnmapBatching,
};

const CAPACITY: usize = 64;

#[derive(Debug, Clone, Copy)]
pub(super) struct UnmappedEntry {
    pub ipa: Ipa,
    pub level: Level,
    /// Indicates that the entry pointed at a table without valid entries.
    pub is_empty_table: bool,
    /// The entry before the break.
    pub old: Descriptor,
}

impl UnmappedEntry {
    #[inline]
    const fn unlinked_table(&self) -> Option<UnlinkedTable> {
        match (self.old.kind(self.level), self.level.child()) {
            (EntryKind::Table(table), Some(level)) => Some(UnlinkedTable { table, level }),
            _ => None,
        }
    }

    /// Returns whether the entry pointed at a table with leaves below it.
    #[inline]
    const fn has_leaves(&self) -> bool {
        !self.is_empty_table && !self.old.is_leaf(self.level)
    }
}

/// Broken entries to be invalidated together, in ascending order of their last address.
pub(super) struct UnmapBatch {
    entries: ArrayVec<UnmappedEntry, CAPACITY>,
    /// Maximum number of entries, at least 1.
    pub limit: usize,
    /// Indicates that a table completely in the range is unmapped by its parent entry.
    pub unlinks_whole_tables: bool,
}

impl UnmapBatch {
    /// Creates an empty batch as the policy requires.
    pub fn new(stage2: &Stage2) -> Self {
        let defers = stage2.features.fwb && stage2.uses_range_tlbi();
        let (unlinks_whole_tables, limit) = match stage2.policy.unmap_batching {
            UnmapBatching::Deferred if defers => (false, CAPACITY),
            UnmapBatching::Deferred => (false, 1),
            UnmapBatching::Batch(limit) => (false, usize::from(limit)),
            UnmapBatching::WholeTables(limit) => (true, usize::from(limit)),
        };
        let limit = limit.clamp(1, CAPACITY);
        Self { entries: ArrayVec::new(), limit, unlinks_whole_tables }
    }

    #[inline]
    pub const fn len(&self) -> usize {
        self.entries.len()
    }

    /// Adds an entry. The batch must not be full.
    #[inline]
    pub fn push(&mut self, entry: UnmappedEntry) {
        self.entries.push(entry);
    }
}

impl<O: Operations> Walk<'_, O, ExclusiveWalk> {
    /// Completes a full batch, out of line.
    #[inline(never)]
    pub(super) fn complete_full_batch(&self, batch: &mut UnmapBatch) {
        self.complete_batch(batch);
    }

    /// Invalidates a batch's entries, performs the CMOs for their memory, frees their tables.
    #[inline(always)]
    pub(super) fn complete_batch(&self, batch: &mut UnmapBatch) {
        if batch.entries.is_empty() {
            return;
        }
        self.invalidate_batch(&batch.entries);
        if !self.stage2.features.fwb {
            let mut deferred = DeferredClean::default();
            for unmapped in &batch.entries {
                self.defer_clean_of_unmapped(unmapped, &mut deferred);
            }
            self.clean_deferred(&deferred);
        }
        self.free_batch(batch);
        batch.entries.clear();
    }

    /// Invalidates a batch: its whole range if range TLBIs cover several entries or a table is
    /// unmapped with leaves below it, otherwise entry by entry.
    fn invalidate_batch(&self, unmapped: &[UnmappedEntry]) {
        let span = |u: &UnmappedEntry| self.stage2.geometry.span(u.level);
        match unmapped {
            [one] if one.has_leaves() => self.invalidate_range(one.ipa, span(one)),
            [_, .., last]
                if self.stage2.uses_range_tlbi()
                    || unmapped.iter().any(UnmappedEntry::has_leaves) =>
            {
                let from = unmapped.iter().fold(last.ipa, |from, u| from.min(u.ipa));
                self.invalidate_range(from, last.ipa + span(last) - from);
            }
            _ => {
                let ttl = |u: &UnmappedEntry| u.old.is_leaf(u.level).then_some(u.level);
                let entries = unmapped.iter().map(|u| (u.ipa, ttl(u)));
                self.invalidate_ipas(entries, Scope::Broadcast);
            }
        }
    }

    #[inline(never)]
    fn free_batch(&self, batch: &UnmapBatch) {
        let mut frees = TableFreeBatch::new();
        for unmapped in &batch.entries {
            match unmapped.unlinked_table() {
                Some(UnlinkedTable { table, .. }) if unmapped.is_empty_table => {
                    frees.push(self.ops, table);
                }
                Some(unlinked) => self.stage2.collect_tables(self.ops, unlinked, &mut frees),
                None => {}
            }
        }
        frees.free_all(self.ops);
    }

    fn defer_clean_of_unmapped(&self, unmapped: &UnmappedEntry, deferred: &mut DeferredClean) {
        match unmapped.unlinked_table() {
            Some(_) if unmapped.is_empty_table => {}
            Some(UnlinkedTable { table, level }) => {
                self.defer_clean_of_leaves(table, level, deferred)
            }
            None => self.defer_clean_of_leaf(unmapped.old, unmapped.level, deferred),
        }
    }
}
