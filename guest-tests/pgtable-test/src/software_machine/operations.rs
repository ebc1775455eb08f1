// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The engine's operations for one vCPU or for the host's thread.
//!
//! Loads and stores of entries access the table pool; this CPU executes CMOs and their barrier. TLB
//! invalidations are only counted, as no TLB exists.

use std::{
    cell::Cell,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use granule_stage2::{
    EntryAddress, Operations, PhysAddr, TableAddress,
    descriptor::Descriptor,
    operations::{Dsb, Note, Order, Tlbi, UnlinkedTable, Vmid},
    pool::NoMaintenance,
};

use super::state::{CountedEvent, MachineState};

/// The engine's operations for one vCPU or for the host's thread.
#[derive(Debug)]
pub struct CpuOperations {
    pub state: Arc<MachineState>,
    /// Number of the CPU in the state's [`EpochReclaim`](granule_stage2::epoch::EpochReclaim).
    cpu: usize,
    vmid: Cell<Vmid>,
}

impl CpuOperations {
    pub fn new(state: &Arc<MachineState>, cpu: usize) -> Self {
        Self { state: Arc::clone(state), cpu, vmid: Cell::default() }
    }

    /// Frees unlinked tables that no walk uses any more.
    pub fn drain(&self) {
        self.state.reclaim.drain(&self.state.mmu, self);
    }

    /// Returns access to the tables' entries and reference counts, without CMOs.
    fn tables(&self) -> NoMaintenance<'_, Box<[AtomicU64]>> {
        NoMaintenance(&self.state.pool)
    }

    fn count_lines(&self, event: CountedEvent, size: u64) {
        self.state.count(event, size / self.state.memory.cache.data_line_size as u64);
    }
}

impl Operations for CpuOperations {
    fn load(&self, entry: EntryAddress) -> Descriptor {
        self.tables().load(entry)
    }

    fn store(&self, entry: EntryAddress, new: Descriptor, order: Order) {
        self.tables().store(entry, new, order);
    }

    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        self.tables().compare_exchange(entry, old, new)
    }

    fn allocate(&self) -> Option<TableAddress> {
        self.state.count(CountedEvent::TableAllocations, 1);
        self.state.pool.allocate()
    }

    fn free(&self, table: TableAddress) {
        self.free_all(&[table]);
    }

    fn free_all(&self, tables: &[TableAddress]) {
        self.state.freed_table_count.fetch_add(tables.len() as u64, Ordering::SeqCst);
        self.state.pool.free_all(tables);
    }

    fn defer_free(&self, unlinked: UnlinkedTable) {
        self.state.reclaim.defer_free(unlinked);
    }

    fn begin_walk(&self) {
        self.state.reclaim.begin_walk(self.cpu);
    }

    fn end_walk(&self) {
        self.state.reclaim.end_walk(self.cpu);
    }

    fn take_references(&self, table: TableAddress, count: u32) {
        self.tables().take_references(table, count);
    }

    fn drop_references(&self, table: TableAddress, count: u32) -> u32 {
        self.tables().drop_references(table, count)
    }

    fn references(&self, table: TableAddress) -> u32 {
        self.tables().references(table)
    }

    fn dsb(&self, kind: Dsb) {
        if kind == Dsb::Ish {
            self.state.memory.cache.wait();
        }
    }

    fn isb(&self) {}

    fn tlbi(&self, kind: Tlbi) {
        let event = match kind {
            Tlbi::Ipa { .. } | Tlbi::Range { .. } => CountedEvent::TlbiAddress,
            Tlbi::Stage1 { .. } | Tlbi::All { .. } => CountedEvent::TlbiAll,
        };
        self.state.count(event, 1);
    }

    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        self.vmid.replace(vmid)
    }

    fn clean_invalidate(&self, phys: PhysAddr, size: u64) {
        self.count_lines(CountedEvent::DataCacheLines, size);
        self.state.memory.clean_invalidate(phys, size);
    }

    fn invalidate_icache(&self, range: Option<(PhysAddr, u64)>) {
        let Some((phys, size)) = range else {
            self.state.count(CountedEvent::InstructionCacheAll, 1);
            return;
        };
        self.count_lines(CountedEvent::InstructionCacheLines, size);
        self.state.memory.invalidate_icache(phys, size);
    }

    /// Yields: the host may have fewer CPUs than vCPUs.
    fn pause(&self) {
        thread::yield_now();
    }

    fn note(&self, note: Note) {
        if note == Note::TopUp {
            self.state.count(CountedEvent::MemcacheTopUps, 1);
        }
    }
}
