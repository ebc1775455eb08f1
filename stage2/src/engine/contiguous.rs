// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The contiguous hint: a run of pages side by side in both address spaces, which a TLB may hold as
//! one entry (Arm ARM D8.7.1).
//!
//! One entry of a run speaks for all of them, so all must agree; the access flag and the software
//! bits may differ (Arm ARM, "misprogramming of the Contiguous bit"; Linux: `contpte_convert()`).
//! Two things follow:
//!
//! - The hint is set where the only walker fills a whole run of nothing.
//! - Before one entry changes, the hint is taken from all: break all → invalidate → make all
//!   without it. As long as one were left, a CPU could fetch the whole run from it again.
//!
//! Shared walkers cannot change a run by compare-and-swap of one entry: they give
//! [`MapError::Contiguous`], and the caller comes again as the only walker.

use super::{MapError, Slot, Walk};
use crate::{
    address::EntryAddress,
    descriptor::Descriptor,
    geometry::Level,
    operations::{Operations, Order},
};

/// The longest run of pages: 128 with 16K.
const LONGEST: usize = 128;

impl<O: Operations> Walk<'_, O> {
    /// Entries of a run, and the first one's slot.
    pub(super) fn run_of(&self, slot: &Slot) -> (u64, Slot) {
        let granule = self.stage2.geometry.granule();
        let (count, span) = (slot.level.contiguous(granule), slot.level.span(granule));
        let ipa = slot.ipa.align_down(count * span);
        let back = (slot.ipa - ipa) >> slot.level.shift(granule);
        let entry = EntryAddress(slot.entry.0 - back * 8);
        (
            count,
            Slot {
                entry,
                ipa,
                ..*slot
            },
        )
    }

    /// Whether leaves such as this one get the hint where they fill a run.
    pub(super) fn hints(&self, slot: &Slot, leaf: Descriptor) -> bool {
        let run = slot.level.contiguous(self.stage2.geometry.granule());
        let bytes = run * self.stage2.geometry.span(slot.level);
        self.stage2.policy.contiguous
            && !self.shared
            && slot.level == Level::PAGE
            && slot.ipa.offset_in(bytes) == leaf.address().offset_in(bytes)
    }

    /// Maps a run that begins at a slot, if it does and nothing is there. Gives its entries.
    pub(super) fn map_run(&self, slot: &Slot, leaf: Descriptor, most: u64, ready: bool) -> u64 {
        let (count, first) = self.run_of(slot);
        let span = self.stage2.geometry.span(slot.level);
        let empty = |n| self.ops.load(slot.entry.skip(n)) == Descriptor::EMPTY;
        if first.ipa != slot.ipa || most < count || !(0..count).all(empty) {
            return 0;
        }
        if !ready {
            self.prepare(leaf.address(), count * span, leaf.attributes());
        }
        let leaf = leaf.contiguous(true);
        self.ops
            .store_run(slot.entry, count, leaf, span, Order::Release);
        count
    }

    /// Takes the hint from the run that a leaf is in, before it changes. Gives what it then is.
    ///
    /// # Errors
    /// [`MapError::Contiguous`]: others are at work.
    pub(super) fn unfold(&self, slot: &Slot, old: Descriptor) -> Result<Descriptor, MapError> {
        if !old.is_contiguous() {
            return Ok(old);
        }
        if self.shared {
            return Err(MapError::Contiguous);
        }
        let (count, first) = self.run_of(slot);
        let span = self.stage2.geometry.span(slot.level);
        let mut leaves = [Descriptor::EMPTY; LONGEST];
        let run = || (0..count).map(|n| first.entry.skip(n));
        for (leaf, entry) in leaves.iter_mut().zip(run()) {
            *leaf = self.ops.load(entry).contiguous(false);
            self.ops.store(entry, Descriptor::EMPTY, Order::Plain);
        }
        self.invalidate_range(first.ipa, count * span);
        for (leaf, entry) in leaves.iter().zip(run()) {
            self.ops.store(entry, *leaf, Order::Release);
        }
        Ok(old.contiguous(false))
    }
}
