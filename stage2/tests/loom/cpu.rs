// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory of a few tables, and the operations of one CPU on it.
//!
//! The first two entries of each table are loom atomics. The others are plain values, which only
//! change before the table is linked. Each CPU has one free table of its own.

use std::{cell::RefCell, collections::BTreeMap, sync::Mutex};

use granule_stage2::{
    EntryAddress, Operations, PhysAddr, TableAddress,
    descriptor::Descriptor,
    operations::{Dsb, Order, Tlbi, UnlinkedTable, Vmid},
};
use loom::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use crate::{PAGE, ROOT, TABLES};

pub struct LoomMemory {
    atomic_entries: Vec<[AtomicU64; 2]>,
    counts: Vec<AtomicU64>,
    plain_entries: Mutex<BTreeMap<EntryAddress, Descriptor>>,
}

impl LoomMemory {
    pub fn new() -> Self {
        let all = 0..4 + TABLES;
        Self {
            atomic_entries: all.clone().map(|_| [AtomicU64::new(0), AtomicU64::new(0)]).collect(),
            counts: all.map(|_| AtomicU64::new(1)).collect(),
            plain_entries: Mutex::default(),
        }
    }

    fn table_index(table: TableAddress) -> usize {
        usize::try_from((table.0 - ROOT) / PAGE).unwrap()
    }

    fn atomic_entry(&self, entry: EntryAddress) -> Option<&AtomicU64> {
        let index = usize::try_from(entry.0 % PAGE / 8).unwrap();
        self.atomic_entries[Self::table_index(TableAddress(entry.0))].get(index)
    }
}

/// One CPU: its free tables and the tables that it has deferred.
pub struct LoomCpu {
    memory: Arc<LoomMemory>,
    pub own_tables: RefCell<Vec<TableAddress>>,
    pub deferred_tables: RefCell<Vec<UnlinkedTable>>,
}

impl LoomCpu {
    pub fn new(memory: &Arc<LoomMemory>, index: u64) -> Self {
        Self {
            memory: Arc::clone(memory),
            own_tables: RefCell::new(vec![TableAddress(ROOT + (4 + index) * PAGE)]),
            deferred_tables: RefCell::default(),
        }
    }
}

impl Operations for LoomCpu {
    fn load(&self, entry: EntryAddress) -> Descriptor {
        match self.memory.atomic_entry(entry) {
            Some(hot) => Descriptor(hot.load(Ordering::Acquire)),
            None => {
                self.memory.plain_entries.lock().unwrap().get(&entry).copied().unwrap_or_default()
            }
        }
    }

    fn store(&self, entry: EntryAddress, new: Descriptor, order: Order) {
        let ordering = match order {
            Order::Plain => Ordering::Relaxed,
            Order::Release => Ordering::Release,
        };
        match self.memory.atomic_entry(entry) {
            Some(hot) => hot.store(new.0, ordering),
            None => drop(self.memory.plain_entries.lock().unwrap().insert(entry, new)),
        }
    }

    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        let hot = self.memory.atomic_entry(entry).expect("only the first two entries change");
        hot.compare_exchange(old.0, new.0, Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
            .map_err(Descriptor)
    }

    fn allocate(&self) -> Option<TableAddress> {
        self.own_tables.borrow_mut().pop()
    }
    fn free(&self, table: TableAddress) {
        self.own_tables.borrow_mut().push(table);
    }
    fn defer_free(&self, unlinked: UnlinkedTable) {
        self.deferred_tables.borrow_mut().push(unlinked);
    }
    fn take_references(&self, table: TableAddress, count: u32) {
        self.memory.counts[LoomMemory::table_index(table)]
            .fetch_add(count.into(), Ordering::Relaxed);
    }
    fn drop_references(&self, table: TableAddress, count: u32) -> u32 {
        let count = u64::from(count);
        let before =
            self.memory.counts[LoomMemory::table_index(table)].fetch_sub(count, Ordering::AcqRel);
        u32::try_from(before - count).unwrap()
    }
    fn references(&self, table: TableAddress) -> u32 {
        let count = self.memory.counts[LoomMemory::table_index(table)].load(Ordering::Acquire);
        u32::try_from(count).unwrap()
    }
    fn dsb(&self, _: Dsb) {}
    fn isb(&self) {}
    fn tlbi(&self, _: Tlbi) {}
    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        vmid
    }
    fn clean_invalidate(&self, _: PhysAddr, _: u64) {}
    fn invalidate_icache(&self, _: Option<(PhysAddr, u64)>) {}
    fn pause(&self) {
        loom::thread::yield_now();
    }
}
