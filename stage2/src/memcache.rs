// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables put aside before the lock is taken.
//!
//! Building a table needs memory, and memory may make one sleep: not under the lock. So whoever
//! might need tables fills a [`Memcache`] beforehand. To draw from an empty one is an error that
//! leaves what is mapped as it was, and the fault is taken again with a full one (Linux:
//! `kvm_mmu_topup_memory_cache()`).
//!
//! Tables that maps have made superfluous go the same way back: they are given back together
//! ([`TableFreeBatch`]), when there are too many, when a top-up fetches tables, or in the end. So a pool has
//! twice [`Memcache::CAPACITY`] tables more than are linked for every memcache.

use arrayvec::ArrayVec;

use crate::{
    address::TableAddress,
    operations::{Note, Operations},
};

/// Tables that nobody can reach any more, to be given back together.
#[derive(Debug, Default)]
pub(crate) struct TableFreeBatch(ArrayVec<TableAddress, { Memcache::CAPACITY }>);

impl TableFreeBatch {
    pub(crate) const fn new() -> Self {
        Self(ArrayVec::new_const())
    }

    /// Takes one more.
    #[inline]
    pub(crate) fn push<O: Operations>(&mut self, ops: &O, table: TableAddress) {
        if self.0.is_full() {
            self.free_all(ops);
        }
        self.0.push(table);
    }

    /// Gives all back.
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

/// Tables in hand, at most [`Memcache::CAPACITY`].
#[derive(Debug, Default)]
pub struct Memcache {
    tables: ArrayVec<TableAddress, { Self::CAPACITY }>,
    /// Superfluous ones.
    spent: TableFreeBatch,
    /// It was topped up and not drained since: its owner knows that it has to be.
    owned: bool,
    /// Drawing from it when it is empty is no mistake: it stands for no memcache at all, or holds
    /// what was missing when the fault was taken, and more may be by now.
    withheld: bool,
}

impl Memcache {
    /// What a top-up fills to (Linux: `KVM_ARCH_NR_OBJS_PER_MEMORY_CACHE`).
    pub const CAPACITY: usize = 40;

    /// An empty one.
    pub const fn new() -> Self {
        Self {
            tables: ArrayVec::new_const(),
            spent: TableFreeBatch::new(),
            owned: false,
            withheld: false,
        }
    }

    /// None: what needs a table fails, and nobody is to blame.
    pub const fn unavailable() -> Self {
        let mut none = Self::new();
        none.withheld = true;
        none
    }

    /// Says whether it may be drawn from when it is empty.
    pub(crate) const fn may_run_dry(&mut self, may: bool) {
        self.withheld = may;
    }

    /// Tables in hand.
    pub const fn len(&self) -> usize {
        self.tables.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// Unless `least` are in hand, fills up to `most`. Not under the lock. Gives whether `least`
    /// are in hand.
    #[inline]
    pub fn top_up<O: Operations>(&mut self, ops: &O, least: usize, most: usize) -> bool {
        self.len() >= least || self.fill(ops, least, most)
    }

    #[inline(never)]
    fn fill<O: Operations>(&mut self, ops: &O, least: usize, most: usize) -> bool {
        ops.note(Note::TopUp);
        self.owned = true;
        self.free_retired(ops);
        while self.len() < most.min(Self::CAPACITY) {
            let Some(table) = ops.allocate() else { break };
            self.tables.push(table);
        }
        self.len() >= least
    }

    /// Takes a table; `None` if there is none.
    pub fn take<O: Operations>(&mut self, ops: &O) -> Option<TableAddress> {
        let table = self.tables.pop();
        if table.is_none() && !self.withheld {
            ops.note(Note::Empty);
        }
        table
    }

    /// Puts a table that was drawn and not used back, still zeroed.
    pub(crate) fn return_unused(&mut self, table: TableAddress) {
        self.tables.push(table);
    }

    /// Adds replaced tables to those to be freed by `collect`. Frees them at once if the memcache
    /// was never topped up, as its owner need not drain it.
    #[inline]
    pub(crate) fn retire<O: Operations>(
        &mut self,
        ops: &O,
        collect: impl FnOnce(&mut TableFreeBatch),
    ) {
        collect(&mut self.spent);
        if !self.owned {
            self.spent.free_all(ops);
        }
    }

    /// Gives superfluous tables back.
    pub fn free_retired<O: Operations>(&mut self, ops: &O) {
        self.spent.free_all(ops);
    }

    /// Gives all tables back.
    pub fn drain<O: Operations>(&mut self, ops: &O) {
        self.free_retired(ops);
        ops.free_all(&self.tables);
        self.tables.clear();
        self.owned = false;
    }
}
