// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Permissions and the access flag of leaves that stay where they are: no break is needed.
//!
//! A permission that *grows* may be missed by a CPU that holds the old entry: it takes a fault and
//! comes here itself. Its own entry must go, or it would fault for ever; even if the leaf has been
//! widened by somebody else. A permission that *shrinks* must be gone everywhere before anyone
//! relies on it.

use super::{MapError, Slot, Stage2, Walk};
use crate::{
    address::{Ipa, TableAddress},
    descriptor::{Attributes, Descriptor, EntryKind},
    geometry::Level,
    operations::{Operations, Order},
};

impl<O: Operations> Walk<'_, O> {
    /// The entry that an address's translation ends at.
    pub(super) fn find(&self, ipa: Ipa) -> (Slot, Descriptor) {
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
            // What is there then may lead further down.
            self.wait_for(&slot)?;
        };
        if !old.is_leaf(slot.level) || old.is_break_pending() {
            return Err(MapError::Again);
        }
        let new = old.with_permissions(old.attributes().relaxed(by));
        if new != old {
            let old = self.unfold(&slot, old)?;
            let new = new.contiguous(false);
            self.ready_to_execute(&slot, old, new);
            self.put(&slot, old, new, Order::Plain)?;
        }
        if self.stage2.policy.local_relax {
            self.invalidate_own(slot.ipa, slot.level);
        } else {
            self.invalidate_leaf(slot.ipa, slot.level);
        }
        Ok(())
    }

    /// Changes every leaf of a range; gives whether one was changed.
    fn change_in(
        &self,
        table: TableAddress,
        level: Level,
        (ipa, end): (Ipa, Ipa),
        change: &impl Fn(Descriptor) -> Descriptor,
    ) -> bool {
        let span = self.stage2.geometry.span(level);
        let mut slot = self.slot(table, level, ipa);
        let run = span * level.contiguous(self.stage2.geometry.granule());
        // Otherwise every run is in the range as a whole.
        let cuts_runs = (ipa.0 | end.0) & (run - 1) != 0;
        let mut changed = false;
        while slot.ipa < end {
            let old = self.ops.load(slot.entry);
            match (old.kind(level), level.down()) {
                (EntryKind::Leaf(_), _) => {
                    let mut new = change(old);
                    if new != old {
                        let differs = old.is_contiguous() && !old.agrees(new);
                        if cuts_runs && differs && !self.has_run_of(&slot, (ipa, end)) {
                            // The only walker can.
                            let _ = self.unfold(&slot, old);
                            new = new.contiguous(false);
                        }
                        self.ops.store(slot.entry, new, Order::Plain);
                        changed = true;
                    }
                }
                (EntryKind::Table(child), Some(below)) => {
                    let part = (ipa.max(slot.ipa), end.min(slot.ipa + span));
                    changed |= self.change_in(child, below, part, change);
                }
                _ => {}
            }
            slot = slot.next(span);
        }
        changed
    }

    /// Whether the run that a slot is in lies in a range as a whole.
    fn has_run_of(&self, slot: &Slot, (ipa, end): (Ipa, Ipa)) -> bool {
        let (count, first) = self.run_of(slot);
        let span = self.stage2.geometry.span(slot.level);
        first.ipa >= ipa && first.ipa + count * span <= end
    }
}

impl Stage2 {
    /// Gives the leaf at an address further permissions, the only walker. Only the CPU that calls
    /// is sure to see them.
    ///
    /// # Errors
    /// [`MapError::Again`]: there is no such leaf now.
    pub fn relax<O: Operations>(
        &mut self,
        ops: &O,
        ipa: Ipa,
        by: Attributes,
    ) -> Result<(), MapError> {
        self.exclusive(ops).relax(ipa, by)
    }

    /// As [`Stage2::relax`], beside other walkers.
    ///
    /// # Errors
    /// As [`Stage2::relax`].
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

    /// Takes the permission to write from every leaf of a range. When it returns no CPU writes
    /// through an older one.
    ///
    /// # Errors
    /// The range is no range of pages in the IPA space.
    pub fn write_protect<O: Operations>(
        &mut self,
        ops: &O,
        ipa: Ipa,
        size: u64,
    ) -> Result<(), MapError> {
        self.reduce(ops, (ipa, size), &Descriptor::write_protected)
    }

    /// Takes from every leaf of a range the permissions that `keep` has not: to read, to write, to
    /// execute. When it returns no CPU uses them any more.
    ///
    /// # Errors
    /// The range is no range of pages in the IPA space.
    pub fn protect<O: Operations>(
        &mut self,
        ops: &O,
        ipa: Ipa,
        size: u64,
        keep: Attributes,
    ) -> Result<(), MapError> {
        self.reduce(ops, (ipa, size), &|leaf| {
            leaf.with_permissions(leaf.attributes().restricted(keep))
        })
    }

    /// Takes something away from every leaf of a range, and from what CPUs hold of it.
    fn reduce<O: Operations>(
        &mut self,
        ops: &O,
        (ipa, size): (Ipa, u64),
        change: &impl Fn(Descriptor) -> Descriptor,
    ) -> Result<(), MapError> {
        self.check_range(ipa, size)?;
        let (root, start) = (self.root, self.geometry.start());
        let walk = self.exclusive(ops);
        if walk.change_in(root, start, (ipa, ipa + size), change) {
            walk.invalidate_range(ipa, size);
        }
        Ok(())
    }

    /// Clears the access flag of every leaf of a range and gives whether one was set. CPUs that hold
    /// the old entry may go on for a while without setting it: that is no harm (Arm ARM D8.4.5), so
    /// nothing is invalidated.
    ///
    /// # Errors
    /// The range is no range of pages in the IPA space.
    pub fn age<O: Operations>(&mut self, ops: &O, ipa: Ipa, size: u64) -> Result<bool, MapError> {
        self.check_range(ipa, size)?;
        let (root, start) = (self.root, self.geometry.start());
        let walk = self.exclusive(ops);
        Ok(walk.change_in(
            root,
            start,
            (ipa, ipa + size),
            &Descriptor::without_access_flag,
        ))
    }

    /// Sets the access flag of the leaf at an address, after an access flag fault. No CPU holds a
    /// leaf without it, so nothing is invalidated. Outside the IPA space there is none.
    pub fn mark_accessed<O: Operations>(&mut self, ops: &O, ipa: Ipa) {
        if self.check_address(ipa).is_err() {
            return;
        }
        let walk = self.exclusive(ops);
        let (slot, old) = walk.find(ipa);
        if old.is_leaf(slot.level) && !old.attributes().accessed {
            let new = old.with_permissions(Attributes {
                accessed: true,
                ..old.attributes()
            });
            ops.store(slot.entry, new, Order::Plain);
        }
    }
}
