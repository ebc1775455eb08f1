// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Mapping a range: down to the highest level at which a leaf fits, and there.

use super::{MapError, Slot, Stage2, Walk};
use crate::{
    descriptor::{Attributes, Descriptor, Kind},
    geometry::Level,
    memcache::Memcache,
    operations::{Operations, Order, TableAddress},
    policy::{Maintenance, SameLeaf},
};

/// What to map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapRequest {
    /// Guest address.
    pub ipa: u64,
    /// Host address.
    pub phys: u64,
    /// Bytes.
    pub size: u64,
    /// For every leaf.
    pub attributes: Attributes,
    /// The largest leaf, in bytes.
    pub largest: u64,
}

impl MapRequest {
    /// A request for the largest leaves that fit.
    pub const fn new(ipa: u64, phys: u64, size: u64, attributes: Attributes) -> Self {
        Self {
            ipa,
            phys,
            size,
            attributes,
            largest: u64::MAX,
        }
    }
}

/// How far a map has come.
pub(super) struct Cursor<'a> {
    pub ipa: u64,
    pub end: u64,
    pub phys: u64,
    pub attributes: Attributes,
    pub largest: u64,
    /// What is left of the range is ready for the guest: it is part of a block that was split.
    pub ready: bool,
    /// The leaf was written with the table that it is in.
    pub filled: bool,
    /// Something was left to the next attempt.
    pub again: bool,
    pub memcache: &'a mut Memcache,
}

impl<O: Operations> Walk<'_, O> {
    pub(super) fn map(&self, memcache: &mut Memcache, r: &MapRequest) -> Result<(), MapError> {
        self.stage2.check(r.ipa, r.phys, r.size)?;
        let mut cursor = Cursor {
            ipa: r.ipa,
            end: r.ipa + r.size,
            phys: r.phys,
            attributes: r.attributes,
            largest: r.largest,
            ready: false,
            filled: false,
            again: false,
            memcache,
        };
        let Stage2 { root, geometry, .. } = self.stage2;
        self.map_in(*root, geometry.start(), &mut cursor)?;
        if cursor.again {
            Err(MapError::Again)
        } else {
            Ok(())
        }
    }

    fn map_in(
        &self,
        table: TableAddress,
        level: Level,
        c: &mut Cursor<'_>,
    ) -> Result<(), MapError> {
        let geometry = &self.stage2.geometry;
        let table_end = if level == geometry.start() {
            c.end
        } else {
            let whole = geometry.span(level) * geometry.granule().entries();
            c.end.min((c.ipa & !(whole - 1)) + whole)
        };
        while c.ipa < table_end {
            let slot = self.slot(table, level, c.ipa);
            let step = if self.fits(&slot, c) {
                self.map_leaf(&slot, c)
            } else if let Some(below) = level.down() {
                match self.table_below(&slot, below, c) {
                    Ok(child) => {
                        self.map_in(child, below, c)?;
                        continue;
                    }
                    Err(error) => Err(error),
                }
            } else {
                Err(MapError::Unaligned {
                    ipa: c.ipa,
                    phys: c.phys,
                    size: c.end - c.ipa,
                })
            };
            match step {
                Ok(()) => {}
                Err(MapError::Again) => c.again = true,
                Err(error) => return Err(error),
            }
            let next = self.end(&slot).min(c.end);
            c.phys += next - c.ipa;
            c.ipa = next;
        }
        Ok(())
    }

    /// Whether a leaf of this slot's level is what is wanted.
    fn fits(&self, slot: &Slot, c: &Cursor<'_>) -> bool {
        let geometry = &self.stage2.geometry;
        let span = geometry.span(slot.level);
        slot.level.can_map(geometry.granule())
            && (c.ipa | c.phys) & (span - 1) == 0
            && c.end - c.ipa >= span
            && span <= c.largest.max(geometry.granule().size())
    }

    fn map_leaf(&self, slot: &Slot, c: &Cursor<'_>) -> Result<(), MapError> {
        let new = self.leaf(c.phys, slot.level, c.attributes);
        let old = self.load_settled(slot)?;
        match old.kind(slot.level) {
            Kind::Table(child) => self.coalesce(slot, old, TableAddress(child), new),
            Kind::Leaf(_) if c.filled && old == new => Ok(()),
            Kind::Leaf(_) if !old.needs_break(new) => self.meet(slot, old, new),
            Kind::Leaf(_) => self.remake(slot, old, new),
            Kind::Invalid | Kind::Locked => self.install(slot, old, new, c.ready),
        }
    }

    /// A leaf is there that differs in permissions at most.
    fn meet(&self, slot: &Slot, old: Descriptor, new: Descriptor) -> Result<(), MapError> {
        let wide = old.with_permissions(old.attributes().widened(new.attributes()));
        match self.stage2.policy.same_leaf {
            SameLeaf::Remake if old == new => Ok(()),
            SameLeaf::Remake => self.remake(slot, old, new),
            SameLeaf::Retry => Err(MapError::Again),
            SameLeaf::Widen if wide == old || old.is_claimed() => Err(MapError::Again),
            SameLeaf::Widen => {
                // A CPU that holds the narrower leaf takes a permission fault, which invalidates.
                self.ready_to_execute(slot, old, wide);
                self.put(slot, old, wide, Order::Plain)
            }
        }
    }

    /// Before a leaf becomes executable in place.
    pub(super) fn ready_to_execute(&self, slot: &Slot, old: Descriptor, new: Descriptor) {
        let gains = new.attributes().execute && !old.attributes().execute;
        if gains && !self.maintains(Maintenance::FaultPath) {
            let size = self.stage2.geometry.span(slot.level);
            self.invalidate_instructions(new.address(), size);
        }
    }

    /// A leaf in the place of another.
    fn remake(&self, slot: &Slot, mut old: Descriptor, new: Descriptor) -> Result<(), MapError> {
        let (phys, size) = (new.address(), self.stage2.geometry.span(slot.level));
        if self.maintains(Maintenance::BeforeBreak) {
            old = self.claim(slot, old)?;
            self.prepare(phys, size, new.attributes());
        } else if self.shared && old.is_claimed() {
            // Whoever splits it has a table ready and counts on it.
            return Err(MapError::Again);
        }
        self.break_entry(slot, old)?;
        if self.maintains(Maintenance::InsideWindow) {
            self.prepare(phys, size, new.attributes());
        }
        self.make(slot, new);
        Ok(())
    }

    /// A leaf where nothing is.
    fn install(
        &self,
        slot: &Slot,
        old: Descriptor,
        new: Descriptor,
        ready: bool,
    ) -> Result<(), MapError> {
        self.lock_empty(slot, old)?;
        if !ready && !self.maintains(Maintenance::FaultPath) {
            let size = self.stage2.geometry.span(slot.level);
            self.prepare(new.address(), size, new.attributes());
        }
        self.ops.take_references(slot.table, 1);
        self.make(slot, new);
        Ok(())
    }

    /// The table below a slot, made if need be.
    fn table_below(
        &self,
        slot: &Slot,
        below: Level,
        c: &mut Cursor<'_>,
    ) -> Result<TableAddress, MapError> {
        let old = self.load_settled(slot)?;
        match old.kind(slot.level) {
            Kind::Table(child) => Ok(TableAddress(child)),
            Kind::Leaf(_) => self.split_for(slot, old, below, c),
            Kind::Invalid | Kind::Locked => {
                let child = c.memcache.draw(self.ops).ok_or(MapError::NoTable)?;
                let new = Descriptor::table(child.0);
                if let Err(error) = self.put(slot, old, new, Order::Release) {
                    c.memcache.put_back(child);
                    return Err(error);
                }
                self.ops.take_references(slot.table, 1);
                Ok(child)
            }
        }
    }
}
