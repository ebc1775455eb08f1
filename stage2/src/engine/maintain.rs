// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Making memory ready for a guest, and for the host's return.
//!
//! A guest may go around the caches (its MMU off, its own attributes), so without FEAT_S2FWB every
//! byte that it is about to reach is cleaned and invalidated to the point of coherency first, and
//! again when the host gets it back. What is about to be executed must not be in an I-cache in an
//! older form. The D-side goes first: instruction fetches that follow must find what the host wrote.
//! Both end with a DSB, which also orders them before the store of the entry.
//!
//! What has to be done is judged by the entry to come: the one before says nothing about the memory
//! behind the new one.

use super::{Slot, Stage2, Walk};
use crate::{
    address::{Ipa, PhysAddr, TableAddress},
    descriptor::{Attributes, Descriptor, EntryKind, MemoryType},
    geometry::Level,
    operations::{Dsb, Operations},
    policy::CmoPlacement,
};

/// Bytes in a cache line as `IC IVAU` is counted by; only [`Policy::icache_lines`] depends on it.
///
/// [`Policy::icache_lines`]: crate::Policy::icache_lines
const LINE: u64 = 64;

/// Neighbouring memory that needs the same, put together.
#[derive(Debug, Default)]
pub(super) struct Run {
    start: PhysAddr,
    end: PhysAddr,
}

impl<O: Operations> Walk<'_, O> {
    /// Whether handlers maintain, at `when`.
    pub(super) fn maintains(&self, when: CmoPlacement) -> bool {
        self.stage2.policy.cmo == when
    }

    /// Whether nothing has to be made ready for a leaf with these attributes, here.
    #[inline]
    pub(super) fn is_ready(&self, a: Attributes) -> bool {
        let features = &self.stage2.features;
        self.stage2.all_ready
            || ((features.fwb || a.memory != MemoryType::Normal) && (features.dic || !a.execute))
    }

    /// D-side: to the point of coherency.
    pub(super) fn clean(&self, phys: PhysAddr, size: u64) {
        if self.stage2.features.fwb || size == 0 {
            return;
        }
        self.ops.clean_invalidate(phys, size);
        self.ops.dsb(Dsb::Ish);
    }

    /// I-side: nothing stale may be fetched.
    pub(super) fn invalidate_instructions(&self, phys: PhysAddr, size: u64) {
        if self.stage2.features.dic || size == 0 {
            return;
        }
        let whole = self
            .stage2
            .policy
            .icache_lines
            .is_some_and(|most| size / LINE > most);
        let range = (!whole).then_some((phys, size));
        self.ops.invalidate_instructions(range);
        self.ops.dsb(Dsb::Ish);
    }

    /// Makes memory ready for a leaf with these attributes.
    pub(super) fn prepare(&self, phys: PhysAddr, size: u64, attributes: Attributes) {
        if attributes.memory == MemoryType::Normal {
            self.clean(phys, size);
        }
        if attributes.execute {
            self.invalidate_instructions(phys, size);
        }
    }

    /// Makes memory ready for part of a block that `old` maps: what the guest reaches already, at
    /// the same address and cacheable, has been ready since `old` was made.
    pub(super) fn prepare_part(
        &self,
        slot: &Slot,
        old: Descriptor,
        ipa: Ipa,
        leaf: (PhysAddr, u64, Attributes),
    ) {
        let (phys, size, attributes) = leaf;
        let before = old.attributes();
        let same = old.address() + (ipa - slot.ipa) == phys;
        if !same || before.memory != MemoryType::Normal {
            self.prepare(phys, size, attributes);
        } else if attributes.execute && !before.execute {
            self.invalidate_instructions(phys, size);
        }
    }

    /// Makes memory ready for a block in place of a table. Parts that the table's leaves map at the
    /// same address are ready already, as a leaf is only made when its memory is.
    pub(super) fn prepare_block(
        &self,
        table: TableAddress,
        level: Level,
        phys: PhysAddr,
        new: Attributes,
    ) {
        if self.is_ready(new) {
            return;
        }
        let span = self.stage2.geometry.granule().entries() * self.stage2.geometry.span(level);
        if !self.stage2.policy.skip_mapped || new.memory != MemoryType::Normal {
            return self.prepare(phys, span, new);
        }
        let (mut clean, mut stale) = (Run::default(), false);
        self.unready(table, level, phys, new, &mut clean, &mut stale);
        self.clean(clean.start, clean.end - clean.start);
        if stale {
            self.invalidate_instructions(phys, span);
        }
    }

    fn unready(
        &self,
        table: TableAddress,
        level: Level,
        phys: PhysAddr,
        new: Attributes,
        clean: &mut Run,
        stale: &mut bool,
    ) {
        let span = self.stage2.geometry.span(level);
        for index in 0..self.stage2.geometry.granule().entries() {
            let at = phys + index * span;
            let entry = self.ops.load(table.entry(index));
            match (entry.kind(level), level.down()) {
                (EntryKind::Table(child), Some(below)) => {
                    self.unready(child, below, at, new, clean, stale);
                    continue;
                }
                (EntryKind::Leaf(address), _)
                    if address == at && entry.attributes().memory == MemoryType::Normal =>
                {
                    *stale |= new.execute && !entry.attributes().execute;
                    continue;
                }
                _ => {}
            }
            *stale |= new.execute;
            if clean.end != at {
                self.clean(clean.start, clean.end - clean.start);
                clean.start = at;
            }
            clean.end = at + span;
        }
    }

    /// Cleans what was collected last.
    pub(super) fn clean_run(&self, run: &Run) {
        self.clean(run.start, run.end - run.start);
    }

    /// Adds what the guest may have written past the caches to what is to be cleaned; what that is
    /// not next to is cleaned now.
    pub(super) fn collect(&self, old: Descriptor, level: Level, run: &mut Run) {
        let phys = old.address();
        if old.attributes().memory != MemoryType::Normal {
            return;
        }
        if run.end != phys {
            self.clean_run(run);
            run.start = phys;
        }
        run.end = phys + self.stage2.geometry.span(level);
    }

    /// Adds all leaves below a table that no entry points at any more.
    pub(super) fn collect_unlinked(&self, table: TableAddress, level: Level, run: &mut Run) {
        for index in 0..self.stage2.geometry.granule().entries() {
            let entry = self.ops.load(table.entry(index));
            match (entry.kind(level), level.down()) {
                (EntryKind::Table(child), Some(below)) => {
                    self.collect_unlinked(child, below, run);
                }
                (EntryKind::Leaf(_), _) => self.collect(entry, level, run),
                _ => {}
            }
        }
    }
}

impl Stage2 {
    /// Makes memory (address and bytes) ready for a leaf with these attributes; the D-side only
    /// with `data`.
    pub(crate) fn prepare<O: Operations>(
        &self,
        ops: &O,
        (phys, size): (PhysAddr, u64),
        attributes: Attributes,
        data: bool,
    ) {
        let walk = self.shared(ops);
        if data && attributes.memory == MemoryType::Normal {
            walk.clean(phys, size);
        }
        if attributes.execute {
            walk.invalidate_instructions(phys, size);
        }
    }
}
