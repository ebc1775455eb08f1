// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! State shared by the vCPUs and the host's thread, and the engine's operations of one of them.
//!
//! Tables, counts and dirty bitmap are the same in real and in virtual time. A [`Platform`]
//! performs all that differs: memory, cache maintenance, and the time of each [`Event`].

use std::{
    cell::Cell,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use granule_stage2::{
    Access, EntryAddress, Operations, PhysAddr, TableAddress,
    descriptor::Descriptor,
    epoch::EpochReclaim,
    fault::{Mmu, Page},
    operations::{Dsb, Note, Order, Scope, Tlbi, Unlinked, Vmid},
    pool::{NoMaintenance, TablePool},
};
use parking_lot::lock_api::RawRwLock;

use super::{CountedEvent, NAMES};
use granule_types::record::EventCounts;

/// Initiator of an event, which determines its cost in virtual time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Initiator {
    /// The guest's walks, whose time is part of that of the access.
    Guest,
    /// The fault path.
    FaultPath,
    /// The host's memory management.
    Host,
}

/// An event that affects the platform or takes time on it.
#[derive(Debug, Clone, Copy)]
pub enum PlatformEvent {
    /// The guest's access, before its walk.
    Access,
    FaultEntry,
    FaultExit,
    /// A fault that the guest repeats.
    Retry,
    LoadEntry,
    StoreEntry,
    ExchangeEntry,
    AllocateTable,
    /// Number of freed tables.
    FreeTables(u64),
    /// Number of taken or dropped references of a table.
    ChangeReferences(u32),
    /// The table's lock is taken.
    Locked,
    /// A pause between two reads of a locked entry.
    Pause,
    Dsb(Dsb),
    Tlbi(Scope),
    CleanInvalidate(PhysAddr, u64),
    InvalidateInstructions(Option<(PhysAddr, u64)>),
}

/// The parts of a machine that differ in real and in virtual time.
pub trait Platform: fmt::Debug + Sized + 'static {
    /// Lock of the tables.
    type Lock: RawRwLock;

    /// Returns the size of a line of the data cache.
    fn line(&self) -> u64;

    /// Performs an event and takes its time.
    fn perform(&self, initiator: Initiator, event: PlatformEvent);

    /// Returns the page of the host behind an offset in the region, populated for the access.
    fn page(ops: &CpuOperations<Self>, offset: u64, access: Access) -> Page;

    /// Reads 8 bytes.
    fn load(&self, phys: PhysAddr) -> u64;

    /// Writes 8 bytes.
    fn store(&self, phys: PhysAddr, value: u64);

    /// Reads 8 bytes whose value is not used.
    fn touch(&self, phys: PhysAddr);
}

/// State of a machine.
pub struct MachineState<P: Platform> {
    pub(super) platform: P,
    pub(super) pool: TablePool<Box<[AtomicU64]>>,
    pub(super) reclaim: EpochReclaim,
    pub(super) mmu: Mmu<P::Lock>,
    /// Size of the region.
    pub(super) size: u64,
    pub(super) backing_page: u64,
    pub(super) logging: AtomicBool,
    /// Dirty bitmap: one bit for each page.
    pub(super) dirty: Box<[AtomicU64]>,
    /// Number of invalidations of host pages, as `mmu_invalidate_seq`.
    pub(super) sequence: AtomicU64,
    /// Number of invalidations in progress, as `mmu_invalidate_in_progress`.
    pub(super) invalidating: AtomicU64,
    /// Number of freed tables: a walk during which it changes may have read a reused table.
    pub(super) frees: AtomicU64,
    pub(super) counts: [AtomicU64; NAMES.len()],
}

impl<P: Platform> MachineState<P> {
    pub(super) fn count(&self, what: CountedEvent, by: u64) {
        self.counts[what as usize].fetch_add(by, Ordering::Relaxed);
    }

    pub(super) fn events(&self) -> EventCounts {
        let counts = NAMES.iter().zip(&self.counts);
        counts.map(|(name, count)| ((*name).to_owned(), count.load(Ordering::Relaxed))).collect()
    }
}

impl<P: Platform> fmt::Debug for MachineState<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MachineState").field("platform", &self.platform).finish_non_exhaustive()
    }
}

/// Operations of one vCPU, or of the host's thread.
#[derive(Debug)]
pub struct CpuOperations<P: Platform> {
    pub(super) state: Arc<MachineState<P>>,
    cpu: usize,
    initiator: Initiator,
    vmid: Cell<Vmid>,
}

impl<P: Platform> CpuOperations<P> {
    pub(super) fn new(state: &Arc<MachineState<P>>, cpu: usize, initiator: Initiator) -> Self {
        Self { state: Arc::clone(state), cpu, initiator, vmid: Cell::default() }
    }

    /// Frees unlinked tables that no walk can reach any more.
    pub(super) fn drain(&self) {
        self.state.reclaim.drain(&self.state.mmu, self);
    }

    /// Returns the entries and counts of the tables, without maintenance.
    fn tables(&self) -> NoMaintenance<'_, Box<[AtomicU64]>> {
        NoMaintenance(&self.state.pool)
    }

    pub(super) fn perform(&self, event: PlatformEvent) {
        self.state.platform.perform(self.initiator, event);
    }
}

impl<P: Platform> Operations for CpuOperations<P> {
    fn load(&self, entry: EntryAddress) -> Descriptor {
        self.perform(PlatformEvent::LoadEntry);
        self.tables().load(entry)
    }

    fn store(&self, entry: EntryAddress, new: Descriptor, order: Order) {
        self.perform(PlatformEvent::StoreEntry);
        self.tables().store(entry, new, order);
    }

    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        self.perform(PlatformEvent::ExchangeEntry);
        self.tables().compare_exchange(entry, old, new)
    }

    fn allocate(&self) -> Option<TableAddress> {
        self.state.count(CountedEvent::Tables, 1);
        self.perform(PlatformEvent::AllocateTable);
        self.state.pool.allocate()
    }

    fn free(&self, table: TableAddress) {
        self.free_all(&[table]);
    }

    fn free_all(&self, tables: &[TableAddress]) {
        let count = tables.len() as u64;
        self.perform(PlatformEvent::FreeTables(count));
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
        self.perform(PlatformEvent::ChangeReferences(count));
        self.tables().take_references(table, count);
    }

    fn drop_references(&self, table: TableAddress, count: u32) -> u32 {
        self.perform(PlatformEvent::ChangeReferences(count));
        self.tables().drop_references(table, count)
    }

    fn references(&self, table: TableAddress) -> u32 {
        self.tables().references(table)
    }

    fn dsb(&self, kind: Dsb) {
        self.perform(PlatformEvent::Dsb(kind));
    }

    fn isb(&self) {}

    fn tlbi(&self, kind: Tlbi) {
        let (what, scope) = match kind {
            Tlbi::Ipa { scope, .. } | Tlbi::Range { scope, .. } => {
                (CountedEvent::TlbiAddress, scope)
            }
            Tlbi::Stage1 { scope } | Tlbi::All { scope } => (CountedEvent::TlbiAll, scope),
        };
        self.state.count(what, 1);
        self.perform(PlatformEvent::Tlbi(scope));
    }

    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        self.vmid.replace(vmid)
    }

    fn clean_invalidate(&self, phys: PhysAddr, size: u64) {
        self.state.count(CountedEvent::CleanedLines, size / self.state.platform.line());
        self.perform(PlatformEvent::CleanInvalidate(phys, size));
    }

    fn invalidate_instructions(&self, range: Option<(PhysAddr, u64)>) {
        match range {
            Some((_, size)) => {
                let lines = size / self.state.platform.line();
                self.state.count(CountedEvent::InvalidatedLines, lines);
            }
            None => self.state.count(CountedEvent::InvalidatedAll, 1),
        }
        self.perform(PlatformEvent::InvalidateInstructions(range));
    }

    fn pause(&self) {
        self.perform(PlatformEvent::Pause);
    }

    fn note(&self, note: Note) {
        match note {
            Note::TopUp => self.state.count(CountedEvent::TopUps, 1),
            Note::Lock { .. } => self.perform(PlatformEvent::Locked),
            _ => {}
        }
    }
}
