// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rules for an entry of the kernel that becomes valid, and for a root.

use alloc::{format, vec::Vec};

use super::{
    checker::{NewTable, Stage1Checker, kernel_address},
    entry::{Conflict, Stage1Entry},
};
use crate::{
    address::{TableAddress, VirtAddr},
    check::{
        entry::TableEntry,
        event::StoreKind,
        rule::Rule,
        stale_entry::{EntryChange, StaleEntry},
        table_model::EntryPosition,
    },
    descriptor::EntryKind,
    engine::BbmLevel,
    geometry::Level,
};

type Position = EntryPosition<VirtAddr>;

impl Stage1Checker {
    /// Handles an invalid entry that becomes valid.
    pub(super) fn make_valid(&mut self, position: &Position, new: Stage1Entry, kind: StoreKind) {
        self.check_invalidated(position, new);
        self.make_equal(position, new, kind);
    }

    /// Handles a valid entry at addresses that no CPU translates otherwise.
    pub(super) fn make_equal(&mut self, position: &Position, new: Stage1Entry, kind: StoreKind) {
        if let EntryKind::Table(child) = new.kind(position.level) {
            self.link(position, child, kind);
        }
    }

    /// Checks that no CPU may hold an entry of the same addresses that conflicts with a new one.
    pub(super) fn check_invalidated(&mut self, position: &Position, new: Stage1Entry) {
        let size = self.geometry.span(position.level);
        let conflict = self.tlbs.overlapping(position.ipa, size);
        let conflict = conflict.filter(|stale| stale.entry.change == EntryChange::Removed);
        let conflict = conflict.into_iter().find(|stale| self.conflicts(stale, position, new));
        if let Some(stale) = conflict.cloned() {
            let (at, was) = (kernel_address(stale.entry.position.ipa), stale.entry.old);
            let detail = format!("{at}: {was:?} may be held, {new:?} is made");
            self.report(Rule::MakeBeforeInvalidated, detail, Some(stale.entry.cause));
        }
    }

    /// Returns whether a held entry and a new one that overlaps it require an invalidation in between.
    /// The leaves below a new table are compared by themselves.
    fn conflicts(
        &self,
        stale: &StaleEntry<Stage1Entry>,
        position: &Position,
        new: Stage1Entry,
    ) -> bool {
        let (old, level) = (stale.entry.old, stale.entry.position.level);
        let is_leaf = new.is_leaf(position.level);
        match stale.entry.table {
            // A walker may still read the table, and translate by what it finds there.
            Some(_) if is_leaf => level >= position.level,
            Some(table) => level == position.level && new.kind(level) != EntryKind::Table(table),
            // At level 2 of FEAT_BBM, sizes may change; both must map the same memory.
            None if is_leaf && level == position.level => {
                let conflict = old.conflict(new, self.types);
                conflict.is_some_and(|what| what != Conflict::Contiguous || self.bbm < BbmLevel::L2)
            }
            None if is_leaf && self.bbm >= BbmLevel::L2 => {
                self.parts_conflict((old, level), position, new)
            }
            None => is_leaf || level <= position.level,
        }
    }

    /// Compares leaves of different sizes: the larger one's part with the smaller one.
    fn parts_conflict(
        &self,
        (old, old_level): (Stage1Entry, Level),
        position: &Position,
        new: Stage1Entry,
    ) -> bool {
        let span = |level| self.geometry.span(level);
        let (block, part, level) = match old_level < position.level {
            true => (old, new, position.level),
            false => (new, old, old_level),
        };
        let offset = TableEntry::address(part).offset_in(span(old_level.min(position.level)));
        let own = block.block_part(level, offset);
        own.conflict(part.without_contiguous(), self.types).is_some()
    }

    fn link(&mut self, position: &Position, child: TableAddress, kind: StoreKind) {
        let Some(below) = position.level.child() else { return };
        if !self.adopt(child) {
            return;
        }
        let Some(table) = self.tables.table_states.get_mut(&child) else { return };
        let is_unpublished = !kind.is_release() && table.writer.is_some();
        (table.level, table.ipa, table.is_linked) = (Some(below), position.ipa, true);
        if is_unpublished {
            let detail = format!("table {:#x} at {}", child.0, kernel_address(position.ipa));
            self.report(Rule::TableNotPublished, detail, None);
        }
        self.make_entries_valid(child, kind);
    }

    /// Adds a link to a table. Returns whether it is the first one.
    fn adopt(&mut self, table: TableAddress) -> bool {
        let known = self.new_tables.remove(&table);
        if let Some(state) = self.tables.table_states.get_mut(&table).filter(|one| one.is_linked) {
            state.reference_count += 1;
            return false;
        }
        self.unknown_tables += u64::from(known.is_none());
        let unknown = || NewTable { entries: [].into(), unordered_writer: None };
        let NewTable { entries, unordered_writer } = known.unwrap_or_else(unknown);
        self.reuse_page(table);
        self.tables.adopt(table, entries, unordered_writer);
        true
    }

    /// Handles the entries of a table that a store of this kind has linked.
    fn make_entries_valid(&mut self, table: TableAddress, kind: StoreKind) {
        let Some(state) = self.tables.table_states.get(&table) else { return };
        let Some(level) = state.level else { return };
        let (base, span) = (state.ipa, self.geometry.span(level));
        let valid = state.entries.iter().filter(|(_, entry)| entry.is_valid());
        let valid: Vec<_> = valid.map(|(index, entry)| (*index, *entry)).collect();
        for (index, entry) in valid {
            let at = Position { entry: table.entry(index), level, ipa: base + index * span };
            self.make_valid(&at, entry, kind);
        }
    }

    /// Selects a root: `before` is the one that the CPU used, if no CPU uses it any more.
    /// Entries that CPUs hold by that root remain unknown: Linux changes the root with an invalidation.
    pub(in crate::check) fn select_root(
        &mut self,
        root: TableAddress,
        before: Option<TableAddress>,
    ) {
        let level = self.geometry.start_level();
        let is_linked = self.tables.is_linked(root);
        if !is_linked && self.adopt(root) {
            let base = VirtAddr((!0 << self.geometry.ipa_bits()) & ((1 << 56) - 1));
            let Some(table) = self.tables.table_states.get_mut(&root) else { return };
            (table.level, table.ipa, table.is_linked) = (Some(level), base, true);
            if table.writer.is_some() {
                let detail = format!("root {:#x}", root.0);
                self.report(Rule::TableNotPublished, detail, None);
            }
            self.make_entries_valid(root, StoreKind::Plain);
        }
        if let Some(before) = before {
            self.detach(before);
            self.forget_unlinked();
        }
    }

    /// Starts to use the tables on a CPU, whose TLB holds no entry of the regime.
    pub(in crate::check) fn start_cpu(&mut self, cpu: usize) {
        self.tlbs.set_user(cpu, true);
        self.tlbs.forget(cpu);
    }

    /// Removes unlinked tables that no CPU can walk.
    pub(in crate::check) fn forget_unlinked(&mut self) {
        let unlinked = self.tables.table_states.iter().filter(|(_, table)| !table.is_linked);
        let unlinked: Vec<_> = unlinked.map(|(at, _)| *at).collect();
        for table in unlinked {
            if self.find_walked(table).is_none() {
                self.tables.free(table);
            }
        }
    }
}
