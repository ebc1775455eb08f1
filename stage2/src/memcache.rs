// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables put aside before the lock is taken.
//!
//! Building a table needs memory, and memory may make one sleep: not under the lock. So whoever
//! might need tables fills a [`Memcache`] beforehand. It is topped up as a whole or not used: to
//! draw from an empty one is an error that leaves the tables unchanged, and the fault is taken
//! again with a full one (Linux: `kvm_mmu_topup_memory_cache()`).
//!
//! Tables that maps have made superfluous go the same way back: they lie at the other end and are
//! given back together, when there is no more room, when a top-up fetches tables, or in the end. So
//! a pool has at least [`Memcache::CAPACITY`] tables more than are linked for every memcache.

use crate::operations::{Note, Operations, TableAddress};

/// Tables in hand, at most [`Memcache::CAPACITY`].
#[derive(Debug)]
pub struct Memcache {
    tables: [TableAddress; Self::CAPACITY],
    len: usize,
    /// Superfluous ones, at the end.
    spent: usize,
    /// It was topped up and not drained since: its owner knows that it has to be.
    owned: bool,
    /// Drawing from it when it is empty is no mistake: it stands for no memcache at all, or holds
    /// what was missing when the fault was taken, and more may be by now.
    withheld: bool,
}

impl Default for Memcache {
    fn default() -> Self {
        Self::new()
    }
}

impl Memcache {
    /// What a top-up fills to (Linux: `KVM_ARCH_NR_OBJS_PER_MEMORY_CACHE`).
    pub const CAPACITY: usize = 40;

    /// An empty one.
    pub const fn new() -> Self {
        Self {
            tables: [TableAddress(0); Self::CAPACITY],
            len: 0,
            spent: 0,
            owned: false,
            withheld: false,
        }
    }

    /// None: what needs a table fails, and nobody is to blame.
    pub const fn withheld() -> Self {
        Self {
            withheld: true,
            ..Self::new()
        }
    }

    /// Says whether it may be drawn from when it is empty.
    pub(crate) const fn may_run_dry(&mut self, may: bool) {
        self.withheld = may;
    }

    /// One that only collects what is to be given back.
    pub(crate) const fn for_returns() -> Self {
        Self {
            owned: true,
            ..Self::new()
        }
    }

    /// Tables in hand.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Unless `least` are in hand, fills up to `most`. Not under the lock. Gives whether `least`
    /// are in hand.
    #[inline]
    pub fn top_up<O: Operations>(&mut self, ops: &O, least: usize, most: usize) -> bool {
        self.len >= least || self.fill(ops, least, most)
    }

    #[inline(never)]
    fn fill<O: Operations>(&mut self, ops: &O, least: usize, most: usize) -> bool {
        ops.note(Note::TopUp);
        self.owned = true;
        self.give_back(ops);
        while self.len < most.min(Self::CAPACITY) {
            let Some(table) = ops.allocate() else { break };
            self.tables[self.len] = table;
            self.len += 1;
        }
        self.len >= least
    }

    /// Takes a table; `None` if there is none.
    pub fn draw<O: Operations>(&mut self, ops: &O) -> Option<TableAddress> {
        if self.len == 0 {
            if !self.withheld {
                ops.note(Note::Empty);
            }
            return None;
        }
        self.len -= 1;
        Some(self.tables[self.len])
    }

    /// Puts an unused table back, still zeroed.
    pub(crate) fn put_back(&mut self, table: TableAddress) -> bool {
        let fits = self.len + self.spent < Self::CAPACITY;
        if fits {
            self.tables[self.len] = table;
            self.len += 1;
        }
        fits
    }

    /// Takes a table that nobody can reach any more, to be given back: at once by one that is full
    /// of tables in hand, or was never topped up, as nobody may drain that.
    #[inline]
    pub(crate) fn retire<O: Operations>(&mut self, ops: &O, table: TableAddress) {
        if self.len + self.spent == Self::CAPACITY {
            self.give_back(ops);
        }
        if !self.owned || self.len == Self::CAPACITY {
            return ops.free(table);
        }
        self.spent += 1;
        self.tables[Self::CAPACITY - self.spent] = table;
    }

    /// Gives superfluous tables back.
    #[inline(never)]
    pub fn give_back<O: Operations>(&mut self, ops: &O) {
        ops.free_all(&self.tables[Self::CAPACITY - self.spent..]);
        self.spent = 0;
    }

    /// Gives all tables back.
    pub fn drain<O: Operations>(&mut self, ops: &O) {
        self.give_back(ops);
        ops.free_all(&self.tables[..self.len]);
        self.len = 0;
        self.owned = false;
    }
}
