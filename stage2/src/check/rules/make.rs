// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rules for an entry that becomes valid: the old entry is invalidated, a linked table is
//! published, and a leaf's memory belongs to the guest, is aligned and clean to the PoC.

use alloc::{format, vec::Vec};

use crate::{
    address::TableAddress,
    check::{
        checker::Checker,
        event::{StoreKind, guest_address, physical_address},
        rule::Rule,
        stale_entry::{EntryChange, StaleEntry},
        table_model::EntryPosition,
    },
    descriptor::{Descriptor, EntryKind, MemoryType},
};

impl Checker {
    /// Checks that no CPU may hold an entry that was removed from the same addresses.
    pub(super) fn check_invalidated(&mut self, position: &EntryPosition, new: Descriptor) {
        let size = self.setup.geometry.span(position.level);
        let conflicts = |stale: &&StaleEntry| {
            let is_same = new.is_leaf(position.level) && stale.is_removal_of(position.level, new);
            stale.entry.change == EntryChange::Removed && !is_same
        };
        let conflict = self.tlbs.overlapping(position.ipa, size).find(conflicts).cloned();
        if let Some(stale) = conflict {
            let rule = if stale.holds_only_combined() {
                Rule::CombinedNotInvalidated
            } else {
                Rule::MakeBeforeInvalidated
            };
            let (ipa, was) = (stale.entry.position.ipa, stale.entry.old);
            let detail = format!("{}: {was:?} may be held, {new:?} is made", guest_address(ipa));
            self.report_caused(rule, detail, Some(stale.entry.cause));
        }
    }

    pub(in crate::check) fn make_valid(
        &mut self,
        cpu: usize,
        position: &EntryPosition,
        new: Descriptor,
        kind: StoreKind,
    ) {
        let looked_up = self.cpus[cpu].lookup_sequence;
        if looked_up.is_some_and(|sequence| sequence != self.invalidation_sequence) {
            self.report(Rule::StaleLookUp, guest_address(position.ipa));
        }
        match new.kind(position.level) {
            EntryKind::Table(child) => self.link(cpu, position, child, kind),
            EntryKind::Leaf(_) => {
                self.live_leaves.add(position.level, new);
                self.tlbs.restore(position, new);
                self.check_leaf(position, new, false);
            }
            _ => {}
        }
    }

    fn link(&mut self, cpu: usize, position: &EntryPosition, child: TableAddress, kind: StoreKind) {
        let Some(below) = position.level.child() else {
            return;
        };
        let Some(table) = self.tables.table_states.get_mut(&child) else {
            let detail = format!("unallocated table {:#x} is linked", child.0);
            return self.report(Rule::TableNotOwned, detail);
        };
        self.effect.is_strong = table.writer.is_some();
        let is_unpublished = !kind.is_release() && table.writer.is_some();
        table.level = Some(below);
        table.ipa = position.ipa;
        table.is_linked = true;
        table.unlinked_at = None;
        let entries: Vec<_> = table.entries.iter().map(|(i, e)| (*i, *e)).collect();
        if is_unpublished {
            self.report(Rule::TableNotPublished, format!("table {:#x}", child.0));
        }
        if let Some(block) = self.tables.broken_leaves.remove(&position.entry) {
            let allowed = block.attributes();
            let span = self.setup.geometry.span(below);
            let changes = |(index, leaf): &&(u64, Descriptor)| {
                leaf.is_leaf(below)
                    && (leaf.attributes().restricted_to(allowed) != leaf.attributes()
                        || leaf
                            .with_contiguous(false)
                            .needs_break(block.block_part(below, index * span)))
            };
            let changed = entries.iter().filter(changes).count();
            // The faulting access requires one changed part.
            if changed > 1 {
                let detail =
                    format!("{}: {changed} parts of {block:?} differ", guest_address(position.ipa));
                self.report(Rule::SplitRelaxed, detail);
            }
        }
        for (index, entry) in entries.into_iter().filter(|(_, entry)| entry.is_valid()) {
            let at = EntryPosition {
                entry: child.entry(index),
                level: below,
                ipa: position.ipa + index * self.setup.geometry.span(below),
            };
            self.make_valid(cpu, &at, entry, kind);
        }
    }

    /// Checks a leaf that becomes valid or is relaxed. Checks instructions only if the memory was
    /// not executable before.
    pub(super) fn check_leaf(
        &mut self,
        position: &EntryPosition,
        leaf: Descriptor,
        was_executable: bool,
    ) {
        let (phys, size) = (leaf.address(), self.setup.geometry.span(position.level));
        let attributes = leaf.attributes();
        let is_memory = attributes.memory == MemoryType::Normal;
        let features = self.setup.features;
        let addresses = [guest_address(position.ipa), physical_address(phys)].join(" → ");
        let detail = |why: &str| format!("{addresses}, {size:#x} bytes: {why}");
        let granule = self.setup.geometry.granule();
        if !leaf.is_aligned(position.level, granule) {
            self.report(Rule::Misaligned, detail("not aligned"));
        }
        let slot = self.memslots.range(..=position.ipa).next_back();
        let is_in_slot = slot.is_some_and(|(ipa, slot)| {
            position.ipa + size <= *ipa + slot.size
                && phys == slot.phys + (position.ipa - *ipa)
                && slot.is_device != is_memory
        });
        if !is_in_slot {
            self.report(Rule::OutsideSlot, detail("not the memslot's memory"));
        }
        if is_memory {
            if !features.fwb
                && let Some(at) = self.caches.first_dirty_address(phys, size)
            {
                let why = format!("{} is not clean", physical_address(at));
                self.report(Rule::UncleanReachable, detail(&why));
            }
            if attributes.execute
                && !was_executable
                && !features.dic
                && let Some(at) = self.caches.first_stale_address(phys, size)
            {
                let why = format!("{} may be stale", physical_address(at));
                self.report(Rule::StaleInstructions, detail(&why));
            }
        }
        self.caches.map(phys, size, attributes.execute, is_memory);
        if attributes.write {
            self.note_writable(position.ipa, size);
        }
    }
}
