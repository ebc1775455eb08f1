// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Unmapping a range: break → invalidate → clean to PoC → free, for one entry or a batch of them.
//!
//! Broken entries wait in a batch until it is full or the walk ends. One invalidation then covers
//! all of them, their memory is cleaned (a line that the host reads must not hide what the guest
//! wrote past the caches), and their tables are freed. From the invalidation on no CPU reaches
//! anything below them.

use arrayvec::ArrayVec;

use super::{
    bbm::BrokenEntry,
    cmo::CleanRange,
    table::{MapError, Stage2},
    walk::{ExclusiveWalk, Slot, Walk},
};
use crate::{
    address::{Ipa, TableAddress},
    descriptor::{Descriptor, EntryKind},
    geometry::{Level, index},
    memcache::TableFreeBatch,
    operations::{Operations, Unlinked},
    policy::Unmap,
};

/// Capacity of a batch.
const MAX_BATCH: usize = 64;

/// What a broken entry led to.
#[derive(Debug, Clone, Copy)]
enum Below {
    Memory,
    EmptyTable(TableAddress),
    /// A table with leaves below it.
    Table(Unlinked),
}

/// An entry of the batch.
#[derive(Debug, Clone, Copy)]
struct Unmapped {
    broken: BrokenEntry,
    below: Below,
}

/// Broken entries that wait for one invalidation, in ascending order of their last address.
struct Batch {
    unmapped: ArrayVec<Unmapped, MAX_BATCH>,
    /// The range of all of them.
    from: Ipa,
    to: Ipa,
    /// Whether one of them has leaves below it.
    has_leaves: bool,
    limit: usize,
    /// Whether a table that lies in the range is unmapped as a whole.
    whole_tables: bool,
}

impl<O: Operations> Walk<'_, O, ExclusiveWalk> {
    fn unmap_in(
        &self,
        table: TableAddress,
        level: Level,
        (ipa, end): (Ipa, Ipa),
        batch: &mut Batch,
    ) -> Result<(), MapError> {
        let span = self.stage2.geometry.span(level);
        let mut slot = self.slot(table, level, ipa);
        while slot.ipa < end {
            let old = self.ops.load(slot.entry);
            let next = slot.next(span);
            match (old.kind(level), level.down()) {
                (EntryKind::Table(child), Some(below)) => {
                    if batch.whole_tables && slot.ipa >= ipa && next.ipa <= end {
                        let (table, level) = (child, below);
                        let below = Below::Table(Unlinked { table, level });
                        self.unmap_entry(&slot, old, (below, next.ipa), batch)?;
                    } else {
                        let part = (ipa.max(slot.ipa), end.min(next.ipa));
                        self.unmap_in(child, below, part, batch)?;
                        let last = self.stage2.geometry.index(Ipa(part.1.0 - 1), below);
                        if self.is_empty(child, last) {
                            self.unmap_entry(
                                &slot,
                                old,
                                (Below::EmptyTable(child), next.ipa),
                                batch,
                            )?;
                        }
                    }
                }
                (EntryKind::Leaf(_), _) if old.is_contiguous() => {
                    slot = self.unmap_run(&slot, old, (ipa, end), batch)?;
                    continue;
                }
                (EntryKind::Leaf(_), _) => {
                    self.unmap_entry(&slot, old, (Below::Memory, next.ipa), batch)?
                }
                _ => {}
            }
            slot = next;
        }
        Ok(())
    }

    /// Breaks a whole contiguous run in one batch, or removes the hint from a run that does not fit.
    /// Returns the slot to go on at.
    #[inline(never)]
    fn unmap_run(
        &self,
        slot: &Slot,
        old: Descriptor,
        (ipa, end): (Ipa, Ipa),
        batch: &mut Batch,
    ) -> Result<Slot, MapError> {
        let (count, first) = self.run_of(slot);
        let span = self.stage2.geometry.span(slot.level);
        let (len, run_end) = (index(count), first.ipa + count * span);
        if first.ipa < ipa || run_end > end || len > batch.limit {
            self.contpte_unfold(slot, old)?;
            return Ok(*slot);
        }
        if batch.unmapped.len() + len > batch.limit {
            self.flush(batch);
        }
        for n in 0..count {
            let slot = first.skip(n, span);
            self.unmap_entry(
                &slot,
                self.ops.load(slot.entry),
                (Below::Memory, slot.ipa + span),
                batch,
            )?;
        }
        Ok(first.skip(count, span))
    }

    /// Breaks one entry, to be invalidated with the batch.
    #[inline]
    fn unmap_entry(
        &self,
        slot: &Slot,
        old: Descriptor,
        (below, end): (Below, Ipa),
        batch: &mut Batch,
    ) -> Result<(), MapError> {
        let broken = self.break_entry(slot, old)?;
        if self.stage2.policy.count_references {
            self.ops.drop_references(self.table_of(slot.entry), 1);
        }
        batch.from = batch.from.min(slot.ipa);
        batch.to = end;
        batch.has_leaves |= matches!(below, Below::Table(_));
        batch.unmapped.push(Unmapped { broken, below });
        if batch.unmapped.len() == batch.limit {
            self.flush(batch);
        }
        Ok(())
    }

    /// Invalidates, cleans and frees what the batch holds.
    fn flush(&self, batch: &mut Batch) {
        if batch.unmapped.is_empty() {
            return;
        }
        self.invalidate_batch(batch);
        if !self.stage2.features.fwb {
            let mut range = CleanRange::default();
            for unmapped in &batch.unmapped {
                self.collect_unmapped(unmapped, &mut range);
            }
            self.clean_range(&range);
        }
        if let [one] = &batch.unmapped[..] {
            match one.below {
                Below::Memory => {}
                Below::EmptyTable(table) => self.ops.free(table),
                Below::Table(unlinked) => self.stage2.free_unlinked(self.ops, unlinked),
            }
        } else {
            self.free_batch(batch);
        }
        batch.unmapped.clear();
        (batch.from, batch.has_leaves) = (Ipa(u64::MAX), false);
    }

    /// Invalidates the whole range of a batch where that is one TLBI, or a table goes with its
    /// leaves; otherwise entry by entry.
    fn invalidate_batch(&self, batch: &Batch) {
        if batch.has_leaves || (batch.unmapped.len() > 1 && self.stage2.uses_range_tlbi()) {
            self.invalidate_range(batch.from, batch.to - batch.from);
        } else {
            self.invalidate_ipas(batch.unmapped.iter().map(|u| {
                let BrokenEntry { slot, old } = u.broken;
                (slot.ipa, old.is_leaf(slot.level).then_some(slot.level))
            }));
        }
    }

    /// Frees the tables of a batch together.
    #[inline(never)]
    fn free_batch(&self, batch: &Batch) {
        let mut frees = TableFreeBatch::new();
        for unmapped in &batch.unmapped {
            match unmapped.below {
                Below::Memory => {}
                Below::EmptyTable(table) => frees.push(self.ops, table),
                Below::Table(unlinked) => {
                    self.stage2.collect_tables(self.ops, unlinked, &mut frees);
                }
            }
        }
        frees.free_all(self.ops);
    }

    fn collect_unmapped(&self, unmapped: &Unmapped, range: &mut CleanRange) {
        let BrokenEntry { slot, old } = unmapped.broken;
        match unmapped.below {
            Below::Memory => self.collect_leaf(old, slot.level, range),
            Below::EmptyTable(_) => {}
            Below::Table(Unlinked { table, level }) => self.collect_leaves(table, level, range),
        }
    }
}

impl Stage2 {
    /// Unmaps a range, and the whole of a block that reaches into it. When it returns, no CPU
    /// reaches the memory, and the host sees what the guest wrote.
    ///
    /// # Errors
    /// [`MapError::Unaligned`] or [`MapError::OutOfRange`].
    pub fn unmap<O: Operations>(&mut self, ops: &O, ipa: Ipa, size: u64) -> Result<(), MapError> {
        self.check_range(ipa, size)?;
        let (root, start) = (self.root, self.geometry.start());
        let (whole_tables, limit) = match self.policy.unmap {
            Unmap::Deferred if self.features.fwb && self.uses_range_tlbi() => (false, MAX_BATCH),
            Unmap::Deferred => (false, 1),
            Unmap::Batch(limit) => (false, usize::from(limit)),
            Unmap::Tables(limit) => (true, usize::from(limit)),
        };
        let mut batch = Batch {
            unmapped: ArrayVec::new(),
            from: Ipa(u64::MAX),
            to: Ipa(0),
            has_leaves: false,
            limit: limit.clamp(1, MAX_BATCH),
            whole_tables,
        };
        let walk = self.exclusive(ops);
        let done = walk.unmap_in(root, start, (ipa, ipa + size), &mut batch);
        walk.flush(&mut batch);
        done
    }
}
