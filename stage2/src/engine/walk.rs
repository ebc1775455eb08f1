// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Exclusive and shared walks, and their reads and changes of one entry.

use core::{fmt, marker::PhantomData};

use super::{BbmLevel, MapError, Stage2};
use crate::{
    address::{EntryAddress, Ipa, PhysAddr, TableAddress},
    descriptor::{Attributes, Descriptor},
    geometry::Level,
    operations::{Operations, Order},
};

/// Mode of a walk: [`ExclusiveWalk`] or [`SharedWalk`]. The trait is sealed: its path is private.
pub trait WalkMode: fmt::Debug + Copy {
    /// Indicates that other walkers may change the table at the same time.
    #[doc(hidden)]
    const IS_SHARED: bool;
    /// The entry that a break stores. Other walkers leave a locked entry unchanged.
    #[doc(hidden)]
    const BROKEN_ENTRY: Descriptor;
    /// The lowest FEAT_BBM level at which a size changes without a break. Below 3, a change takes
    /// two stores, and another walker could change the entry between them.
    #[doc(hidden)]
    const MIN_BBM_LEVEL: BbmLevel;

    /// Replaces `old` by `new`; fails if another walker has changed the entry.
    #[doc(hidden)]
    fn replace<O: Operations>(
        ops: &O,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
        order: Order,
    ) -> Result<(), MapError>;

    /// Stores `new` if the entry is empty. Returns whether it was empty.
    #[doc(hidden)]
    fn make_if_empty<O: Operations>(ops: &O, entry: EntryAddress, new: Descriptor) -> bool;

    #[doc(hidden)]
    fn begin_walk<O: Operations>(ops: &O);

    #[doc(hidden)]
    fn end_walk<O: Operations>(ops: &O);
}

/// Walk that changes entries by plain stores, as the only walker.
#[derive(Debug, Clone, Copy)]
pub struct ExclusiveWalk;

/// Walk that changes entries by compare-and-swap, concurrently with other walkers.
#[derive(Debug, Clone, Copy)]
pub struct SharedWalk;

impl WalkMode for ExclusiveWalk {
    const IS_SHARED: bool = false;
    const BROKEN_ENTRY: Descriptor = Descriptor::EMPTY;
    const MIN_BBM_LEVEL: BbmLevel = BbmLevel::L1;

    #[inline(always)]
    fn replace<O: Operations>(
        ops: &O,
        entry: EntryAddress,
        _: Descriptor,
        new: Descriptor,
        order: Order,
    ) -> Result<(), MapError> {
        ops.store(entry, new, order);
        Ok(())
    }

    #[inline(always)]
    fn make_if_empty<O: Operations>(ops: &O, entry: EntryAddress, new: Descriptor) -> bool {
        let empty = ops.load(entry) == Descriptor::EMPTY;
        if empty {
            ops.store(entry, new, Order::Release);
        }
        empty
    }

    #[inline(always)]
    fn begin_walk<O: Operations>(_: &O) {}

    #[inline(always)]
    fn end_walk<O: Operations>(_: &O) {}
}

impl WalkMode for SharedWalk {
    const IS_SHARED: bool = true;
    const BROKEN_ENTRY: Descriptor = Descriptor::LOCKED;
    const MIN_BBM_LEVEL: BbmLevel = BbmLevel::L3;

    #[inline(always)]
    fn replace<O: Operations>(
        ops: &O,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
        _: Order,
    ) -> Result<(), MapError> {
        ops.compare_exchange(entry, old, new).map_err(|_| MapError::Again)
    }

    #[inline(always)]
    fn make_if_empty<O: Operations>(ops: &O, entry: EntryAddress, new: Descriptor) -> bool {
        ops.compare_exchange(entry, Descriptor::EMPTY, new).is_ok()
    }

    #[inline(always)]
    fn begin_walk<O: Operations>(ops: &O) {
        ops.begin_walk();
    }

    #[inline(always)]
    fn end_walk<O: Operations>(ops: &O) {
        ops.end_walk();
    }
}

/// An entry, its level, and the first guest address that it translates.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    pub entry: EntryAddress,
    pub level: Level,
    pub ipa: Ipa,
}

impl Slot {
    /// Returns the next slot of the same table. `span` is the size of one entry in bytes.
    pub(super) fn next(self, span: u64) -> Self {
        self.skip(1, span)
    }

    /// Returns the slot `count` entries after this one in the same table.
    pub(super) fn skip(self, count: u64, span: u64) -> Self {
        Self { entry: self.entry.skip(count), ipa: self.ipa + count * span, ..self }
    }
}

/// One walk of a table, on one CPU.
#[derive(Debug)]
pub(super) struct Walk<'a, O, M> {
    pub stage2: &'a Stage2,
    pub ops: &'a O,
    mode: PhantomData<M>,
}

impl<O, M> Clone for Walk<'_, O, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<O, M> Copy for Walk<'_, O, M> {}

impl Stage2 {
    pub(super) const fn shared_walk<'a, O>(&'a self, ops: &'a O) -> Walk<'a, O, SharedWalk> {
        Walk { stage2: self, ops, mode: PhantomData }
    }

    pub(super) const fn exclusive_walk<'a, O>(
        &'a mut self,
        ops: &'a O,
    ) -> Walk<'a, O, ExclusiveWalk> {
        Walk { stage2: self, ops, mode: PhantomData }
    }
}

impl<O: Operations, M: WalkMode> Walk<'_, O, M> {
    /// Returns the slot that translates `ipa` in a table of `level`.
    #[inline]
    pub(super) fn slot(&self, table: TableAddress, level: Level, ipa: Ipa) -> Slot {
        let geometry = &self.stage2.geometry;
        Slot {
            entry: table.entry(geometry.index(ipa, level)),
            level,
            ipa: ipa.align_down(geometry.span(level)),
        }
    }

    #[inline]
    pub(super) fn slot_end(&self, slot: &Slot) -> Ipa {
        slot.ipa + self.stage2.geometry.span(slot.level)
    }

    /// Returns the table that contains an entry. Root tables count references separately.
    pub(super) const fn table_containing(&self, entry: EntryAddress) -> TableAddress {
        self.stage2.geometry.granule().table_containing(entry)
    }

    /// Adds references for entries that have become valid, if the policy counts them.
    #[inline]
    pub(super) fn add_references(&self, table: TableAddress, entries: u32) {
        if self.stage2.policy.counts_references && entries > 0 {
            self.ops.take_references(table, entries);
        }
    }

    /// Returns a leaf without the contiguous hint.
    #[inline]
    pub(super) fn new_leaf(&self, phys: PhysAddr, level: Level, a: Attributes) -> Descriptor {
        let a = Attributes { is_contiguous: false, ..a };
        Descriptor::leaf(phys, level, a, self.stage2.features.fwb)
    }

    /// Stores a leaf whose memory needs no CMO if the entry is empty. Returns whether it was empty.
    #[inline(always)]
    pub(super) fn make_if_empty(&self, entry: EntryAddress, new: Descriptor) -> bool {
        M::make_if_empty(self.ops, entry, new)
    }

    /// Replaces an invalid entry, or a valid entry by a valid one: neither needs a break.
    #[inline]
    pub(super) fn replace(
        &self,
        slot: &Slot,
        old: Descriptor,
        new: Descriptor,
        order: Order,
    ) -> Result<(), MapError> {
        debug_assert!(!old.is_valid() || new.is_valid(), "only break_entry() may break");
        M::replace(self.ops, slot.entry, old, new, order)
    }

    /// Reads an entry. If another walker has locked it, waits according to the policy.
    ///
    /// # Errors
    /// [`MapError::Again`] if it stays locked.
    #[inline]
    pub(super) fn load_unlocked(&self, slot: &Slot) -> Result<Descriptor, MapError> {
        let entry = self.ops.load(slot.entry);
        if entry.is_locked() { self.wait_for_unlock(slot) } else { Ok(entry) }
    }

    /// Waits, according to the policy, until a locked entry changes. Returns the new entry.
    ///
    /// # Errors
    /// [`MapError::Again`] if it stays locked.
    #[inline(never)]
    pub(super) fn wait_for_unlock(&self, slot: &Slot) -> Result<Descriptor, MapError> {
        for _ in 1..self.stage2.policy.locked_entry_reads {
            self.ops.pause();
            let entry = self.ops.load(slot.entry);
            if !entry.is_locked() {
                return Ok(entry);
            }
        }
        Err(MapError::Again)
    }
}
