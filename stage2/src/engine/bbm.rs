// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Break-before-make of one entry or of a contiguous run, and size changes of mappings without it.
//!
//! An exclusive walk breaks an entry by storing zero. A shared walk swaps in
//! [`Descriptor::LOCKED`], and owns the entry until it makes the entry valid again. If CMOs precede
//! the break, the shared walk first marks the valid entry *break-pending*, so that no second walker
//! repeats the CMOs; the guest continues to use the entry.
//!
//! A TLB may hold a contiguous run of pages as one entry, so the entries of a run must agree in all
//! but access flag and software bits (Arm ARM R_NGLXZ, "misprogramming of the Contiguous bit";
//! Linux: `contpte_convert()`). An exclusive walk therefore sets the hint only when it fills a
//! whole empty run. Before one entry changes, the walk removes the hint from all entries: break all
//! → invalidate → make all without it. While one entry keeps the hint, a CPU may fetch the whole
//! run again. A compare-and-swap of one entry cannot change a run: shared walks return
//! [`MapError::Contiguous`], and the caller retries with an exclusive walk.
//!
//! Only [`Walk::break_entry`] makes a valid entry invalid. It returns a [`BrokenEntry`], which the
//! caller must invalidate before it makes an entry: alone, or in a batch when it unmaps a range.

use super::{
    BbmLevel, MapError,
    walk::{Slot, Walk, WalkMode},
};
use crate::{
    address::EntryAddress,
    descriptor::{Descriptor, EntryKind},
    geometry::Level,
    operations::{Operations, Order},
};

/// Number of entries of the longest run: 128 pages of 16K.
const MAX_RUN_ENTRIES: usize = 128;

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
        M::replace(self.ops, slot.entry, old, M::BROKEN_ENTRY, Order::Plain)?;
        Ok(BrokenEntry { slot: *slot, old })
    }

    /// Breaks a valid entry and invalidates it on all CPUs.
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

    /// Makes an entry after a break, with release ordering.
    #[inline]
    pub(super) fn make_entry(&self, slot: &Slot, new: Descriptor) {
        self.ops.store(slot.entry, new, Order::Release);
    }

    /// Marks a valid entry as break-pending in a shared walk. Returns the resulting entry.
    ///
    /// # Errors
    /// [`MapError::Again`] if another walker has marked or changed it.
    pub(super) fn mark_break_pending(
        &self,
        slot: &Slot,
        old: Descriptor,
    ) -> Result<Descriptor, MapError> {
        if !M::IS_SHARED {
            return Ok(old);
        }
        if old.is_break_pending() {
            return Err(MapError::Again);
        }
        let marked = old.with_break_pending();
        self.replace(slot, old, marked, Order::Plain)?;
        Ok(marked)
    }

    /// Locks an invalid entry in a shared walk, so that no other walker makes it valid.
    pub(super) fn lock_invalid(&self, slot: &Slot, old: Descriptor) -> Result<(), MapError> {
        if M::IS_SHARED {
            self.replace(slot, old, Descriptor::LOCKED, Order::Plain)?;
        }
        Ok(())
    }

    /// Replaces `old` by `new`, which maps the same memory at another block size: by
    /// break-before-make, or without a break if FEAT_BBM and the policy allow it.
    ///
    /// With FEAT_BBM levels 1 and 2 the block has nT first, so that no TLB holds both sizes: a TLB that
    /// holds both may cause a conflict abort (Arm ARM R_KFLJB). nT forbids only to hold the block in a way
    /// that conflicts, so a split ends with another invalidation: a later one of a page, with its level as
    /// a hint, need not remove what a TLB holds of the block.
    pub(super) fn change_size(
        &self,
        slot: &Slot,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), MapError> {
        match (self.bbm_level(), old.is_leaf(slot.level)) {
            (BbmLevel::L0, _) => {
                self.break_and_invalidate(slot, old)?;
                self.make_entry(slot, new);
            }
            (BbmLevel::L1 | BbmLevel::L2, true) => {
                let block = old.with_nt(true);
                self.replace(slot, old, block, Order::Plain)?;
                self.invalidate_leaf(slot.ipa, slot.level);
                self.replace(slot, block, new, Order::Release)?;
                self.invalidate_leaf(slot.ipa, slot.level);
            }
            (BbmLevel::L1 | BbmLevel::L2, false) => {
                let block = new.with_nt(true);
                self.replace(slot, old, block, Order::Release)?;
                self.invalidate_entry(slot, old);
                self.replace(slot, block, new, Order::Plain)?;
            }
            (BbmLevel::L3, _) => {
                self.replace(slot, old, new, Order::Release)?;
                self.invalidate_entry(slot, old);
            }
        }
        Ok(())
    }

    /// Returns the FEAT_BBM level to use: level 0 if the policy requires a break.
    #[inline]
    pub(super) fn bbm_level(&self) -> BbmLevel {
        if self.stage2.policy.uses_bbm { self.stage2.features.bbm } else { BbmLevel::L0 }
    }

    /// Invalidates a broken or replaced entry on all CPUs.
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

    /// Returns the number of entries of the run that contains a slot, and the run's first slot.
    pub(super) fn contiguous_run(&self, slot: &Slot) -> (u64, Slot) {
        let granule = self.stage2.geometry.granule();
        let (count, span) = (slot.level.contiguous_entries(granule), slot.level.span(granule));
        let ipa = slot.ipa.align_down(count * span);
        let back = (slot.ipa - ipa) >> slot.level.shift(granule);
        let first = Slot { entry: EntryAddress(slot.entry.0 - back * 8), ipa, ..*slot };
        (count, first)
    }

    /// Returns whether a map that starts with `leaf` sets the contiguous hint on the runs that it
    /// fills.
    pub(super) fn sets_contiguous(&self, slot: &Slot, leaf: Descriptor) -> bool {
        let run = slot.level.contiguous_entries(self.stage2.geometry.granule());
        let bytes = run * self.stage2.geometry.span(slot.level);
        self.stage2.policy.sets_contiguous
            && !M::IS_SHARED
            && slot.level == Level::PAGE
            && slot.ipa.offset_in(bytes) == leaf.address().offset_in(bytes)
    }

    /// Maps a run if it starts at `slot`, has at most `max` leaves, and all its entries are empty.
    /// Returns the number of entries mapped.
    pub(super) fn map_run(&self, slot: &Slot, leaf: Descriptor, max: u64, skip_cmo: bool) -> u64 {
        let (count, first) = self.contiguous_run(slot);
        let span = self.stage2.geometry.span(slot.level);
        let is_empty = |n| self.ops.load(slot.entry.skip(n)) == Descriptor::EMPTY;
        if first.ipa != slot.ipa || max < count || !(0..count).all(is_empty) {
            return 0;
        }
        if !skip_cmo {
            self.perform_cmos(leaf.address(), count * span, leaf.attributes());
        }
        let leaf = leaf.with_contiguous(true);
        self.ops.store_adjacent(slot.entry, count, leaf, span, Order::Release);
        count
    }

    /// Removes the contiguous hint from a leaf's run before the leaf changes. Returns the leaf
    /// without the hint.
    ///
    /// # Errors
    /// [`MapError::Contiguous`] in a shared walk.
    pub(super) fn contpte_unfold(
        &self,
        slot: &Slot,
        old: Descriptor,
    ) -> Result<Descriptor, MapError> {
        if !old.is_contiguous() {
            return Ok(old);
        }
        if M::IS_SHARED {
            return Err(MapError::Contiguous);
        }
        let (count, first) = self.contiguous_run(slot);
        let span = self.stage2.geometry.span(slot.level);
        let mut leaves = [Descriptor::EMPTY; MAX_RUN_ENTRIES];
        let run = || (0..count).map(|n| first.skip(n, span));
        for (leaf, slot) in leaves.iter_mut().zip(run()) {
            *leaf = self.ops.load(slot.entry);
            let _broken = self.break_entry(&slot, *leaf)?;
        }
        self.invalidate_range(first.ipa, count * span);
        for (leaf, slot) in leaves.iter().zip(run()) {
            self.make_entry(&slot, leaf.with_contiguous(false));
        }
        Ok(old.with_contiguous(false))
    }
}
