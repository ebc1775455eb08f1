// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Break-before-make of one entry, and the change of a mapping's size without it.
//!
//! *Exclusive*: a break stores zero. *Shared*: a break swaps in [`Descriptor::LOCKED`], and the
//! entry belongs to this walker until it makes a new one. If CMOs come before the break, a valid
//! entry is marked *break-pending* first, so that no second walker does the same CMOs; the guest
//! goes on using it.
//!
//! [`Walk::break_entry`] is the only function that makes a valid entry invalid. It returns a
//! [`BrokenEntry`], and the caller invalidates it before it makes anything new: alone, or many at
//! once where a range is unmapped.

use super::{
    table::MapError,
    walk::{Slot, Walk, WalkMode},
};
use crate::{
    descriptor::{Descriptor, EntryKind},
    operations::{Operations, Order},
};

/// An entry that is broken but may still be in TLBs.
#[derive(Debug, Clone, Copy)]
#[must_use = "a broken entry must be invalidated"]
pub(super) struct BrokenEntry {
    pub slot: Slot,
    /// The entry before the break.
    pub old: Descriptor,
}

impl<O: Operations, M: WalkMode> Walk<'_, O, M> {
    /// Breaks a valid entry. TLBs may hold it until the caller invalidates it.
    #[inline]
    pub(super) fn break_entry(
        &self,
        slot: &Slot,
        old: Descriptor,
    ) -> Result<BrokenEntry, MapError> {
        M::replace(self.ops, slot.entry, old, M::BROKEN, Order::Plain)?;
        Ok(BrokenEntry { slot: *slot, old })
    }

    /// Breaks a valid entry and invalidates it: afterwards no CPU holds anything cached from it.
    #[inline]
    pub(super) fn break_and_invalidate(
        &self,
        slot: &Slot,
        old: Descriptor,
    ) -> Result<(), MapError> {
        let BrokenEntry { slot, old } = self.break_entry(slot, old)?;
        self.invalidate_entry(&slot, old);
        Ok(())
    }

    /// Stores the new entry after a break, ordered behind everything before it.
    #[inline]
    pub(super) fn make(&self, slot: &Slot, new: Descriptor) {
        self.ops.store(slot.entry, new, Order::Release);
    }

    /// Marks a valid entry as break-pending where others walk, and returns the entry as it then is.
    ///
    /// # Errors
    /// [`MapError::Again`] if another walker has marked or changed it.
    pub(super) fn mark_break_pending(
        &self,
        slot: &Slot,
        old: Descriptor,
    ) -> Result<Descriptor, MapError> {
        if !M::SHARED {
            return Ok(old);
        }
        if old.is_break_pending() {
            return Err(MapError::Again);
        }
        let marked = old.with_break_pending();
        self.replace(slot, old, marked, Order::Plain)?;
        Ok(marked)
    }

    /// Locks an invalid entry where others walk, so that this walker alone makes it.
    pub(super) fn lock_invalid(&self, slot: &Slot, old: Descriptor) -> Result<(), MapError> {
        if M::SHARED {
            self.replace(slot, old, Descriptor::LOCKED, Order::Plain)?;
        }
        Ok(())
    }

    /// Replaces `old` by `new`, which maps the same memory in another size: by break-before-make,
    /// or as FEAT_BBM allows if the policy uses it.
    ///
    /// Levels 1 and 2 set nT on the block first, so that no TLB holds both sizes; level 3 stands
    /// for CPUs whose TLBs may (Arm ARM D8.16.2).
    pub(super) fn change_size(
        &self,
        slot: &Slot,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), MapError> {
        match (self.bbm_level(), old.is_leaf(slot.level)) {
            (0, _) => {
                self.break_and_invalidate(slot, old)?;
                self.make(slot, new);
            }
            (1 | 2, true) => {
                let block = old.with_nt(true);
                self.replace(slot, old, block, Order::Plain)?;
                self.invalidate_leaf(slot.ipa, slot.level);
                self.replace(slot, block, new, Order::Release)?;
            }
            (1 | 2, false) => {
                let block = new.with_nt(true);
                self.replace(slot, old, block, Order::Release)?;
                self.invalidate_entry(slot, old);
                self.replace(slot, block, new, Order::Plain)?;
            }
            _ => {
                self.replace(slot, old, new, Order::Release)?;
                self.invalidate_entry(slot, old);
            }
        }
        Ok(())
    }

    /// Returns the FEAT_BBM level to use: 0 if CPUs or policy want a break.
    #[inline]
    pub(super) fn bbm_level(&self) -> u8 {
        if self.stage2.policy.use_bbm { self.stage2.features.bbm } else { 0 }
    }

    /// Invalidates the cached copies of an entry that has been broken or replaced, on all CPUs.
    #[inline]
    fn invalidate_entry(&self, slot: &Slot, old: Descriptor) {
        match old.kind(slot.level) {
            EntryKind::Leaf(_) => self.invalidate_leaf(slot.ipa, slot.level),
            EntryKind::Table(_) => {
                self.invalidate_range(slot.ipa, self.stage2.geometry.span(slot.level));
            }
            EntryKind::Invalid | EntryKind::Locked => {}
        }
    }
}
