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
    cmo::CleanRange,
    walk::{ExclusiveWalk, Slot, Walk},
};
use crate::{
    address::{EntryAddress, Ipa, TableAddress},
    descriptor::{Descriptor, EntryKind},
    geometry::{Level, index},
    memcache::TableFreeBatch,
    operations::{Operations, Scope, Unlinked},
    policy::Unmap,
};

/// Capacity of a batch.
const MAX_BATCH: usize = 64;
/// Maximum number of table levels below the root.
const MAX_DEPTH: usize = 3;

/// A broken entry of the batch.
#[derive(Debug, Clone, Copy)]
struct Unmapped {
    ipa: Ipa,
    level: Level,
    /// Set if the entry pointed at a table without valid entries.
    empty_table: bool,
    /// The entry before the break.
    old: Descriptor,
}

impl Unmapped {
    /// Returns the table that the entry pointed at.
    #[inline]
    const fn unlinked(&self) -> Option<Unlinked> {
        match (self.old.kind(self.level), self.level.down()) {
            (EntryKind::Table(table), Some(level)) => Some(Unlinked { table, level }),
            _ => None,
        }
    }

    /// Returns whether the entry pointed at a table with leaves below it.
    #[inline]
    const fn has_leaves(&self) -> bool {
        !self.empty_table && !self.old.is_leaf(self.level)
    }
}

/// A table from which the walk has descended to a lower table.
#[derive(Debug, Clone, Copy)]
struct Parent {
    /// The entry that points at the lower table.
    entry: EntryAddress,
    ipa: Ipa,
    old: Descriptor,
    /// The end of the range within this table.
    end: Ipa,
}

/// Broken entries to be invalidated together, in ascending order of their last address.
struct Batch {
    unmapped: ArrayVec<Unmapped, MAX_BATCH>,
    limit: usize,
    /// Set if a table that lies completely in the range is unmapped by its parent entry.
    whole_tables: bool,
}

impl<O: Operations> Walk<'_, O, ExclusiveWalk> {
    /// Unmaps a range, and each table that is empty when the walk leaves it.
    ///
    /// The position in the current table is kept in scalars: the compiler would copy a [`Slot`]
    /// that changes in the loop through memory, with its padding, for every entry.
    #[inline]
    fn unmap_range(&self, start: Ipa, end: Ipa, batch: &mut Batch) -> Result<(), MapError> {
        let geometry = &self.stage2.geometry;
        let (granule, mut level) = (geometry.granule(), geometry.start());
        let mut parents = ArrayVec::<Parent, MAX_DEPTH>::new();
        let mut shift = level.shift(granule);
        let mut entry = self.stage2.root.entry(start.0 >> shift);
        let (mut ipa, mut table_end) = (start.align_down(1 << shift), end);
        loop {
            while ipa < table_end {
                let slot = Slot { entry, level, ipa };
                let old = self.ops.load(entry);
                let next = ipa + (1 << shift);
                match (old.kind(level), level.down()) {
                    (EntryKind::Table(table), Some(below))
                        if !batch.whole_tables || ipa < start || next > end =>
                    {
                        parents.push(Parent { entry, ipa, old, end: table_end });
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
            let (Some(parent), Some(above)) = (parents.pop(), level.up()) else {
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
        batch: &mut Batch,
    ) -> Result<Slot, MapError> {
        let (count, first) = self.run_of(&slot);
        let span = self.stage2.geometry.span(slot.level);
        let (len, run_end) = (index(count), first.ipa + count * span);
        if first.ipa < ipa || run_end > end || len > batch.limit {
            self.contpte_unfold(&slot, old)?;
            return Ok(slot);
        }
        if batch.unmapped.len() + len > batch.limit {
            self.flush_full(batch);
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
        empty_table: bool,
        batch: &mut Batch,
    ) -> Result<(), MapError> {
        let BrokenEntry { slot, old } = self.break_entry(&slot, old)?;
        if self.stage2.policy.count_references {
            self.ops.drop_references(self.table_of(slot.entry), 1);
        }
        batch.unmapped.push(Unmapped { ipa: slot.ipa, level: slot.level, empty_table, old });
        if batch.unmapped.len() == batch.limit {
            self.flush_full(batch);
        }
        Ok(())
    }

    /// Flushes a full batch.
    #[inline(never)]
    fn flush_full(&self, batch: &mut Batch) {
        self.flush(batch);
    }

    /// Invalidates a batch's entries, performs the CMOs for their memory, frees their tables.
    #[inline(always)]
    fn flush(&self, batch: &mut Batch) {
        if batch.unmapped.is_empty() {
            return;
        }
        self.invalidate_batch(&batch.unmapped);
        if !self.stage2.features.fwb {
            let mut range = CleanRange::default();
            for unmapped in &batch.unmapped {
                self.collect_unmapped(unmapped, &mut range);
            }
            self.clean_range(&range);
        }
        self.free_batch(batch);
        batch.unmapped.clear();
    }

    /// Invalidates a batch: its whole range if range TLBIs cover several entries or a table is
    /// unmapped with leaves below it, otherwise entry by entry.
    fn invalidate_batch(&self, unmapped: &[Unmapped]) {
        let span = |u: &Unmapped| self.stage2.geometry.span(u.level);
        match unmapped {
            [one] if one.has_leaves() => self.invalidate_range(one.ipa, span(one)),
            [_, .., last]
                if self.stage2.uses_range_tlbi() || unmapped.iter().any(Unmapped::has_leaves) =>
            {
                let from = unmapped.iter().fold(last.ipa, |from, u| from.min(u.ipa));
                self.invalidate_range(from, last.ipa + span(last) - from);
            }
            _ => {
                let ttl = |u: &Unmapped| u.old.is_leaf(u.level).then_some(u.level);
                let entries = unmapped.iter().map(|u| (u.ipa, ttl(u)));
                self.invalidate_ipas(entries, Scope::Broadcast);
            }
        }
    }

    /// Frees the tables of a batch with one call.
    #[inline(never)]
    fn free_batch(&self, batch: &Batch) {
        let mut frees = TableFreeBatch::new();
        for unmapped in &batch.unmapped {
            match unmapped.unlinked() {
                Some(Unlinked { table, .. }) if unmapped.empty_table => {
                    frees.push(self.ops, table);
                }
                Some(unlinked) => self.stage2.collect_tables(self.ops, unlinked, &mut frees),
                None => {}
            }
        }
        frees.free_all(self.ops);
    }

    fn collect_unmapped(&self, unmapped: &Unmapped, range: &mut CleanRange) {
        match unmapped.unlinked() {
            Some(_) if unmapped.empty_table => {}
            Some(Unlinked { table, level }) => self.collect_leaves(table, level, range),
            None => self.collect_leaf(unmapped.old, unmapped.level, range),
        }
    }
}

impl Stage2 {
    /// Unmaps a range, and any partially covered block completely. After it returns, no CPU can
    /// access the memory through the table, and the host reads all that the guest wrote.
    ///
    /// # Errors
    /// [`MapError::Unaligned`] or [`MapError::OutOfRange`].
    pub fn unmap<O: Operations>(&mut self, ops: &O, ipa: Ipa, size: u64) -> Result<(), MapError> {
        self.check_range(ipa, size)?;
        let (whole_tables, limit) = match self.policy.unmap {
            Unmap::Deferred if self.features.fwb && self.uses_range_tlbi() => (false, MAX_BATCH),
            Unmap::Deferred => (false, 1),
            Unmap::Batch(limit) => (false, usize::from(limit)),
            Unmap::Tables(limit) => (true, usize::from(limit)),
        };
        let mut batch =
            Batch { unmapped: ArrayVec::new(), limit: limit.clamp(1, MAX_BATCH), whole_tables };
        let walk = self.exclusive(ops);
        let done = walk.unmap_range(ipa, ipa + size, &mut batch);
        walk.flush(&mut batch);
        done
    }
}
