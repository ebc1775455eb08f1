// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the engine asks of its surroundings: memory of tables, barriers, TLB and caches.
//!
//! One value of the trait stands for one CPU (or one thread that plays one): whoever changes tables
//! brings its own. The same engine then runs at EL2, in tests, and in a program that only times it.
//! Every call is one architectural event, so an implementation that wraps another can record, check,
//! leave out or exchange any of them.

use crate::{
    address::{EntryAddress, Ipa, PhysAddr, TableAddress},
    descriptor::Descriptor,
    geometry::Level,
};

/// The number that tells one guest's translations from another's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Vmid(pub u16);

/// How a store is ordered against those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Not at all.
    Plain,
    /// It is seen after all that came before it (STLR).
    Release,
}

/// A data synchronisation barrier (Arm ARM B2.3.12).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dsb {
    /// Stores only, this CPU: `DSB NSHST`.
    NshSt,
    /// This CPU: `DSB NSH`.
    Nsh,
    /// Stores only, all CPUs: `DSB ISHST`.
    IshSt,
    /// All CPUs: `DSB ISH`.
    Ish,
}

/// Whom a TLB invalidation reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// The CPU that executes it.
    Local,
    /// Every CPU (the forms with `IS`).
    Broadcast,
}

/// A TLB invalidation for the current VMID (Arm ARM D8.14).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tlbi {
    /// `IPAS2E1(IS)`, or with `leaf_only` `IPAS2LE1(IS)`: stage-2 entries of one address.
    Ipa {
        /// The address.
        ipa: Ipa,
        /// The level of the leaf, if told (FEAT_TTL).
        ttl: Option<Level>,
        /// Leaves alone, no walk-cache entries.
        leaf_only: bool,
        /// Whom it reaches.
        scope: Scope,
    },
    /// `RIPAS2E1(IS)`: stage-2 entries of a range (FEAT_TLBIRANGE).
    Range {
        /// The first address.
        ipa: Ipa,
        /// Bytes.
        size: u64,
        /// The level of the leaves, if told.
        ttl: Option<Level>,
        /// Whom it reaches.
        scope: Scope,
    },
    /// `VMALLE1(IS)`: all stage-1 and combined entries.
    Stage1 {
        /// Whom it reaches.
        scope: Scope,
    },
    /// `VMALLS12E1(IS)`: all entries of both stages.
    All {
        /// Whom it reaches.
        scope: Scope,
    },
}

/// A table that no entry points at any more, with all below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unlinked {
    /// The table.
    pub table: TableAddress,
    /// Its own level.
    pub level: Level,
}

/// What is no architectural event, but what a checker must know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Note {
    /// The table's lock is taken, for this CPU alone or shared.
    Lock {
        /// For this CPU alone.
        exclusive: bool,
    },
    /// The lock is released.
    Unlock,
    /// Tables are allocated into a memcache; may sleep.
    TopUp,
    /// A table was wanted from an empty memcache.
    Empty,
    /// The host is about to let the guest write these bytes: they count as dirty.
    MarkDirty {
        /// First address.
        ipa: Ipa,
        /// Bytes.
        size: u64,
    },
    /// The result of a page lookup holds from here on unless the invalidation sequence moves.
    LookUp,
    /// The host's memory management takes mappings away: lookups so far are void.
    Sequence,
}

/// One CPU's way to tables, TLBs and caches.
pub trait Operations {
    /// Reads an entry; what the table it points at held when it was linked is seen too.
    fn load(&self, entry: EntryAddress) -> Descriptor;

    /// Writes an entry.
    fn store(&self, entry: EntryAddress, new: Descriptor, order: Order);

    /// Writes entries in a row, each for the next `span` bytes of memory: as many stores, each
    /// ordered so.
    fn store_run(
        &self,
        first: EntryAddress,
        count: u64,
        leaf: Descriptor,
        span: u64,
        order: Order,
    ) {
        for n in 0..count {
            self.store(first.skip(n), leaf.after(n * span), order);
        }
    }

    /// Writes an entry if it is what it was thought to be, ordered as a release; otherwise gives
    /// what it is.
    ///
    /// # Errors
    /// The entry holds something else.
    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor>;

    /// A table of zeroes with one reference, its own. May sleep.
    fn allocate(&self) -> Option<TableAddress>;

    /// Gives a table back. Nobody can reach it.
    fn free(&self, table: TableAddress);

    /// Gives tables back that nobody can reach: as [`Operations::free`] for each, which takes a
    /// lock but once, for example.
    fn free_all(&self, tables: &[TableAddress]) {
        tables.iter().for_each(|table| self.free(*table));
    }

    /// Has [`Stage2::free_unlinked`](crate::Stage2::free_unlinked) called for it once every shared
    /// walk that is under way has ended.
    fn defer(&self, unlinked: Unlinked);

    /// A shared walk begins; there may be one already, which it ends within: a
    /// [`Mapper`](crate::Mapper) walks for as long as it is there.
    fn begin_walk(&self) {}

    /// The one that began last ends: nothing of what it found in tables is used any more.
    fn end_walk(&self) {}

    /// Counts entries of a table that have become valid.
    fn take_references(&self, table: TableAddress, count: u32);

    /// Counts entries of a table that are valid no longer and gives what is left: 1 for an empty
    /// table.
    fn drop_references(&self, table: TableAddress, count: u32) -> u32;

    /// What a table's count stands at.
    fn references(&self, table: TableAddress) -> u32;

    /// A data synchronisation barrier.
    fn dsb(&self, kind: Dsb);

    /// An instruction synchronisation barrier.
    fn isb(&self);

    /// A TLB invalidation.
    fn tlbi(&self, kind: Tlbi);

    /// Makes TLB invalidations apply to this VMID and gives the one before; an ISB follows.
    fn switch_vmid(&self, vmid: Vmid) -> Vmid;

    /// Cleans and invalidates memory to the point of coherency, line by line (`DC CIVAC`).
    fn clean_invalidate(&self, phys: PhysAddr, size: u64);

    /// Invalidates the I-cache over a range (`IC IVAU`), or all of it (`IC IALLUIS`).
    fn invalidate_instructions(&self, range: Option<(PhysAddr, u64)>);

    /// Called while waiting for another CPU.
    fn pause(&self) {
        core::hint::spin_loop();
    }

    /// For observers.
    fn note(&self, _note: Note) {}
}
