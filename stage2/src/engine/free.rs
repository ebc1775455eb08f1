// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Freeing of unlinked tables.
//!
//! A shared walk passes each table that it unlinks to [`Operations::defer_free`], as other walkers
//! may still be below it. An exclusive walk frees a table immediately if the policy counts
//! references, otherwise together with others in a [`TableFreeBatch`].

use super::{
    Stage2,
    walk::{ExclusiveWalk, Walk, WalkMode},
};
use crate::{
    address::{EntryAddress, Ipa, TableAddress},
    descriptor::EntryKind,
    geometry::Level,
    memcache::{Memcache, TableFreeBatch},
    operations::{Operations, UnlinkedTable},
};

impl Stage2 {
    /// Frees an unlinked table with all tables below it. For a table passed to
    /// [`Operations::defer_free`], call this once no walker can be in it.
    #[inline]
    pub fn free_unlinked<O: Operations>(&self, ops: &O, unlinked: UnlinkedTable) {
        let mut batch = TableFreeBatch::new();
        self.collect_tables(ops, unlinked, &mut batch);
        batch.free_all(ops);
    }

    /// Adds an unlinked table and all tables below it to a batch.
    #[inline]
    pub(super) fn collect_tables<O: Operations>(
        &self,
        ops: &O,
        unlinked: UnlinkedTable,
        batch: &mut TableFreeBatch,
    ) {
        // The contents matter only if tables are below it or references are counted.
        if self.policy.counts_references || unlinked.level != Level::PAGE {
            self.collect_children(ops, unlinked, batch);
        }
        batch.push(ops, unlinked.table);
    }

    /// Frees an unlinked table immediately if the policy counts references, as Linux does;
    /// otherwise adds it to a batch.
    #[inline]
    pub(super) fn free_or_collect<O: Operations>(
        &self,
        ops: &O,
        unlinked: UnlinkedTable,
        batch: &mut TableFreeBatch,
    ) {
        if self.policy.counts_references {
            self.free_unlinked(ops, unlinked);
        } else {
            self.collect_tables(ops, unlinked, batch);
        }
    }

    #[inline(never)]
    fn collect_children<O: Operations>(
        &self,
        ops: &O,
        UnlinkedTable { table, level }: UnlinkedTable,
        batch: &mut TableFreeBatch,
    ) {
        let mut valid = 0;
        for index in 0..self.geometry.granule().entries() {
            let entry = ops.load(table.entry(index));
            if let (EntryKind::Table(table), Some(level)) = (entry.kind(level), level.child()) {
                self.collect_tables(ops, UnlinkedTable { table, level }, batch);
            }
            valid += u32::from(entry.is_valid());
        }
        if self.policy.counts_references {
            ops.drop_references(table, valid);
        }
    }

    /// Unmaps the whole IPA space. The empty root tables remain.
    pub fn clear<O: Operations>(&mut self, ops: &O) {
        let size = self.geometry.size();
        // The whole IPA space is a valid range.
        let _ = self.unmap(ops, Ipa(0), size);
    }
}

impl<O: Operations, M: WalkMode> Walk<'_, O, M> {
    /// Frees a table that a block has replaced, or defers the free.
    #[inline]
    pub(super) fn free_replaced(&self, unlinked: UnlinkedTable, memcache: &mut Memcache) {
        if M::IS_SHARED {
            self.ops.defer_free(unlinked);
        } else {
            memcache.retire(self.ops, |batch| {
                self.stage2.free_or_collect(self.ops, unlinked, batch);
            });
        }
    }
}

impl<O: Operations> Walk<'_, O, ExclusiveWalk> {
    /// Returns whether a table below the root has no valid entry. Reads the entries that follow the
    /// unmapped ones first (`next` or the end of the table), as ranges are mostly unmapped in
    /// ascending order.
    #[inline]
    pub(super) fn is_empty(&self, table: TableAddress, next: EntryAddress) -> bool {
        if self.stage2.policy.counts_references {
            return self.ops.references(table) == 1;
        }
        let next = (next.0 - table.0) >> 3;
        let entries = self.stage2.geometry.granule().entries();
        let is_valid = |index| self.ops.load(table.entry(index)).is_valid();
        !(next..entries).any(is_valid) && !(0..next).any(is_valid)
    }
}
