// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stage-2 tables of the simulation, allocated when they are first used.

use std::cell::{Cell, OnceCell, RefCell};

use granule_stage2::{EntryAddress, TableAddress, descriptor::Descriptor};

/// Host address of the tables, apart from the memory under test.
const BASE: u64 = 1 << 46;
const SHIFT: u32 = 12;
const ENTRIES: usize = 512;

type Entries = Box<[Cell<u64>]>;

/// A pool of 4K tables.
#[derive(Debug)]
pub(super) struct Tables {
    tables: Box<[OnceCell<Entries>]>,
    references: Box<[Cell<u32>]>,
    free: RefCell<Vec<u32>>,
    /// Number of tables that were ever in use.
    made: Cell<usize>,
}

fn index(address: u64) -> usize {
    usize::try_from((address - BASE) >> SHIFT).unwrap_or(usize::MAX)
}

impl Tables {
    /// Returns a pool of `most` tables, the first `root` of them in use.
    pub(super) fn new(root: usize, most: usize) -> Self {
        let tables = Self {
            tables: (0..most).map(|_| OnceCell::new()).collect(),
            references: (0..most).map(|_| Cell::new(1)).collect(),
            free: RefCell::new(Vec::new()),
            made: Cell::new(0),
        };
        for _ in 0..root {
            let _ = tables.allocate();
        }
        tables
    }

    pub(super) const fn root(&self) -> TableAddress {
        TableAddress(BASE)
    }

    /// Returns a zeroed table, or `None` when the pool is exhausted.
    pub(super) fn allocate(&self) -> Option<TableAddress> {
        let number = self.free.borrow_mut().pop().map_or_else(
            || {
                let number = self.made.get();
                self.made.set(number + 1);
                number
            },
            |number| number as usize,
        );
        let entries = self.tables.get(number)?;
        let zeroes = || (0..ENTRIES).map(|_| Cell::new(0)).collect();
        entries.get_or_init(zeroes).iter().for_each(|e| e.set(0));
        self.references[number].set(1);
        Some(TableAddress(BASE + ((number as u64) << SHIFT)))
    }

    pub(super) fn free(&self, table: TableAddress) {
        let number = u32::try_from(index(table.0)).unwrap_or(u32::MAX);
        self.free.borrow_mut().push(number);
    }

    fn entry(&self, entry: EntryAddress) -> &Cell<u64> {
        let at = usize::try_from((entry.0 >> 3) % ENTRIES as u64).unwrap_or(0);
        match self.tables[index(entry.0)].get() {
            Some(entries) => &entries[at],
            None => panic!("{:#x} is not in a table in use", entry.0),
        }
    }

    pub(super) fn load(&self, entry: EntryAddress) -> Descriptor {
        Descriptor(self.entry(entry).get())
    }

    pub(super) fn store(&self, entry: EntryAddress, new: Descriptor) {
        self.entry(entry).set(new.0);
    }

    /// Returns the reference count of a table.
    pub(super) fn references(&self, table: TableAddress) -> &Cell<u32> {
        &self.references[index(table.0)]
    }
}
