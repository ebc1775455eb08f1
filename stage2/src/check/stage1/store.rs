// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rules for a store to a table of the kernel.

use alloc::{format, vec, vec::Vec};

use super::{
    checker::{Stage1Checker, kernel_address},
    entry::{Conflict, Stage1Entry},
};
use crate::{
    address::{EntryAddress, TableAddress, VirtAddr},
    check::{
        entry::TableEntry,
        event::StoreKind,
        rule::Rule,
        stale_entry::{ChangedEntry, EntryChange},
        table_model::EntryPosition,
    },
    descriptor::EntryKind,
    engine::BbmLevel,
    geometry::Level,
};

type Position = EntryPosition<VirtAddr>;

impl Stage1Checker {
    /// Processes a change of an entry by a CPU. Returns the position of an entry of a linked table;
    /// `None` if the entry belongs to no table of the kernel that is linked.
    pub(in crate::check) fn store(
        &mut self,
        cpu: usize,
        entry: EntryAddress,
        (old, new): (Stage1Entry, Stage1Entry),
        kind: StoreKind,
    ) -> Option<Position> {
        let (_, position) = self.tables.store(cpu, entry, new)?;
        self.tlbs.record_store(cpu, entry);
        let position = position?;
        match (old.is_valid(), new.is_valid()) {
            (true, true) => self.replace(&position, (old, new), kind),
            (true, false) => self.remove(&position, old),
            (false, true) => self.make_valid(&position, new, kind),
            (false, false) => {}
        }
        Some(position)
    }

    fn replace(
        &mut self,
        position: &Position,
        (old, new): (Stage1Entry, Stage1Entry),
        kind: StoreKind,
    ) {
        let level = position.level;
        match (old.kind(level), new.kind(level)) {
            (EntryKind::Table(a), EntryKind::Table(b)) if a == b => {}
            (EntryKind::Leaf(_), EntryKind::Leaf(_)) => self.replace_leaf(position, old, new),
            (EntryKind::Leaf(_), EntryKind::Table(table)) => {
                self.check_size(position, (old, new), (old, table));
                // CPUs that hold the block translate as before by it, unless the table permits less.
                let parts = self.parts(position.level, old, table);
                if parts.iter().any(|(part, own)| !part.is_valid() || own.permits_more_than(*part))
                {
                    self.add_stale(position, old, EntryChange::Restricted, false);
                }
                self.make_equal(position, new, kind);
            }
            (EntryKind::Table(table), EntryKind::Leaf(_)) => {
                self.check_size(position, (old, new), (new, table));
                self.add_stale(position, old, EntryChange::Removed, false);
                for (at, entry) in self.detach(table) {
                    let own = new.block_part(at.level, at.ipa - position.ipa);
                    let differs = entry.without_contiguous().conflict(own, self.types).is_some();
                    if !entry.is_leaf(at.level) || differs || entry.permits_more_than(own) {
                        self.add_stale(&at, entry, EntryChange::Removed, true);
                    }
                }
                self.make_equal(position, new, kind);
            }
            _ => {
                let detail = format!("{}: {old:?} → {new:?}", kernel_address(position.ipa));
                self.report(Rule::BreakBeforeMake, format!("{detail} (next table)"), None);
                self.remove(position, old);
                self.make_equal(position, new, kind);
            }
        }
    }

    fn replace_leaf(&mut self, position: &Position, old: Stage1Entry, new: Stage1Entry) {
        let detail = format!("{}: {old:?} → {new:?}", kernel_address(position.ipa));
        match old.conflict(new, self.types) {
            Some(Conflict::Contiguous) if self.bbm == BbmLevel::L3 => {}
            Some(Conflict::Contiguous) if self.bbm > BbmLevel::L0 => {
                self.report(Rule::BlockSizeChange, format!("{detail} (Contiguous bit)"), None);
            }
            Some(conflict) => {
                self.report(Rule::BreakBeforeMake, format!("{detail} ({conflict})"), None);
            }
            None => {}
        }
        if old.has_nt() && !new.has_nt() {
            self.check_invalidated(position, new);
        }
        if old.permits_more_than(new) || (new.has_nt() && !old.has_nt()) {
            self.add_stale(position, old, EntryChange::Restricted, false);
        }
    }

    /// Returns whether a CPU may hold the block of an entry as it was before nT was set.
    fn is_held_without_nt(&self, position: &Position) -> bool {
        let mut held = self.tlbs.of_entry(position.entry).map(|stale| &stale.entry);
        held.any(|held| held.table.is_none() && !held.old.has_nt())
    }

    /// Checks a block that replaces the table of its parts, or is replaced by it.
    fn check_size(
        &mut self,
        position: &Position,
        (old, new): (Stage1Entry, Stage1Entry),
        (block, table): (Stage1Entry, TableAddress),
    ) {
        let detail = format!("{}: {old:?} → {new:?}", kernel_address(position.ipa));
        let differs = |(part, own): (Stage1Entry, Stage1Entry)| {
            // The parts may have the Contiguous bit, which is a change of size too.
            let part = part.without_contiguous();
            let (old, new) = if old == block { (own, part) } else { (part, own) };
            part.is_valid() && old.conflict(new, self.types).is_some()
        };
        let conflicts = self.parts(position.level, block, table).into_iter().any(differs);
        if self.bbm == BbmLevel::L0 || conflicts {
            self.report(Rule::BreakBeforeMake, format!("{detail} (size)"), None);
        } else if self.bbm < BbmLevel::L3 && (!block.has_nt() || self.is_held_without_nt(position))
        {
            self.report(Rule::BlockSizeChange, detail, None);
        }
    }

    /// Returns the entries of a table below `level`, and of the tables below it, that are no tables, each
    /// with the part of the block at its addresses.
    fn parts(
        &self,
        level: Level,
        block: Stage1Entry,
        table: TableAddress,
    ) -> Vec<(Stage1Entry, Stage1Entry)> {
        let Some(below) = level.child() else { return Vec::new() };
        let linked = self.tables.table_states.get(&table).filter(|table| table.is_linked);
        let new = self.new_tables.get(&table).map(|table| &table.entries);
        let Some(entries) = linked.map(|table| &table.entries).or(new) else { return Vec::new() };
        let span = self.geometry.span(below);
        let parts = (0..self.geometry.granule().entries()).flat_map(|index| {
            let entry = entries.get(&index).copied().unwrap_or_default();
            let own = block.block_part(below, index * span);
            match entry.kind(below) {
                EntryKind::Table(child) => self.parts(below, own, child),
                _ => vec![(entry, own)],
            }
        });
        parts.collect()
    }

    pub(super) fn add_stale(
        &mut self,
        position: &Position,
        old: Stage1Entry,
        change: EntryChange,
        is_below_unlinked_table: bool,
    ) {
        let table = match old.kind(position.level) {
            EntryKind::Table(child) => Some(child),
            _ => None,
        };
        let size = self.geometry.span(position.level);
        let (position, cause) = (*position, self.current);
        let entry =
            ChangedEntry { position, old, size, change, table, is_below_unlinked_table, cause };
        self.tlbs.add(self.event, entry);
    }

    /// Handles a valid entry that is made invalid or replaced.
    fn remove(&mut self, position: &Position, old: Stage1Entry) {
        self.add_stale(position, old, EntryChange::Removed, false);
        if let EntryKind::Table(child) = old.kind(position.level) {
            self.unlink(child);
        }
    }

    /// Removes a link to a table; with the last one, the table and its leaves are unreachable.
    fn unlink(&mut self, child: TableAddress) {
        for (position, entry) in self.detach(child) {
            self.add_stale(&position, entry, EntryChange::Removed, true);
        }
    }

    /// Removes a link to a table. Returns the valid entries that become unreachable with the last one.
    pub(super) fn detach(&mut self, child: TableAddress) -> Vec<(Position, Stage1Entry)> {
        let Some(table) = self.tables.table_states.get_mut(&child) else {
            return Vec::new();
        };
        table.reference_count -= 1;
        if table.reference_count > 0 || !table.is_linked {
            return Vec::new();
        }
        table.is_linked = false;
        table.unlinked_at = Some(self.event);
        let (base, level) = (table.ipa, table.level);
        let entries = table.entries.clone();
        let Some(level) = level else { return Vec::new() };
        let mut unreachable = Vec::new();
        for (index, entry) in entries.into_iter().filter(|(_, entry)| entry.is_valid()) {
            let ipa = base + index * self.geometry.span(level);
            unreachable.push((Position { entry: child.entry(index), level, ipa }, entry));
            if let EntryKind::Table(below) = entry.kind(level) {
                unreachable.extend(self.detach(below));
            }
        }
        unreachable
    }
}
