// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Operations whose pauses are another walker's turns.

use std::{cell::Cell, sync::atomic::AtomicU64};

use granule_stage2::{
    EntryAddress, Offline, Operations, PhysAddr, TableAddress,
    descriptor::Descriptor,
    operations::{Dsb, Order, Tlbi, Unlinked, Vmid},
};

/// What another walker does, and in which of its turns.
#[derive(Debug)]
pub struct Other {
    pub entry: EntryAddress,
    pub new: Descriptor,
    pub after: u32,
}

/// The operations.
#[derive(Debug)]
pub struct Pausing<'a> {
    pub pool: Offline<'a, Box<[AtomicU64]>>,
    pub other: Other,
    pub pauses: Cell<u32>,
}

#[rustfmt::skip]
impl Operations for Pausing<'_> {
    fn load(&self, entry: EntryAddress) -> Descriptor { self.pool.load(entry) }
    fn store(&self, entry: EntryAddress, new: Descriptor, order: Order) { self.pool.store(entry, new, order); }
    fn compare_exchange(&self, entry: EntryAddress, old: Descriptor, new: Descriptor) -> Result<(), Descriptor> { self.pool.compare_exchange(entry, old, new) }
    fn allocate(&self) -> Option<TableAddress> { self.pool.allocate() }
    fn free(&self, table: TableAddress) { self.pool.free(table); }
    fn defer(&self, unlinked: Unlinked) { self.pool.defer(unlinked); }
    fn take_references(&self, table: TableAddress, count: u32) { self.pool.take_references(table, count); }
    fn drop_references(&self, table: TableAddress, count: u32) -> u32 { self.pool.drop_references(table, count) }
    fn references(&self, table: TableAddress) -> u32 { self.pool.references(table) }
    fn dsb(&self, kind: Dsb) { self.pool.dsb(kind); }
    fn isb(&self) { self.pool.isb(); }
    fn tlbi(&self, kind: Tlbi) { self.pool.tlbi(kind); }
    fn switch_vmid(&self, vmid: Vmid) -> Vmid { self.pool.switch_vmid(vmid) }
    fn clean_invalidate(&self, phys: PhysAddr, size: u64) { self.pool.clean_invalidate(phys, size); }
    fn invalidate_instructions(&self, range: Option<(PhysAddr, u64)>) { self.pool.invalidate_instructions(range); }
    fn pause(&self) {
        self.pauses.set(self.pauses.get() + 1);
        if self.pauses.get() == self.other.after {
            self.pool.store(self.other.entry, self.other.new, Order::Release);
        }
    }
}
