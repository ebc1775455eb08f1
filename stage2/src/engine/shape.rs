// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Blocks into tables and tables into blocks.
//!
//! *Split*: the table is drawn and, if the policy populates, filled before the block is broken, so
//! that the guest misses the block for one invalidation and its parts not at all. A part has the
//! block's attributes; the one that is wanted is written as wanted.
//!
//! *Coalesce*: everything below the table's entry goes. With shared walkers it goes after a grace
//! period, as others may still be below it.

use super::{MapError, Slot, Stage2, Walk, map::Cursor};
use crate::{
    address::{Ipa, TableAddress},
    descriptor::{Attributes, Descriptor, EntryKind},
    geometry::Level,
    memcache::Memcache,
    operations::{Operations, Order, Unlinked},
    policy::{CmoPlacement, Coalesce},
};

impl<O: Operations> Walk<'_, O> {
    /// Splits a block so that part of it can be mapped as the cursor says.
    pub(super) fn split_for(
        &self,
        slot: &Slot,
        old: Descriptor,
        below: Level,
        c: &mut Cursor<'_>,
    ) -> Result<TableAddress, MapError> {
        let child = c.memcache.take(self.ops).ok_or(MapError::NoTable)?;
        let old = match self.claim(slot, old) {
            Ok(old) => old,
            Err(error) => {
                c.memcache.return_unused(child);
                return Err(error);
            }
        };
        let size = c.end.min(self.end(slot)) - c.ipa;
        if !self.maintains(CmoPlacement::FaultPath) {
            self.prepare_part(slot, old, c.ipa, (c.phys, size, c.leaf.attributes()));
            c.split.ready = c.end <= self.end(slot);
        }
        if self.stage2.policy.populate_on_split {
            let wanted = c.leaf.moved(c.phys, below == Level::PAGE);
            self.fill(child, old, below, (c.ipa, size, wanted));
            self.reshape(slot, old, Descriptor::table(child))?;
            c.split.filled = true;
        } else {
            self.break_entry(slot, old)?;
            self.make(slot, Descriptor::table(child));
        }
        Ok(child)
    }

    /// Fills a new table with the parts of a block; `wanted` at its address if it is one part.
    fn fill(
        &self,
        child: TableAddress,
        old: Descriptor,
        below: Level,
        (ipa, size, wanted): (Ipa, u64, Descriptor),
    ) {
        let geometry = &self.stage2.geometry;
        let (span, count) = (geometry.span(below), geometry.granule().entries());
        let first = old.part(below, 0);
        self.ops
            .store_run(child.entry(0), count, first, span, Order::Plain);
        let at = geometry.index(ipa, below);
        if size == span && !first.after(at * span).needs_break(wanted) {
            self.ops.store(child.entry(at), wanted, Order::Plain);
        }
        self.count(child, u32::try_from(count).unwrap_or(u32::MAX));
    }

    /// Puts a block in the place of a table. The reference that was counted for the table is the
    /// block's.
    pub(super) fn coalesce(
        &self,
        slot: &Slot,
        mut old: Descriptor,
        child: TableAddress,
        new: Descriptor,
    ) -> Result<(), MapError> {
        let Some(level) = slot.level.down() else {
            return Err(MapError::Again);
        };
        let unlinked = Unlinked {
            table: child,
            level,
        };
        if self.needs_no_break(child, level, new) {
            self.reshape(slot, old, new)?;
            self.take_down(unlinked);
            return Ok(());
        }
        let unready = self.stage2.policy.coalesce == Coalesce::InstallWithoutCmo;
        let readies = !unready && !self.stage2.all_ready;
        if readies && self.maintains(CmoPlacement::BeforeBreak) {
            old = self.claim(slot, old)?;
            self.prepare_block(child, level, new.address(), new.attributes());
        }
        self.break_entry(slot, old)?;
        let first = self.stage2.policy.coalesce == Coalesce::FreeFirst;
        if first {
            self.take_down(unlinked);
        }
        if readies && self.maintains(CmoPlacement::BetweenBreakAndMake) {
            let (phys, attributes) = (new.address(), new.attributes());
            if first {
                let size = self.stage2.geometry.span(slot.level);
                self.prepare(phys, size, attributes);
            } else {
                // Others may still be in the table, but take nothing out of it.
                self.prepare_block(child, level, phys, attributes);
            }
        }
        self.make(slot, new);
        if !first {
            self.take_down(unlinked);
        }
        Ok(())
    }

    /// Whether a block may take a table's place as FEAT_BBM allows it: whatever the table maps is the
    /// same memory, accessed alike, and the rest is ready. Beside other walkers only if one store does
    /// it.
    fn needs_no_break(&self, child: TableAddress, level: Level, new: Descriptor) -> bool {
        let least = if self.shared { 3 } else { 1 };
        if !self.stage2.policy.use_bbm || self.stage2.features.bbm < least {
            return false;
        }
        let span = self.stage2.geometry.span(level);
        let ready = self.is_ready(new.attributes());
        (0..self.stage2.geometry.granule().entries()).all(|index| {
            let entry = self.ops.load(child.entry(index));
            if entry == Descriptor::EMPTY {
                return ready;
            }
            entry.contiguous(false) == new.part(level, index * span)
        })
    }

    fn take_down(&self, unlinked: Unlinked) {
        if self.shared {
            self.ops.defer(unlinked);
        } else {
            self.stage2.free_unlinked(self.ops, unlinked);
        }
    }

    /// The block that a full table's leaves amount to: neighbours in host memory with the same
    /// memory type and software bits; permissions that all of them have, accessed if one of them is.
    fn block_of(&self, slot: &Slot, child: TableAddress, level: Level) -> Option<Descriptor> {
        let span = self.stage2.geometry.span(level);
        let first = self.ops.load(child.entry(0));
        let mut all = first.attributes();
        for index in 0..self.stage2.geometry.granule().entries() {
            let entry = self.ops.load(child.entry(index));
            let one = entry.attributes();
            if !entry.is_leaf(level)
                || entry.address() != first.address() + index * span
                || one.memory != all.memory
                || one.software != all.software
            {
                return None;
            }
            all = Attributes {
                read: all.read && one.read,
                write: all.write && one.write,
                execute: all.execute && one.execute,
                accessed: all.accessed || one.accessed,
                contiguous: false,
                ..all
            };
        }
        let block = self.leaf(first.address(), slot.level, all);
        block
            .is_aligned(slot.level, self.stage2.geometry.granule())
            .then_some(block)
    }

    fn recover_in(&self, table: TableAddress, level: Level, (ipa, end): (Ipa, Ipa), largest: u64) {
        let geometry = &self.stage2.geometry;
        let mut at = ipa;
        while at < end {
            let slot = self.slot(table, level, at);
            let next = self.end(&slot);
            let old = self.ops.load(slot.entry);
            if let (EntryKind::Table(child), Some(below)) = (old.kind(level), level.down()) {
                self.recover_in(child, below, (at, end.min(next)), largest);
                let whole = slot.ipa >= ipa && next <= end && next - slot.ipa <= largest;
                if whole
                    && level.can_map(geometry.granule())
                    && let Some(block) = self.block_of(&slot, child, below)
                    // Nobody else changes anything: this cannot be too late.
                    && self.recover(&slot, old, (child, below), block).is_ok()
                {
                    self.take_down(Unlinked {
                        table: child,
                        level: below,
                    });
                }
            }
            at = next;
        }
    }

    /// Stores the block that a table amounts to: without a break only if nothing but the size
    /// changes.
    fn recover(
        &self,
        slot: &Slot,
        old: Descriptor,
        (child, below): (TableAddress, Level),
        block: Descriptor,
    ) -> Result<(), MapError> {
        if self.needs_no_break(child, below, block) {
            return self.reshape(slot, old, block);
        }
        self.break_entry(slot, old)?;
        self.make(slot, block);
        Ok(())
    }

    fn split_in(
        &self,
        table: TableAddress,
        level: Level,
        (ipa, end): (Ipa, Ipa),
        memcache: &mut Memcache,
    ) -> Result<(), MapError> {
        let Some(below) = level.down() else {
            return Ok(());
        };
        let mut at = ipa;
        while at < end {
            let slot = self.slot(table, level, at);
            let next = self.end(&slot);
            let old = self.ops.load(slot.entry);
            let child = match old.kind(level) {
                EntryKind::Leaf(_) => {
                    let child = memcache.take(self.ops).ok_or(MapError::NoTable)?;
                    self.fill(child, old, below, (Ipa(0), 0, Descriptor::EMPTY));
                    self.reshape(&slot, old, Descriptor::table(child))?;
                    Some(child)
                }
                EntryKind::Table(child) => Some(child),
                EntryKind::Invalid | EntryKind::Locked => None,
            };
            if let Some(child) = child {
                self.split_in(child, below, (at, end.min(next)), memcache)?;
            }
            at = next;
        }
        Ok(())
    }
}

impl Stage2 {
    /// Puts blocks together again in a range, up to `largest` bytes each, where a table's leaves
    /// amount to one. The caller knows that the host's memory is that large in one piece.
    ///
    /// # Errors
    /// The range is no range of pages in the IPA space.
    pub fn recover_blocks<O: Operations>(
        &mut self,
        ops: &O,
        ipa: Ipa,
        size: u64,
        largest: u64,
    ) -> Result<(), MapError> {
        self.check_range(ipa, size)?;
        let (root, start) = (self.root, self.geometry.start());
        self.exclusive(ops)
            .recover_in(root, start, (ipa, ipa + size), largest);
        Ok(())
    }

    /// Splits every block of a range into pages, before anybody has to do it in a fault.
    ///
    /// # Errors
    /// [`MapError::NoTable`]: top the memcache up and call again, what is split is left alone; or
    /// the range is no range of pages in the IPA space.
    pub fn split<O: Operations>(
        &mut self,
        ops: &O,
        memcache: &mut Memcache,
        ipa: Ipa,
        size: u64,
    ) -> Result<(), MapError> {
        self.check_range(ipa, size)?;
        let (root, start) = (self.root, self.geometry.start());
        self.exclusive(ops)
            .split_in(root, start, (ipa, ipa + size), memcache)
    }
}
