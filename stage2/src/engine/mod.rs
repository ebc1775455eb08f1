// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A stage-2 table: what can be done to it, and under which lock.
//!
//! A [`Stage2`] belongs into a read-write lock. What takes `&mut self` is done by one CPU at a time
//! and changes entries by plain stores. What takes `&self` may be done by many: an entry is changed
//! only by compare-and-swap from the value seen, whoever has locked or claimed one brings it to an
//! end, and a table that no entry points at any more is freed after a grace period
//! ([`Operations::defer`]). Both are the same code; [`Walk`] knows which it is.
//!
//! Of a contiguous run one entry speaks for all: such a run is changed by the only walker alone
//! (`contiguous`).
//!
//! The order of every change that needs a break is the same (Arm ARM D8.16.1):
//! make the memory ready → store invalid → DSB, TLBI, DSB → store the new entry → take down what
//! the old one led to. The [`Policy`] moves maintenance and takedown to where kernels have them.

mod change;
mod contiguous;
mod exchange;
mod lookup;
mod maintain;
mod map;
mod shape;
mod single;
mod unmap;

use thiserror::Error;

pub use lookup::{Access, Fault, FaultStatus, Translation, Walker};
pub use map::MapRequest;
pub use single::Mapper;

use crate::{
    address::{EntryAddress, Ipa, PhysAddr, TableAddress},
    descriptor::{Attributes, Descriptor, EntryKind},
    geometry::{ADDRESS_BITS, Geometry, Level},
    memcache::{Memcache, TableFreeBatch},
    operations::{Operations, Unlinked, Vmid},
    policy::{CmoPlacement, Coalesce, Policy},
};

/// What the CPUs can do, all of them alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features {
    /// FEAT_S2FWB: the guest cannot go around the caches.
    pub fwb: bool,
    /// CTR_EL0.DIC: no I-cache invalidation is needed.
    pub dic: bool,
    /// FEAT_TLBIRANGE.
    pub tlb_range: bool,
    /// FEAT_BBM: 0 to 3, where 3 stands for level 2 on CPUs that give no conflict aborts.
    pub bbm: u8,
}

/// Why a change was not made, or not all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum MapError {
    /// Addresses or size are no multiples of the page.
    #[error("{ipa:#x} to {phys:#x}, {size:#x} bytes: not on boundaries of the granule")]
    Unaligned {
        /// Guest address.
        ipa: Ipa,
        /// Host address.
        phys: PhysAddr,
        /// Bytes.
        size: u64,
    },
    /// The range leaves the IPA space.
    #[error("{ipa:#x} and {size:#x} bytes from there leave the IPA space")]
    OutOfRange {
        /// Guest address.
        ipa: Ipa,
        /// Bytes.
        size: u64,
    },
    /// The host's memory does not end within the addresses that descriptors hold.
    #[error("{phys:#x} and {size:#x} bytes from there leave the addresses of 48 bits")]
    TooHigh {
        /// Host address.
        phys: PhysAddr,
        /// Bytes.
        size: u64,
    },
    /// A table is needed and the memcache has none: top it up and try again.
    #[error("the memcache is empty: top it up and try again")]
    NoTable,
    /// Another CPU was faster, or is at it: the guest should just try again.
    #[error("another CPU has changed the entry: try again")]
    Again,
    /// The leaf is one of a contiguous run, which shared walkers leave alone: call what needs the
    /// table for itself.
    #[error("the page is one of a contiguous run: only the sole walker changes it")]
    Contiguous,
}

/// A stage-2 translation table.
#[derive(Debug)]
pub struct Stage2 {
    geometry: Geometry,
    features: Features,
    policy: Policy,
    vmid: Vmid,
    root: TableAddress,
    /// Whether no leaf's memory has to be made ready where it is installed.
    all_ready: bool,
    /// Whether, besides, a table of pages that a block replaces has to be given back and no more.
    drops_pages: bool,
}

/// One entry and what it spans.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    pub entry: EntryAddress,
    pub level: Level,
    pub ipa: Ipa,
}

impl Slot {
    /// The one behind it, in the same table.
    pub(crate) fn next(self, span: u64) -> Self {
        self.skip(1, span)
    }

    /// The one `count` behind it.
    pub(crate) fn skip(self, count: u64, span: u64) -> Self {
        Self {
            entry: self.entry.skip(count),
            ipa: self.ipa + count * span,
            ..self
        }
    }
}

/// One walk over a table.
#[derive(Debug)]
pub(crate) struct Walk<'a, O> {
    pub stage2: &'a Stage2,
    pub ops: &'a O,
    pub shared: bool,
}

impl Stage2 {
    /// A table over `root`: [`Geometry::root_tables`] zeroed tables side by side.
    pub const fn new(
        geometry: Geometry,
        features: Features,
        policy: Policy,
        vmid: Vmid,
        root: TableAddress,
    ) -> Self {
        let all_ready =
            (features.fwb && features.dic) || matches!(policy.cmo, CmoPlacement::FaultPath);
        Self {
            geometry,
            features,
            policy,
            vmid,
            root,
            all_ready,
            drops_pages: all_ready
                && !policy.count_references
                && !matches!(policy.coalesce, Coalesce::FreeFirst),
        }
    }

    /// Its shape.
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// What it goes by.
    pub const fn policy(&self) -> &Policy {
        &self.policy
    }

    /// What the CPUs can do.
    pub const fn features(&self) -> &Features {
        &self.features
    }

    /// The guest's number.
    pub const fn vmid(&self) -> Vmid {
        self.vmid
    }

    /// The first table.
    pub const fn root(&self) -> TableAddress {
        self.root
    }

    /// Tables that any one mapping may need: the memcache's sizing rule (Linux:
    /// `kvm_mmu_cache_min_pages()`).
    pub const fn memcache_min(&self) -> usize {
        self.geometry.depth()
    }

    /// Whether ranges are invalidated as such.
    #[inline]
    const fn uses_ranges(&self) -> bool {
        self.features.tlb_range && self.policy.range_invalidation
    }

    fn shared<'a, O>(&'a self, ops: &'a O) -> Walk<'a, O> {
        Walk {
            stage2: self,
            ops,
            shared: true,
        }
    }

    fn exclusive<'a, O>(&'a mut self, ops: &'a O) -> Walk<'a, O> {
        Walk {
            stage2: self,
            ops,
            shared: false,
        }
    }

    /// Maps a range, the only walker.
    ///
    /// # Errors
    /// [`MapError`]; after [`MapError::Again`] and [`MapError::NoTable`] part of it may be mapped.
    #[inline(always)]
    pub fn map<O: Operations>(
        &mut self,
        ops: &O,
        memcache: &mut Memcache,
        request: &MapRequest,
    ) -> Result<(), MapError> {
        self.exclusive(ops).map(memcache, request)
    }

    /// Maps a range beside other walkers.
    ///
    /// # Errors
    /// As [`Stage2::map`].
    #[inline(always)]
    pub fn map_shared<O: Operations>(
        &self,
        ops: &O,
        memcache: &mut Memcache,
        request: &MapRequest,
    ) -> Result<(), MapError> {
        ops.begin_walk();
        let result = self.shared(ops).map(memcache, request);
        ops.end_walk();
        result
    }

    /// Whether an address is in the IPA space.
    fn check_address(&self, ipa: Ipa) -> Result<(), MapError> {
        let page = self.geometry.granule().size();
        self.check_range(ipa.align_down(page), page)
    }

    /// Checks a range of guest addresses alone.
    fn check_range(&self, ipa: Ipa, size: u64) -> Result<(), MapError> {
        self.check(ipa, PhysAddr(0), size)
    }

    #[inline]
    fn check(&self, ipa: Ipa, phys: PhysAddr, size: u64) -> Result<(), MapError> {
        if (ipa.0 | phys.0 | size) & (self.geometry.granule().size() - 1) != 0 {
            return Err(MapError::Unaligned { ipa, phys, size });
        }
        let within = |at: u64, end| at.checked_add(size).is_some_and(|to| to <= end);
        if !within(ipa.0, self.geometry.size()) {
            return Err(MapError::OutOfRange { ipa, size });
        }
        if !within(phys.0, 1 << ADDRESS_BITS) {
            return Err(MapError::TooHigh { phys, size });
        }
        Ok(())
    }

    /// Frees a table that nothing points at any more, with all below it: what
    /// [`Operations::defer`] hands on comes here after the grace period.
    #[inline]
    pub fn free_unlinked<O: Operations>(&self, ops: &O, unlinked: Unlinked) {
        if self.is_bare(&unlinked) {
            return ops.free(unlinked.table);
        }
        let mut returns = TableFreeBatch::new();
        self.return_unlinked(ops, unlinked, &mut returns);
        returns.free_all(ops);
    }

    /// Whether a table has neither tables below it nor a count: then it may hold anything.
    #[inline]
    fn is_bare(&self, unlinked: &Unlinked) -> bool {
        !self.policy.count_references && unlinked.level == Level::PAGE
    }

    /// The same, one by one into what is to be given back together.
    fn return_unlinked<O: Operations>(
        &self,
        ops: &O,
        unlinked: Unlinked,
        returns: &mut TableFreeBatch,
    ) {
        if !self.is_bare(&unlinked) {
            self.return_below(ops, unlinked, returns);
        }
        returns.push(ops, unlinked.table);
    }

    #[inline(never)]
    fn return_below<O: Operations>(
        &self,
        ops: &O,
        Unlinked { table, level }: Unlinked,
        returns: &mut TableFreeBatch,
    ) {
        let mut counted = 0;
        for index in 0..self.geometry.granule().entries() {
            let old = ops.load(table.entry(index));
            if let (EntryKind::Table(child), Some(level)) = (old.kind(level), level.down()) {
                let table = child;
                self.return_unlinked(ops, Unlinked { table, level }, returns);
            }
            counted += u32::from(old.is_valid());
        }
        if self.policy.count_references {
            ops.drop_references(table, counted);
        }
    }

    /// Takes everything down; the root's tables remain and are empty.
    pub fn clear<O: Operations>(&mut self, ops: &O) {
        let size = self.geometry.size();
        // The whole space is a valid range.
        let _ = self.unmap(ops, Ipa(0), size);
    }
}

impl<O: Operations> Walk<'_, O> {
    /// The slot of an address in a table of `level`.
    #[inline]
    pub(crate) fn slot(&self, table: TableAddress, level: Level, ipa: Ipa) -> Slot {
        let geometry = &self.stage2.geometry;
        let index = geometry.index(ipa, level);
        Slot {
            entry: table.entry(index),
            level,
            ipa: ipa.align_down(geometry.span(level)),
        }
    }

    /// The table that an entry is in. Of tables side by side each has its own count.
    pub(crate) const fn table_of(&self, entry: EntryAddress) -> TableAddress {
        TableAddress(entry.0 & !(self.stage2.geometry.granule().size() - 1))
    }

    /// Counts entries of a table that have become valid, where tables are counted.
    #[inline]
    pub(crate) fn count(&self, table: TableAddress, entries: u32) {
        if self.stage2.policy.count_references && entries > 0 {
            self.ops.take_references(table, entries);
        }
    }

    /// Whether a table that is no root has no valid entry; the only walker asks. If it is looked
    /// through, entries behind `from` come first: whoever empties it begins at the other end.
    pub(crate) fn is_empty(&self, table: TableAddress, from: u64) -> bool {
        if self.stage2.policy.count_references {
            return self.ops.references(table) == 1;
        }
        let entries = self.stage2.geometry.granule().entries();
        (from..entries)
            .chain(0..from)
            .all(|index| !self.ops.load(table.entry(index)).is_valid())
    }

    /// The first address behind a slot.
    #[inline]
    pub(crate) fn end(&self, slot: &Slot) -> Ipa {
        slot.ipa + self.stage2.geometry.span(slot.level)
    }

    /// A leaf at a level. Whether it is one of a contiguous run is for `contiguous` to say.
    #[inline]
    pub(crate) fn leaf(&self, phys: PhysAddr, level: Level, attributes: Attributes) -> Descriptor {
        let attributes = Attributes {
            contiguous: false,
            ..attributes
        };
        Descriptor::leaf(phys, level, attributes, self.stage2.features.fwb)
    }
}
