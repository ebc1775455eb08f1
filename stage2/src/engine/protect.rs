// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Changes of permissions and access flag in existing leaves, which need no break-before-make.
//!
//! A CPU with fewer permissions in its TLB takes a permission fault. The handler relaxes the leaf
//! and invalidates that CPU's TLB entry, even if another CPU has already relaxed the leaf:
//! otherwise the CPU would refault forever. Restricted permissions must be invalidated on all CPUs
//! before software relies on them.

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
    fn find_entry(&self, ipa: Ipa) -> (Slot, Descriptor) {
        let (table, entry, level) = self.stage2.walker().find_entry(self.ops, ipa);
        (self.slot(table, level, ipa), entry)
    }

    fn relax(&self, ipa: Ipa, level: Level, by: Attributes) -> Result<(), MapError> {
        self.stage2.check_address(ipa)?;
        let (slot, old) = loop {
            let (slot, old) = self.find_entry(ipa);
            if !old.is_locked() {
                break (slot, old);
            }
            // The entry may become a table: repeat the walk.
            self.wait_for_unlock(&slot)?;
        };
        if slot.level != level || !old.is_leaf(level) || old.is_break_pending() {
            return Err(MapError::Again);
        }
        let relaxed = old.with_permissions(old.attributes().relaxed_by(by));
        if relaxed != old {
            self.relax_leaf(&slot, old, relaxed)?;
        }
        if self.stage2.policy.relaxes_locally {
            self.invalidate_leaf_local(slot.ipa, level);
        } else {
            self.invalidate_leaf(slot.ipa, level);
        }
        Ok(())
    }
}

impl<O: Operations> Walk<'_, O, ExclusiveWalk> {
    /// Changes every leaf of a range. Returns whether any has changed.
    fn change_leaves(
        &self,
        table: TableAddress,
        level: Level,
        (ipa, end): (Ipa, Ipa),
        change: &impl Fn(Descriptor) -> Descriptor,
    ) -> Result<bool, MapError> {
        let span = self.stage2.geometry.span(level);
        let mut slot = self.slot(table, level, ipa);
        let run = span * level.contiguous_entries(self.stage2.geometry.granule());
        // If no range boundary cuts a run, the range contains every run completely.
        let cuts_runs = (ipa.0 | end.0) & (run - 1) != 0;
        let mut changed = false;
        while slot.ipa < end {
            let old = self.ops.load(slot.entry);
            match (old.kind(level), level.child()) {
                (EntryKind::Leaf(_), _) => {
                    let mut new = change(old);
                    if new != old {
                        let differs = old.is_contiguous() && !old.may_share_run(new);
                        if cuts_runs && differs && !self.contains_run(&slot, (ipa, end)) {
                            self.contpte_unfold(&slot, old)?;
                            new = new.with_contiguous(false);
                        }
                        self.replace(&slot, old, new, Order::Plain)?;
                        changed = true;
                    }
                }
                (EntryKind::Table(child), Some(below)) => {
                    let part = (ipa.max(slot.ipa), end.min(slot.ipa + span));
                    changed |= self.change_leaves(child, below, part, change)?;
                }
                _ => {}
            }
            slot = slot.next(span);
        }
        Ok(changed)
    }

    fn contains_run(&self, slot: &Slot, (ipa, end): (Ipa, Ipa)) -> bool {
        let (count, first) = self.contiguous_run(slot);
        let span = self.stage2.geometry.span(slot.level);
        first.ipa >= ipa && first.ipa + count * span <= end
    }
}

impl Stage2 {
    /// Relaxes the permissions of the leaf at an address, as the sole walker. They take effect
    /// immediately on the calling CPU; other CPUs may first take a spurious fault. `level` is that
    /// of the fault: a block that has replaced the page would become writable as a whole.
    ///
    /// # Errors
    /// [`MapError::Again`] if no leaf of that level maps the address, [`MapError::IpaOutOfRange`].
    pub fn relax<O: Operations>(
        &mut self,
        ops: &O,
        ipa: Ipa,
        level: Level,
        by: Attributes,
    ) -> Result<(), MapError> {
        self.exclusive_walk(ops).relax(ipa, level, by)
    }

    /// Relaxes permissions as [`Stage2::relax`] does, concurrently with other walkers.
    ///
    /// # Errors
    /// As [`Stage2::relax`]; also [`MapError::Again`] if another walker is changing the leaf, and
    /// [`MapError::Contiguous`].
    pub fn relax_shared<O: Operations>(
        &self,
        ops: &O,
        ipa: Ipa,
        level: Level,
        by: Attributes,
    ) -> Result<(), MapError> {
        ops.begin_walk();
        let result = self.shared_walk(ops).relax(ipa, level, by);
        ops.end_walk();
        result
    }

    /// Write-protects every leaf of a range. After it returns, no CPU writes through a stale TLB
    /// entry.
    ///
    /// # Errors
    /// [`MapError::Unaligned`] or [`MapError::IpaOutOfRange`].
    pub fn write_protect<O: Operations>(
        &mut self,
        ops: &O,
        ipa: Ipa,
        size: u64,
    ) -> Result<(), MapError> {
        self.restrict(ops, (ipa, size), &Descriptor::write_protected)
    }

    /// Restricts every leaf of a range to the permissions in `keep` (read, write, execute). After
    /// it returns, no CPU uses any other permission.
    ///
    /// # Errors
    /// [`MapError::Unaligned`] or [`MapError::IpaOutOfRange`].
    pub fn protect<O: Operations>(
        &mut self,
        ops: &O,
        ipa: Ipa,
        size: u64,
        keep: Attributes,
    ) -> Result<(), MapError> {
        self.restrict(ops, (ipa, size), &|leaf| {
            leaf.with_permissions(leaf.attributes().restricted_to(keep))
        })
    }

    /// Changes every leaf of a range. Invalidates the range if any has changed.
    fn restrict<O: Operations>(
        &mut self,
        ops: &O,
        (ipa, size): (Ipa, u64),
        change: &impl Fn(Descriptor) -> Descriptor,
    ) -> Result<(), MapError> {
        self.check_range(ipa, size)?;
        if size == 0 {
            return Ok(());
        }
        let (root, start) = (self.root, self.geometry.start_level());
        let walk = self.exclusive_walk(ops);
        if walk.change_leaves(root, start, (ipa, ipa + size), change)? {
            walk.invalidate_range(ipa, size);
        }
        Ok(())
    }

    /// Clears the access flag of every leaf of a range. Returns whether any was set. Nothing is
    /// invalidated: a CPU with a cached leaf may delay setting the flag, which the architecture
    /// permits (Arm ARM D8.4.5).
    ///
    /// # Errors
    /// [`MapError::Unaligned`] or [`MapError::IpaOutOfRange`].
    pub fn age<O: Operations>(&mut self, ops: &O, ipa: Ipa, size: u64) -> Result<bool, MapError> {
        self.check_range(ipa, size)?;
        if size == 0 {
            return Ok(false);
        }
        let (root, start) = (self.root, self.geometry.start_level());
        let change = &Descriptor::without_access_flag;
        self.exclusive_walk(ops).change_leaves(root, start, (ipa, ipa + size), change)
    }

    /// Sets the access flag of the leaf at an address, after an access flag fault. TLBs cache no
    /// leaf without the flag, so nothing is invalidated. Does nothing if no leaf maps the address.
    pub fn mark_accessed<O: Operations>(&mut self, ops: &O, ipa: Ipa) {
        if self.check_address(ipa).is_err() {
            return;
        }
        let walk = self.exclusive_walk(ops);
        let (slot, old) = walk.find_entry(ipa);
        if old.is_leaf(slot.level) && !old.attributes().is_accessed {
            let new = old.with_permissions(Attributes { is_accessed: true, ..old.attributes() });
            // A replacement in an exclusive walk cannot conflict.
            let _ = walk.replace(&slot, old, new, Order::Plain);
        }
    }
}
