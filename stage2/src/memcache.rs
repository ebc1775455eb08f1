// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables allocated before the lock is taken.
//!
//! Allocation may sleep, so it must not happen under the lock. The fault path tops up a
//! [`Memcache`] before it takes the lock. A map that needs a table fails if the memcache is empty,
//! and the guest refaults after a top-up (Linux: `kvm_mmu_topup_memory_cache()`).
//!
//! The memcache also collects tables that blocks have replaced, and frees them together
//! ([`TableFreeBatch`]): when the batch is full, at a top-up, and when drained. For each memcache,
//! a pool therefore needs twice [`Memcache::CAPACITY`] tables in addition to the linked ones.

use arrayvec::ArrayVec;

use crate::{
    address::TableAddress,
    operations::{Note, Operations},
};

/// Unlinked tables to be freed together.
#[derive(Debug, Default)]
pub(crate) struct TableFreeBatch(ArrayVec<TableAddress, { Memcache::CAPACITY }>);

impl TableFreeBatch {
    pub(crate) const fn new() -> Self {
        Self(ArrayVec::new_const())
    }

    #[inline]
    pub(crate) fn push<O: Operations>(&mut self, ops: &O, table: TableAddress) {
        if self.0.is_full() {
            self.free_all(ops);
        }
        self.0.push(table);
    }

    #[inline(never)]
    pub(crate) fn free_all<O: Operations>(&mut self, ops: &O) {
        match self.0[..] {
            [] => {}
            [table] => ops.free(table),
            _ => ops.free_all(&self.0),
        }
        self.0.clear();
    }
}

/// Free tables for one vCPU, up to [`Memcache::CAPACITY`]. A memcache does not know its pool: tables in
/// it when it is dropped are lost, unless [`Memcache::drain`] has freed them.
#[derive(Debug, Default)]
pub struct Memcache {
    tables: ArrayVec<TableAddress, { Self::CAPACITY }>,
    /// Tables that blocks have replaced.
    retired_tables: TableFreeBatch,
    /// Flag set by a top-up: the owner must then drain the memcache.
    is_drained_by_owner: bool,
    /// Indicates that the memcache always stays empty, so taking a table is not an error.
    is_unavailable: bool,
}

impl Memcache {
    /// Maximum number of tables in a memcache (Linux: `KVM_ARCH_NR_OBJS_PER_MEMORY_CACHE`).
    pub const CAPACITY: usize = 40;

    /// Creates an empty memcache.
    pub const fn new() -> Self {
        Self {
            tables: ArrayVec::new_const(),
            retired_tables: TableFreeBatch::new(),
            is_drained_by_owner: false,
            is_unavailable: false,
        }
    }

    /// Creates a memcache that always stays empty: every map that needs a table fails.
    pub const fn new_unavailable() -> Self {
        let mut none = Self::new();
        none.is_unavailable = true;
        none
    }

    /// Returns the number of tables.
    pub const fn len(&self) -> usize {
        self.tables.len()
    }

    /// Returns whether the memcache is empty.
    pub const fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// Allocates up to `max` tables unless the memcache holds `min`. Must not be called under the
    /// lock. Returns whether the memcache holds `min`.
    #[inline]
    pub fn top_up<O: Operations>(&mut self, ops: &O, min: usize, max: usize) -> bool {
        self.len() >= min || self.fill(ops, min, max)
    }

    #[inline(never)]
    fn fill<O: Operations>(&mut self, ops: &O, min: usize, max: usize) -> bool {
        ops.note(Note::TopUp);
        self.is_drained_by_owner = true;
        self.free_retired(ops);
        while self.len() < max.min(Self::CAPACITY) {
            let Some(table) = ops.allocate() else { break };
            self.tables.push(table);
        }
        self.len() >= min
    }

    /// Takes a zeroed table. Returns `None` if the memcache is empty.
    pub fn take<O: Operations>(&mut self, ops: &O) -> Option<TableAddress> {
        let table = self.tables.pop();
        if table.is_none() && !self.is_unavailable {
            ops.note(Note::EmptyMemcache);
        }
        table
    }

    /// Adds an unused table, which is still zeroed, to the memcache.
    pub(crate) fn return_unused(&mut self, table: TableAddress) {
        self.tables.push(table);
    }

    /// Collects replaced tables, to be freed together. If the memcache was never topped up, its
    /// owner need not drain it, so the tables are freed immediately.
    #[inline]
    pub(crate) fn retire<O: Operations>(
        &mut self,
        ops: &O,
        collect: impl FnOnce(&mut TableFreeBatch),
    ) {
        collect(&mut self.retired_tables);
        if !self.is_drained_by_owner {
            self.retired_tables.free_all(ops);
        }
    }

    /// Frees the tables that blocks have replaced.
    pub fn free_retired<O: Operations>(&mut self, ops: &O) {
        self.retired_tables.free_all(ops);
    }

    /// Frees all tables.
    pub fn drain<O: Operations>(&mut self, ops: &O) {
        self.free_retired(ops);
        ops.free_all(&self.tables);
        self.tables.clear();
        self.is_drained_by_owner = false;
    }
}
