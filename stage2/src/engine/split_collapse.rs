// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Splitting of blocks, coalescing of tables into blocks, and recovery of block mappings.
//!
//! *Split*: if the policy populates tables, the walk fills the new table before it breaks the
//! block, so that one invalidation suffices. A part has the block's attributes; the requested leaf
//! has the requested attributes.
//!
//! *Coalesce*: a block replaces a table and all tables below it. A shared walk defers the free of
//! the tables, as other walkers may still be below them (`free`).

use super::{
    MapError, Stage2,
    map::MapCursor,
    walk::{ExclusiveWalk, Slot, Walk, WalkMode},
};
use crate::{
    address::{Ipa, TableAddress},
    descriptor::{Attributes, Descriptor, EntryKind},
    geometry::Level,
    memcache::{Memcache, TableFreeBatch},
    operations::{Operations, Order, UnlinkedTable},
    policy::{CmoPlacement, CoalesceOrder},
};

impl<O: Operations, M: WalkMode> Walk<'_, O, M> {
    /// Splits a block, so that its part at the cursor can be mapped separately. Returns the new
    /// table.
    pub(super) fn split_block(
        &self,
        slot: &Slot,
        old: Descriptor,
        below: Level,
        c: &mut MapCursor<'_>,
    ) -> Result<TableAddress, MapError> {
        let child = c.memcache.take(self.ops).ok_or(MapError::NoTable)?;
        let old = match self.mark_break_pending(slot, old) {
            Ok(old) => old,
            Err(error) => {
                c.memcache.return_unused(child);
                return Err(error);
            }
        };
        let size = c.end.min(self.slot_end(slot)) - c.ipa;
        if !self.places_cmos_at(CmoPlacement::FaultPath) {
            self.cmos_within_block(slot, old, c.ipa, (c.phys, size, c.leaf.attributes()));
            c.split_state.is_cmo_done = c.end <= self.slot_end(slot);
        }
        if self.stage2.policy.populates_on_split {
            let requested = c.leaf.with_address(c.phys, below == Level::PAGE);
            self.fill_with_parts(child, old, below);
            self.store_requested_leaf(child, below, (c.ipa, size, requested));
            self.change_size(slot, old, Descriptor::table(child))?;
            c.split_state.is_leaf_stored = true;
        } else {
            self.break_and_invalidate(slot, old)?;
            self.make_entry(slot, Descriptor::table(child));
        }
        Ok(child)
    }

    fn fill_with_parts(&self, child: TableAddress, block: Descriptor, below: Level) {
        let geometry = &self.stage2.geometry;
        let (span, count) = (geometry.span(below), geometry.granule().entries());
        let first = block.block_part(below, 0);
        self.ops.store_adjacent(child.entry(0), count, first, span, Order::Plain);
        self.add_references(child, u32::try_from(count).unwrap_or(u32::MAX));
    }

    /// Stores the requested leaf into a filled, not yet linked table if it is one entry and differs
    /// from the block's part at most in permissions.
    fn store_requested_leaf(
        &self,
        child: TableAddress,
        below: Level,
        (ipa, size, requested): (Ipa, u64, Descriptor),
    ) {
        let geometry = &self.stage2.geometry;
        let entry = child.entry(geometry.index(ipa, below));
        if size == geometry.span(below) && !self.ops.load(entry).needs_break(requested) {
            self.ops.store(entry, requested, Order::Plain);
        }
    }

    /// Replaces a table by a block. The parent's reference count stays the same.
    pub(super) fn coalesce(
        &self,
        slot: &Slot,
        mut old: Descriptor,
        child: TableAddress,
        new: Descriptor,
        memcache: &mut Memcache,
    ) -> Result<(), MapError> {
        let Some(level) = slot.level.child() else {
            return Err(MapError::Again);
        };
        let unlinked = UnlinkedTable { table: child, level };
        if self.needs_no_break(child, level, new) {
            self.change_size(slot, old, new)?;
            self.free_replaced(unlinked, memcache);
            return Ok(());
        }
        let cmo = !self.stage2.skips_all_cmos;
        if cmo && self.places_cmos_at(CmoPlacement::BeforeBreak) {
            old = self.mark_break_pending(slot, old)?;
            self.cmos_for_block(child, level, new);
        }
        self.break_and_invalidate(slot, old)?;
        self.clean_replaced_leaves(child, level, new.address());
        let between = cmo && self.places_cmos_at(CmoPlacement::BetweenBreakAndMake);
        if self.stage2.policy.coalesce_order == CoalesceOrder::FreeFirst {
            self.free_replaced(unlinked, memcache);
            if between {
                let size = self.stage2.geometry.span(slot.level);
                self.perform_cmos(new.address(), size, new.attributes());
            }
            self.make_entry(slot, new);
            return Ok(());
        }
        if between {
            // Other walkers may still be in the table, but they replace none of its leaves.
            self.cmos_for_block(child, level, new);
        }
        self.make_entry(slot, new);
        self.free_replaced(unlinked, memcache);
        Ok(())
    }

    /// Returns whether FEAT_BBM lets a block replace a table without a break: every leaf of the
    /// table equals its part of the block, and memory not yet mapped needs no CMO.
    fn needs_no_break(&self, child: TableAddress, level: Level, new: Descriptor) -> bool {
        if self.bbm_level() < M::MIN_BBM_LEVEL {
            return false;
        }
        let span = self.stage2.geometry.span(level);
        let may_be_empty = self.needs_no_cmo(new.attributes());
        let (mut address, mut part) = (child.entry(0), new.block_part(level, 0));
        for _ in 0..self.stage2.geometry.granule().entries() {
            let entry = self.ops.load(address);
            if entry.with_contiguous(false) != part && !(may_be_empty && entry == Descriptor::EMPTY)
            {
                return false;
            }
            (address, part) = (address.skip(1), part.offset_by(span));
        }
        true
    }

    /// Returns the block that is equivalent to a full table's leaves: contiguous in host memory,
    /// with the same memory type and software bits. The block has the permissions common to all
    /// leaves, and the access flag if any leaf has it.
    fn matching_block(&self, slot: &Slot, child: TableAddress, level: Level) -> Option<Descriptor> {
        let span = self.stage2.geometry.span(level);
        let first = self.ops.load(child.entry(0));
        let mut all = first.attributes();
        let mut address = first.address();
        for index in 0..self.stage2.geometry.granule().entries() {
            let entry = self.ops.load(child.entry(index));
            let one = entry.attributes();
            if !entry.is_leaf(level)
                || entry.address() != address
                || one.memory != all.memory
                || one.software != all.software
            {
                return None;
            }
            address += span;
            let is_accessed = all.is_accessed || one.is_accessed;
            all = Attributes { is_accessed, ..all.restricted_to(one) };
        }
        let block = self.new_leaf(first.address(), slot.level, all);
        block.is_aligned(slot.level, self.stage2.geometry.granule()).then_some(block)
    }
}

impl<O: Operations> Walk<'_, O, ExclusiveWalk> {
    fn overlapping_slots(
        &self,
        table: TableAddress,
        level: Level,
        (ipa, end): (Ipa, Ipa),
    ) -> impl Iterator<Item = Slot> {
        let span = self.stage2.geometry.span(level);
        let first = self.slot(table, level, ipa);
        let count = (end - first.ipa).div_ceil(span);
        (0..count).map(move |n| first.skip(n, span))
    }

    fn recover_range(
        &self,
        table: TableAddress,
        level: Level,
        (ipa, end): (Ipa, Ipa),
        highest: Level,
        batch: &mut TableFreeBatch,
    ) -> Result<(), MapError> {
        let Some(below) = level.child() else {
            return Ok(());
        };
        for slot in self.overlapping_slots(table, level, (ipa, end)) {
            let next = self.slot_end(&slot);
            let old = self.ops.load(slot.entry);
            if let EntryKind::Table(child) = old.kind(level) {
                let part = (ipa.max(slot.ipa), end.min(next));
                self.recover_range(child, below, part, highest, batch)?;
                if (slot.ipa >= ipa && next <= end && level >= highest)
                    && level.can_be_leaf(self.stage2.geometry.granule())
                    && let Some(block) = self.matching_block(&slot, child, below)
                {
                    self.recover(&slot, old, (child, below), block, batch)?;
                }
            }
        }
        Ok(())
    }

    /// Coalesces a table into the block equivalent to its leaves; omits the break only if nothing
    /// but the size changes.
    fn recover(
        &self,
        slot: &Slot,
        old: Descriptor,
        (table, level): (TableAddress, Level),
        block: Descriptor,
        batch: &mut TableFreeBatch,
    ) -> Result<(), MapError> {
        if self.needs_no_break(table, level, block) {
            self.change_size(slot, old, block)?;
        } else {
            self.break_and_invalidate(slot, old)?;
            self.make_entry(slot, block);
        }
        let unlinked = UnlinkedTable { table, level };
        self.stage2.free_or_collect(self.ops, unlinked, batch);
        Ok(())
    }

    fn split_range(
        &self,
        table: TableAddress,
        level: Level,
        (ipa, end): (Ipa, Ipa),
        memcache: &mut Memcache,
    ) -> Result<(), MapError> {
        let Some(below) = level.child() else {
            return Ok(());
        };
        for slot in self.overlapping_slots(table, level, (ipa, end)) {
            let old = self.ops.load(slot.entry);
            let child = match old.kind(level) {
                EntryKind::Leaf(_) => {
                    let child = memcache.take(self.ops).ok_or(MapError::NoTable)?;
                    self.fill_with_parts(child, old, below);
                    self.change_size(&slot, old, Descriptor::table(child))?;
                    child
                }
                EntryKind::Table(child) => child,
                EntryKind::Invalid | EntryKind::Locked => continue,
            };
            let part = (ipa.max(slot.ipa), end.min(self.slot_end(&slot)));
            self.split_range(child, below, part, memcache)?;
        }
        Ok(())
    }
}

impl Stage2 {
    /// Recovers block mappings in a range, where the leaves of a table are equivalent to a block. The
    /// blocks are at level `highest` or below: for host pages of a size, at that of
    /// [`largest_leaf_within`](crate::geometry::Geometry::largest_leaf_within).
    ///
    /// # Errors
    /// [`MapError::Unaligned`] or [`MapError::IpaOutOfRange`].
    pub fn recover_blocks<O: Operations>(
        &mut self,
        ops: &O,
        ipa: Ipa,
        size: u64,
        highest: Level,
    ) -> Result<(), MapError> {
        self.check_range(ipa, size)?;
        if size == 0 {
            return Ok(());
        }
        let (root, start) = (self.root, self.geometry.start_level());
        let mut batch = TableFreeBatch::new();
        let range = (ipa, ipa + size);
        let done = self.exclusive_walk(ops).recover_range(root, start, range, highest, &mut batch);
        batch.free_all(ops);
        done
    }

    /// Splits every block of a range into pages before a fault requires it (Linux: eager page
    /// splitting).
    ///
    /// # Errors
    /// [`MapError::NoTable`]: top up the memcache and call again; completed splits remain.
    /// [`MapError::Unaligned`] or [`MapError::IpaOutOfRange`].
    pub fn split<O: Operations>(
        &mut self,
        ops: &O,
        memcache: &mut Memcache,
        ipa: Ipa,
        size: u64,
    ) -> Result<(), MapError> {
        self.check_range(ipa, size)?;
        if size == 0 {
            return Ok(());
        }
        let (root, start) = (self.root, self.geometry.start_level());
        self.exclusive_walk(ops).split_range(root, start, (ipa, ipa + size), memcache)
    }
}
