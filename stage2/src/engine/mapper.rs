// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Mapping of many leaves in one walk: a [`Mapper`] caches the table of its last leaf, so that the
//! next leaf in the same table needs no walk.
//!
//! One comparison decides whether the next leaf has the size and attributes of the last one and lies in the
//! cached table. The mapper compares a key, an address below size and attributes:
//!
//! ```text
//!  62              54 53        48 47                        0
//!  │   attributes    │ log2 size │ first address of the table │
//! ```
//!
//! The key of a request minus that of the table is the offset in the table, or too large for it.
//!
//! In a shared walk, another walker may replace the cached table by a block. The table is not freed
//! before the walk ends, and the block maps the same memory as leaves added to the table.

use super::{
    MapError, Stage2,
    leaf::SplitState,
    map::MapRequest,
    walk::{ExclusiveWalk, SharedWalk, Slot, Walk, WalkMode},
};
use crate::{
    address::{EntryAddress, Ipa, TableAddress},
    descriptor::{Attributes, Descriptor},
    geometry::{ADDRESS_BITS, Geometry, Level},
    memcache::Memcache,
    operations::Operations,
};

/// A table and the guest addresses that it translates.
#[derive(Debug, Clone, Copy)]
struct TableSpan {
    table: TableAddress,
    level: Level,
    ipa: Ipa,
    bytes: u64,
}

impl TableSpan {
    const EMPTY: Self = Self { table: TableAddress(0), level: Level::PAGE, ipa: Ipa(0), bytes: 0 };

    /// Returns the table of `level` that contains the entry for `ipa`. A single root table may have
    /// more entries than the IPA space needs.
    fn of_ipa(entry: EntryAddress, level: Level, ipa: Ipa, geometry: &Geometry) -> Self {
        let granule = geometry.granule();
        let bytes = 1 << (level.shift(granule) + granule.level_bits());
        let ipa = ipa.align_down(bytes);
        Self {
            table: granule.table_containing(entry),
            level,
            ipa,
            bytes: bytes.min(geometry.size() - ipa.0),
        }
    }
}

/// Walk that maps many leaves: [`Stage2::mapper`], [`Stage2::mapper_shared`].
#[derive(Debug)]
pub struct Mapper<'a, O: Operations, M: WalkMode> {
    walk: Walk<'a, O, M>,
    /// The cached table, and the level of its entries.
    table: TableAddress,
    level: Level,
    /// The key of the first address that the table translates.
    first_key: u64,
    /// The bytes that the table translates; 0 if none is cached.
    bytes: u64,
    /// The last leaf, with output address 0.
    leaf: Descriptor,
}

/// Returns the upper bits of a key, size and attributes, if the request is for one leaf.
#[inline(always)]
fn leaf_key(r: &MapRequest) -> Option<u64> {
    let Attributes { memory, read, write, execute, is_accessed, is_contiguous: _, software } =
        r.attributes;
    let one_leaf = r.size.is_power_of_two() && r.size >= 4096 && r.size <= r.max_leaf_size;
    if !one_leaf || !r.is_aligned() {
        return None;
    }
    let flags = [read, write, execute, is_accessed];
    let bits = flags.into_iter().fold(memory as u64, |bits, flag| bits << 1 | u64::from(flag));
    let bits = bits << 3 | u64::from(software & 7);
    Some((bits << 6 | u64::from(r.size.trailing_zeros())) << ADDRESS_BITS)
}

impl<'a, O: Operations, M: WalkMode> Mapper<'a, O, M> {
    fn new(walk: Walk<'a, O, M>) -> Self {
        M::begin_walk(walk.ops);
        Self {
            walk,
            table: TableAddress(0),
            level: Level::PAGE,
            first_key: 0,
            bytes: 0,
            leaf: Descriptor::EMPTY,
        }
    }

    /// Maps a range.
    ///
    /// # Errors
    /// As [`Stage2::map`] or [`Stage2::map_shared`].
    #[inline(always)]
    pub fn map(&mut self, memcache: &mut Memcache, r: &MapRequest) -> Result<(), MapError> {
        let key = leaf_key(r);
        if let Some(key) = key {
            let offset = (r.ipa.0 | key).wrapping_sub(self.first_key);
            if offset < self.bytes {
                // Most callers know the size at compile time, so the shift is a constant.
                let entry = self.table.entry(offset >> r.size.trailing_zeros());
                if self.walk.make_if_empty(entry, self.leaf.with_address_bits(r.phys)) {
                    return Ok(());
                }
                // In a shared walk the table may no longer be linked: walk from the root.
                if !M::IS_SHARED {
                    let (level, ipa) = (self.level, r.ipa);
                    let new = self.leaf.with_address_bits(r.phys);
                    let (walk, slot) = (self.walk, Slot { entry, level, ipa });
                    return walk.map_leaf(&slot, new, SplitState::default(), memcache);
                }
            }
        }
        // This map may unlink the cached table.
        self.bytes = 0;
        let (span, leaf) = map_from_root(self.walk, memcache, *r)?;
        if let Some(key) = key {
            (self.table, self.level) = (span.table, span.level);
            (self.first_key, self.bytes) = (span.ipa.0 | key, span.bytes);
            self.leaf = leaf;
        }
        Ok(())
    }
}

/// Maps a range by a walk from the root. Returns the table and the leaf with which the mapper can
/// continue. Takes its arguments by value, so that the mapper can stay in registers.
#[inline(never)]
fn map_from_root<O: Operations, M: WalkMode>(
    walk: Walk<'_, O, M>,
    memcache: &mut Memcache,
    r: MapRequest,
) -> Result<(TableSpan, Descriptor), MapError> {
    walk.map(memcache, &r)?;
    let stage2 = walk.stage2;
    let shape = stage2.geometry.granule_and_start();
    // The range has been mapped, so it lies in the IPA space.
    let span = match walk.single_leaf_entry(shape, &r) {
        Some((entry, level))
            if walk.needs_no_cmo(r.attributes) && !stage2.policy.counts_references =>
        {
            TableSpan::of_ipa(entry, level, r.ipa, &stage2.geometry)
        }
        _ => TableSpan::EMPTY,
    };
    Ok((span, walk.template_leaf(shape.0, &r)))
}

impl<O: Operations, M: WalkMode> Drop for Mapper<'_, O, M> {
    fn drop(&mut self) {
        M::end_walk(self.walk.ops);
    }
}

impl Stage2 {
    /// Begins an exclusive walk for many maps.
    pub fn mapper<'a, O: Operations>(&'a mut self, ops: &'a O) -> Mapper<'a, O, ExclusiveWalk> {
        Mapper::new(self.exclusive_walk(ops))
    }

    /// Begins a shared walk for many maps. Tables are not freed until the mapper is dropped.
    pub fn mapper_shared<'a, O: Operations>(&'a self, ops: &'a O) -> Mapper<'a, O, SharedWalk> {
        Mapper::new(self.shared_walk(ops))
    }
}
