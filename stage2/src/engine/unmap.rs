// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Unmapping a range: break → invalidate → clean → free, in this order, for one entry or many.
//!
//! Entries that were broken wait in a batch until it is full or the walk ends. Then one
//! invalidation covers them all, the memory is cleaned (what the guest wrote past the caches must
//! not be hidden by a line that the host reads), and tables are freed. Nothing below is touched by
//! a CPU from the invalidation on.

use arrayvec::ArrayVec;

use super::{MapError, Slot, Stage2, Walk, maintain::Run};
use crate::{
    address::{Ipa, TableAddress},
    descriptor::{Descriptor, EntryKind},
    geometry::{Level, index},
    memcache::TableFreeBatch,
    operations::{Operations, Order, Unlinked},
    policy::Unmap,
};

const MOST: usize = 64;

/// An entry that was broken and not invalidated yet.
#[derive(Debug, Clone, Copy)]
struct Broken {
    slot: Slot,
    old: Descriptor,
    /// A table below which there were leaves.
    live: bool,
}

struct Batch {
    broken: ArrayVec<Broken, MOST>,
    most: usize,
    tables: bool,
}

impl<O: Operations> Walk<'_, O> {
    fn unmap_in(
        &self,
        table: TableAddress,
        level: Level,
        (ipa, end): (Ipa, Ipa),
        batch: &mut Batch,
    ) {
        let mut at = ipa;
        while at < end {
            let slot = self.slot(table, level, at);
            let next = self.end(&slot);
            let old = self.ops.load(slot.entry);
            match (old.kind(level), level.down()) {
                (EntryKind::Table(child), Some(below)) => {
                    let whole = batch.tables && at == slot.ipa && next <= end;
                    if !whole {
                        self.unmap_in(child, below, (at, end.min(next)), batch);
                    }
                    let empty = !whole && {
                        let from = self.stage2.geometry.index(Ipa(end.min(next).0 - 1), below);
                        self.is_empty(child, from)
                    };
                    if whole || empty {
                        self.break_later(slot, old, !empty, batch);
                    }
                }
                (EntryKind::Leaf(_), _) if old.is_contiguous() => {
                    at = self.break_run(&slot, old, (ipa, end), batch);
                    continue;
                }
                (EntryKind::Leaf(_), _) => self.break_later(slot, old, false, batch),
                _ => {}
            }
            at = next;
        }
    }

    /// Breaks a whole contiguous run before one invalidation, or takes the hint from it. Gives the
    /// address to go on at.
    fn break_run(
        &self,
        slot: &Slot,
        old: Descriptor,
        (ipa, end): (Ipa, Ipa),
        batch: &mut Batch,
    ) -> Ipa {
        let (count, first) = self.run_of(slot);
        let span = self.stage2.geometry.span(slot.level);
        let (len, run_end) = (index(count), first.ipa + count * span);
        if first.ipa < ipa || run_end > end || len > batch.most {
            // The only walker can. What is left has no hint.
            let _ = self.unfold(slot, old);
            return slot.ipa;
        }
        if batch.broken.len() + len > batch.most {
            self.flush(batch);
        }
        for n in 0..count {
            let slot = first.skip(n, span);
            self.break_later(slot, self.ops.load(slot.entry), false, batch);
        }
        run_end
    }

    fn break_later(&self, slot: Slot, old: Descriptor, live: bool, batch: &mut Batch) {
        self.ops.store(slot.entry, Descriptor::EMPTY, Order::Plain);
        if self.stage2.policy.count_references {
            self.ops.drop_references(self.table_of(slot.entry), 1);
        }
        batch.broken.push(Broken { slot, old, live });
        if batch.broken.len() == batch.most {
            self.flush(batch);
        }
    }

    fn flush(&self, batch: &mut Batch) {
        let broken = || batch.broken.iter();
        let (Some(first), Some(last)) = (batch.broken.first(), batch.broken.last()) else {
            return;
        };
        let ends = broken().map(|b| self.end(&b.slot));
        let (from, to) = (
            broken().map(|b| b.slot.ipa).min().unwrap_or(first.slot.ipa),
            ends.max().unwrap_or(self.end(&last.slot)),
        );
        if broken().any(|b| b.live) || (batch.broken.len() > 1 && self.stage2.uses_ranges()) {
            self.invalidate_range(from, to - from);
        } else {
            self.invalidate_ipas(broken().map(|b| {
                let leaf = b.old.is_leaf(b.slot.level);
                (b.slot.ipa, leaf.then_some(b.slot.level))
            }));
        }
        if !self.stage2.features.fwb {
            let mut run = Run::default();
            broken().for_each(|b| self.collect_broken(b, &mut run));
            self.clean_run(&run);
        }
        let mut returns = TableFreeBatch::new();
        for b in broken() {
            if let (EntryKind::Table(child), Some(level)) =
                (b.old.kind(b.slot.level), b.slot.level.down())
            {
                let table = child;
                if b.live {
                    let unlinked = Unlinked { table, level };
                    self.stage2
                        .return_unlinked(self.ops, unlinked, &mut returns);
                } else {
                    returns.push(self.ops, table);
                }
            }
        }
        returns.free_all(self.ops);
        batch.broken.clear();
    }

    fn collect_broken(&self, b: &Broken, run: &mut Run) {
        match (b.old.kind(b.slot.level), b.slot.level.down()) {
            (EntryKind::Table(child), Some(below)) if b.live => {
                self.collect_unlinked(child, below, run);
            }
            (EntryKind::Leaf(_), _) => self.collect(b.old, b.slot.level, run),
            _ => {}
        }
    }
}

impl Stage2 {
    /// Unmaps a range; a block that it cuts goes as a whole. When it returns no CPU reaches the
    /// memory, and the host sees what the guest wrote.
    ///
    /// # Errors
    /// The range is no range of pages in the IPA space.
    pub fn unmap<O: Operations>(&mut self, ops: &O, ipa: Ipa, size: u64) -> Result<(), MapError> {
        self.check_range(ipa, size)?;
        if self.exclusive(ops).drop_pages(ipa, size) {
            return Ok(());
        }
        let (root, start) = (self.root, self.geometry.start());
        let (tables, most) = match self.policy.unmap {
            Unmap::Deferred if self.features.fwb && self.uses_ranges() => (false, MOST),
            Unmap::Deferred => (false, 1),
            Unmap::Batch(most) => (false, usize::from(most)),
            Unmap::Tables(most) => (true, usize::from(most)),
        };
        let mut batch = Batch {
            broken: ArrayVec::new(),
            most: most.clamp(1, MOST),
            tables,
        };
        let walk = self.exclusive(ops);
        walk.unmap_in(root, start, (ipa, ipa + size), &mut batch);
        walk.flush(&mut batch);
        Ok(())
    }
}
