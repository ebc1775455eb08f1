// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cache maintenance operations (CMOs) for memory that is mapped or unmapped.
//!
//! A guest may bypass the caches (its MMU is off, or its attributes are non-cacheable). Without
//! FEAT_S2FWB, memory is therefore cleaned and invalidated to the PoC before the guest can access
//! it, and again after it is unmapped. Memory that becomes executable must have no stale I-cache
//! lines. D-cache CMOs come first: later instruction fetches must read the bytes that the host
//! wrote. Both kinds of CMO end with a DSB, which also orders them before the store of the entry.
//!
//! CMOs before a make depend only on the new entry: the old one may map other memory. That memory is
//! cleaned and invalidated after the invalidation, as unmapped memory is.

use super::{
    Stage2,
    lookup::{Access, Fault, FaultStatus},
    map::MapRequest,
    walk::{Slot, Walk, WalkMode},
};
use crate::{
    address::{Ipa, PhysAddr, TableAddress},
    descriptor::{Attributes, Descriptor, EntryKind, MemoryType},
    geometry::Level,
    operations::{Dsb, Operations},
    policy::CmoPlacement,
};

/// Size of a cache line in [`Policy::max_icache_lines`](crate::Policy::max_icache_lines), in bytes.
const CACHE_LINE_SIZE: u64 = 64;

/// Contiguous memory whose clean and invalidate to the PoC is deferred.
#[derive(Debug, Default)]
pub(super) struct DeferredClean {
    start: PhysAddr,
    end: PhysAddr,
}

impl<O: Operations, M: WalkMode> Walk<'_, O, M> {
    /// Returns whether the policy places CMOs at this point.
    pub(super) fn places_cmos_at(&self, placement: CmoPlacement) -> bool {
        self.stage2.policy.cmo_placement == placement
    }

    /// Returns whether a leaf with these attributes needs no CMO in a map walker.
    #[inline]
    pub(super) fn needs_no_cmo(&self, a: Attributes) -> bool {
        let features = &self.stage2.features;
        self.stage2.skips_all_cmos
            || ((features.fwb || a.memory != MemoryType::Normal) && (features.dic || !a.execute))
    }

    pub(super) fn clean_invalidate_to_poc(&self, phys: PhysAddr, size: u64) {
        if self.stage2.features.fwb || size == 0 {
            return;
        }
        self.ops.clean_invalidate(phys, size);
        self.ops.dsb(Dsb::Ish);
    }

    /// Invalidates the I-cache for a range, or the whole I-cache above the policy's limit.
    pub(super) fn invalidate_icache(&self, phys: PhysAddr, size: u64) {
        if self.stage2.features.dic || size == 0 {
            return;
        }
        let limit = self.stage2.policy.max_icache_lines;
        let whole = limit.is_some_and(|lines| size / CACHE_LINE_SIZE > lines);
        let range = (!whole).then_some((phys, size));
        self.ops.invalidate_icache(range);
        self.ops.dsb(Dsb::Ish);
    }

    /// Performs the CMOs that a new leaf requires for its memory.
    pub(super) fn perform_cmos(&self, phys: PhysAddr, size: u64, attributes: Attributes) {
        if attributes.memory == MemoryType::Normal {
            self.clean_invalidate_to_poc(phys, size);
        }
        if attributes.execute {
            self.invalidate_icache(phys, size);
        }
    }

    /// Performs the CMOs for part of the block `old`. Memory that `old` maps cacheable at the same
    /// address needs no clean and invalidate: it was done when `old` was made.
    pub(super) fn cmos_within_block(
        &self,
        slot: &Slot,
        old: Descriptor,
        ipa: Ipa,
        (phys, size, attributes): (PhysAddr, u64, Attributes),
    ) {
        let before = old.attributes();
        let same = old.address() + (ipa - slot.ipa) == phys;
        if !same || before.memory != MemoryType::Normal {
            self.perform_cmos(phys, size, attributes);
        } else if attributes.execute && !before.execute {
            self.invalidate_icache(phys, size);
        }
    }

    /// Performs the CMOs for a block that replaces `table`. If the policy allows it, skips memory
    /// that the table's leaves map at the same address: its CMOs were done when those leaves were
    /// made.
    pub(super) fn cmos_for_block(&self, table: TableAddress, level: Level, block: Descriptor) {
        let (phys, new) = (block.address(), block.attributes());
        if self.needs_no_cmo(new) {
            return;
        }
        let span = self.stage2.geometry.granule().entries() * self.stage2.geometry.span(level);
        if !self.stage2.policy.skips_mapped_cmos || new.memory != MemoryType::Normal {
            return self.perform_cmos(phys, span, new);
        }
        let (mut deferred, mut stale) = (DeferredClean::default(), false);
        self.clean_unmapped_parts(table, level, phys, new, &mut deferred, &mut stale);
        self.clean_deferred(&deferred);
        if stale {
            self.invalidate_icache(phys, span);
        }
    }

    /// Cleans and invalidates the parts of a block that the table's leaves do not map at the same
    /// addresses. Sets `stale` if part of the block becomes executable.
    fn clean_unmapped_parts(
        &self,
        table: TableAddress,
        level: Level,
        phys: PhysAddr,
        new: Attributes,
        deferred: &mut DeferredClean,
        stale: &mut bool,
    ) {
        let span = self.stage2.geometry.span(level);
        for index in 0..self.stage2.geometry.granule().entries() {
            let part = phys + index * span;
            let entry = self.ops.load(table.entry(index));
            match (entry.kind(level), level.child()) {
                (EntryKind::Table(child), Some(below)) => {
                    self.clean_unmapped_parts(child, below, part, new, deferred, stale);
                }
                (EntryKind::Leaf(address), _)
                    if address == part && entry.attributes().memory == MemoryType::Normal =>
                {
                    *stale |= new.execute && !entry.attributes().execute;
                }
                _ => {
                    *stale |= new.execute;
                    self.defer_clean(deferred, part, span);
                }
            }
        }
    }

    /// Adds memory to the deferred range, after performing the deferred CMO if the two are not
    /// adjacent.
    fn defer_clean(&self, deferred: &mut DeferredClean, phys: PhysAddr, size: u64) {
        if deferred.end != phys {
            self.clean_deferred(deferred);
            deferred.start = phys;
        }
        deferred.end = phys + size;
    }

    pub(super) fn clean_deferred(&self, deferred: &DeferredClean) {
        self.clean_invalidate_to_poc(deferred.start, deferred.end - deferred.start);
    }

    /// Defers the CMO for a broken leaf: the guest may have written its memory uncached.
    pub(super) fn defer_clean_of_leaf(
        &self,
        old: Descriptor,
        level: Level,
        deferred: &mut DeferredClean,
    ) {
        if old.attributes().memory == MemoryType::Normal {
            self.defer_clean(deferred, old.address(), self.stage2.geometry.span(level));
        }
    }

    /// Cleans and invalidates the memory of a broken leaf that a leaf of other memory replaces.
    pub(super) fn clean_replaced_leaf(&self, old: Descriptor, level: Level) {
        let mut deferred = DeferredClean::default();
        self.defer_clean_of_leaf(old, level, &mut deferred);
        self.clean_deferred(&deferred);
    }

    /// Cleans and invalidates the memory that the leaves of an unlinked table map and a block at
    /// `phys`, which replaces the table, does not.
    pub(super) fn clean_replaced_leaves(&self, table: TableAddress, level: Level, phys: PhysAddr) {
        if self.stage2.features.fwb {
            return;
        }
        let mut deferred = DeferredClean::default();
        self.defer_clean_of_others(table, level, phys, &mut deferred);
        self.clean_deferred(&deferred);
    }

    fn defer_clean_of_others(
        &self,
        table: TableAddress,
        level: Level,
        phys: PhysAddr,
        deferred: &mut DeferredClean,
    ) {
        let span = self.stage2.geometry.span(level);
        for index in 0..self.stage2.geometry.granule().entries() {
            let (entry, part) = (self.ops.load(table.entry(index)), phys + index * span);
            match (entry.kind(level), level.child()) {
                (EntryKind::Table(child), Some(below)) => {
                    self.defer_clean_of_others(child, below, part, deferred);
                }
                (EntryKind::Leaf(address), _) if address != part => {
                    self.defer_clean_of_leaf(entry, level, deferred);
                }
                _ => {}
            }
        }
    }

    /// Defers the CMOs for all leaves below an unlinked table.
    pub(super) fn defer_clean_of_leaves(
        &self,
        table: TableAddress,
        level: Level,
        deferred: &mut DeferredClean,
    ) {
        for index in 0..self.stage2.geometry.granule().entries() {
            let entry = self.ops.load(table.entry(index));
            match (entry.kind(level), level.child()) {
                (EntryKind::Table(child), Some(below)) => {
                    self.defer_clean_of_leaves(child, below, deferred)
                }
                (EntryKind::Leaf(_), _) => self.defer_clean_of_leaf(entry, level, deferred),
                _ => {}
            }
        }
    }
}

impl Stage2 {
    /// Performs the CMOs of Linux 5.10's fault path: a clean and invalidate for each fault except a
    /// permission fault, and an I-cache invalidation for each instruction abort.
    pub(crate) fn cmo_in_fault_path<O: Operations>(
        &self,
        ops: &O,
        fault: &Fault,
        request: &MapRequest,
    ) {
        let walk = self.shared_walk(ops);
        if !walk.places_cmos_at(CmoPlacement::FaultPath) {
            return;
        }
        let is_memory = request.attributes.memory == MemoryType::Normal;
        if is_memory && fault.status != FaultStatus::Permission {
            walk.clean_invalidate_to_poc(request.phys, request.size);
        }
        if fault.access == Access::Fetch {
            walk.invalidate_icache(request.phys, request.size);
        }
    }
}
