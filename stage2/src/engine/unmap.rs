// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Unmapping of a range, in ascending order, with the tables that become empty.
//!
//! ```text
//! level n       … │ parent │ …        An entry that points at a table cut by the range, or whose leaves
//!                     │               are unmapped one by one: the walk descends.
//! level n + 1       entry, entry, …   A leaf, or a table that lies in the range and that the policy
//!                                     unlinks as a whole, is broken and added to the batch.
//! ```
//!
//! At the end of a table, or of the range, the walk returns to the parent entry. It breaks that entry, too,
//! if the table is empty: before the table's own entries are invalidated, as one invalidation covers both
//! ([`UnmapBatch`]).

use arrayvec::ArrayVec;

use super::{
    MapError, Stage2,
    bbm::BrokenEntry,
    unmap_batch::{UnmapBatch, UnmappedEntry},
    walk::{ExclusiveWalk, Slot, Walk},
};
use crate::{
    address::{EntryAddress, Ipa, TableAddress},
    descriptor::{Descriptor, EntryKind},
    geometry::to_usize,
    operations::Operations,
};

/// Maximum number of table levels below the root.
const MAX_DEPTH: usize = 3;

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
        if batch.len() + len > batch.limit {
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
        batch.push(UnmappedEntry { ipa: slot.ipa, level: slot.level, is_empty_table, old });
        if batch.len() == batch.limit {
            self.complete_full_batch(batch);
        }
        Ok(())
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
        let mut batch = UnmapBatch::new(self);
        let walk = self.exclusive_walk(ops);
        let done = walk.unmap_range(ipa, ipa + size, &mut batch);
        walk.complete_batch(&mut batch);
        done
    }
}
