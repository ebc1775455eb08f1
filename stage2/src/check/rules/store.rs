// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rules for a store to a table.

use alloc::{format, vec::Vec};

use crate::{
    address::{EntryAddress, TableAddress},
    check::{
        checker::{Checker, HeldLock},
        event::{StoreKind, guest_address},
        rule::Rule,
        stale_entry::{ChangedEntry, EntryChange, StaleEntry},
        table_model::EntryPosition,
    },
    descriptor::{Attributes, Descriptor, EntryKind},
    engine::BbmLevel,
    geometry::Level,
};

impl Checker {
    pub(crate) fn store(
        &mut self,
        cpu: usize,
        entry: EntryAddress,
        (old, new): (Descriptor, Descriptor),
        kind: StoreKind,
    ) {
        self.check_lock(cpu, entry, (old, new), kind);
        let Some((at, position)) = self.tables.store(cpu, entry, new) else {
            let detail = format!("entry {:#x} of no table is written", entry.0);
            return self.report(Rule::TableNotOwned, detail);
        };
        self.tables.changed_tables.insert(at);
        self.tlbs.record_store(cpu, entry);
        let Some(position) = position else { return };
        match (old.is_valid(), new.is_valid()) {
            (true, true) => self.replace_entry(cpu, &position, old, new, kind),
            (true, false) => self.remove_entry(cpu, &position, old),
            (false, true) => {
                self.check_invalidated(&position, new);
                self.make_valid(cpu, &position, new, kind);
            }
            (false, false) => {}
        }
    }

    fn check_lock(
        &mut self,
        cpu: usize,
        entry: EntryAddress,
        (old, new): (Descriptor, Descriptor),
        kind: StoreKind,
    ) {
        let address = entry.0;
        let owner = self.tables.locked_entries.get(&entry);
        if old.is_locked() && owner.is_none_or(|owner| usize::from(owner.cpu) != cpu) {
            let detail = format!("entry {address:#x} is locked by another CPU");
            self.report(Rule::LockedEntry, detail);
        }
        if new.is_locked() {
            self.tables.locked_entries.insert(entry, self.current());
        } else {
            self.tables.locked_entries.remove(&entry);
        }
        let table = self.tables.table_containing(entry);
        if !table.is_some_and(|(_, table)| table.is_linked) {
            return;
        }
        match self.cpus[cpu].lock {
            Some(HeldLock { is_exclusive, .. }) => {
                let is_allowed = is_exclusive
                    || kind.is_atomic()
                    || old.is_locked()
                    || (self.shares_plain_relaxations && only_relaxes(old, new));
                if !is_allowed {
                    self.report(Rule::SharedStore, format!("entry {address:#x}"));
                }
            }
            None => {
                let detail = format!("entry {address:#x} is written without the lock");
                self.report(Rule::LockDiscipline, detail);
            }
        }
    }

    fn replace_entry(
        &mut self,
        cpu: usize,
        position: &EntryPosition,
        old: Descriptor,
        new: Descriptor,
        kind: StoreKind,
    ) {
        let level = position.level;
        match (old.kind(level), new.kind(level)) {
            (EntryKind::Table(a), EntryKind::Table(b)) if a == b => {}
            (EntryKind::Leaf(_), EntryKind::Leaf(_))
                if !old.with_nt(false).needs_break(new.with_nt(false)) =>
            {
                self.change_in_place(position, old, new);
            }
            (EntryKind::Leaf(_), EntryKind::Leaf(_))
                if self.setup.features.bbm == BbmLevel::L3 && changes_contiguous(old, new) =>
            {
                self.live_leaves.remove(level, old);
                self.live_leaves.add(level, new);
                self.change_in_place(position, old, new);
            }
            _ => {
                self.check_replacement(position, old, new);
                self.remove_entry(cpu, position, old);
                self.make_valid(cpu, position, new, kind);
            }
        }
    }

    fn check_replacement(&mut self, position: &EntryPosition, old: Descriptor, new: Descriptor) {
        let detail = format!("{}: {old:?} → {new:?}", guest_address(position.ipa));
        let bbm = self.setup.features.bbm;
        let (has_nt, table, block) = match (old.kind(position.level), new.kind(position.level)) {
            // The guarantee of nT is for accesses by the entry that has it (R_HHCXC).
            (EntryKind::Leaf(_), EntryKind::Table(table)) => {
                (old.has_nt() && !self.is_held_without_nt(position), table, old)
            }
            (EntryKind::Table(table), EntryKind::Leaf(_)) => (new.has_nt(), table, new),
            (EntryKind::Leaf(_), EntryKind::Leaf(_))
                if bbm > BbmLevel::L0 && changes_contiguous(old, new) =>
            {
                return self.report(Rule::BlockSizeChange, detail);
            }
            _ => return self.report(Rule::BreakBeforeMake, detail),
        };
        if bbm == BbmLevel::L0 || self.parts_differ(position.level, table, block, 0) {
            self.report(Rule::BreakBeforeMake, detail);
        } else if bbm < BbmLevel::L3 && !has_nt {
            self.report(Rule::BlockSizeChange, detail);
        }
    }

    /// Returns whether an entry of a table below `level`, or of a table below that one, does not map its
    /// part of a block, from `offset` on, with its memory type, as is required at every FEAT_BBM level.
    fn parts_differ(
        &self,
        level: Level,
        table: TableAddress,
        block: Descriptor,
        offset: u64,
    ) -> bool {
        let Some(below) = level.child() else { return false };
        let entries = self.tables.table_states.get(&table).map(|table| &table.entries);
        entries.into_iter().flatten().any(|(index, entry)| {
            let offset = offset + index * self.setup.geometry.span(below);
            match entry.kind(below) {
                EntryKind::Table(child) => self.parts_differ(below, child, block, offset),
                _ => {
                    let part = block.block_part(below, offset);
                    entry.is_valid() && entry.with_contiguous(false).needs_break(part)
                }
            }
        })
    }

    /// Returns whether a CPU may hold the block of an entry as it was before nT was set.
    fn is_held_without_nt(&self, position: &EntryPosition) -> bool {
        let mut held = self.tlbs.of_entry(position.entry).map(|stale| &stale.entry);
        held.any(|held| held.table.is_none() && !held.old.has_nt())
    }

    fn change_in_place(&mut self, position: &EntryPosition, old: Descriptor, new: Descriptor) {
        if old.has_nt() && !new.has_nt() {
            // The block is in use like a new one.
            self.check_invalidated(position, new);
        }
        let (a, b) = (old.attributes(), new.attributes());
        let restricts = permits_more(a, b) || (new.has_nt() && !old.has_nt());
        let relaxes = permits_more(b, a);
        for (applies, change) in
            [(restricts, EntryChange::Restricted), (relaxes, EntryChange::Relaxed)]
        {
            // CPUs do not cache an entry whose access flag is clear or whose nT is set.
            if applies && a.is_accessed && !old.has_nt() {
                self.add_stale(position, old, change, false);
            }
        }
        if restricts && !a.is_accessed {
            self.restrict_aged(position, new);
        }
        if a.execute && !b.execute {
            let size = self.setup.geometry.span(position.level);
            self.caches.restrict_execution(old.address(), size);
        }
        // CPUs keep the old entry after ageing: a later restriction must invalidate it.
        let is_known = |stale: &StaleEntry| stale.entry.old == old;
        if a.is_accessed && !b.is_accessed && !self.tlbs.of_entry(position.entry).any(is_known) {
            self.add_stale(position, old, EntryChange::Relaxed, false);
        }
        if relaxes {
            self.check_leaf(position, new, a.execute);
        }
    }

    /// Restricts an aged entry: CPUs may hold the one before the ageing, which permits more.
    fn restrict_aged(&mut self, position: &EntryPosition, new: Descriptor) {
        let held = self.tlbs.of_entry(position.entry).map(|stale| &stale.entry);
        let held = held.filter(|held| held.change == EntryChange::Relaxed);
        let aged: Vec<_> = held.map(|held| held.old).collect();
        for old in aged.into_iter().filter(|old| permits_more(old.attributes(), new.attributes())) {
            self.add_stale(position, old, EntryChange::Restricted, false);
        }
    }

    fn add_stale(
        &mut self,
        position: &EntryPosition,
        old: Descriptor,
        change: EntryChange,
        is_below_unlinked_table: bool,
    ) {
        let table = match old.kind(position.level) {
            EntryKind::Table(child) => Some(child),
            _ => None,
        };
        let entry = ChangedEntry {
            position: *position,
            old,
            size: self.setup.geometry.span(position.level),
            change,
            table,
            is_below_unlinked_table,
            cause: self.current(),
        };
        self.tlbs.add(self.event_index, entry);
    }

    /// Handles a valid entry that is made invalid or replaced.
    fn remove_entry(&mut self, cpu: usize, position: &EntryPosition, old: Descriptor) {
        self.check_cmos_complete(cpu);
        if !old.has_nt() || !old.is_leaf(position.level) {
            self.add_stale(position, old, EntryChange::Removed, false);
        }
        match old.kind(position.level) {
            EntryKind::Leaf(phys) => {
                self.live_leaves.remove(position.level, old);
                self.tables.broken_leaves.insert(position.entry, old);
                let size = self.setup.geometry.span(position.level);
                self.caches.unmap(phys, size);
                self.writable_unmarked_ranges.remove(position.ipa, size);
            }
            EntryKind::Table(child) => self.unlink(child),
            _ => {}
        }
    }

    fn unlink(&mut self, child: TableAddress) {
        let subtree = self.tables.subtree(child);
        for (position, leaf) in subtree.leaves {
            self.live_leaves.remove(position.level, leaf);
            let size = self.setup.geometry.span(position.level);
            self.add_stale(&position, leaf, EntryChange::Removed, true);
            self.caches.unmap(leaf.address(), size);
            self.writable_unmarked_ranges.remove(position.ipa, size);
        }
        for at in subtree.tables {
            if let Some(table) = self.tables.table_states.get_mut(&at) {
                table.is_linked = false;
                table.unlinked_at = Some(self.event_index);
            }
        }
    }
}

/// Returns whether a change of a leaf requires a break because of the Contiguous bit alone.
const fn changes_contiguous(old: Descriptor, new: Descriptor) -> bool {
    let (old, new) = (old.with_nt(false), new.with_nt(false));
    old.needs_break(new) && !old.with_contiguous(false).needs_break(new.with_contiguous(false))
}

/// Returns whether a change of a leaf only adds permissions or sets the access flag: a lost one is made
/// again at the next fault.
fn only_relaxes(old: Descriptor, new: Descriptor) -> bool {
    let (a, b) = (old.attributes(), new.attributes());
    let keeps_accessed = b.is_accessed || !a.is_accessed;
    old.is_valid() && old.with_permissions(b) == new && !permits_more(a, b) && keeps_accessed
}

/// Returns whether a leaf with attributes `a` permits an access that one with `b` does not.
///
/// DBM is no permission here: it permits writes only if VTCR_EL2.HD is set, and hardware updates of the
/// dirty state are not modelled.
const fn permits_more(a: Attributes, b: Attributes) -> bool {
    (a.read && !b.read) || (a.write && !b.write) || (a.execute && !b.execute)
}
