// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cache maintenance operations (CMOs) for memory that is mapped or unmapped.
//!
//! A guest may bypass the caches (its MMU is off, or its attributes are non-cacheable). Without
//! FEAT_S2FWB, memory is therefore cleaned and invalidated to the PoC before the guest can access
//! it, and again after it is unmapped. Memory that becomes executable must have no stale I-cache
//! lines. D-cache CMOs come first: later instruction fetches must read the bytes that the host
//! wrote. Both kinds of CMO end with a DSB, which also orders them before the store of the entry.
//!
//! CMOs depend only on the new entry: the old one may map other memory.

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

/// Size of a cache line in [`Policy::icache_lines`](crate::Policy::icache_lines), in bytes.
const LINE: u64 = 64;

/// Contiguous host memory to clean and invalidate to the PoC.
#[derive(Debug, Default)]
pub(super) struct CleanRange {
    start: PhysAddr,
    end: PhysAddr,
}

impl<O: Operations, M: WalkMode> Walk<'_, O, M> {
    /// Returns whether the policy places CMOs at this point.
    pub(super) fn does_cmo(&self, placement: CmoPlacement) -> bool {
        self.stage2.policy.cmo == placement
    }

    /// Returns whether a leaf with these attributes needs no CMO in a map handler.
    #[inline]
    pub(super) fn needs_no_cmo(&self, a: Attributes) -> bool {
        let features = &self.stage2.features;
        self.stage2.without_cmo
            || ((features.fwb || a.memory != MemoryType::Normal) && (features.dic || !a.execute))
    }

    /// Cleans and invalidates memory to the PoC.
    pub(super) fn clean_to_poc(&self, phys: PhysAddr, size: u64) {
        if self.stage2.features.fwb || size == 0 {
            return;
        }
        self.ops.clean_invalidate(phys, size);
        self.ops.dsb(Dsb::Ish);
    }

    /// Invalidates the I-cache for a range, or all of it beyond the limit of the policy.
    pub(super) fn invalidate_icache(&self, phys: PhysAddr, size: u64) {
        if self.stage2.features.dic || size == 0 {
            return;
        }
        let limit = self.stage2.policy.icache_lines;
        let whole = limit.is_some_and(|lines| size / LINE > lines);
        let range = (!whole).then_some((phys, size));
        self.ops.invalidate_instructions(range);
        self.ops.dsb(Dsb::Ish);
    }

    /// Performs the CMOs that a new leaf requires for its memory.
    pub(super) fn cmo(&self, phys: PhysAddr, size: u64, attributes: Attributes) {
        if attributes.memory == MemoryType::Normal {
            self.clean_to_poc(phys, size);
        }
        if attributes.execute {
            self.invalidate_icache(phys, size);
        }
    }

    /// Performs the CMOs for part of the block `old`. Memory that `old` maps cacheable at the same
    /// address needs no clean and invalidate: it was done when `old` was made.
    pub(super) fn cmo_within_block(
        &self,
        slot: &Slot,
        old: Descriptor,
        ipa: Ipa,
        (phys, size, attributes): (PhysAddr, u64, Attributes),
    ) {
        let before = old.attributes();
        let same = old.address() + (ipa - slot.ipa) == phys;
        if !same || before.memory != MemoryType::Normal {
            self.cmo(phys, size, attributes);
        } else if attributes.execute && !before.execute {
            self.invalidate_icache(phys, size);
        }
    }

    /// Performs the CMOs for a block that replaces `table`. With
    /// [`Policy::skip_mapped`](crate::Policy::skip_mapped), skips memory that the table's leaves
    /// map at the same address: its CMOs were done when those leaves were made.
    pub(super) fn cmo_for_block(&self, table: TableAddress, level: Level, block: Descriptor) {
        let (phys, new) = (block.address(), block.attributes());
        if self.needs_no_cmo(new) {
            return;
        }
        let span = self.stage2.geometry.granule().entries() * self.stage2.geometry.span(level);
        if !self.stage2.policy.skip_mapped || new.memory != MemoryType::Normal {
            return self.cmo(phys, span, new);
        }
        let (mut range, mut stale) = (CleanRange::default(), false);
        self.clean_unmapped(table, level, phys, new, &mut range, &mut stale);
        self.clean_range(&range);
        if stale {
            self.invalidate_icache(phys, span);
        }
    }

    /// Cleans and invalidates the parts of a block that the table's leaves do not map at the same
    /// addresses. Sets `stale` if part of the block becomes executable.
    fn clean_unmapped(
        &self,
        table: TableAddress,
        level: Level,
        phys: PhysAddr,
        new: Attributes,
        range: &mut CleanRange,
        stale: &mut bool,
    ) {
        let span = self.stage2.geometry.span(level);
        for index in 0..self.stage2.geometry.granule().entries() {
            let part = phys + index * span;
            let entry = self.ops.load(table.entry(index));
            match (entry.kind(level), level.down()) {
                (EntryKind::Table(child), Some(below)) => {
                    self.clean_unmapped(child, below, part, new, range, stale);
                }
                (EntryKind::Leaf(address), _)
                    if address == part && entry.attributes().memory == MemoryType::Normal =>
                {
                    *stale |= new.execute && !entry.attributes().execute;
                }
                _ => {
                    *stale |= new.execute;
                    self.extend(range, part, span);
                }
            }
        }
    }

    /// Adds memory to a range. If it is not adjacent, cleans and invalidates the range first.
    fn extend(&self, range: &mut CleanRange, phys: PhysAddr, size: u64) {
        if range.end != phys {
            self.clean_range(range);
            range.start = phys;
        }
        range.end = phys + size;
    }

    /// Cleans and invalidates a range to the PoC.
    pub(super) fn clean_range(&self, range: &CleanRange) {
        self.clean_to_poc(range.start, range.end - range.start);
    }

    /// Adds the memory of a broken leaf: the guest may have written it with the caches bypassed.
    pub(super) fn collect_leaf(&self, old: Descriptor, level: Level, range: &mut CleanRange) {
        if old.attributes().memory == MemoryType::Normal {
            self.extend(range, old.address(), self.stage2.geometry.span(level));
        }
    }

    /// Adds the memory of all leaves below an unlinked table.
    pub(super) fn collect_leaves(&self, table: TableAddress, level: Level, range: &mut CleanRange) {
        for index in 0..self.stage2.geometry.granule().entries() {
            let entry = self.ops.load(table.entry(index));
            match (entry.kind(level), level.down()) {
                (EntryKind::Table(child), Some(below)) => self.collect_leaves(child, below, range),
                (EntryKind::Leaf(_), _) => self.collect_leaf(entry, level, range),
                _ => {}
            }
        }
    }
}

impl Stage2 {
    /// Performs the CMOs of Linux 5.10's fault path: a clean and invalidate for each fault except a
    /// permission fault, and an I-cache invalidation for each instruction fault.
    pub(crate) fn cmo_in_fault_path<O: Operations>(
        &self,
        ops: &O,
        fault: &Fault,
        request: &MapRequest,
    ) {
        let walk = self.shared(ops);
        if !walk.does_cmo(CmoPlacement::FaultPath) {
            return;
        }
        let is_memory = request.attributes.memory == MemoryType::Normal;
        if is_memory && fault.status != FaultStatus::Permission {
            walk.clean_to_poc(request.phys, request.size);
        }
        if fault.access == Access::Fetch {
            walk.invalidate_icache(request.phys, request.size);
        }
    }
}
