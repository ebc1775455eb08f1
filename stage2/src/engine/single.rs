// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One leaf, where nothing is and all tables are: what most maps of a running guest come to, and
//! short enough to become part of whoever calls. It is one store, or one compare-and-swap. All else
//! is left to [`map`](super::map), as is a leaf whose memory has to be made ready first.
//!
//! A [`Mapper`] maps many in one walk and remembers the table that it was last in. In a shared walk
//! somebody may put a block in that table's place meanwhile: the table stays for as long as the walk
//! lasts, and what is mapped into it is mapped by the block.

use super::{MapError, MapRequest, Stage2, Walk};
use crate::{
    descriptor::Descriptor,
    geometry::Level,
    memcache::Memcache,
    operations::{EntryAddress, Operations, TableAddress},
};

/// A table, and what lies in it.
#[derive(Debug, Clone, Copy)]
struct Place {
    table: TableAddress,
    /// The guest addresses of its entries.
    ipa: u64,
    bytes: u64,
    /// Bytes of a leaf there, and the same as a shift.
    size: u64,
    shift: u32,
    page: bool,
}

impl Place {
    /// Nowhere.
    const NONE: Self = Self {
        table: TableAddress(0),
        ipa: 0,
        bytes: 0,
        size: 0,
        shift: 0,
        page: false,
    };

    #[inline(always)]
    fn has(&self, r: &MapRequest) -> bool {
        r.ipa.wrapping_sub(self.ipa) < self.bytes
            && r.size == self.size
            && r.size <= r.largest
            && (r.ipa | r.phys) & (r.size - 1) == 0
    }

    #[inline(always)]
    fn entry(&self, ipa: u64) -> EntryAddress {
        self.table.entry(ipa.wrapping_sub(self.ipa) >> self.shift)
    }
}

impl<O: Operations> Walk<'_, O> {
    /// Goes down to the table that one leaf for all that is asked for belongs in, if it is there.
    #[inline]
    fn place_of(&self, r: &MapRequest) -> Option<Place> {
        let geometry = &self.stage2.geometry;
        let granule = geometry.granule();
        // A leaf on a boundary of its size that begins in the IPA space ends there.
        if (r.ipa | r.phys) & r.size.wrapping_sub(1) != 0
            || r.ipa >= geometry.size()
            || r.size < granule.size()
            || r.size > granule.largest_leaf().min(r.largest)
        {
            return None;
        }
        let mut shift = geometry.start().shift(granule);
        let mut table = self.table_of(self.stage2.root.entry(r.ipa >> shift));
        while r.size < 1 << shift {
            let index = (r.ipa >> shift) & (granule.entries() - 1);
            // Above pages: the size is a page's at least.
            let old = self.ops.load(table.entry(index));
            if !old.is_table_or_page() {
                return None;
            }
            table = TableAddress(old.address());
            shift -= granule.level_bits();
        }
        let covers = shift + granule.level_bits();
        (r.size == 1 << shift).then_some(Place {
            table,
            ipa: r.ipa >> covers << covers,
            bytes: 1 << covers,
            size: r.size,
            shift,
            page: shift == granule.shift(),
        })
    }

    /// Maps the one leaf into its table, if nothing is there. Gives whether it did.
    #[inline(always)]
    fn map_into(&self, place: &Place, r: &MapRequest, leaf: Descriptor) -> bool {
        let entry = place.entry(r.ipa);
        let placed = self.place(entry, leaf.moved(r.phys, place.page));
        if placed {
            self.count(self.table_of(entry), 1);
        }
        placed
    }

    /// Maps what was asked for if it is such a leaf. Gives whether it was.
    #[inline(always)]
    pub(super) fn map_single(&self, r: &MapRequest, leaf: Descriptor) -> bool {
        self.is_ready(r.attributes)
            && self
                .place_of(r)
                .is_some_and(|place| self.map_into(&place, r, leaf))
    }
}

/// Many maps in one walk: [`Stage2::mapper`].
#[derive(Debug)]
pub struct Mapper<'a, O: Operations> {
    walk: Walk<'a, O>,
    last: Place,
}

impl<O: Operations> Mapper<'_, O> {
    /// Maps a range.
    ///
    /// # Errors
    /// As [`Stage2::map`].
    #[inline(always)]
    pub fn map(&mut self, memcache: &mut Memcache, r: &MapRequest) -> Result<(), MapError> {
        let leaf = self.walk.leaf(0, Level::PAGE, r.attributes);
        if self.last.has(r)
            && self.walk.is_ready(r.attributes)
            && self.walk.map_into(&self.last, r, leaf)
        {
            return Ok(());
        }
        let Walk {
            stage2,
            ops,
            shared,
        } = self.walk;
        let (to, from) = ((r.ipa, r.size), (r.phys, r.largest));
        // The table that was last used may be one that this very map takes away.
        self.last = Place::NONE;
        self.last = Self::map_elsewhere((stage2, ops, shared), memcache, to, from, leaf)?;
        Ok(())
    }

    /// Maps in the common way and gives the table that it was in. All it gets are values: a mapper
    /// that nothing points at can be held in registers.
    #[inline(never)]
    fn map_elsewhere(
        (stage2, ops, shared): (&Stage2, &O, bool),
        memcache: &mut Memcache,
        (ipa, size): (u64, u64),
        (phys, largest): (u64, u64),
        leaf: Descriptor,
    ) -> Result<Place, MapError> {
        let walk = Walk {
            stage2,
            ops,
            shared,
        };
        let r = MapRequest {
            ipa,
            phys,
            size,
            attributes: leaf.attributes(),
            largest,
        };
        walk.map(memcache, &r)?;
        Ok(walk.place_of(&r).unwrap_or(Place::NONE))
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
        Mapper {
            walk: self.exclusive(ops),
            last: Place::NONE,
        }
    }

    /// For many maps, beside other walkers. No table is freed while it is there.
    pub fn mapper_shared<'a, O: Operations>(&'a self, ops: &'a O) -> Mapper<'a, O> {
        ops.begin_walk();
        Mapper {
            walk: self.shared(ops),
            last: Place::NONE,
        }
    }
}
