// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Permissions and access flag of leaves that stay where they are: no break is needed.
//!
//! A CPU that holds a leaf with fewer permissions takes a permission fault; its handler relaxes the
//! leaf and invalidates the CPU's own TLB entry, even if another CPU has relaxed the leaf before:
//! otherwise the CPU would refault forever. Permissions that are restricted must be invalidated on
//! all CPUs before anything relies on them.

use super::{
    MapError, Stage2,
    walk::{ExclusiveWalk, Slot, Walk, WalkMode},
};
use crate::{
    address::{Ipa, TableAddress},
    descriptor::{Attributes, Descriptor, EntryKind},
    geometry::Level,
    operations::{Operations, Order},
};

impl<O: Operations, M: WalkMode> Walk<'_, O, M> {
    /// Returns the entry that the translation of `ipa` ends at.
    fn find(&self, ipa: Ipa) -> (Slot, Descriptor) {
        let (table, entry, level) = self.stage2.walker().find(self.ops, ipa);
        (self.slot(table, level, ipa), entry)
    }

    fn relax(&self, ipa: Ipa, by: Attributes) -> Result<(), MapError> {
        self.stage2.check_address(ipa)?;
        let (slot, old) = loop {
            let (slot, old) = self.find(ipa);
            if !old.is_locked() {
                break (slot, old);
            }
            // The entry may become a table: walk again.
            self.wait_for(&slot)?;
        };
        if !old.is_leaf(slot.level) || old.is_break_pending() {
            return Err(MapError::Again);
        }
        let relaxed = old.with_permissions(old.attributes().relaxed(by));
        if relaxed != old {
            self.relax_leaf(&slot, old, relaxed)?;
        }
        if self.stage2.policy.local_relax {
            self.invalidate_leaf_local(slot.ipa, slot.level);
        } else {
            self.invalidate_leaf(slot.ipa, slot.level);
        }
        Ok(())
    }
}

impl<O: Operations> Walk<'_, O, ExclusiveWalk> {
    /// Changes every leaf of a range; returns whether one has changed.
    fn change_in(
        &self,
        table: TableAddress,
        level: Level,
        (ipa, end): (Ipa, Ipa),
        change: &impl Fn(Descriptor) -> Descriptor,
    ) -> Result<bool, MapError> {
        let span = self.stage2.geometry.span(level);
        let mut slot = self.slot(table, level, ipa);
        let run = span * level.contiguous(self.stage2.geometry.granule());
        // Otherwise every run lies in the range as a whole.
        let cuts_runs = (ipa.0 | end.0) & (run - 1) != 0;
        let mut changed = false;
        while slot.ipa < end {
            let old = self.ops.load(slot.entry);
            match (old.kind(level), level.down()) {
                (EntryKind::Leaf(_), _) => {
                    let mut new = change(old);
                    if new != old {
                        let differs = old.is_contiguous() && !old.agrees(new);
                        if cuts_runs && differs && !self.contains_run(&slot, (ipa, end)) {
                            self.contpte_unfold(&slot, old)?;
                            new = new.contiguous(false);
                        }
                        self.replace(&slot, old, new, Order::Plain)?;
                        changed = true;
                    }
                }
                (EntryKind::Table(child), Some(below)) => {
                    let part = (ipa.max(slot.ipa), end.min(slot.ipa + span));
                    changed |= self.change_in(child, below, part, change)?;
                }
                _ => {}
            }
            slot = slot.next(span);
        }
        Ok(changed)
    }

    /// Returns whether the run around a slot lies in a range as a whole.
    fn contains_run(&self, slot: &Slot, (ipa, end): (Ipa, Ipa)) -> bool {
        let (count, first) = self.run_of(slot);
        let span = self.stage2.geometry.span(slot.level);
        first.ipa >= ipa && first.ipa + count * span <= end
    }
}

impl Stage2 {
    /// Relaxes the permissions of the leaf at an address, as the sole walker. The calling CPU uses
    /// them from here on; other CPUs may take a spurious fault first.
    ///
    /// # Errors
    /// [`MapError::Again`] if the address has no leaf, [`MapError::OutOfRange`].
    pub fn relax<O: Operations>(
        &mut self,
        ops: &O,
        ipa: Ipa,
        by: Attributes,
    ) -> Result<(), MapError> {
        self.exclusive(ops).relax(ipa, by)
    }

    /// Relaxes as [`Stage2::relax`], concurrently with other walkers.
    ///
    /// # Errors
    /// As [`Stage2::relax`]; also [`MapError::Again`] if another walker is at the leaf, and
    /// [`MapError::Contiguous`].
    pub fn relax_shared<O: Operations>(
        &self,
        ops: &O,
        ipa: Ipa,
        by: Attributes,
    ) -> Result<(), MapError> {
        ops.begin_walk();
        let result = self.shared(ops).relax(ipa, by);
        ops.end_walk();
        result
    }

    /// Write-protects every leaf of a range. When it returns, no CPU writes through an older leaf.
    ///
    /// # Errors
    /// [`MapError::Unaligned`] or [`MapError::OutOfRange`].
    pub fn write_protect<O: Operations>(
        &mut self,
        ops: &O,
        ipa: Ipa,
        size: u64,
    ) -> Result<(), MapError> {
        self.restrict(ops, (ipa, size), &Descriptor::write_protected)
    }

    /// Restricts every leaf of a range to the permissions of `keep` (read, write, execute). When it
    /// returns, no CPU uses others.
    ///
    /// # Errors
    /// [`MapError::Unaligned`] or [`MapError::OutOfRange`].
    pub fn protect<O: Operations>(
        &mut self,
        ops: &O,
        ipa: Ipa,
        size: u64,
        keep: Attributes,
    ) -> Result<(), MapError> {
        self.restrict(ops, (ipa, size), &|leaf| {
            leaf.with_permissions(leaf.attributes().restricted(keep))
        })
    }

    /// Changes every leaf of a range and invalidates the range if one has changed.
    fn restrict<O: Operations>(
        &mut self,
        ops: &O,
        (ipa, size): (Ipa, u64),
        change: &impl Fn(Descriptor) -> Descriptor,
    ) -> Result<(), MapError> {
        self.check_range(ipa, size)?;
        let (root, start) = (self.root, self.geometry.start());
        let walk = self.exclusive(ops);
        if walk.change_in(root, start, (ipa, ipa + size), change)? {
            walk.invalidate_range(ipa, size);
        }
        Ok(())
    }

    /// Clears the access flag of every leaf of a range and returns whether one was set. Nothing is
    /// invalidated: a CPU that holds the old leaf may go on without setting the flag for a while,
    /// which the architecture permits (Arm ARM D8.4.5).
    ///
    /// # Errors
    /// [`MapError::Unaligned`] or [`MapError::OutOfRange`].
    pub fn age<O: Operations>(&mut self, ops: &O, ipa: Ipa, size: u64) -> Result<bool, MapError> {
        self.check_range(ipa, size)?;
        let (root, start) = (self.root, self.geometry.start());
        let change = &Descriptor::without_access_flag;
        self.exclusive(ops).change_in(root, start, (ipa, ipa + size), change)
    }

    /// Sets the access flag of the leaf at an address, after an access flag fault. TLBs hold no
    /// leaf without the flag, so nothing is invalidated. Does nothing where no leaf is.
    pub fn mark_accessed<O: Operations>(&mut self, ops: &O, ipa: Ipa) {
        if self.check_address(ipa).is_err() {
            return;
        }
        let walk = self.exclusive(ops);
        let (slot, old) = walk.find(ipa);
        if old.is_leaf(slot.level) && !old.attributes().accessed {
            let new = old.with_permissions(Attributes { accessed: true, ..old.attributes() });
            // An exclusive walk has no conflicts.
            let _ = walk.replace(&slot, old, new, Order::Plain);
        }
    }
}
