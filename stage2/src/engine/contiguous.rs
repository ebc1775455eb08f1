// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The contiguous hint: a run of pages, adjacent in both address spaces, which a TLB may hold as
//! one entry (Arm ARM D8.7.1).
//!
//! All entries of a run must agree, but for access flag and software bits (Arm ARM, "misprogramming
//! of the Contiguous bit"; Linux: `contpte_convert()`). Two rules follow:
//!
//! - The hint is set where an exclusive walk fills a whole empty run.
//! - Before one entry changes, the hint is removed from all: break all → invalidate → make all
//!   without it. While one entry keeps the hint, a CPU may fetch the whole run from it again.
//!
//! A compare-and-swap of one entry cannot change a run: shared walks return
//! [`MapError::Contiguous`], and the caller retries with an exclusive one.

use super::{
    table::MapError,
    walk::{Slot, Walk, WalkMode},
};
use crate::{
    address::EntryAddress,
    descriptor::Descriptor,
    geometry::Level,
    operations::{Operations, Order},
};

/// Entries of the longest run: 128 pages of 16K.
const MAX_RUN: usize = 128;

impl<O: Operations, M: WalkMode> Walk<'_, O, M> {
    /// Returns the number of entries of the run around a slot, and the first slot.
    pub(super) fn run_of(&self, slot: &Slot) -> (u64, Slot) {
        let granule = self.stage2.geometry.granule();
        let (count, span) = (slot.level.contiguous(granule), slot.level.span(granule));
        let ipa = slot.ipa.align_down(count * span);
        let back = (slot.ipa - ipa) >> slot.level.shift(granule);
        let first = Slot { entry: EntryAddress(slot.entry.0 - back * 8), ipa, ..*slot };
        (count, first)
    }

    /// Returns whether leaves from this one on get the hint where they fill a run.
    pub(super) fn sets_contiguous(&self, slot: &Slot, leaf: Descriptor) -> bool {
        let run = slot.level.contiguous(self.stage2.geometry.granule());
        let bytes = run * self.stage2.geometry.span(slot.level);
        self.stage2.policy.contiguous
            && !M::SHARED
            && slot.level == Level::PAGE
            && slot.ipa.offset_in(bytes) == leaf.address().offset_in(bytes)
    }

    /// Maps a run if it begins at the slot, at most `max` leaves are wanted, and all entries are
    /// empty. Returns the number of entries that it has mapped.
    pub(super) fn map_run(&self, slot: &Slot, leaf: Descriptor, max: u64, skip_cmo: bool) -> u64 {
        let (count, first) = self.run_of(slot);
        let span = self.stage2.geometry.span(slot.level);
        let is_empty = |n| self.ops.load(slot.entry.skip(n)) == Descriptor::EMPTY;
        if first.ipa != slot.ipa || max < count || !(0..count).all(is_empty) {
            return 0;
        }
        if !skip_cmo {
            self.cmo(leaf.address(), count * span, leaf.attributes());
        }
        let leaf = leaf.contiguous(true);
        self.ops.store_run(slot.entry, count, leaf, span, Order::Release);
        count
    }

    /// Removes the hint from the run of a leaf before the leaf changes. Returns the leaf as it then
    /// is.
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
        if M::SHARED {
            return Err(MapError::Contiguous);
        }
        let (count, first) = self.run_of(slot);
        let span = self.stage2.geometry.span(slot.level);
        let mut leaves = [Descriptor::EMPTY; MAX_RUN];
        let run = || (0..count).map(|n| first.skip(n, span));
        for (leaf, slot) in leaves.iter_mut().zip(run()) {
            *leaf = self.ops.load(slot.entry);
            let _broken = self.break_entry(&slot, *leaf)?;
        }
        self.invalidate_range(first.ipa, count * span);
        for (leaf, slot) in leaves.iter().zip(run()) {
            self.make(&slot, leaf.contiguous(false));
        }
        Ok(old.contiguous(false))
    }
}
