// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The contents of all pages that are tables, according to the trace.

use alloc::{collections::BTreeMap, vec::Vec};

use crate::{
    address::{PhysAddr, TableAddress},
    descriptor::{Descriptor, EntryKind},
    geometry::Level,
};

#[derive(Debug, Clone)]
pub(super) struct TablePage {
    pub(super) level: Level,
    pub(super) entries: BTreeMap<u16, u64>,
    /// The CPU whose stores no DSB has ordered.
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
    pages: BTreeMap<u64, TablePage>,
    pub(super) size: u64,
}

impl Pages {
    pub(super) const fn new(size: u64) -> Self {
        Self { pages: BTreeMap::new(), size }
    }

    pub(super) fn insert(&mut self, table: PhysAddr, page: TablePage) {
        self.pages.insert(table.0, page);
    }

    pub(super) fn get(&self, table: PhysAddr) -> Option<&TablePage> {
        self.pages.get(&table.0)
    }

    /// Returns the page of an entry, and the entry's index.
    pub(super) fn of_entry(&mut self, entry: PhysAddr) -> Option<(&mut TablePage, u16)> {
        let page = self.pages.get_mut(&entry.align_down(self.size).0)?;
        let index = u16::try_from(entry.offset_in(self.size) / 8).ok()?;
        Some((page, index))
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
            let Some(page) = self.pages.get_mut(&at.0) else { continue };
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
            if let Some(page) = self.pages.remove(&at.0) {
                pending.extend(page.children());
            }
        }
    }

    /// Removes the pages of a destroyed guest.
    pub(super) fn remove(&mut self, guest: usize) {
        self.pages.retain(|_, page| page.guest != Some(guest));
    }
}
