// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory for a few tables as loom atomics, and one CPU's operations on it.
//!
//! The first two entries of each table are loom atomics; the others keep the values written before
//! the table was linked. Each CPU has one free table of its own.

use std::{cell::RefCell, collections::BTreeMap, sync::Mutex};

use granule_stage2::{
    EntryAddress, Operations, PhysAddr, TableAddress,
    descriptor::Descriptor,
    operations::{Dsb, Order, Tlbi, Unlinked, Vmid},
};
use loom::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use crate::{PAGE, ROOT, TABLES};

pub struct Memory {
    hot: Vec<[AtomicU64; 2]>,
    counts: Vec<AtomicU64>,
    cold: Mutex<BTreeMap<EntryAddress, Descriptor>>,
}

impl Memory {
    pub fn new() -> Self {
        let all = 0..4 + TABLES;
        Self {
            hot: all.clone().map(|_| [AtomicU64::new(0), AtomicU64::new(0)]).collect(),
            counts: all.map(|_| AtomicU64::new(1)).collect(),
            cold: Mutex::default(),
        }
    }

    fn number(table: TableAddress) -> usize {
        usize::try_from((table.0 - ROOT) / PAGE).unwrap()
    }

    fn hot(&self, entry: EntryAddress) -> Option<&AtomicU64> {
        let index = usize::try_from(entry.0 % PAGE / 8).unwrap();
        self.hot[Self::number(TableAddress(entry.0))].get(index)
    }
}

/// One CPU: its free tables and the tables that it has deferred.
pub struct Cpu {
    memory: Arc<Memory>,
    pub own: RefCell<Vec<TableAddress>>,
    pub deferred: RefCell<Vec<Unlinked>>,
}

impl Cpu {
    pub fn new(memory: &Arc<Memory>, own: u64) -> Self {
        Self {
            memory: Arc::clone(memory),
            own: RefCell::new(vec![TableAddress(ROOT + (4 + own) * PAGE)]),
            deferred: RefCell::default(),
        }
    }
}

impl Operations for Cpu {
    fn load(&self, entry: EntryAddress) -> Descriptor {
        match self.memory.hot(entry) {
            Some(hot) => Descriptor(hot.load(Ordering::Acquire)),
            None => self.memory.cold.lock().unwrap().get(&entry).copied().unwrap_or_default(),
        }
    }

    fn store(&self, entry: EntryAddress, new: Descriptor, order: Order) {
        let ordering = match order {
            Order::Plain => Ordering::Relaxed,
            Order::Release => Ordering::Release,
        };
        match self.memory.hot(entry) {
            Some(hot) => hot.store(new.0, ordering),
            None => drop(self.memory.cold.lock().unwrap().insert(entry, new)),
        }
    }

    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        let hot = self.memory.hot(entry).expect("only the first two are changed");
        hot.compare_exchange(old.0, new.0, Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
            .map_err(Descriptor)
    }

    fn allocate(&self) -> Option<TableAddress> {
        self.own.borrow_mut().pop()
    }
    fn free(&self, table: TableAddress) {
        self.own.borrow_mut().push(table);
    }
    fn defer(&self, unlinked: Unlinked) {
        self.deferred.borrow_mut().push(unlinked);
    }
    fn take_references(&self, table: TableAddress, count: u32) {
        self.memory.counts[Memory::number(table)].fetch_add(count.into(), Ordering::Relaxed);
    }
    fn drop_references(&self, table: TableAddress, count: u32) -> u32 {
        let count = u64::from(count);
        let before = self.memory.counts[Memory::number(table)].fetch_sub(count, Ordering::AcqRel);
        u32::try_from(before - count).unwrap()
    }
    fn references(&self, table: TableAddress) -> u32 {
        let count = self.memory.counts[Memory::number(table)].load(Ordering::Acquire);
        u32::try_from(count).unwrap()
    }
    fn dsb(&self, _: Dsb) {}
    fn isb(&self) {}
    fn tlbi(&self, _: Tlbi) {}
    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        vmid
    }
    fn clean_invalidate(&self, _: PhysAddr, _: u64) {}
    fn invalidate_instructions(&self, _: Option<(PhysAddr, u64)>) {}
    fn pause(&self) {
        loom::thread::yield_now();
    }
}
