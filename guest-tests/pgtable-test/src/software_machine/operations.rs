// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! State shared by the vCPUs and the host's thread, and the operations of one thread: tables in a
//! pool, cache maintenance and its barriers by the CPU, and counts of the other operations.

use std::{
    cell::Cell,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use granule_stage2::{
    Access, EntryAddress, Ipa, Operations, PhysAddr, TableAddress,
    descriptor::Descriptor,
    epoch::EpochReclaim,
    fault::{Host, Mmu, Page},
    operations::{Dsb, Note, Order, Tlbi, Unlinked, Vmid},
    pool::TablePool,
};

use super::{Count, NAMES, PAGE, START, arch::CacheMaintenance, host_memory::HostMemory};
use granule_types::record::EventCounts;

/// State of the machine.
#[derive(Debug)]
pub(super) struct MachineState {
    pub(super) memory: HostMemory,
    pub(super) cache: CacheMaintenance,
    pub(super) pool: TablePool<Box<[AtomicU64]>>,
    pub(super) reclaim: EpochReclaim,
    pub(super) mmu: Mmu<parking_lot::RawRwLock>,
    /// Size of the region.
    pub(super) size: u64,
    pub(super) backing_page: u64,
    pub(super) logging: AtomicBool,
    /// Dirty bitmap: one bit for each page.
    pub(super) dirty: Box<[AtomicU64]>,
    pub(super) sequence: AtomicU64,
    /// Number of freed tables: a walk during which it changes may have read a reused table.
    pub(super) frees: AtomicU64,
    pub(super) counts: [AtomicU64; NAMES.len()],
}

impl MachineState {
    pub(super) fn count(&self, what: Count, by: u64) {
        self.counts[what as usize].fetch_add(by, Ordering::Relaxed);
    }

    fn count_lines(&self, what: Count, size: u64) {
        self.count(what, size / self.cache.line() as u64);
    }

    pub(super) fn events(&self) -> EventCounts {
        NAMES
            .iter()
            .zip(&self.counts)
            .map(|(name, count)| ((*name).to_owned(), count.load(Ordering::Relaxed)))
            .collect()
    }

    /// Returns the offset of a host address in the memory.
    pub(super) fn offset(&self, phys: u64) -> usize {
        usize::try_from(phys.wrapping_sub(self.memory.address())).unwrap_or(usize::MAX)
    }

    /// Returns address and length of a range in this process.
    fn range(&self, phys: PhysAddr, size: u64) -> (*const u8, usize) {
        let len = usize::try_from(size).unwrap_or(usize::MAX);
        self.memory.part(self.offset(phys.0), len)
    }
}

impl Host for MachineState {
    fn page(&self, ipa: Ipa, _: Access) -> Option<Page> {
        let offset = ipa.0.checked_sub(START).filter(|at| *at < self.size)?;
        let base = offset & !(self.backing_page - 1);
        Some(Page {
            ipa: Ipa(START + base),
            phys: PhysAddr(self.memory.address() + base),
            size: self.backing_page,
            writable: true,
        })
    }

    fn logging(&self, _: Ipa) -> bool {
        self.logging.load(Ordering::Acquire)
    }

    fn sequence(&self) -> u64 {
        self.sequence.load(Ordering::Acquire)
    }

    fn mark_dirty(&self, ipa: Ipa, size: u64) {
        if !self.logging.load(Ordering::Acquire) {
            return;
        }
        let first = (ipa - Ipa(START)) / PAGE;
        for page in first..first + size / PAGE {
            if let Some(word) = usize::try_from(page / 64).ok().and_then(|at| self.dirty.get(at)) {
                word.fetch_or(1 << (page % 64), Ordering::Relaxed);
            }
        }
    }
}

/// Operations of one vCPU, or of the host's thread.
#[derive(Debug)]
pub(super) struct CpuOperations {
    pub(super) state: Arc<MachineState>,
    cpu: usize,
    vmid: Cell<Vmid>,
}

impl CpuOperations {
    pub(super) fn new(state: Arc<MachineState>, cpu: usize) -> Self {
        Self { state, cpu, vmid: Cell::default() }
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
        let (start, len) = self.state.range(phys, size);
        // SAFETY: the range is within the memory, which is mapped.
        unsafe { self.state.cache.clean_invalidate(start, len) };
        self.state.count_lines(Count::CleanedLines, size);
    }

    fn invalidate_instructions(&self, range: Option<(PhysAddr, u64)>) {
        let Some((phys, size)) = range else {
            return self.state.count(Count::InvalidatedAll, 1);
        };
        let (start, len) = self.state.range(phys, size);
        // SAFETY: the range is within the memory, which is mapped.
        unsafe { self.state.cache.invalidate_instructions(start, len) };
        self.state.count_lines(Count::InvalidatedLines, size);
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
