// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The model of the tables: their contents, linkage and reference counts.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec::Vec,
};

use super::event::Setup;
use crate::{
    address::{EntryAddress, Ipa, TableAddress},
    descriptor::{Descriptor, EntryKind},
    geometry::{Geometry, Level},
};

/// The position of an entry in the tables and in the IPA space.
#[derive(Debug, Clone, Copy)]
pub(super) struct EntryPosition {
    pub(super) entry: EntryAddress,
    pub(super) level: Level,
    pub(super) ipa: Ipa,
}

/// A translation table.
#[derive(Debug)]
pub(super) struct Table {
    /// Size in bytes: several granules for a concatenated root.
    pub(super) size: u64,
    pub(super) level: Option<Level>,
    pub(super) ipa: Ipa,
    pub(super) linked: bool,
    pub(super) unlinked_at: Option<u64>,
    pub(super) entries: BTreeMap<u64, Descriptor>,
    pub(super) count: i64,
    /// The CPU whose stores to the table are not yet ordered by a barrier.
    pub(super) writer: Option<usize>,
}

impl Table {
    const fn new(size: u64, count: i64) -> Self {
        Self {
            size,
            level: None,
            ipa: Ipa(0),
            linked: false,
            unlinked_at: None,
            entries: BTreeMap::new(),
            count,
            writer: None,
        }
    }
}

/// The leaves and tables below a table.
#[derive(Debug, Default)]
pub(super) struct Subtree {
    pub(super) leaves: Vec<(EntryPosition, Descriptor)>,
    pub(super) tables: Vec<TableAddress>,
}

/// The tables of a run, keyed by address.
#[derive(Debug)]
pub(super) struct TableModel {
    pub(super) all: BTreeMap<TableAddress, Table>,
    /// Locked entries and the CPUs that locked them.
    pub(super) locked: BTreeMap<EntryAddress, usize>,
    /// Leaves that are broken and not yet replaced, while the lock is held.
    pub(super) broken: BTreeMap<EntryAddress, Descriptor>,
    pub(super) changed: BTreeSet<TableAddress>,
    /// Set when the trace first changes a reference count.
    counted: bool,
    geometry: Geometry,
    root: TableAddress,
}

impl TableModel {
    pub(super) fn new(setup: &Setup) -> Self {
        let geometry = setup.geometry;
        let tables = geometry.root_tables();
        let root = Table {
            level: Some(geometry.start()),
            linked: true,
            ..Table::new(tables * geometry.granule().size(), i64::try_from(tables).unwrap_or(1))
        };
        Self {
            all: [(setup.root, root)].into(),
            locked: BTreeMap::new(),
            broken: BTreeMap::new(),
            changed: BTreeSet::new(),
            counted: false,
            geometry,
            root: setup.root,
        }
    }

    /// Returns the table that contains an entry, and the table's address.
    pub(super) fn holding(&mut self, entry: EntryAddress) -> Option<(TableAddress, &mut Table)> {
        let (at, table) = self.all.range_mut(..=TableAddress(entry.0)).next_back()?;
        (entry.0 < at.0 + table.size).then_some((*at, table))
    }

    pub(super) fn allocate(&mut self, cpu: usize, table: TableAddress) {
        let zeroed = Table { writer: Some(cpu), ..Table::new(self.geometry.granule().size(), 1) };
        self.all.insert(table, zeroed);
    }

    /// Removes a table and returns its reference count.
    pub(super) fn free(&mut self, table: TableAddress) -> Option<i64> {
        self.changed.remove(&table);
        self.all.remove(&table).map(|table| table.count)
    }

    pub(super) fn is_linked(&self, table: TableAddress) -> bool {
        self.all.get(&table).is_some_and(|table| table.linked)
    }

    pub(super) fn unlinked_at(&self, table: TableAddress) -> Option<u64> {
        self.all.get(&table)?.unlinked_at
    }

    /// Records a barrier, which orders the stores of a CPU.
    pub(super) fn publish(&mut self, cpu: usize) {
        for table in self.all.values_mut() {
            if table.writer == Some(cpu) {
                table.writer = None;
            }
        }
    }

    pub(super) fn change_references(&mut self, table: TableAddress, change: i64) {
        self.counted = true;
        if let Some((at, table)) = self.holding(EntryAddress(table.0)) {
            table.count += change;
            self.changed.insert(at);
        }
    }

    /// Removes and returns the entries that a CPU has locked.
    pub(super) fn take_locked_by(&mut self, cpu: usize) -> Vec<EntryAddress> {
        let locked = self.locked.extract_if(.., |_, owner| *owner == cpu);
        locked.map(|(entry, _)| entry).collect()
    }

    /// Returns the changed tables with a wrong count: address, count, number of valid entries.
    /// Returns none for a trace without reference counts.
    pub(super) fn take_miscounted(&mut self) -> Vec<(TableAddress, i64, usize)> {
        let changed = core::mem::take(&mut self.changed);
        let counted = changed.into_iter().filter(|_| self.counted);
        counted
            .filter_map(|at| {
                let table = self.all.get(&at)?;
                let valid = table.entries.values().filter(|e| e.is_valid()).count();
                let own = table.size / self.geometry.granule().size();
                let right = i64::try_from(own + valid as u64) == Ok(table.count);
                (!right).then_some((at, table.count, valid))
            })
            .collect()
    }

    /// Returns the leaves, in changed and linked tables, whose contiguous run is incomplete or
    /// inconsistent.
    pub(super) fn uneven_runs(&self) -> Vec<(Ipa, Descriptor)> {
        let mut found = Vec::new();
        let tables = self.changed.iter().filter_map(|at| self.all.get(at));
        for table in tables.filter(|table| table.linked) {
            let Some(level) = table.level else { continue };
            let count = level.contiguous(self.geometry.granule());
            let span = self.geometry.span(level);
            for (index, entry) in &table.entries {
                if !entry.is_leaf(level) || !entry.is_contiguous() {
                    continue;
                }
                let first = index & !(count - 1);
                let start = entry.address().align_down(count * span);
                let fits = |n: u64| {
                    table.entries.get(&(first + n)).is_some_and(|other| {
                        other.is_valid()
                            && other.agrees(*entry)
                            && other.address() == start + n * span
                    })
                };
                if count == 1 || !(0..count).all(fits) {
                    found.push((table.ipa + index * span, *entry));
                }
            }
        }
        found
    }

    /// Returns whether the contiguous run of an entry still has any contiguous entry.
    pub(super) fn run_remains(&mut self, entry: EntryAddress, level: Level) -> bool {
        let count = level.contiguous(self.geometry.granule());
        let Some((at, table)) = self.holding(entry) else {
            return false;
        };
        let first = ((entry.0 - at.0) / 8) & !(count - 1);
        let mut run = table.entries.range(first..first + count);
        table.linked && run.any(|(_, entry)| entry.is_contiguous())
    }

    /// Returns a linked table with all tables and leaves below it.
    pub(super) fn subtree(&self, table: TableAddress) -> Subtree {
        let mut found = Subtree::default();
        self.collect(table, &mut found);
        found
    }

    fn collect(&self, at: TableAddress, found: &mut Subtree) {
        let Some((table, level)) = self.all.get(&at).and_then(|t| Some((t, t.level?))) else {
            return;
        };
        found.tables.push(at);
        for (index, descriptor) in &table.entries {
            match descriptor.kind(level) {
                EntryKind::Leaf(_) => {
                    let position = EntryPosition {
                        entry: at.entry(*index),
                        level,
                        ipa: table.ipa + index * self.geometry.span(level),
                    };
                    found.leaves.push((position, *descriptor));
                }
                EntryKind::Table(child) => self.collect(child, found),
                _ => {}
            }
        }
    }

    /// Returns the first writable leaf that overlaps a range.
    pub(super) fn writable_in(&self, ipa: Ipa, size: u64) -> Option<Ipa> {
        let leaves = self.subtree(self.root).leaves.into_iter();
        leaves
            .filter(|(_, leaf)| leaf.attributes().write)
            .map(|(position, _)| (position.ipa, self.geometry.span(position.level)))
            .find(|(at, span)| *at < ipa + size && ipa < *at + *span)
            .map(|(at, _)| at)
    }
}
