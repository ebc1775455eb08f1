// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One leaf where all tables are: what most maps of a running guest come to, and short enough to
//! become part of whoever calls. Where nothing is and the memory is ready it is one store, or one
//! compare-and-swap. All else is left to [`map`](super::map).
//!
//! A [`Mapper`] maps many in one walk and remembers the table that it was last in. In a shared walk
//! somebody may put a block in that table's place meanwhile: the table stays for as long as the walk
//! lasts, and what is mapped into it is mapped by the block.

use super::{MapError, MapRequest, Slot, Stage2, Walk, map::Split};
use crate::{
    descriptor::Descriptor,
    geometry::{Granule, Level},
    memcache::Memcache,
    operations::{EntryAddress, Operations, Order, TableAddress},
};

/// A table, and which leaves go into it.
#[derive(Debug, Clone, Copy)]
struct Place {
    table: TableAddress,
    level: Level,
    /// The guest addresses of its entries.
    ipa: u64,
    bytes: u64,
}

impl Place {
    /// Nowhere.
    const NONE: Self = Self {
        table: TableAddress(0),
        level: Level::PAGE,
        ipa: 0,
        bytes: 0,
    };

    #[inline(always)]
    fn has(&self, r: &MapRequest) -> bool {
        r.ipa.wrapping_sub(self.ipa) < self.bytes
    }

    /// The entry of an address in it. Callers mostly know the size, and so the shift.
    #[inline(always)]
    fn entry(&self, r: &MapRequest) -> EntryAddress {
        self.table
            .entry(r.ipa.wrapping_sub(self.ipa) >> r.size.trailing_zeros())
    }
}

impl<O: Operations> Walk<'_, O> {
    /// Goes down to the table that one leaf for all that is asked for belongs in, if it is there. The
    /// address is in the IPA space.
    #[inline(always)]
    fn place_of(&self, (granule, start): (Granule, Level), r: &MapRequest) -> Option<Place> {
        // A leaf on a boundary of its size that begins in the IPA space ends there.
        if (r.ipa | r.phys) & r.size.wrapping_sub(1) != 0
            || r.size < granule.size()
            || r.size > granule.largest_leaf().min(r.largest)
        {
            return None;
        }
        let (mut level, mut shift) = (start, start.shift(granule));
        let (mut table, mut index) = (self.stage2.root, r.ipa >> shift);
        while r.size < 1 << shift {
            // Above pages: the size is a page's at least.
            table = TableAddress(self.ops.load(table.entry(index)).next_table()?);
            level = level.down()?;
            shift = level.shift(granule);
            index = (r.ipa >> shift) & (granule.entries() - 1);
        }
        let covers = shift + granule.level_bits();
        (r.size == 1 << shift).then_some(Place {
            // Of the root's, which lie side by side, the one that it is in.
            table: TableAddress(table.entry(index).0 & !(granule.size() - 1)),
            level,
            ipa: r.ipa >> covers << covers,
            bytes: 1 << covers,
        })
    }

    /// Maps what was asked for if it is one leaf and its table is there. Gives what came of it. The
    /// address is in the IPA space.
    #[inline(always)]
    pub(super) fn map_single(
        &self,
        shape: (Granule, Level),
        r: &MapRequest,
    ) -> Option<Result<(), MapError>> {
        let place = self.place_of(shape, r)?;
        let (entry, new) = (place.entry(r), self.leaf_for(shape.0, r).at(r.phys));
        if self.is_ready(r.attributes) && self.place(entry, new) {
            self.count(self.table_of(entry), 1);
            return Some(Ok(()));
        }
        let walk = (self.stage2, self.ops, self.shared);
        Some(Self::map_over(walk, entry, (place.level, r.ipa), new))
    }

    /// The same where something is, or something has to be done first. All it gets are values, as
    /// [`Walk::map_any`].
    #[inline(never)]
    fn map_over(
        (stage2, ops, shared): (&Stage2, &O, bool),
        entry: EntryAddress,
        (level, ipa): (Level, u64),
        new: Descriptor,
    ) -> Result<(), MapError> {
        let walk = Walk {
            stage2,
            ops,
            shared,
        };
        walk.map_leaf(&Slot { entry, level, ipa }, new, Split::default())
    }

    /// Puts a block of `size` bytes where a table of pages is, where that takes no more than a break,
    /// an invalidation and a new entry: what [`Walk::coalesce`] comes to then. Gives whether it did.
    #[inline(always)]
    fn replace_pages(&self, slot: &Slot, size: u64, new: Descriptor) -> bool {
        if self.shared || !self.stage2.drops_pages || slot.level.down() != Some(Level::PAGE) {
            return false;
        }
        let Some(child) = self.ops.load(slot.entry).next_table() else {
            return false;
        };
        self.ops.store(slot.entry, Descriptor::EMPTY, Order::Plain);
        self.invalidate_range(slot.ipa, size);
        self.make(slot, new);
        self.ops.free(TableAddress(child));
        true
    }

    /// The leaf of a request for one, at address 0.
    #[inline(always)]
    fn leaf_for(&self, granule: Granule, r: &MapRequest) -> Descriptor {
        let page = r.size == granule.size();
        self.leaf(0, Level::PAGE, r.attributes).moved(0, page)
    }
}

/// Many maps in one walk: [`Stage2::mapper`].
#[derive(Debug)]
pub struct Mapper<'a, O: Operations> {
    walk: Walk<'a, O>,
    last: Place,
    /// What was asked for last ([`key`]), and the leaf for it.
    key: u64,
    leaf: Descriptor,
}

/// Attributes and size as one word, if the request is for one leaf.
#[inline(always)]
const fn key(r: &MapRequest) -> Option<u64> {
    let one = r.size.is_power_of_two() && r.size >= 4096 && r.size <= r.largest;
    if one && (r.ipa | r.phys) & (r.size - 1) == 0 {
        Some(Descriptor::leaf(r.size, Level::PAGE, r.attributes, false).0)
    } else {
        None
    }
}

impl<'a, O: Operations> Mapper<'a, O> {
    const fn new(walk: Walk<'a, O>) -> Self {
        Self {
            walk,
            last: Place::NONE,
            key: 0,
            leaf: Descriptor::EMPTY,
        }
    }

    /// Maps a range.
    ///
    /// # Errors
    /// As [`Stage2::map`].
    #[inline(always)]
    pub fn map(&mut self, memcache: &mut Memcache, r: &MapRequest) -> Result<(), MapError> {
        let key = key(r);
        if self.last.has(r) && key == Some(self.key) {
            if self.walk.place(self.last.entry(r), self.leaf.at(r.phys)) {
                return Ok(());
            }
            if r.size > self.walk.stage2.geometry.granule().size() && self.replace_pages(r) {
                return Ok(());
            }
        }
        let Walk {
            stage2,
            ops,
            shared,
        } = self.walk;
        let (to, from) = ((r.ipa, r.size), (r.phys, r.largest));
        let attributes = Descriptor::leaf(0, Level::PAGE, r.attributes, false);
        // The table that was last used may be one that this very map takes away.
        self.last = Place::NONE;
        (self.last, self.leaf) =
            Self::map_elsewhere((stage2, ops, shared), memcache, to, from, attributes)?;
        self.key = key.unwrap_or(0);
        Ok(())
    }

    /// Has a block take the place of a table of pages in the table that was last used. Gives whether
    /// it did.
    #[inline(always)]
    fn replace_pages(&self, r: &MapRequest) -> bool {
        let slot = Slot {
            entry: self.last.entry(r),
            level: self.last.level,
            ipa: r.ipa,
        };
        let new = self.leaf.at(r.phys);
        self.walk.replace_pages(&slot, r.size, new)
    }

    /// Maps in the common way and gives the table that it was in, if more leaves such as this one
    /// may follow without further ado, and the leaf. All it gets are values: a mapper that nothing
    /// points at can be held in registers.
    #[inline(never)]
    fn map_elsewhere(
        (stage2, ops, shared): (&Stage2, &O, bool),
        memcache: &mut Memcache,
        (ipa, size): (u64, u64),
        (phys, largest): (u64, u64),
        attributes: Descriptor,
    ) -> Result<(Place, Descriptor), MapError> {
        let walk = Walk {
            stage2,
            ops,
            shared,
        };
        let r = MapRequest {
            ipa,
            phys,
            size,
            attributes: attributes.attributes(),
            largest,
        };
        walk.map(memcache, &r)?;
        let shape = stage2.geometry.shape();
        // What was mapped is in the IPA space.
        let place = walk
            .place_of(shape, &r)
            .filter(|_| walk.is_ready(r.attributes) && !stage2.policy.counts_entries);
        Ok((place.unwrap_or(Place::NONE), walk.leaf_for(shape.0, &r)))
    }
}

impl<O: Operations> Drop for Mapper<'_, O> {
    fn drop(&mut self) {
        if self.walk.shared {
            self.walk.ops.end_walk();
        }
    }
}

impl Stage2 {
    /// For many maps, the only walker.
    pub fn mapper<'a, O: Operations>(&'a mut self, ops: &'a O) -> Mapper<'a, O> {
        Mapper::new(self.exclusive(ops))
    }

    /// For many maps, beside other walkers. No table is freed while it is there.
    pub fn mapper_shared<'a, O: Operations>(&'a self, ops: &'a O) -> Mapper<'a, O> {
        ops.begin_walk();
        Mapper::new(self.shared(ops))
    }
}
