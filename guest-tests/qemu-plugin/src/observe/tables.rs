// SPDX-License-Identifier: GPL-2.0-or-later
//! The tables of a stage: which pages are tables, and a copy of their entries.
//!
//! A write of the base register makes its root tables known. Each table descriptor in a known table makes
//! another one known, and a store that overwrites the descriptor makes it unknown with its subtree.
//! A store is reported from the difference between memory and the copy: a compare-and-swap that
//! fails changes nothing, and one store may change two entries.

use std::collections::HashMap;

use granule_stage2::{
    PhysAddr,
    geometry::{Granule, Level},
};

use super::{
    machine::Machine,
    pages::{PAGE_SIZE, PageFlag, Pages},
    shape::Shape,
};

/// A page that has become a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewTable {
    /// First byte.
    pub address: PhysAddr,
    /// Level of its entries.
    pub level: Level,
    /// Size in bytes.
    pub size: u64,
    /// Indices and values of the entries that are not zero.
    pub entries: Vec<(u16, u64)>,
}

/// A change of an entry, and the tables that become reachable by it, children first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Address of the entry.
    pub entry: PhysAddr,
    /// Value before.
    pub old: u64,
    /// Value after.
    pub new: u64,
    /// Tables that become reachable.
    pub tables: Vec<NewTable>,
}

/// Value that a store writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredValue {
    /// The value is in memory.
    InMemory,
    /// The value is zero, and not yet in memory.
    Zero,
}

#[derive(Debug)]
struct Table {
    level: Level,
    granule: Granule,
    entries: Box<[u64]>,
    /// Number of entries and roots that point at the table.
    links: usize,
}

impl Table {
    /// Returns the table that an entry points at.
    fn child(&self, value: u64) -> Option<PhysAddr> {
        let is_table = self.level < Level::PAGE && value & 3 == 3;
        is_table.then(|| PhysAddr(value & 0xffff_ffff_ffff).align_down(self.granule.size()))
    }
}

/// The known tables.
#[derive(Debug, Default)]
pub struct Tables {
    tables: HashMap<u64, Table>,
    /// Number of root tables, by the address of the first.
    roots: HashMap<u64, u64>,
    /// Indicates that the first store to a page that was a table is reported.
    reports_reuse: bool,
}

impl Tables {
    /// Returns tables without a root, of which also the first store to an unlinked one is reported.
    pub fn reporting_reuse() -> Self {
        Self { reports_reuse: true, ..Self::default() }
    }

    /// Adds the root of a value of VTTBR_EL2; returns the tables that become known, children first.
    pub fn add_stage2(
        &mut self,
        machine: &dyn Machine,
        pages: &Pages,
        vttbr: u64,
        vtcr: u64,
    ) -> Vec<NewTable> {
        let root = PhysAddr(vttbr & 0xffff_ffff_fffe);
        match Shape::of_vtcr(vtcr).filter(|_| root.0 != 0) {
            Some(shape) => self.add_root(machine, pages, root, shape),
            None => Vec::new(),
        }
    }

    /// Adds a root; returns the tables that become known, children first.
    pub fn add_root(
        &mut self,
        machine: &dyn Machine,
        pages: &Pages,
        root: PhysAddr,
        shape: Shape,
    ) -> Vec<NewTable> {
        let mut added = Vec::new();
        if self.roots.contains_key(&root.0) {
            return added;
        }
        self.roots.insert(root.0, shape.roots);
        for index in 0..shape.roots {
            let address = root + index * shape.granule.size();
            self.link(machine, pages, (address, shape.start, shape.granule), &mut added);
        }
        added
    }

    /// Removes the tables of the root that starts at an address; returns whether there was one.
    pub fn remove_root(&mut self, pages: &Pages, root: PhysAddr) -> bool {
        let Some(count) = self.roots.remove(&root.0) else { return false };
        let size = self.tables.get(&root.0).map_or(0, |table| table.granule.size());
        for index in 0..count {
            self.unlink(pages, root + index * size);
        }
        true
    }

    /// Returns the changes of entries by a store of `size` bytes.
    pub fn store(
        &mut self,
        machine: &dyn Machine,
        pages: &Pages,
        (phys, size): (PhysAddr, u64),
        value: StoredValue,
    ) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut entry = phys.align_down(8);
        while entry < phys + size {
            let new = match value {
                StoredValue::InMemory => machine.read_u64(entry),
                StoredValue::Zero => Some(0),
            };
            if let Some(new) = new {
                changes.extend(self.update(machine, pages, entry, new));
            }
            entry += 8;
        }
        changes
    }

    /// Sets an entry; returns `None` if it has this value.
    fn update(
        &mut self,
        machine: &dyn Machine,
        pages: &Pages,
        entry: PhysAddr,
        new: u64,
    ) -> Option<Change> {
        let (address, index) = self.locate(entry)?;
        let table = self.tables.get_mut(&address.0)?;
        let old = std::mem::replace(&mut table.entries[index], new);
        if old == new {
            return None;
        }
        let (before, after) = (table.child(old), table.child(new));
        let (level, granule) = (table.level.child(), table.granule);
        let mut tables = Vec::new();
        if before != after {
            if let Some(before) = before {
                self.unlink(pages, before);
            }
            if let (Some(after), Some(level)) = (after, level) {
                self.link(machine, pages, (after, level, granule), &mut tables);
            }
        }
        Some(Change { entry, old, new, tables })
    }

    /// Returns the table of an entry, and its index.
    fn locate(&self, entry: PhysAddr) -> Option<(PhysAddr, usize)> {
        [Granule::K4, Granule::K16, Granule::K64].into_iter().find_map(|granule| {
            let address = entry.align_down(granule.size());
            let table = self.tables.get(&address.0)?;
            let index = usize::try_from((entry - address) / 8).ok()?;
            (table.granule == granule).then_some((address, index))
        })
    }

    /// Adds a link to a table, and the table and those that it reaches if it is not yet known.
    fn link(
        &mut self,
        machine: &dyn Machine,
        pages: &Pages,
        (address, level, granule): (PhysAddr, Level, Granule),
        added: &mut Vec<NewTable>,
    ) {
        let size = granule.size();
        if let Some(table) = self.tables.get_mut(&address.0) {
            table.links += 1;
            return;
        }
        let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
        if !machine.read(address, &mut bytes) {
            return;
        }
        let entries: Box<[u64]> =
            bytes.as_chunks().0.iter().map(|entry| u64::from_le_bytes(*entry)).collect();
        let table = Table { level, granule, entries, links: 1 };
        let used = |(index, value): (usize, &u64)| Some((u16::try_from(index).ok()?, *value));
        let entries: Vec<_> = table
            .entries
            .iter()
            .enumerate()
            .filter(|(_, value)| **value != 0)
            .filter_map(used)
            .collect();
        let children: Vec<_> =
            entries.iter().filter_map(|(_, value)| table.child(*value)).collect();
        self.tables.insert(address.0, table);
        mark(pages, address, size, true);
        for child in children {
            if let Some(level) = level.child() {
                self.link(machine, pages, (child, level, granule), added);
            }
        }
        added.push(NewTable { address, level, size, entries });
    }

    /// Removes a link to a table, and with the last one the table and those that it reaches.
    fn unlink(&mut self, pages: &Pages, address: PhysAddr) {
        let Some(table) = self.tables.get_mut(&address.0) else { return };
        table.links -= 1;
        if table.links > 0 {
            return;
        }
        let Some(table) = self.tables.remove(&address.0) else { return };
        mark(pages, address, table.granule.size(), false);
        if self.reports_reuse {
            for page in 0..table.granule.size() / PAGE_SIZE {
                pages.set(address + page * PAGE_SIZE, PageFlag::Written, false);
            }
        }
        for child in table.entries.iter().filter_map(|value| table.child(*value)) {
            self.unlink(pages, child);
        }
    }

    /// Returns the number of tables, and of entries whose copy differs from memory.
    pub fn verify(&self, machine: &dyn Machine) -> (usize, usize) {
        let differences = self.tables.iter().map(|(address, table)| {
            let entries = (0..).step_by(8).map(|offset| PhysAddr(address + offset));
            let pairs = entries.zip(&table.entries);
            pairs.filter(|(entry, copy)| machine.read_u64(*entry) != Some(**copy)).count()
        });
        (self.tables.len(), differences.sum())
    }
}

/// Sets whether the pages of a table are part of one.
fn mark(pages: &Pages, address: PhysAddr, size: u64, is_table: bool) {
    for page in 0..size / PAGE_SIZE {
        pages.set(address + page * PAGE_SIZE, PageFlag::Table, is_table);
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::machine::fake::{FakeMachine, MEMORY},
        *,
    };

    /// VTCR_EL2 of a guest with 40 address bits and 4K pages: two root tables of level 1.
    const VTCR: u64 = 0x8002_3558;
    const ROOT: u64 = MEMORY + 0x2000;
    const TABLE: u64 = MEMORY + 0x4000;
    const PAGES: u64 = MEMORY + 0x5000;

    fn level(number: u8) -> Level {
        Level::new(number).unwrap()
    }

    fn new_table(address: u64, number: u8, entries: &[(u16, u64)]) -> NewTable {
        let (address, entries) = (PhysAddr(address), entries.to_vec());
        NewTable { address, level: level(number), size: 4096, entries }
    }

    #[test]
    fn a_root_is_reported_behind_its_subtree_and_once() {
        let (machine, pages, mut tables) =
            (FakeMachine::new(8), Pages::default(), Tables::default());
        machine.write(ROOT + 8, TABLE | 3);
        machine.write(TABLE, PAGES | 3);
        machine.write(PAGES + 16, 0x1234_5003);

        let added = tables.add_stage2(&machine, &pages, ROOT | 1, VTCR);

        let leaf = new_table(PAGES, 3, &[(2, 0x1234_5003)]);
        let middle = new_table(TABLE, 2, &[(0, PAGES | 3)]);
        let root = new_table(ROOT, 1, &[(1, TABLE | 3)]);
        assert_eq!(added, [leaf, middle, root, new_table(ROOT + 4096, 1, &[])]);
        assert!(tables.add_stage2(&machine, &pages, ROOT, VTCR).is_empty());
        assert!(tables.add_stage2(&machine, &pages, 0, VTCR).is_empty());
        assert_eq!(tables.verify(&machine), (4, 0));
        machine.write(PAGES, 1);
        assert_eq!(tables.verify(&machine), (4, 1));

        assert!(tables.remove_root(&pages, PhysAddr(ROOT)));
        assert!(!tables.remove_root(&pages, PhysAddr(ROOT)));
        assert_eq!(tables.verify(&machine), (0, 0));
        assert!([ROOT, TABLE, PAGES].iter().all(|at| !pages.has(PhysAddr(*at), PageFlag::Table)));
    }

    #[test]
    fn a_store_that_links_a_table_reports_it_and_one_that_unlinks_it_forgets_it() {
        let (machine, pages, mut tables) =
            (FakeMachine::new(8), Pages::default(), Tables::default());
        tables.add_stage2(&machine, &pages, ROOT, VTCR);
        machine.write(TABLE + 8, 0x7fd);
        let mut store = |phys: u64, value: u64, size| {
            machine.write(phys, value);
            tables.store(&machine, &pages, (PhysAddr(phys), size), StoredValue::InMemory)
        };

        let linked = store(ROOT, TABLE | 3, 8);
        let again = store(ROOT, TABLE | 3, 8);
        let below = store(TABLE, 0x40_07fd, 16);
        let unlinked = store(ROOT, 0, 4);
        let forgotten = store(TABLE, 0, 8);

        let change = |entry, old, new, tables: &[NewTable]| Change {
            entry: PhysAddr(entry),
            old,
            new,
            tables: tables.to_vec(),
        };
        let table = new_table(TABLE, 2, &[(1, 0x7fd)]);
        assert_eq!(linked, [change(ROOT, 0, TABLE | 3, &[table])]);
        assert_eq!(again, []);
        assert_eq!(below, [change(TABLE, 0, 0x40_07fd, &[])]);
        assert_eq!(unlinked, [change(ROOT, TABLE | 3, 0, &[])]);
        assert_eq!(forgotten, []);
    }

    #[test]
    fn a_table_is_known_until_its_last_link_is_gone() {
        let (machine, pages, mut tables) =
            (FakeMachine::new(8), Pages::default(), Tables::default());
        tables.add_stage2(&machine, &pages, ROOT, VTCR);
        for (entry, value, known) in
            [(ROOT, TABLE | 3, 3), (ROOT + 8, TABLE | 3, 3), (ROOT, 0, 3), (ROOT + 8, 0, 2)]
        {
            machine.write(entry, value);
            tables.store(&machine, &pages, (PhysAddr(entry), 8), StoredValue::InMemory);

            assert_eq!(tables.verify(&machine), (known, 0), "{entry:#x} = {value:#x}");
        }
    }

    #[test]
    fn one_store_may_change_two_entries() {
        let (machine, pages, mut tables) =
            (FakeMachine::new(8), Pages::default(), Tables::default());
        tables.add_stage2(&machine, &pages, ROOT, VTCR);
        machine.write(ROOT + 8, 0x1_0000_07fd);
        machine.write(ROOT + 16, 0x2_0000_07fd);

        for (value, new) in
            [(StoredValue::InMemory, [0x1_0000_07fd, 0x2_0000_07fd]), (StoredValue::Zero, [0, 0])]
        {
            let changes = tables.store(&machine, &pages, (PhysAddr(ROOT + 8), 16), value);

            let found: Vec<_> = changes.iter().map(|change| (change.entry.0, change.new)).collect();
            assert_eq!(found, [(ROOT + 8, new[0]), (ROOT + 16, new[1])]);
        }
    }
}
