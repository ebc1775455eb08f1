// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The model of the tables: their contents, linkage and reference counts.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec::Vec,
};

use super::{
    entry::{InputAddress, TableEntry},
    event::{Cause, Setup},
};
use crate::{
    address::{EntryAddress, Ipa, TableAddress},
    descriptor::{Descriptor, EntryKind},
    geometry::{Geometry, Level},
};

/// The position of an entry in the tables, and the first input address that it translates.
#[derive(Debug, Clone, Copy)]
pub(super) struct EntryPosition<A = Ipa> {
    pub(super) entry: EntryAddress,
    pub(super) level: Level,
    pub(super) ipa: A,
}

#[derive(Debug)]
pub(super) struct TableState<E: TableEntry = Descriptor> {
    /// Size in bytes: several granules for a concatenated root.
    pub(super) size: u64,
    pub(super) level: Option<Level>,
    pub(super) ipa: E::Input,
    pub(super) is_linked: bool,
    pub(super) unlinked_at: Option<u64>,
    pub(super) entries: BTreeMap<u64, E>,
    pub(super) reference_count: i64,
    /// The CPU whose stores to the table no barrier has ordered yet.
    pub(super) writer: Option<usize>,
}

impl<E: TableEntry> TableState<E> {
    const fn new(size: u64, reference_count: i64) -> Self {
        Self {
            size,
            level: None,
            ipa: E::Input::LOWEST,
            is_linked: false,
            unlinked_at: None,
            entries: BTreeMap::new(),
            reference_count,
            writer: None,
        }
    }
}

/// The leaves and tables below a table.
#[derive(Debug)]
pub(super) struct Subtree<E: TableEntry = Descriptor> {
    pub(super) leaves: Vec<(EntryPosition<E::Input>, E)>,
    pub(super) tables: Vec<TableAddress>,
}

/// The tables of a run, keyed by address.
#[derive(Debug)]
pub(super) struct TableModel<E: TableEntry = Descriptor> {
    pub(super) table_states: BTreeMap<TableAddress, TableState<E>>,
    /// Locked entries and the stores that locked them.
    pub(super) locked_entries: BTreeMap<EntryAddress, Cause>,
    /// Leaves that are broken and not yet replaced, while the lock is held.
    pub(super) broken_leaves: BTreeMap<EntryAddress, E>,
    pub(super) changed_tables: BTreeSet<TableAddress>,
    /// Tables with a `writer`, or that had one.
    unpublished_tables: BTreeSet<TableAddress>,
    /// Flag set when the trace first changes a reference count.
    counts_references: bool,
    geometry: Geometry,
}

impl TableModel {
    /// Returns the model of a stage-2 tree with an empty root.
    pub(super) fn of_stage2(setup: &Setup) -> Self {
        let geometry = setup.geometry;
        let tables = geometry.root_tables();
        let root = TableState {
            level: Some(geometry.start_level()),
            is_linked: true,
            ..TableState::new(
                tables * geometry.granule().size(),
                i64::try_from(tables).unwrap_or(1),
            )
        };
        let mut model = Self::new(geometry);
        model.table_states.insert(setup.root, root);
        model
    }

    /// Returns the first writable leaf that overlaps a range, of the tree with this root.
    pub(super) fn first_writable_leaf(
        &self,
        root: TableAddress,
        ipa: Ipa,
        size: u64,
    ) -> Option<Ipa> {
        let leaves = self.subtree(root).leaves.into_iter();
        leaves
            .filter(|(_, leaf)| leaf.attributes().write)
            .map(|(position, _)| (position.ipa, self.geometry.span(position.level)))
            .find(|(at, span)| *at < ipa + size && ipa < *at + *span)
            .map(|(at, _)| at)
    }
}

impl<E: TableEntry> TableModel<E> {
    /// Returns the model of tables without a root.
    pub(super) fn new(geometry: Geometry) -> Self {
        Self {
            table_states: BTreeMap::new(),
            locked_entries: BTreeMap::new(),
            broken_leaves: BTreeMap::new(),
            changed_tables: BTreeSet::new(),
            unpublished_tables: BTreeSet::new(),
            counts_references: false,
            geometry,
        }
    }

    pub(super) fn table_containing(
        &mut self,
        entry: EntryAddress,
    ) -> Option<(TableAddress, &mut TableState<E>)> {
        let (at, table) = self.table_states.range_mut(..=TableAddress(entry.0)).next_back()?;
        (entry.0 < at.0 + table.size).then_some((*at, table))
    }

    pub(super) fn allocate(&mut self, cpu: usize, table: TableAddress) {
        let zeroed =
            TableState { writer: Some(cpu), ..TableState::new(self.geometry.granule().size(), 1) };
        self.table_states.insert(table, zeroed);
        self.unpublished_tables.insert(table);
    }

    /// Adds a table with these entries, whose stores by `writer` no barrier has ordered.
    pub(super) fn adopt(
        &mut self,
        table: TableAddress,
        entries: BTreeMap<u64, E>,
        writer: Option<usize>,
    ) {
        let size = self.geometry.granule().size();
        self.table_states.insert(table, TableState { entries, writer, ..TableState::new(size, 1) });
        self.unpublished_tables.insert(table);
    }

    pub(super) fn free(&mut self, table: TableAddress) -> Option<i64> {
        self.changed_tables.remove(&table);
        self.table_states.remove(&table).map(|table| table.reference_count)
    }

    pub(super) fn is_linked(&self, table: TableAddress) -> bool {
        self.table_states.get(&table).is_some_and(|table| table.is_linked)
    }

    pub(super) fn unlinked_at(&self, table: TableAddress) -> Option<u64> {
        self.table_states.get(&table)?.unlinked_at
    }

    /// Records a store of a CPU to an entry. Returns its table, and its position if the table is
    /// linked; `None` if the entry belongs to no table. A release orders earlier stores, not itself.
    pub(super) fn store(
        &mut self,
        cpu: usize,
        entry: EntryAddress,
        new: E,
    ) -> Option<(TableAddress, Option<EntryPosition<E::Input>>)> {
        let geometry = self.geometry;
        let (at, table) = self.table_containing(entry)?;
        let index = (entry.0 - at.0) / 8;
        if new == E::EMPTY {
            table.entries.remove(&index);
        } else {
            table.entries.insert(index, new);
        }
        table.writer = Some(cpu);
        let base = table.ipa;
        let position = table.level.filter(|_| table.is_linked).map(|level| {
            let ipa = base + index * geometry.span(level);
            EntryPosition { entry, level, ipa }
        });
        self.unpublished_tables.insert(at);
        Some((at, position))
    }

    /// Records a barrier, which orders the stores of a CPU.
    pub(super) fn publish_stores(&mut self, cpu: usize) {
        let states = &mut self.table_states;
        self.unpublished_tables.retain(|table| {
            let Some(state) = states.get_mut(table) else { return false };
            state.writer = state.writer.filter(|writer| *writer != cpu);
            state.writer.is_some()
        });
    }

    pub(super) fn change_references(&mut self, table: TableAddress, change: i64) {
        self.counts_references = true;
        if let Some((at, table)) = self.table_containing(EntryAddress(table.0)) {
            table.reference_count += change;
            self.changed_tables.insert(at);
        }
    }

    /// Removes and returns the entries that a CPU has locked.
    pub(super) fn take_locked_by(&mut self, cpu: usize) -> Vec<(EntryAddress, Cause)> {
        self.locked_entries.extract_if(.., |_, owner| usize::from(owner.cpu) == cpu).collect()
    }

    /// Returns the changed tables with a wrong count: address, count, number of valid entries.
    /// Returns none for a trace without reference counts.
    pub(super) fn take_miscounted(&mut self) -> Vec<(TableAddress, i64, usize)> {
        let changed = core::mem::take(&mut self.changed_tables);
        let counted = changed.into_iter().filter(|_| self.counts_references);
        counted
            .filter_map(|at| {
                let table = self.table_states.get(&at)?;
                let valid = table.entries.values().filter(|e| e.is_valid()).count();
                let own = table.size / self.geometry.granule().size();
                let right = i64::try_from(own + valid as u64) == Ok(table.reference_count);
                (!right).then_some((at, table.reference_count, valid))
            })
            .collect()
    }

    /// Returns the leaves of changed, linked tables whose contiguous run is incomplete or
    /// inconsistent.
    pub(super) fn inconsistent_runs(&self) -> Vec<(E::Input, E)> {
        let mut found = Vec::new();
        let tables = self.changed_tables.iter().filter_map(|at| self.table_states.get(at));
        for table in tables.filter(|table| table.is_linked) {
            let Some(level) = table.level else { continue };
            let count = level.contiguous_entries(self.geometry.granule());
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
                            && other.may_share_run(*entry)
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

    /// Returns whether the run of an entry still has a contiguous entry.
    pub(super) fn run_remains(&mut self, entry: EntryAddress, level: Level) -> bool {
        let count = level.contiguous_entries(self.geometry.granule());
        let Some((at, table)) = self.table_containing(entry) else {
            return false;
        };
        let first = ((entry.0 - at.0) / 8) & !(count - 1);
        let mut run = table.entries.range(first..first + count);
        table.is_linked && run.any(|(_, entry)| entry.is_contiguous())
    }

    /// Returns a linked table with all tables and leaves below it.
    pub(super) fn subtree(&self, table: TableAddress) -> Subtree<E> {
        let mut found = Subtree { leaves: Vec::new(), tables: Vec::new() };
        self.collect_subtree(table, &mut found);
        found
    }

    fn collect_subtree(&self, at: TableAddress, found: &mut Subtree<E>) {
        let Some((table, level)) = self.table_states.get(&at).and_then(|t| Some((t, t.level?)))
        else {
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
                EntryKind::Table(child) => self.collect_subtree(child, found),
                _ => {}
            }
        }
    }
}
