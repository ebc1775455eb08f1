// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Operations on a table that no CPU walks: they access entries and maintain nothing.
//!
//! They serve a table that is built before its guest first runs, tests, and benchmarks of the
//! engine. Once a CPU may walk the table, operations must invalidate and clean as the architecture
//! requires.

use core::ops::Deref;

use crate::{
    address::{EntryAddress, PhysAddr, TableAddress},
    descriptor::Descriptor,
    operations::{Dsb, Operations, Order, Tlbi, Unlinked, Vmid},
    pool::TablePool,
    sync::AtomicU64,
};

/// Operations on a pool alone. Shared walks must not coalesce: deferred tables
/// ([`Operations::defer`]) are never freed.
#[derive(Debug)]
pub struct NoMaintenance<'a, M>(pub &'a TablePool<M>);

impl<M: Deref<Target = [AtomicU64]>> Operations for NoMaintenance<'_, M> {
    #[inline]
    fn load(&self, entry: EntryAddress) -> Descriptor {
        self.0.load(entry)
    }

    #[inline]
    fn store(&self, entry: EntryAddress, new: Descriptor, order: Order) {
        self.0.store(entry, new, order);
    }

    fn store_run(
        &self,
        first: EntryAddress,
        count: u64,
        leaf: Descriptor,
        span: u64,
        order: Order,
    ) {
        self.0.store_run(first, count, leaf, span, order);
    }

    #[inline]
    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        self.0.compare_exchange(entry, old, new)
    }

    fn allocate(&self) -> Option<TableAddress> {
        self.0.allocate()
    }

    fn free(&self, table: TableAddress) {
        self.0.free(table);
    }

    fn free_all(&self, tables: &[TableAddress]) {
        self.0.free_all(tables);
    }

    fn defer(&self, _: Unlinked) {}

    #[inline]
    fn take_references(&self, table: TableAddress, count: u32) {
        self.0.take_references(table, count);
    }

    #[inline]
    fn drop_references(&self, table: TableAddress, count: u32) -> u32 {
        self.0.drop_references(table, count)
    }

    #[inline]
    fn references(&self, table: TableAddress) -> u32 {
        self.0.references(table)
    }

    #[inline]
    fn dsb(&self, _: Dsb) {}

    #[inline]
    fn isb(&self) {}

    #[inline]
    fn tlbi(&self, _: Tlbi) {}

    #[inline]
    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        vmid
    }

    #[inline]
    fn clean_invalidate(&self, _: PhysAddr, _: u64) {}

    #[inline]
    fn invalidate_instructions(&self, _: Option<(PhysAddr, u64)>) {}
}
