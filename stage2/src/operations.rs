// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The engine's interface to its environment: tables in memory, barriers, TLBs and caches.
//!
//! A value that implements [`Operations`] represents one CPU, or a thread that simulates one, so
//! the same engine runs at EL2 and in tests. Every call is one architectural event: a wrapper can
//! record, check, drop or replace any of them.

use crate::{
    address::{EntryAddress, Ipa, PhysAddr, TableAddress},
    descriptor::Descriptor,
    geometry::{Granule, Level},
};

/// VMID, which tags the TLB entries of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Vmid(pub u16);

/// Ordering of a store with respect to earlier stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// No ordering.
    Plain,
    /// Release: observed after all earlier accesses (STLR).
    Release,
}

/// A data synchronisation barrier (Arm ARM, DSB).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dsb {
    /// This CPU, stores only: `DSB NSHST`.
    NshSt,
    /// This CPU: `DSB NSH`.
    Nsh,
    /// Stores, for all CPUs: `DSB ISHST`.
    IshSt,
    /// Loads and stores, for all CPUs: `DSB ISH`.
    Ish,
}

/// CPUs that a TLB invalidation affects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// The executing CPU.
    Local,
    /// CPUs of the Inner Shareable domain (instructions with `IS`).
    Broadcast,
}

/// A TLB invalidation for the current VMID (Arm ARM, TLB maintenance), and the CPUs that it affects. The TTL
/// hint is the level of the leaves (FEAT_TTL); `size` is in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the documentation of the type names the fields")]
pub enum Tlbi {
    /// `IPAS2E1(IS)`: stage-2 entries of one address; `IPAS2LE1(IS)`: leaf entries only, not walk
    /// caches.
    Ipa { ipa: Ipa, ttl: Option<Level>, leaf_only: bool, scope: Scope },
    /// `RIPAS2E1(IS)` or, for leaf entries alone, `RIPAS2LE1(IS)`: stage-2 entries of a range
    /// (FEAT_TLBIRANGE).
    Range { ipa: Ipa, size: u64, ttl: Option<Level>, leaf_only: bool, scope: Scope },
    /// `VMALLE1(IS)`: all stage-1 and combined entries.
    Stage1 { scope: Scope },
    /// `VMALLS12E1(IS)`: all entries of both stages.
    All { scope: Scope },
}

impl Tlbi {
    /// Returns the CPUs that the invalidation affects.
    pub const fn scope(self) -> Scope {
        let (Self::Ipa { scope, .. }
        | Self::Range { scope, .. }
        | Self::Stage1 { scope }
        | Self::All { scope }) = self;
        scope
    }

    /// Returns whether one range instruction covers `size` bytes: `(NUM + 1) << (5 × SCALE + 1)` pages,
    /// NUM 0 to 31 and SCALE 0 to 3 (Arm ARM C5.5, TLBI RIPAS2E1IS).
    pub fn is_encodable(granule: Granule, size: u64) -> bool {
        let mut units = (0..4).map(|scale| granule.size() << (5 * scale + 1));
        units.any(|unit| size.is_multiple_of(unit) && (1..=32).contains(&(size / unit)))
    }
}

/// An unlinked table, with all tables below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnlinkedTable {
    /// Address of the table.
    pub table: TableAddress,
    /// Level of the table.
    pub level: Level,
}

/// Software events that a checker needs in addition to the architectural ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the documentation of each variant names its fields")]
pub enum Note {
    /// Acquisition of the table's lock, exclusive or shared.
    Lock { is_exclusive: bool },
    /// Release of the lock.
    Unlock,
    /// Allocation of tables into a memcache, which may sleep.
    TopUp,
    /// Request for a table from an empty memcache.
    EmptyMemcache,
    /// Marking of `size` bytes at `ipa` as dirty by the host: the guest may write them afterwards.
    MarkDirty { ipa: Ipa, size: u64 },
    /// Start of a page lookup, whose result is valid until the invalidation sequence changes.
    LookUp,
    /// Change of the invalidation sequence: earlier page lookups become invalid.
    InvalidationSequence,
}

/// Operations of one CPU on tables, TLBs and caches.
pub trait Operations {
    /// Reads an entry with acquire or dependency ordering: later reads of the table that it points
    /// at observe the contents with which the table was linked, or newer.
    fn load(&self, entry: EntryAddress) -> Descriptor;

    /// Writes an entry.
    fn store(&self, entry: EntryAddress, new: Descriptor, order: Order);

    /// Writes `count` adjacent entries. Each maps the next `span` bytes of memory.
    fn store_adjacent(
        &self,
        first: EntryAddress,
        count: u64,
        leaf: Descriptor,
        span: u64,
        order: Order,
    ) {
        for n in 0..count {
            self.store(first.skip(n), leaf.offset_by(n * span), order);
        }
    }

    /// Writes an entry with release order if it equals `old`.
    ///
    /// # Errors
    /// The current entry, if it differs from `old`.
    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor>;

    /// Allocates a zeroed table with a reference count of 1. May sleep.
    fn allocate(&self) -> Option<TableAddress>;

    /// Frees a table that no walker can reach.
    fn free(&self, table: TableAddress);

    /// Frees tables as [`Operations::free`] does. An implementation may take its lock once for all.
    fn free_all(&self, tables: &[TableAddress]) {
        tables.iter().for_each(|table| self.free(*table));
    }

    /// Defers a call of [`Stage2::free_unlinked`](crate::Stage2::free_unlinked) until every active
    /// shared walk has ended.
    fn defer_free(&self, unlinked: UnlinkedTable);

    /// Begins a shared walk. Walks nest: a [`Mapper`](crate::Mapper) is a walk until it is dropped.
    fn begin_walk(&self) {}

    /// Ends the innermost walk. The walker then uses no entry that it has read in this walk.
    fn end_walk(&self) {}

    /// Adds references to a table, one for each entry that has become valid.
    fn take_references(&self, table: TableAddress, count: u32);

    /// Drops references of a table, one for each entry that has become invalid. Returns the
    /// remaining count, which is 1 for an empty table.
    fn drop_references(&self, table: TableAddress, count: u32) -> u32;

    /// Returns the reference count of a table.
    fn references(&self, table: TableAddress) -> u32;

    /// Executes a data synchronisation barrier.
    fn dsb(&self, kind: Dsb);

    /// Executes an instruction synchronisation barrier.
    fn isb(&self);

    /// Issues a TLB invalidation.
    fn tlbi(&self, kind: Tlbi);

    /// Makes a VMID current for TLB invalidations and returns the previous one. The engine then
    /// executes an ISB. With HCR_EL2.E2H, TGE is 0 meanwhile: otherwise invalidations of stage 1 are
    /// those of EL2&0.
    fn switch_vmid(&self, vmid: Vmid) -> Vmid;

    /// Cleans and invalidates memory to the point of coherency, line by line (`DC CIVAC`).
    fn clean_invalidate(&self, phys: PhysAddr, size: u64);

    /// Invalidates the I-cache over a range (`IC IVAU`), or all of it (`IC IALLUIS`).
    fn invalidate_icache(&self, range: Option<(PhysAddr, u64)>);

    /// Pauses before the next read of an entry that another CPU has locked.
    fn pause(&self) {
        core::hint::spin_loop();
    }

    /// Receives software events, for checkers.
    fn note(&self, _note: Note) {}
}
