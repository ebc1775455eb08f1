// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Mapping of a range: for each table, the walk descends to the highest level at which a leaf fits.
//!
//! A request for one leaf whose tables all exist (most faults of a running guest) takes the fast
//! path [`Walk::map_single`]: the same walk, with the most frequent geometry as a constant, and
//! small enough to be inlined into the caller.

use super::{
    MapError, Stage2,
    leaf::SplitState,
    walk::{Slot, Walk, WalkMode},
};
use crate::{
    address::{EntryAddress, Ipa, PhysAddr, TableAddress},
    descriptor::{Attributes, Descriptor, EntryKind},
    geometry::{Geometry, Granule, Level},
    memcache::Memcache,
    operations::{Operations, Order},
};

/// A range to map to contiguous host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapRequest {
    /// First guest address, a multiple of the page size.
    pub ipa: Ipa,
    /// First host address, a multiple of the page size.
    pub phys: PhysAddr,
    /// Size in bytes, a multiple of the page size.
    pub size: u64,
    /// Attributes of every leaf. `contiguous` is ignored: the engine sets the hint for runs that it
    /// fills.
    pub attributes: Attributes,
    /// Maximum size of a leaf, in bytes.
    pub max_leaf_size: u64,
}

impl MapRequest {
    /// Creates a request without a limit on the size of a leaf.
    pub const fn new(ipa: Ipa, phys: PhysAddr, size: u64, attributes: Attributes) -> Self {
        Self { ipa, phys, size, attributes, max_leaf_size: u64::MAX }
    }

    /// Returns whether both addresses are below 2^48 and multiples of the size, a power of two.
    #[inline(always)]
    pub(super) const fn is_aligned(&self) -> bool {
        let outside = self.size.wrapping_sub(1) | u64::MAX << crate::geometry::ADDRESS_BITS;
        (self.ipa.0 | self.phys.0) & outside == 0
    }
}

/// Progress through a map request.
pub(super) struct MapCursor<'a> {
    pub ipa: Ipa,
    pub end: Ipa,
    pub phys: PhysAddr,
    /// Template of all leaves: a page with output address 0.
    pub leaf: Descriptor,
    pub max_leaf_size: u64,
    pub split_state: SplitState,
    /// Indicates that this exclusive walk has linked the table, which is therefore empty.
    pub is_in_new_table: bool,
    /// Indicates that another walker was changing an entry: the caller retries.
    pub must_retry: bool,
    /// Indicates that an entry belongs to a contiguous run: an exclusive walk must retry.
    pub has_found_contiguous: bool,
    pub memcache: &'a mut Memcache,
}

impl MapCursor<'_> {
    /// Advances to `end`, but not beyond the end of the range.
    fn advance_to(&mut self, end: Ipa) {
        let next = end.min(self.end);
        self.phys += next - self.ipa;
        self.ipa = next;
    }
}

impl<O: Operations, M: WalkMode> Walk<'_, O, M> {
    #[inline(always)]
    pub(super) fn map(self, memcache: &mut Memcache, r: &MapRequest) -> Result<(), MapError> {
        if self.stage2.geometry.is_common_and_contains(r.ipa)
            && let Some(result) = self.map_single(Geometry::COMMON_GRANULE_AND_START, memcache, r)
        {
            return result;
        }
        self.map_range(memcache, *r)
    }

    /// Maps the request if it is for a single leaf and the leaf's table exists. The address must be
    /// in the IPA space.
    #[inline(always)]
    fn map_single(
        self,
        shape: (Granule, Level),
        memcache: &mut Memcache,
        r: &MapRequest,
    ) -> Option<Result<(), MapError>> {
        let (entry, level) = self.single_leaf_entry(shape, r)?;
        let new = self.template_leaf(shape.0, r).with_address_bits(r.phys);
        if self.needs_no_cmo(r.attributes) && self.make_if_empty(entry, new) {
            self.add_references(self.table_containing(entry), 1);
            return Some(Ok(()));
        }
        let ipa = r.ipa;
        Some(self.map_leaf(&Slot { entry, level, ipa }, new, SplitState::default(), memcache))
    }

    /// Walks to the entry of a single-leaf request. Returns `None` if the request needs more than
    /// one leaf, or if a table is missing. The address must be in the IPA space.
    #[inline(always)]
    pub(super) fn single_leaf_entry(
        &self,
        (granule, start): (Granule, Level),
        r: &MapRequest,
    ) -> Option<(EntryAddress, Level)> {
        // An aligned leaf that starts in the IPA space also ends in it.
        if !r.is_aligned()
            || r.size < granule.size()
            || r.size > granule.largest_leaf_size().min(r.max_leaf_size)
        {
            return None;
        }
        let (mut level, mut shift) = (start, start.shift(granule));
        let (mut table, mut index) = (self.stage2.root, r.ipa.0 >> shift);
        while r.size < 1 << shift {
            table = self.ops.load(table.entry(index)).next_table()?;
            level = level.child()?;
            shift = level.shift(granule);
            index = (r.ipa.0 >> shift) & (granule.entries() - 1);
        }
        (r.size == 1 << shift).then_some((table.entry(index), level))
    }

    /// Returns the leaf of a single-leaf request, with output address 0.
    #[inline(always)]
    pub(super) fn template_leaf(&self, granule: Granule, r: &MapRequest) -> Descriptor {
        self.new_leaf(PhysAddr(0), Level::PAGE, r.attributes)
            .with_address(PhysAddr(0), r.size == granule.size())
    }

    /// Maps any request, table by table.
    #[inline(never)]
    fn map_range(self, memcache: &mut Memcache, r: MapRequest) -> Result<(), MapError> {
        let geometry = &self.stage2.geometry;
        if geometry.granule_and_start() != Geometry::COMMON_GRANULE_AND_START
            && r.ipa.0 < geometry.size()
            && let Some(result) = self.map_single(geometry.granule_and_start(), memcache, &r)
        {
            return result;
        }
        self.stage2.check_mapping(r.ipa, r.phys, r.size)?;
        let mut cursor = MapCursor {
            ipa: r.ipa,
            end: r.ipa + r.size,
            phys: r.phys,
            leaf: self.new_leaf(PhysAddr(0), Level::PAGE, r.attributes),
            max_leaf_size: r.max_leaf_size,
            split_state: SplitState::default(),
            is_in_new_table: false,
            must_retry: false,
            has_found_contiguous: false,
            memcache,
        };
        while cursor.ipa < cursor.end {
            self.map_table(&mut cursor)?;
        }
        if cursor.has_found_contiguous {
            return Err(MapError::Contiguous);
        }
        if cursor.must_retry {
            return Err(MapError::Again);
        }
        Ok(())
    }

    /// Walks from the root to the level at which a leaf fits, and maps the part of the range that
    /// lies in the table found.
    #[inline]
    fn map_table(&self, c: &mut MapCursor<'_>) -> Result<(), MapError> {
        let (mut table, mut level) = (self.stage2.root, self.stage2.geometry.start_level());
        c.is_in_new_table = false;
        loop {
            let slot = self.slot(table, level, c.ipa);
            if self.leaf_fits(&slot, c) {
                self.map_leaves(slot, c);
                return Ok(());
            }
            let Some(below) = level.child() else {
                return Err(MapError::Unaligned { ipa: c.ipa, phys: c.phys, size: c.end - c.ipa });
            };
            let old = self.ops.load(slot.entry);
            let child = match old.kind(level) {
                EntryKind::Table(child) => Ok(child),
                kind => self.table_below(&slot, below, kind == EntryKind::Locked, c),
            };
            table = match child {
                Ok(child) => child,
                Err(MapError::Again) => {
                    c.must_retry = true;
                    c.advance_to(self.slot_end(&slot));
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            level = below;
        }
    }

    /// Returns whether the request can map a leaf of the slot's level at the cursor.
    #[inline]
    fn leaf_fits(&self, slot: &Slot, c: &MapCursor<'_>) -> bool {
        let geometry = &self.stage2.geometry;
        let span = geometry.span(slot.level);
        slot.level.can_be_leaf(geometry.granule())
            && (c.ipa.0 | c.phys.0) & (span - 1) == 0
            && c.end - c.ipa >= span
            && span <= c.max_leaf_size.max(geometry.granule().size())
    }

    /// Maps leaves starting at `slot` until the table or the range ends. (No larger leaf fits
    /// inside a table: it would start at the table's first entry.)
    #[inline]
    fn map_leaves(&self, mut slot: Slot, c: &mut MapCursor<'_>) {
        let geometry = &self.stage2.geometry;
        let span = geometry.span(slot.level);
        let whole = span * geometry.granule().entries();
        let table_end = slot.ipa.align_down(whole) + whole;
        let skip_cmo = c.split_state.is_cmo_done || self.needs_no_cmo(c.leaf.attributes());
        let mut new = c.leaf.with_address(c.phys, slot.level == Level::PAGE);
        let (table, mut placed) = (self.table_containing(slot.entry), 0);
        let count = (c.end.min(table_end) - c.ipa) >> span.trailing_zeros();
        let contiguous = self.sets_contiguous(&slot, new);
        if skip_cmo && c.is_in_new_table {
            self.fill_new_table(slot, new, count, contiguous);
            self.add_references(table, u32::try_from(count).unwrap_or(u32::MAX));
            return c.advance_to(slot.ipa + count * span);
        }
        let mut left = count;
        while left > 0 {
            let run = match contiguous {
                true => self.map_run(&slot, new, left, skip_cmo),
                false => 0,
            };
            if run > 0 {
                placed += u32::try_from(run).unwrap_or(u32::MAX);
            } else if skip_cmo && self.make_if_empty(slot.entry, new) {
                placed += 1;
            } else {
                match self.map_leaf(&slot, new, c.split_state, c.memcache) {
                    Ok(()) => {}
                    Err(MapError::Contiguous) => c.has_found_contiguous = true,
                    // The map of a leaf that fits returns no other error.
                    Err(_) => c.must_retry = true,
                }
            }
            let done = run.max(1);
            left -= done;
            slot = slot.skip(done, span);
            new = new.offset_by(done * span);
        }
        self.add_references(table, placed);
        c.advance_to(slot.ipa);
    }

    /// Fills entries of a new table with leaves that need no CMO. If `contiguous` is set, whole
    /// runs get the contiguous hint.
    fn fill_new_table(&self, slot: Slot, leaf: Descriptor, count: u64, contiguous: bool) {
        let span = self.stage2.geometry.span(slot.level);
        let run = slot.level.contiguous_entries(self.stage2.geometry.granule());
        let before = (slot.ipa.0 >> span.trailing_zeros()).wrapping_neg() & (run - 1);
        let head = if contiguous { before.min(count) } else { count };
        let body = (count - head) & !(run - 1);
        let parts =
            [(0, head, false), (head, body, true), (head + body, count - head - body, false)];
        for (from, count, hint) in parts.into_iter().filter(|(_, count, _)| *count > 0) {
            let leaf = leaf.offset_by(from * span).with_contiguous(hint);
            let first = slot.skip(from, span).entry;
            self.ops.store_adjacent(first, count, leaf, span, Order::Release);
        }
    }

    /// Returns whether a block maps the memory at the cursor with the requested permissions.
    fn satisfies(&self, slot: &Slot, block: Descriptor, c: &MapCursor<'_>) -> bool {
        let (has, wants) = (block.attributes(), c.leaf.attributes());
        block.address() + (c.ipa - slot.ipa) == c.phys
            && has.memory == wants.memory
            && has.relaxed_by(wants) == has
    }

    /// Returns the table below a slot. If no table is there, links a new table or splits the block.
    /// Keeps a block that satisfies the request if the entry was locked before: the guest retries.
    #[inline(never)]
    fn table_below(
        &self,
        slot: &Slot,
        below: Level,
        was_locked: bool,
        c: &mut MapCursor<'_>,
    ) -> Result<TableAddress, MapError> {
        let old = self.load_unlocked(slot)?;
        match old.kind(slot.level) {
            EntryKind::Table(child) => Ok(child),
            EntryKind::Leaf(_) if was_locked && self.satisfies(slot, old, c) => {
                Err(MapError::Again)
            }
            EntryKind::Leaf(_) => self.split_block(slot, old, below, c),
            EntryKind::Invalid | EntryKind::Locked => {
                let child = c.memcache.take(self.ops).ok_or(MapError::NoTable)?;
                let new = Descriptor::table(child);
                if let Err(error) = self.replace(slot, old, new, Order::Release) {
                    c.memcache.return_unused(child);
                    return Err(error);
                }
                self.add_references(self.table_containing(slot.entry), 1);
                c.is_in_new_table = !M::IS_SHARED;
                Ok(child)
            }
        }
    }
}

impl Stage2 {
    /// Maps a range as the sole walker.
    ///
    /// A permission that an existing leaf lacks is added without a TLB invalidation
    /// ([`ExistingLeaf::Relax`](crate::ExistingLeaf)). A CPU that still holds the leaf takes a permission
    /// fault, which [`Stage2::relax`] handles: mapping again would not invalidate, and the CPU would
    /// fault again.
    ///
    /// # Errors
    /// [`MapError`]; after [`MapError::Again`] and [`MapError::NoTable`] part of the range may be
    /// mapped. With [`ExistingLeaf::Retry`](crate::ExistingLeaf), `Again` also denotes a leaf that
    /// lacks a permission, which [`Stage2::relax`] adds.
    #[inline(always)]
    pub fn map<O: Operations>(
        &mut self,
        ops: &O,
        memcache: &mut Memcache,
        request: &MapRequest,
    ) -> Result<(), MapError> {
        self.exclusive_walk(ops).map(memcache, request)
    }

    /// Maps a range concurrently with other walkers.
    ///
    /// # Errors
    /// As [`Stage2::map`], and [`MapError::Contiguous`].
    #[inline(always)]
    pub fn map_shared<O: Operations>(
        &self,
        ops: &O,
        memcache: &mut Memcache,
        request: &MapRequest,
    ) -> Result<(), MapError> {
        ops.begin_walk();
        let result = self.shared_walk(ops).map(memcache, request);
        ops.end_walk();
        result
    }
}
