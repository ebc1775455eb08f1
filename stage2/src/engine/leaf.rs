// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Mapping of one leaf at its entry, for any previous contents of the entry.

use super::{
    MapError,
    walk::{Slot, Walk, WalkMode},
};
use crate::{
    descriptor::{Descriptor, EntryKind},
    memcache::Memcache,
    operations::{Operations, Order},
    policy::{CmoPlacement, ExistingLeaf},
};

/// Result of a block split during a map.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SplitState {
    /// The split has done the CMOs for the rest of the range, which lies in the block.
    pub cmo_done: bool,
    /// The split has stored the requested leaf into the new table.
    pub filled: bool,
}

impl<O: Operations, M: WalkMode> Walk<'_, O, M> {
    /// Maps one leaf: installs, relaxes or replaces it, or coalesces a table into it.
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
            EntryKind::Leaf(_) if split.filled && old == new => Ok(()),
            EntryKind::Leaf(_) if !old.contiguous(false).needs_break(new) => {
                self.relax_existing(slot, old, new)
            }
            EntryKind::Leaf(_) => self.replace_leaf(slot, self.contpte_unfold(slot, old)?, new),
            EntryKind::Invalid | EntryKind::Locked => self.install(slot, old, new, split.cmo_done),
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
        let relaxed = old.with_permissions(old.attributes().relaxed(new.attributes()));
        match self.stage2.policy.existing_leaf {
            ExistingLeaf::Replace if old.contiguous(false) == new => Ok(()),
            ExistingLeaf::Replace => self.replace_leaf(slot, self.contpte_unfold(slot, old)?, new),
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
        let relaxed = relaxed.contiguous(false);
        let executable = relaxed.attributes().execute && !old.attributes().execute;
        if executable && !self.does_cmo(CmoPlacement::FaultPath) {
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
        if self.does_cmo(CmoPlacement::BeforeBreak) {
            old = self.mark_break_pending(slot, old)?;
            self.cmo(phys, size, new.attributes());
        } else if M::SHARED && old.is_break_pending() {
            // Another walker is splitting the block and fills the table from the old entry.
            return Err(MapError::Again);
        }
        self.break_and_invalidate(slot, old)?;
        if self.does_cmo(CmoPlacement::BetweenBreakAndMake) {
            self.cmo(phys, size, new.attributes());
        }
        self.make(slot, new);
        Ok(())
    }

    /// Installs a leaf at an invalid entry.
    fn install(
        &self,
        slot: &Slot,
        old: Descriptor,
        new: Descriptor,
        cmo_done: bool,
    ) -> Result<(), MapError> {
        self.lock_invalid(slot, old)?;
        if !cmo_done && !self.does_cmo(CmoPlacement::FaultPath) {
            let size = self.stage2.geometry.span(slot.level);
            self.cmo(new.address(), size, new.attributes());
        }
        self.add_references(self.table_of(slot.entry), 1);
        self.make(slot, new);
        Ok(())
    }
}
