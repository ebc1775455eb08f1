// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Unmapping of a range: break → invalidate → clean and invalidate to PoC → free, in batches.
//!
//! Broken entries are collected in a batch until it is full or the walk ends. One invalidation then
//! covers all of them, their memory is cleaned and invalidated (a cached line must not hide bytes
//! that the guest wrote with the caches bypassed), and their tables are freed. After the
//! invalidation no CPU can reach anything below the entries.

use arrayvec::ArrayVec;

use super::{
    MapError, Stage2,
    bbm::BrokenEntry,
    cmo::DeferredClean,
    walk::{ExclusiveWalk, Slot, Walk},
};
use crate::{
    address::{EntryAddress, Ipa, TableAddress},
    descriptor::{Descriptor, EntryKind},
    geometry::{Level, to_usize},
    memcache::TableFreeBatch,
    operations::{Operations, Scope, UnlinkedTable},
    policy::UnmapBatching,
};

const BATCH_CAPACITY: usize = 64;
/// Maximum number of table levels below the root.
const MAX_DEPTH: usize = 3;

#[derive(Debug, Clone, Copy)]
struct UnmappedEntry {
    ipa: Ipa,
    level: Level,
    /// Indicates that the entry pointed at a table without valid entries.
    is_empty_table: bool,
    /// The entry before the break.
    old: Descriptor,
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

/// A table from which the walk has descended to a lower table.
#[derive(Debug, Clone, Copy)]
struct ParentTable {
    /// The entry that points at the lower table.
    entry: EntryAddress,
    ipa: Ipa,
    old: Descriptor,
    /// The end of the range within this table.
    end: Ipa,
}

/// Broken entries to be invalidated together, in ascending order of their last address.
struct UnmapBatch {
    entries: ArrayVec<UnmappedEntry, BATCH_CAPACITY>,
    limit: usize,
    /// Indicates that a table completely in the range is unmapped by its parent entry.
    unlinks_whole_tables: bool,
}

impl<O: Operations> Walk<'_, O, ExclusiveWalk> {
    /// Unmaps a range, and each table that is empty when the walk leaves it.
    ///
    /// Scalars hold the position in the table: the compiler would copy a [`Slot`] that changes in
    /// the loop through memory for every entry.
    #[inline]
    fn unmap_range(&self, start: Ipa, end: Ipa, batch: &mut UnmapBatch) -> Result<(), MapError> {
        let geometry = &self.stage2.geometry;
        let (granule, mut level) = (geometry.granule(), geometry.start_level());
        let mut parents = ArrayVec::<ParentTable, MAX_DEPTH>::new();
        let mut shift = level.shift(granule);
        let mut entry = self.stage2.root.entry(start.0 >> shift);
        let (mut ipa, mut table_end) = (start.align_down(1 << shift), end);
        loop {
            while ipa < table_end {
                let slot = Slot { entry, level, ipa };
                let old = self.ops.load(entry);
                let next = ipa + (1 << shift);
                match (old.kind(level), level.child()) {
                    (EntryKind::Table(table), Some(below))
                        if !batch.unlinks_whole_tables || ipa < start || next > end =>
                    {
                        parents.push(ParentTable { entry, ipa, old, end: table_end });
                        (level, shift) = (below, shift - granule.level_bits());
                        let index = start.0.saturating_sub(ipa.0) >> shift;
                        (entry, ipa) = (table.entry(index), ipa + (index << shift));
                        table_end = table_end.min(next);
                        continue;
                    }
                    (EntryKind::Leaf(_), _) if old.is_contiguous() => {
                        let next = self.unmap_run(slot, old, (start, end), batch)?;
                        (entry, ipa) = (next.entry, next.ipa);
                        continue;
                    }
                    (EntryKind::Invalid | EntryKind::Locked, _) => {}
                    _ => self.unmap_entry(slot, old, false, batch)?,
                }
                (entry, ipa) = (entry.skip(1), next);
            }
            let (Some(parent), Some(above)) = (parents.pop(), level.parent()) else {
                return Ok(());
            };
            (level, shift) = (above, shift + granule.level_bits());
            if self.is_empty(TableAddress(parent.old.address().0), entry) {
                let (entry, ipa) = (parent.entry, parent.ipa);
                self.unmap_entry(Slot { entry, level, ipa }, parent.old, true, batch)?;
            } else if table_end == end {
                // No parent table is empty, and none contains more of the range.
                return Ok(());
            }
            (entry, ipa) = (parent.entry.skip(1), parent.ipa + (1 << shift));
            table_end = parent.end;
        }
    }

    /// Breaks a whole contiguous run in one batch, or removes the hint from a run that does not
    /// fit. Returns the slot with which the walk continues.
    #[inline(never)]
    fn unmap_run(
        &self,
        slot: Slot,
        old: Descriptor,
        (ipa, end): (Ipa, Ipa),
        batch: &mut UnmapBatch,
    ) -> Result<Slot, MapError> {
        let (count, first) = self.contiguous_run(&slot);
        let span = self.stage2.geometry.span(slot.level);
        let (len, run_end) = (to_usize(count), first.ipa + count * span);
        if first.ipa < ipa || run_end > end || len > batch.limit {
            self.contpte_unfold(&slot, old)?;
            return Ok(slot);
        }
        if batch.entries.len() + len > batch.limit {
            self.complete_full_batch(batch);
        }
        for n in 0..count {
            let slot = first.skip(n, span);
            self.unmap_entry(slot, self.ops.load(slot.entry), false, batch)?;
        }
        Ok(first.skip(count, span))
    }

    /// Breaks one entry and adds it to the batch.
    #[inline]
    fn unmap_entry(
        &self,
        slot: Slot,
        old: Descriptor,
        is_empty_table: bool,
        batch: &mut UnmapBatch,
    ) -> Result<(), MapError> {
        let BrokenEntry { slot, old } = self.break_entry(&slot, old)?;
        if self.stage2.policy.counts_references {
            self.ops.drop_references(self.table_containing(slot.entry), 1);
        }
        batch.entries.push(UnmappedEntry { ipa: slot.ipa, level: slot.level, is_empty_table, old });
        if batch.entries.len() == batch.limit {
            self.complete_full_batch(batch);
        }
        Ok(())
    }

    /// Completes a full batch, out of line.
    #[inline(never)]
    fn complete_full_batch(&self, batch: &mut UnmapBatch) {
        self.complete_batch(batch);
    }

    /// Invalidates a batch's entries, performs the CMOs for their memory, frees their tables.
    #[inline(always)]
    fn complete_batch(&self, batch: &mut UnmapBatch) {
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

impl Stage2 {
    /// Unmaps a range, and the whole of each block that overlaps it. After it returns, no CPU can
    /// access the memory through the table, and the host reads all bytes that the guest wrote.
    ///
    /// # Errors
    /// [`MapError::Unaligned`] or [`MapError::IpaOutOfRange`].
    pub fn unmap<O: Operations>(&mut self, ops: &O, ipa: Ipa, size: u64) -> Result<(), MapError> {
        self.check_range(ipa, size)?;
        if size == 0 {
            return Ok(());
        }
        let defers = self.features.fwb && self.uses_range_tlbi();
        let (unlinks_whole_tables, limit) = match self.policy.unmap_batching {
            UnmapBatching::Deferred if defers => (false, BATCH_CAPACITY),
            UnmapBatching::Deferred => (false, 1),
            UnmapBatching::Batch(limit) => (false, usize::from(limit)),
            UnmapBatching::WholeTables(limit) => (true, usize::from(limit)),
        };
        let limit = limit.clamp(1, BATCH_CAPACITY);
        let mut batch = UnmapBatch { entries: ArrayVec::new(), limit, unlinks_whole_tables };
        let walk = self.exclusive_walk(ops);
        let done = walk.unmap_range(ipa, ipa + size, &mut batch);
        walk.complete_batch(&mut batch);
        done
    }
}
