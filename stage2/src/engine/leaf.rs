// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Mapping of one leaf at its entry, for any previous contents of the entry.

use super::{
    MapError,
    walk::{Slot, Walk, WalkMode},
};
use crate::{
    descriptor::{Descriptor, EntryKind, MemoryType},
    memcache::Memcache,
    operations::{Dsb, Operations, Order},
    policy::{CmoPlacement, ExistingLeaf},
};

/// Result of a block split during a map.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SplitState {
    /// Indicates that the CMOs for the rest of the range, which lies in the block, are done.
    pub is_cmo_done: bool,
    /// Indicates that the split has stored the requested leaf into the new table.
    pub is_leaf_stored: bool,
}

impl<O: Operations, M: WalkMode> Walk<'_, O, M> {
    /// Maps one leaf: makes, relaxes or replaces it, or coalesces a table into it.
    #[inline(never)]
    pub(super) fn map_leaf(
        self,
        slot: &Slot,
        new: Descriptor,
        split: SplitState,
        memcache: &mut Memcache,
    ) -> Result<(), MapError> {
        let old = self.load_unlocked(slot)?;
        match old.kind(slot.level) {
            EntryKind::Table(child) => self.coalesce(slot, old, child, new, memcache),
            EntryKind::Leaf(_) if split.is_leaf_stored && old == new => Ok(()),
            EntryKind::Leaf(_) if !old.with_contiguous(false).needs_break(new) => {
                self.relax_existing(slot, old, new)
            }
            EntryKind::Leaf(_) => self.replace_leaf(slot, self.contpte_unfold(slot, old)?, new),
            EntryKind::Invalid | EntryKind::Locked => {
                self.make_leaf(slot, old, new, split.is_cmo_done)
            }
        }
    }

    /// Handles an existing leaf that differs from the requested one at most in permissions,
    /// according to the policy.
    fn relax_existing(
        &self,
        slot: &Slot,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), MapError> {
        let relaxed = old.with_permissions(old.attributes().relaxed_by(new.attributes()));
        match self.stage2.policy.existing_leaf {
            ExistingLeaf::Replace if old.with_contiguous(false) == new => Ok(()),
            ExistingLeaf::Replace => self.replace_leaf(slot, self.contpte_unfold(slot, old)?, new),
            // No other walker has made the leaf since a fault: a retry would find it again.
            _ if !M::IS_SHARED && relaxed == old => Ok(()),
            ExistingLeaf::Retry => Err(MapError::Again),
            ExistingLeaf::Relax if relaxed == old || old.is_break_pending() => Err(MapError::Again),
            // A CPU with a stale TLB entry takes a permission fault, whose handler invalidates it.
            ExistingLeaf::Relax => self.relax_leaf(slot, old, relaxed),
        }
    }

    /// Stores a leaf with more permissions over the old one, without TLB invalidation.
    pub(super) fn relax_leaf(
        &self,
        slot: &Slot,
        old: Descriptor,
        relaxed: Descriptor,
    ) -> Result<(), MapError> {
        let old = self.contpte_unfold(slot, old)?;
        let relaxed = relaxed.with_contiguous(false);
        let executable = relaxed.attributes().execute && !old.attributes().execute;
        if executable && !self.places_cmos_at(CmoPlacement::FaultPath) {
            let size = self.stage2.geometry.span(slot.level);
            self.invalidate_icache(relaxed.address(), size);
        }
        self.replace(slot, old, relaxed, Order::Plain)
    }

    /// Replaces a leaf by break-before-make.
    fn replace_leaf(
        &self,
        slot: &Slot,
        mut old: Descriptor,
        new: Descriptor,
    ) -> Result<(), MapError> {
        let (phys, size) = (new.address(), self.stage2.geometry.span(slot.level));
        if self.places_cmos_at(CmoPlacement::BeforeBreak) {
            old = self.mark_break_pending(slot, old)?;
            self.perform_cmos(phys, size, new.attributes());
        } else if M::IS_SHARED && old.is_break_pending() {
            // Another walker is splitting the block and fills the table from the old entry.
            return Err(MapError::Again);
        }
        self.break_and_invalidate(slot, old)?;
        if old.address() != phys {
            self.clean_replaced_leaf(old, slot.level);
        } else if old.attributes().memory == MemoryType::Normal
            && new.attributes().memory != MemoryType::Normal
        {
            // What the guest has written through the caches must not overwrite its later writes, also
            // with FEAT_S2FWB.
            self.ops.clean_invalidate(phys, size);
            self.ops.dsb(Dsb::Ish);
        }
        if self.places_cmos_at(CmoPlacement::BetweenBreakAndMake) {
            self.perform_cmos(phys, size, new.attributes());
        }
        self.make_entry(slot, new);
        Ok(())
    }

    /// Makes a leaf at an invalid entry.
    fn make_leaf(
        &self,
        slot: &Slot,
        old: Descriptor,
        new: Descriptor,
        is_cmo_done: bool,
    ) -> Result<(), MapError> {
        self.lock_invalid(slot, old)?;
        if !is_cmo_done && !self.places_cmos_at(CmoPlacement::FaultPath) {
            let size = self.stage2.geometry.span(slot.level);
            self.perform_cmos(new.address(), size, new.attributes());
        }
        self.add_references(self.table_containing(slot.entry), 1);
        self.make_entry(slot, new);
        Ok(())
    }
}
