// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Operations of one thread: tables in a pool, cache maintenance and its barriers by the CPU, and
//! counts of the other operations.

use std::{
    cell::Cell,
    sync::{Arc, atomic::Ordering},
};

use granule_stage2::{
    EntryAddress, Operations, PhysAddr, TableAddress,
    descriptor::Descriptor,
    operations::{Dsb, Note, Order, Tlbi, Unlinked, Vmid},
};

use super::{counters::Count, state::MachineState};

/// Operations of one vCPU, or of the host's thread.
#[derive(Debug)]
pub(super) struct CpuOperations {
    pub(super) state: Arc<MachineState>,
    cpu: usize,
    vmid: Cell<Vmid>,
}

impl CpuOperations {
    pub(super) fn new(state: Arc<MachineState>, cpu: usize) -> Self {
        Self {
            state,
            cpu,
            vmid: Cell::default(),
        }
    }

    /// Frees unlinked tables that no walk can reach any more.
    pub(super) fn drain(&self) {
        self.state.reclaim.drain(&self.state.mmu, self);
    }
}

impl Operations for CpuOperations {
    fn load(&self, entry: EntryAddress) -> Descriptor {
        self.state.pool.load(entry)
    }

    fn store(&self, entry: EntryAddress, new: Descriptor, order: Order) {
        self.state.pool.store(entry, new, order);
    }

    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        self.state.pool.compare_exchange(entry, old, new)
    }

    fn allocate(&self) -> Option<TableAddress> {
        self.state.count(Count::Tables, 1);
        self.state.pool.allocate()
    }

    fn free(&self, table: TableAddress) {
        self.free_all(&[table]);
    }

    fn free_all(&self, tables: &[TableAddress]) {
        let count = tables.len() as u64;
        self.state.frees.fetch_add(count, Ordering::SeqCst);
        self.state.pool.free_all(tables);
    }

    fn defer(&self, unlinked: Unlinked) {
        self.state.reclaim.defer(unlinked);
    }

    fn begin_walk(&self) {
        self.state.reclaim.begin(self.cpu);
    }

    fn end_walk(&self) {
        self.state.reclaim.end(self.cpu);
    }

    fn take_references(&self, table: TableAddress, count: u32) {
        self.state.pool.take_references(table, count);
    }

    fn drop_references(&self, table: TableAddress, count: u32) -> u32 {
        self.state.pool.drop_references(table, count)
    }

    fn references(&self, table: TableAddress) -> u32 {
        self.state.pool.references(table)
    }

    fn dsb(&self, kind: Dsb) {
        if kind == Dsb::Ish {
            self.state.cache.wait();
        }
    }

    fn isb(&self) {}

    fn tlbi(&self, kind: Tlbi) {
        let what = match kind {
            Tlbi::Ipa { .. } | Tlbi::Range { .. } => Count::TlbiAddress,
            Tlbi::Stage1 { .. } | Tlbi::All { .. } => Count::TlbiAll,
        };
        self.state.count(what, 1);
    }

    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        self.vmid.replace(vmid)
    }

    fn clean_invalidate(&self, phys: PhysAddr, size: u64) {
        let state = &self.state;
        let len = usize::try_from(size).unwrap_or(usize::MAX);
        let (start, len) = state.memory.part(state.offset(phys.0), len);
        // SAFETY: the range is within the memory, which is mapped.
        unsafe { state.cache.clean_invalidate(start, len) };
        state.count(Count::CleanedLines, size / state.cache.line() as u64);
    }

    fn invalidate_instructions(&self, range: Option<(PhysAddr, u64)>) {
        let state = &self.state;
        let Some((phys, size)) = range else {
            return state.count(Count::InvalidatedAll, 1);
        };
        let len = usize::try_from(size).unwrap_or(usize::MAX);
        let (start, len) = state.memory.part(state.offset(phys.0), len);
        // SAFETY: the range is within the memory, which is mapped.
        unsafe { state.cache.invalidate_instructions(start, len) };
        state.count(Count::InvalidatedLines, size / state.cache.line() as u64);
    }

    fn pause(&self) {
        // The host may have fewer CPUs than vCPUs.
        std::thread::yield_now();
    }

    fn note(&self, note: Note) {
        if note == Note::TopUp {
            self.state.count(Count::TopUps, 1);
        }
    }
}
