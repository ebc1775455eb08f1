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
    address::{EntryAddress, Ipa, PhysAddr, TableAddress},
    descriptor::{Attributes, Descriptor},
    geometry::{ADDRESS_BITS, Geometry, Granule, Level},
    memcache::Memcache,
    operations::{Operations, Order},
    policy::Unmap,
};

/// A table, and which leaves go into it.
#[derive(Debug, Clone, Copy)]
struct Place {
    table: TableAddress,
    level: Level,
    /// The guest addresses of its entries.
    ipa: Ipa,
    bytes: u64,
}

impl Place {
    /// Nowhere.
    const NONE: Self = Self {
        table: TableAddress(0),
        level: Level::PAGE,
        ipa: Ipa(0),
        bytes: 0,
    };

    /// Around an entry of a table of `level`, which is an address's. A single root may have more
    /// entries than there are addresses.
    fn around(entry: EntryAddress, level: Level, ipa: Ipa, geometry: &Geometry) -> Self {
        let granule = geometry.granule();
        let covers = level.shift(granule) + granule.level_bits();
        let ipa = ipa.align_down(1 << covers);
        Self {
            // Of the root's, which lie side by side, the one that it is in.
            table: TableAddress(entry.0 & !(granule.size() - 1)),
            level,
            ipa,
            bytes: (1 << covers).min(geometry.size() - ipa.0),
        }
    }
}

impl<O: Operations> Walk<'_, O> {
    /// Goes down to the entry that one leaf for all that is asked for belongs in, if its table is
    /// there. The address is in the IPA space.
    #[inline(always)]
    fn entry_for(
        &self,
        (granule, start): (Granule, Level),
        r: &MapRequest,
    ) -> Option<(EntryAddress, Level)> {
        // A leaf on a boundary of its size that begins in the IPA space ends there.
        if !is_on_boundary(r)
            || r.size < granule.size()
            || r.size > granule.largest_leaf().min(r.largest)
        {
            return None;
        }
        let (mut level, mut shift) = (start, start.shift(granule));
        let (mut table, mut index) = (self.stage2.root, r.ipa.0 >> shift);
        while r.size < 1 << shift {
            // Above pages: the size is a page's at least.
            table = self.ops.load(table.entry(index)).next_table()?;
            level = level.down()?;
            shift = level.shift(granule);
            index = (r.ipa.0 >> shift) & (granule.entries() - 1);
        }
        (r.size == 1 << shift).then_some((table.entry(index), level))
    }

    /// Maps what was asked for if it is one leaf and its table is there. Gives what came of it. The
    /// address is in the IPA space.
    #[inline(always)]
    pub(super) fn map_single(
        &self,
        shape: (Granule, Level),
        memcache: &mut Memcache,
        r: &MapRequest,
    ) -> Option<Result<(), MapError>> {
        let (entry, level) = self.entry_for(shape, r)?;
        let new = self.leaf_for(shape.0, r).at(r.phys);
        if self.is_ready(r.attributes) && self.place(entry, new) {
            self.count(self.table_of(entry), 1);
            return Some(Ok(()));
        }
        let walk = (self.stage2, self.ops, self.shared);
        let at = (level, r.ipa, r.size);
        Some(Self::map_over(walk, memcache, entry, at, new))
    }

    /// The same where something is, or something has to be done first. All it gets are values, as
    /// [`Walk::map_any`].
    #[inline(never)]
    fn map_over(
        (stage2, ops, shared): (&Stage2, &O, bool),
        memcache: &mut Memcache,
        entry: EntryAddress,
        (level, ipa, size): (Level, Ipa, u64),
        new: Descriptor,
    ) -> Result<(), MapError> {
        let walk = Walk {
            stage2,
            ops,
            shared,
        };
        let slot = Slot { entry, level, ipa };
        if walk.replace_pages(memcache, &slot, size, new) {
            return Ok(());
        }
        walk.map_leaf(&slot, new, Split::default())
    }

    /// Puts a block of `size` bytes where a table of pages is, where that takes no more than a break,
    /// an invalidation and a new entry: what [`Walk::coalesce`] comes to then. Gives whether it did.
    /// Whether FEAT_BBM would spare the break is not asked: looking all of the table's entries
    /// through takes longer.
    #[inline(always)]
    fn replace_pages(
        &self,
        memcache: &mut Memcache,
        slot: &Slot,
        size: u64,
        new: Descriptor,
    ) -> bool {
        if self.shared || !self.stage2.drops_pages || slot.level.down() != Some(Level::PAGE) {
            return false;
        }
        let Some(child) = self.ops.load(slot.entry).next_table() else {
            return false;
        };
        self.ops.store(slot.entry, Descriptor::EMPTY, Order::Plain);
        self.invalidate_range(slot.ipa, size);
        self.make(slot, new);
        memcache.retire(self.ops, child);
        true
    }

    /// Unmaps a table of pages as a whole, where nothing has to be cleaned or counted and the table
    /// above keeps others: what [`unmap`](super::unmap) comes to then. Gives whether it did.
    pub(super) fn drop_pages(&self, ipa: Ipa, size: u64) -> bool {
        let Stage2 {
            policy, features, ..
        } = self.stage2;
        let drops = self.stage2.drops_pages && features.fwb;
        if !drops || !matches!(policy.unmap, Unmap::Tables(_)) {
            return false;
        }
        let r = MapRequest::new(ipa, PhysAddr(0), size, Attributes::READ);
        if !self.stage2.geometry.is_common(ipa) {
            return false;
        }
        let Some((entry, level)) = self.entry_for(Geometry::COMMON, &r) else {
            return false;
        };
        let Some(child) = self.ops.load(entry).next_table() else {
            return false;
        };
        if level.down() != Some(Level::PAGE) || !self.has_others(entry) {
            return false;
        }
        self.ops.store(entry, Descriptor::EMPTY, Order::Plain);
        self.invalidate_range(ipa, size);
        self.ops.free(child);
        true
    }

    /// Whether an entry's table has another that is valid. Those behind it come first: whoever
    /// empties it begins at the other end.
    fn has_others(&self, entry: EntryAddress) -> bool {
        let table = self.table_of(entry);
        let (at, entries) = (
            (entry.0 - table.0) / 8,
            self.stage2.geometry.granule().entries(),
        );
        (at + 1..entries)
            .chain(0..at)
            .any(|index| self.ops.load(table.entry(index)).is_valid())
    }

    /// The leaf of a request for one, at address 0.
    #[inline(always)]
    fn leaf_for(&self, granule: Granule, r: &MapRequest) -> Descriptor {
        let page = r.size == granule.size();
        self.leaf(PhysAddr(0), Level::PAGE, r.attributes)
            .moved(PhysAddr(0), page)
    }
}

/// Many maps in one walk: [`Stage2::mapper`].
///
/// What the next map is compared with, and whether it is in the table that was last used, is one
/// word: addresses fill the lower 48 bits, and what was asked for (`kind`) the upper 16.
#[derive(Debug)]
pub struct Mapper<'a, O: Operations> {
    walk: Walk<'a, O>,
    /// The table that was last used, what it maps from where on, and its leaf for address 0.
    table: TableAddress,
    level: Level,
    from: u64,
    bytes: u64,
    leaf: Descriptor,
}

/// Whether both addresses are multiples of the size, which is a power of two, and of 48 bits.
#[inline(always)]
const fn is_on_boundary(r: &MapRequest) -> bool {
    let outside = r.size.wrapping_sub(1) | u64::MAX << ADDRESS_BITS;
    (r.ipa.0 | r.phys.0) & outside == 0
}

/// Size and attributes in the bits above an address's, if the request is for one leaf.
#[inline(always)]
fn kind(r: &MapRequest) -> Option<u64> {
    let Attributes {
        memory,
        read,
        write,
        execute,
        accessed,
        contiguous: _,
        software,
    } = r.attributes;
    let one = r.size.is_power_of_two() && r.size >= 4096 && r.size <= r.largest;
    if !one || !is_on_boundary(r) {
        return None;
    }
    let flags = [read, write, execute, accessed];
    let bits = flags
        .into_iter()
        .fold(memory as u64, |bits, flag| bits << 1 | u64::from(flag));
    let bits = bits << 3 | u64::from(software & 7);
    Some((bits << 6 | u64::from(r.size.trailing_zeros())) << ADDRESS_BITS)
}

impl<'a, O: Operations> Mapper<'a, O> {
    const fn new(walk: Walk<'a, O>) -> Self {
        Self {
            walk,
            table: TableAddress(0),
            level: Level::PAGE,
            from: 0,
            bytes: 0,
            leaf: Descriptor::EMPTY,
        }
    }

    /// Maps a range.
    ///
    /// # Errors
    /// As [`Stage2::map`].
    #[inline(always)]
    pub fn map(&mut self, memcache: &mut Memcache, r: &MapRequest) -> Result<(), MapError> {
        let kind = kind(r);
        if let Some(kind) = kind {
            let offset = (r.ipa.0 | kind).wrapping_sub(self.from);
            if offset < self.bytes {
                // Callers mostly know the size, and so the shift.
                let entry = self.table.entry(offset >> r.size.trailing_zeros());
                if self.walk.place(entry, self.leaf.at(r.phys)) {
                    return Ok(());
                }
                if r.size > self.walk.stage2.geometry.granule().size()
                    && self.replace_pages(memcache, entry, r)
                {
                    return Ok(());
                }
            }
        }
        let Walk {
            stage2,
            ops,
            shared,
        } = self.walk;
        let (to, from) = ((r.ipa, r.size), (r.phys, r.largest));
        let attributes = Descriptor::leaf(PhysAddr(0), Level::PAGE, r.attributes, false);
        // The table that was last used may be one that this very map takes away.
        self.bytes = 0;
        let (place, leaf) =
            Self::map_elsewhere((stage2, ops, shared), memcache, to, from, attributes)?;
        if let Some(kind) = kind {
            (self.table, self.level) = (place.table, place.level);
            (self.from, self.bytes) = (place.ipa.0 | kind, place.bytes);
            self.leaf = leaf;
        }
        Ok(())
    }

    /// Has a block take the place of a table of pages in the table that was last used. Gives whether
    /// it did.
    #[inline(always)]
    fn replace_pages(&self, memcache: &mut Memcache, entry: EntryAddress, r: &MapRequest) -> bool {
        let slot = Slot {
            entry,
            level: self.level,
            ipa: r.ipa,
        };
        let new = self.leaf.at(r.phys);
        self.walk.replace_pages(memcache, &slot, r.size, new)
    }

    /// Maps in the common way and gives the table that it was in, if more leaves such as this one
    /// may follow without further ado, and the leaf. All it gets are values: a mapper that nothing
    /// points at can be held in registers.
    #[inline(never)]
    fn map_elsewhere(
        (stage2, ops, shared): (&Stage2, &O, bool),
        memcache: &mut Memcache,
        (ipa, size): (Ipa, u64),
        (phys, largest): (PhysAddr, u64),
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
        let place = match walk.entry_for(shape, &r) {
            Some((entry, level))
                if walk.is_ready(r.attributes) && !stage2.policy.count_references =>
            {
                Place::around(entry, level, r.ipa, &stage2.geometry)
            }
            _ => Place::NONE,
        };
        Ok((place, walk.leaf_for(shape.0, &r)))
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
