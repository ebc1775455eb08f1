// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The contents of all pages that are tables, according to the trace.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec::Vec,
};

use crate::{
    address::{EntryAddress, TableAddress},
    descriptor::{Descriptor, EntryKind},
    geometry::{Granule, Level},
};

#[derive(Debug, Clone)]
pub(super) struct TablePage {
    pub(super) level: Level,
    pub(super) entries: BTreeMap<u16, u64>,
    /// The CPU whose stores no barrier has ordered.
    pub(super) unordered_writer: Option<u8>,
    /// The guest whose tables contain the page, by its number.
    pub(super) guest: Option<usize>,
}

impl TablePage {
    /// Returns the entries that are not empty, by their indices.
    pub(super) fn descriptors(&self) -> BTreeMap<u64, Descriptor> {
        self.entries.iter().map(|(index, value)| (u64::from(*index), Descriptor(*value))).collect()
    }

    pub(super) fn writer(&self) -> Option<usize> {
        self.unordered_writer.map(usize::from)
    }

    fn children(&self) -> impl Iterator<Item = TableAddress> + '_ {
        self.entries.values().filter_map(|value| child(Descriptor(*value), self.level))
    }
}

/// Returns the table to which an entry points.
pub(super) fn child(entry: Descriptor, level: Level) -> Option<TableAddress> {
    match entry.kind(level) {
        EntryKind::Table(table) => Some(table),
        _ => None,
    }
}

/// Pages by their addresses; all have the same size.
#[derive(Debug)]
pub(super) struct Pages {
    pages: BTreeMap<TableAddress, TablePage>,
    /// Pages that may have an unordered writer.
    unordered: BTreeSet<TableAddress>,
    granule: Granule,
}

impl Pages {
    pub(super) const fn new(granule: Granule) -> Self {
        Self { pages: BTreeMap::new(), unordered: BTreeSet::new(), granule }
    }

    pub(super) fn insert(&mut self, table: TableAddress, page: TablePage) {
        if page.unordered_writer.is_some() {
            self.unordered.insert(table);
        }
        self.pages.insert(table, page);
    }

    pub(super) fn get(&self, table: TableAddress) -> Option<&TablePage> {
        self.pages.get(&table)
    }

    /// Returns the page of an entry, and the entry's index.
    pub(super) fn of_entry(&mut self, entry: EntryAddress) -> Option<(&mut TablePage, u16)> {
        let table = self.granule.table_containing(entry);
        let page = self.pages.get_mut(&table)?;
        let index = u16::try_from((entry.0 - table.0) / 8).ok()?;
        Some((page, index))
    }

    /// Records a store to a page that belongs to no guest.
    pub(super) fn set_writer(&mut self, entry: EntryAddress, cpu: u8) {
        let table = self.granule.table_containing(entry);
        if let Some(page) = self.pages.get_mut(&table) {
            page.unordered_writer = Some(cpu);
            self.unordered.insert(table);
        }
    }

    /// Records a barrier, which orders the stores of a CPU.
    pub(super) fn order_stores(&mut self, cpu: u8) {
        let pages = &mut self.pages;
        self.unordered.retain(|table| {
            let Some(page) = pages.get_mut(table) else { return false };
            page.unordered_writer = page.unordered_writer.filter(|writer| *writer != cpu);
            page.unordered_writer.is_some()
        });
    }

    /// Assigns a table and all tables below it to a guest, and returns them: lower ones first.
    pub(super) fn assign(
        &mut self,
        table: TableAddress,
        guest: usize,
    ) -> Vec<(TableAddress, TablePage)> {
        let mut found = Vec::new();
        let mut pending = Vec::from([table]);
        while let Some(at) = pending.pop() {
            let Some(page) = self.pages.get_mut(&at) else { continue };
            // A table that is linked twice would lead to an endless walk.
            if page.guest.replace(guest) == Some(guest) {
                continue;
            }
            pending.extend(page.children());
            found.push((at, page.clone()));
        }
        found.reverse();
        found
    }

    /// Removes a table and all tables below it.
    pub(super) fn forget(&mut self, table: TableAddress) {
        let mut pending = Vec::from([table]);
        while let Some(at) = pending.pop() {
            if let Some(page) = self.pages.remove(&at) {
                pending.extend(page.children());
            }
        }
    }

    /// Removes and returns the pages of a destroyed guest.
    pub(super) fn remove(&mut self, guest: usize) -> Vec<TableAddress> {
        let removed = self.pages.extract_if(.., |_, page| page.guest == Some(guest));
        removed.map(|(table, _)| table).collect()
    }
}
