// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One thread's operations: tables in a pool, the processor's real cache maintenance, barriers that
//! wait for it, and counts of the rest.

use std::{
    cell::Cell,
    sync::{Arc, atomic::Ordering},
};

use granule_stage2::{
    EntryAddress, Operations, PhysAddr, TableAddress,
    descriptor::Descriptor,
    operations::{Dsb, Note, Order, Tlbi, Unlinked, Vmid},
};

use super::shared::{Count, Shared};

/// The operations of one vCPU, or of the host's thread.
#[derive(Debug)]
pub(super) struct CpuOperations {
    pub(super) shared: Arc<Shared>,
    cpu: usize,
    vmid: Cell<Vmid>,
}

impl CpuOperations {
    pub(super) fn new(shared: Arc<Shared>, cpu: usize) -> Self {
        Self {
            shared,
            cpu,
            vmid: Cell::default(),
        }
    }

    /// Frees tables whose grace period is over.
    pub(super) fn drain(&self) {
        self.shared.reclaim.drain(&self.shared.mmu, self);
    }
}

impl Operations for CpuOperations {
    fn load(&self, entry: EntryAddress) -> Descriptor {
        self.shared.pool.load(entry)
    }

    fn store(&self, entry: EntryAddress, new: Descriptor, order: Order) {
        self.shared.pool.store(entry, new, order);
    }

    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        self.shared.pool.compare_exchange(entry, old, new)
    }

    fn allocate(&self) -> Option<TableAddress> {
        self.shared.count(Count::Tables, 1);
        self.shared.pool.allocate()
    }

    fn free(&self, table: TableAddress) {
        self.free_all(&[table]);
    }

    fn free_all(&self, tables: &[TableAddress]) {
        let count = tables.len() as u64;
        self.shared.frees.fetch_add(count, Ordering::SeqCst);
        self.shared.pool.free_all(tables);
    }

    fn defer(&self, unlinked: Unlinked) {
        self.shared.reclaim.defer(unlinked);
    }

    fn begin_walk(&self) {
        self.shared.reclaim.begin(self.cpu);
    }

    fn end_walk(&self) {
        self.shared.reclaim.end(self.cpu);
    }

    fn take_references(&self, table: TableAddress, count: u32) {
        self.shared.pool.take_references(table, count);
    }

    fn drop_references(&self, table: TableAddress, count: u32) -> u32 {
        self.shared.pool.drop_references(table, count)
    }

    fn references(&self, table: TableAddress) -> u32 {
        self.shared.pool.references(table)
    }

    fn dsb(&self, kind: Dsb) {
        if kind == Dsb::Ish {
            self.shared.cleaner.wait();
        }
    }

    fn isb(&self) {}

    fn tlbi(&self, kind: Tlbi) {
        let what = match kind {
            Tlbi::Ipa { .. } | Tlbi::Range { .. } => Count::TlbiAddress,
            Tlbi::Stage1 { .. } | Tlbi::All { .. } => Count::TlbiAll,
        };
        self.shared.count(what, 1);
    }

    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        self.vmid.replace(vmid)
    }

    fn clean_invalidate(&self, phys: PhysAddr, size: u64) {
        let shared = &self.shared;
        let len = usize::try_from(size).unwrap_or(usize::MAX);
        let (start, len) = shared.memory.part(shared.offset(phys.0), len);
        // SAFETY: the part lies within the memory, which is mapped.
        unsafe { shared.cleaner.clean(start, len) };
        shared.count(Count::CleanedLines, size / shared.cleaner.line() as u64);
    }

    fn invalidate_instructions(&self, range: Option<(PhysAddr, u64)>) {
        let shared = &self.shared;
        let Some((phys, size)) = range else {
            return shared.count(Count::InvalidatedAll, 1);
        };
        let len = usize::try_from(size).unwrap_or(usize::MAX);
        let (start, len) = shared.memory.part(shared.offset(phys.0), len);
        // SAFETY: the part lies within the memory, which is mapped.
        unsafe { shared.cleaner.invalidate_instructions(start, len) };
        shared.count(Count::InvalidatedLines, size / shared.cleaner.line() as u64);
    }

    fn pause(&self) {
        // There may be more vCPUs than CPUs.
        std::thread::yield_now();
    }

    fn note(&self, note: Note) {
        if note == Note::TopUp {
            self.shared.count(Count::TopUps, 1);
        }
    }
}
