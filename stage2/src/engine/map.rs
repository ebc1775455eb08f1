// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Mapping a range: down to the highest level at which a leaf fits, and there.

use super::{MapError, Slot, Stage2, Walk};
use crate::{
    address::{EntryAddress, Ipa, PhysAddr, TableAddress},
    descriptor::{Attributes, Descriptor, EntryKind},
    geometry::{Geometry, Level},
    memcache::Memcache,
    operations::{Operations, Order},
    policy::{CmoPlacement, ExistingLeaf},
};

/// What to map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapRequest {
    /// Guest address.
    pub ipa: Ipa,
    /// Host address.
    pub phys: PhysAddr,
    /// Bytes.
    pub size: u64,
    /// For every leaf; `contiguous` is not looked at, as only the engine knows what fills a run.
    pub attributes: Attributes,
    /// The largest leaf, in bytes.
    pub largest: u64,
}

impl MapRequest {
    /// A request for the largest leaves that fit.
    pub const fn new(ipa: Ipa, phys: PhysAddr, size: u64, attributes: Attributes) -> Self {
        Self {
            ipa,
            phys,
            size,
            attributes,
            largest: u64::MAX,
        }
    }
}

/// What a split on the way has done already.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Split {
    /// What is left of the range is ready for the guest: it is part of the block.
    pub ready: bool,
    /// The leaf was written with the table that it is in.
    pub filled: bool,
}

/// How far a map has come.
pub(super) struct Cursor<'a> {
    pub ipa: Ipa,
    pub end: Ipa,
    pub phys: PhysAddr,
    /// With the attributes of all leaves.
    pub leaf: Descriptor,
    pub largest: u64,
    pub split: Split,
    /// The table was drawn for what is mapped now, by the only walker: it is empty.
    pub fresh: bool,
    /// Something was left to the next attempt.
    pub again: bool,
    /// Something was left to the only walker.
    pub contiguous: bool,
    pub memcache: &'a mut Memcache,
}

impl Cursor<'_> {
    /// Goes on behind a slot.
    fn pass(&mut self, end: Ipa) {
        let next = end.min(self.end);
        self.phys += next - self.ipa;
        self.ipa = next;
    }
}

impl<O: Operations> Walk<'_, O> {
    #[inline(always)]
    pub(super) fn map(&self, memcache: &mut Memcache, r: &MapRequest) -> Result<(), MapError> {
        // As in translations, the most frequent shape is a constant.
        if self.stage2.geometry.is_common(r.ipa)
            && let Some(result) = self.map_single(Geometry::COMMON, memcache, r)
        {
            return result;
        }
        // Its parts, so that neither has to be in memory where the above is all there is to do.
        let (to, from) = ((r.ipa, r.size), (r.phys, r.largest));
        Self::map_any(
            (self.stage2, self.ops, self.shared),
            memcache,
            to,
            from,
            r.attributes,
        )
    }

    #[inline(never)]
    fn map_any(
        (stage2, ops, shared): (&Stage2, &O, bool),
        memcache: &mut Memcache,
        (ipa, size): (Ipa, u64),
        (phys, largest): (PhysAddr, u64),
        attributes: Attributes,
    ) -> Result<(), MapError> {
        let walk = Walk {
            stage2,
            ops,
            shared,
        };
        let shape = stage2.geometry.shape();
        let r = MapRequest {
            ipa,
            phys,
            size,
            attributes,
            largest,
        };
        if shape != Geometry::COMMON
            && ipa.0 < stage2.geometry.size()
            && let Some(result) = walk.map_single(shape, memcache, &r)
        {
            return result;
        }
        stage2.check(ipa, phys, size)?;
        let mut cursor = Cursor {
            ipa,
            end: ipa + size,
            phys,
            leaf: walk.leaf(PhysAddr(0), Level::PAGE, attributes),
            largest,
            split: Split::default(),
            fresh: false,
            again: false,
            contiguous: false,
            memcache,
        };
        while cursor.ipa < cursor.end {
            walk.map_table(&mut cursor)?;
        }
        match cursor {
            Cursor {
                contiguous: true, ..
            } => Err(MapError::Contiguous),
            Cursor { again: true, .. } => Err(MapError::Again),
            _ => Ok(()),
        }
    }

    /// Goes down from the root to where a leaf fits, and maps what belongs into that table.
    #[inline]
    fn map_table(&self, c: &mut Cursor<'_>) -> Result<(), MapError> {
        let (mut table, mut level) = (self.stage2.root, self.stage2.geometry.start());
        c.fresh = false;
        loop {
            let slot = self.slot(table, level, c.ipa);
            if self.fits(&slot, c) {
                self.map_leaves(slot, c);
                return Ok(());
            }
            let Some(below) = level.down() else {
                return Err(MapError::Unaligned {
                    ipa: c.ipa,
                    phys: c.phys,
                    size: c.end - c.ipa,
                });
            };
            let old = self.ops.load(slot.entry);
            let child = match old.kind(level) {
                EntryKind::Table(child) => Ok(child),
                kind => self.table_below(&slot, below, kind == EntryKind::Locked, c),
            };
            table = match child {
                Ok(child) => child,
                Err(MapError::Again) => {
                    c.again = true;
                    c.pass(self.end(&slot));
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            level = below;
        }
    }

    /// Maps leaves into neighbouring entries of a table, the first at `slot`, until the table or
    /// what is wanted ends. (No larger leaf fits within a table: those begin where tables do.)
    #[inline]
    fn map_leaves(&self, mut slot: Slot, c: &mut Cursor<'_>) {
        let geometry = &self.stage2.geometry;
        let span = geometry.span(slot.level);
        let whole = span * geometry.granule().entries();
        let table_end = slot.ipa.align_down(whole) + whole;
        let plain = c.split.ready || self.is_ready(c.leaf.attributes());
        let mut new = c.leaf.moved(c.phys, slot.level == Level::PAGE);
        let (table, mut placed) = (self.table_of(slot.entry), 0);
        let wanted = (c.end.min(table_end) - c.ipa) >> span.trailing_zeros();
        let hints = self.hints(&slot, new);
        if plain && c.fresh {
            self.fill_fresh(slot, new, wanted, hints);
            self.count(table, u32::try_from(wanted).unwrap_or(u32::MAX));
            return c.pass(slot.ipa + wanted * span);
        }
        let mut left = wanted;
        while left > 0 {
            let run = match hints {
                true => self.map_run(&slot, new, left, plain),
                false => 0,
            };
            if run > 0 {
                placed += u32::try_from(run).unwrap_or(u32::MAX);
                left -= run;
                slot = slot.skip(run, span);
                new = new.after(run * span);
                continue;
            }
            if plain && self.place(slot.entry, new) {
                placed += 1;
            } else {
                match self.map_leaf(&slot, new, c.split) {
                    Ok(()) => {}
                    Err(MapError::Contiguous) => c.contiguous = true,
                    // Where a leaf fits, nothing else can go wrong.
                    Err(_) => c.again = true,
                }
            }
            left -= 1;
            slot = slot.next(span);
            new = new.after(span);
        }
        self.count(table, placed);
        c.pass(slot.ipa);
    }

    /// Maps leaves whose memory is ready into entries in a row where nothing is, those that fill a
    /// contiguous run with the hint if told.
    fn fill_fresh(&self, slot: Slot, leaf: Descriptor, count: u64, hints: bool) {
        let span = self.stage2.geometry.span(slot.level);
        let run = slot.level.contiguous(self.stage2.geometry.granule());
        let before = (slot.ipa.0 >> span.trailing_zeros()).wrapping_neg() & (run - 1);
        let head = if hints { before.min(count) } else { count };
        let body = (count - head) & !(run - 1);
        let parts = [
            (0, head, false),
            (head, body, true),
            (head + body, count - head - body, false),
        ];
        for (from, count, hint) in parts.into_iter().filter(|(_, count, _)| *count > 0) {
            let leaf = leaf.after(from * span).contiguous(hint);
            let first = slot.skip(from, span).entry;
            self.ops.store_run(first, count, leaf, span, Order::Release);
        }
    }

    /// Puts a leaf whose memory is ready where nothing is, in one store. Gives whether it did.
    #[inline]
    pub(super) fn place(&self, entry: EntryAddress, new: Descriptor) -> bool {
        if self.shared {
            let swap = self.ops.compare_exchange(entry, Descriptor::EMPTY, new);
            return swap.is_ok();
        }
        let empty = self.ops.load(entry) == Descriptor::EMPTY;
        if empty {
            self.ops.store(entry, new, Order::Release);
        }
        empty
    }

    /// Whether a leaf of this slot's level is what is wanted.
    #[inline]
    fn fits(&self, slot: &Slot, c: &Cursor<'_>) -> bool {
        let geometry = &self.stage2.geometry;
        let span = geometry.span(slot.level);
        slot.level.can_map(geometry.granule())
            && (c.ipa.0 | c.phys.0) & (span - 1) == 0
            && c.end - c.ipa >= span
            && span <= c.largest.max(geometry.granule().size())
    }

    #[inline(never)]
    pub(super) fn map_leaf(
        &self,
        slot: &Slot,
        new: Descriptor,
        split: Split,
    ) -> Result<(), MapError> {
        let old = self.load_settled(slot)?;
        match old.kind(slot.level) {
            EntryKind::Table(child) => self.coalesce(slot, old, child, new),
            EntryKind::Leaf(_) if split.filled && old == new => Ok(()),
            EntryKind::Leaf(_) if !old.contiguous(false).needs_break(new) => {
                self.meet(slot, old, new)
            }
            EntryKind::Leaf(_) => self.remake(slot, self.unfold(slot, old)?, new),
            EntryKind::Invalid | EntryKind::Locked => self.install(slot, old, new, split.ready),
        }
    }

    /// A leaf is there that differs in permissions at most.
    fn meet(&self, slot: &Slot, old: Descriptor, new: Descriptor) -> Result<(), MapError> {
        let wide = old.with_permissions(old.attributes().relaxed(new.attributes()));
        match self.stage2.policy.existing_leaf {
            ExistingLeaf::Replace if old.contiguous(false) == new => Ok(()),
            ExistingLeaf::Replace => self.remake(slot, self.unfold(slot, old)?, new),
            ExistingLeaf::Retry => Err(MapError::Again),
            ExistingLeaf::Relax if wide == old || old.is_break_pending() => Err(MapError::Again),
            ExistingLeaf::Relax => {
                let old = self.unfold(slot, old)?;
                let wide = wide.contiguous(false);
                // A CPU that holds the narrower leaf takes a permission fault, which invalidates.
                self.ready_to_execute(slot, old, wide);
                self.put(slot, old, wide, Order::Plain)
            }
        }
    }

    /// Before a leaf becomes executable in place.
    pub(super) fn ready_to_execute(&self, slot: &Slot, old: Descriptor, new: Descriptor) {
        let gains = new.attributes().execute && !old.attributes().execute;
        if gains && !self.maintains(CmoPlacement::FaultPath) {
            let size = self.stage2.geometry.span(slot.level);
            self.invalidate_instructions(new.address(), size);
        }
    }

    /// A leaf in the place of another.
    fn remake(&self, slot: &Slot, mut old: Descriptor, new: Descriptor) -> Result<(), MapError> {
        let (phys, size) = (new.address(), self.stage2.geometry.span(slot.level));
        if self.maintains(CmoPlacement::BeforeBreak) {
            old = self.claim(slot, old)?;
            self.prepare(phys, size, new.attributes());
        } else if self.shared && old.is_break_pending() {
            // Whoever splits it has a table ready and counts on it.
            return Err(MapError::Again);
        }
        self.break_entry(slot, old)?;
        if self.maintains(CmoPlacement::BetweenBreakAndMake) {
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
        if !ready && !self.maintains(CmoPlacement::FaultPath) {
            let size = self.stage2.geometry.span(slot.level);
            self.prepare(new.address(), size, new.attributes());
        }
        self.count(self.table_of(slot.entry), 1);
        self.make(slot, new);
        Ok(())
    }

    /// Whether a block that has become of a locked entry maps what is wanted, as it is wanted.
    fn serves(&self, slot: &Slot, block: Descriptor, c: &Cursor<'_>) -> bool {
        let (has, wants) = (block.attributes(), c.leaf.attributes());
        block.address() + (c.ipa - slot.ipa) == c.phys
            && has.memory == wants.memory
            && has.relaxed(wants) == has
    }

    /// The table below a slot, made if need be. If it was locked and somebody has put a block there
    /// that serves, that is not split: the guest tries again.
    #[inline(never)]
    fn table_below(
        &self,
        slot: &Slot,
        below: Level,
        was_locked: bool,
        c: &mut Cursor<'_>,
    ) -> Result<TableAddress, MapError> {
        let old = self.load_settled(slot)?;
        match old.kind(slot.level) {
            EntryKind::Table(child) => Ok(child),
            EntryKind::Leaf(_) if was_locked && self.serves(slot, old, c) => Err(MapError::Again),
            EntryKind::Leaf(_) => self.split_for(slot, old, below, c),
            EntryKind::Invalid | EntryKind::Locked => {
                let child = c.memcache.take(self.ops).ok_or(MapError::NoTable)?;
                let new = Descriptor::table(child);
                if let Err(error) = self.put(slot, old, new, Order::Release) {
                    c.memcache.return_unused(child);
                    return Err(error);
                }
                self.count(self.table_of(slot.entry), 1);
                c.fresh = !self.shared;
                Ok(child)
            }
        }
    }
}
