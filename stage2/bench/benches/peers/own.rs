// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! This crate's table: with one walker, and with many.

use std::sync::{OnceLock, atomic::AtomicU64};

use granule_stage2::{
    Access, Features, MapError, MapRequest, Memcache, Offline, Policy, Stage2,
    descriptor::Attributes,
    geometry::{Geometry, Granule},
    operations::Vmid,
    pool::{TablePool, words},
};

use super::{BLOCK, PAGE, PHYS, TABLES, Table, memory};

type Pool = TablePool<&'static [AtomicU64]>;

/// CPUs that leave no maintenance to do, as the peers do none.
const CPUS: Features = Features {
    fwb: true,
    dic: true,
    tlb_range: true,
    bbm: 3,
};

fn pool() -> (&'static Pool, Geometry) {
    static POOL: OnceLock<Pool> = OnceLock::new();
    let geometry = Geometry::new(Granule::K4, 39).expect("a width");
    let pool = POOL.get_or_init(|| {
        let meta = Box::leak(words(TABLES * 2));
        Pool::new(1 << 40, &geometry, memory(), meta).expect("a pool")
    });
    (pool, geometry)
}

fn table() -> (&'static Pool, Stage2) {
    let (pool, geometry) = pool();
    let table = Stage2::new(geometry, CPUS, Policy::GRANULE, Vmid(1), pool.root());
    (pool, table)
}

fn request(ipa: u64, size: u64, largest: u64) -> MapRequest {
    let mut request = MapRequest::new(ipa, PHYS + ipa, size, Attributes::READ_WRITE);
    request.largest = largest;
    request
}

/// The only walker.
pub struct Exclusive {
    pool: &'static Pool,
    table: Stage2,
    memcache: Memcache,
}

impl Exclusive {
    fn top_up(&mut self, most: usize) {
        let full = self
            .memcache
            .top_up(&Offline(self.pool), most, Memcache::CAPACITY);
        assert!(full, "the pool is large enough");
    }
}

impl Table for Exclusive {
    const NAME: &'static str = "granule";
    const SPLITS: bool = true;
    const COALESCES: bool = true;

    fn new() -> Self {
        let (pool, table) = table();
        Self {
            pool,
            table,
            memcache: Memcache::new(),
        }
    }

    fn map(&mut self, ipa: u64, size: u64, blocks: bool) {
        // As many tables as the memcache holds at least.
        const PIECE: u64 = 32 * BLOCK;
        let largest = if blocks { BLOCK } else { PAGE };
        let mut at = ipa;
        while at < ipa + size {
            let piece = PIECE.min(ipa + size - at);
            self.top_up(if piece == PIECE { 34 } else { 4 });
            self.table
                .map(
                    &Offline(self.pool),
                    &mut self.memcache,
                    &request(at, piece, largest),
                )
                .expect("nothing is there");
            at += piece;
        }
    }

    fn map_each(&mut self, count: u64, blocks: bool) {
        let size = if blocks { BLOCK } else { PAGE };
        let ops = Offline(self.pool);
        let mut mapper = self.table.mapper(&ops);
        for ipa in (0..count).map(|n| n * size) {
            self.memcache.top_up(&ops, 4, Memcache::CAPACITY);
            mapper
                .map(&mut self.memcache, &request(ipa, size, size))
                .expect("nothing is there");
        }
    }

    fn translate(&self, ipa: u64) -> u64 {
        let seen = self.table.translate(&Offline(self.pool), ipa, Access::Read);
        seen.map_or(0, |seen| seen.phys)
    }

    fn protect(&mut self, ipa: u64, size: u64) {
        self.table
            .write_protect(&Offline(self.pool), ipa, size)
            .expect("a range");
    }

    fn split(&mut self, ipa: u64) {
        self.top_up(1);
        self.table
            .split(&Offline(self.pool), &mut self.memcache, ipa, BLOCK)
            .expect("a block is there");
    }

    fn coalesce(&mut self, ipa: u64) {
        self.table
            .map(
                &Offline(self.pool),
                &mut self.memcache,
                &request(ipa, BLOCK, BLOCK),
            )
            .expect("a table is there");
    }

    fn unmap(&mut self, ipa: u64, size: u64) {
        self.table
            .unmap(&Offline(self.pool), ipa, size)
            .expect("a range");
    }
}

impl Drop for Exclusive {
    fn drop(&mut self) {
        let ops = Offline(self.pool);
        self.table.clear(&ops);
        self.memcache.drain(&ops);
    }
}

/// A table that many walk.
pub struct Shared {
    pool: &'static Pool,
    table: Stage2,
}

/// One of its walkers.
pub struct Walker<'a> {
    ops: Offline<'static, &'static [AtomicU64]>,
    table: &'a Stage2,
    memcache: Memcache,
}

impl Shared {
    pub fn new() -> Self {
        let (pool, table) = table();
        Self { pool, table }
    }

    pub fn walker(&self) -> Walker<'_> {
        Walker {
            ops: Offline(self.pool),
            table: &self.table,
            memcache: Memcache::new(),
        }
    }
}

impl Walker<'_> {
    /// Maps pages one by one, each in a walk of its own, as faults do. In a race one may be left to
    /// another fault.
    pub fn map_each(&mut self, pages: impl Iterator<Item = u64>) {
        for ipa in pages {
            self.memcache.top_up(&self.ops, 4, Memcache::CAPACITY);
            let request = request(ipa, PAGE, PAGE);
            let result = self
                .table
                .map_shared(&self.ops, &mut self.memcache, &request);
            assert!(matches!(result, Ok(()) | Err(MapError::Again)));
        }
    }

    /// The same in one walk.
    pub fn map_all(&mut self, pages: impl Iterator<Item = u64>) {
        let mut mapper = self.table.mapper_shared(&self.ops);
        for ipa in pages {
            self.memcache.top_up(&self.ops, 4, Memcache::CAPACITY);
            let result = mapper.map(&mut self.memcache, &request(ipa, PAGE, PAGE));
            assert!(matches!(result, Ok(()) | Err(MapError::Again)));
        }
    }
}

impl Drop for Walker<'_> {
    fn drop(&mut self) {
        self.memcache.drain(&self.ops);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.table.clear(&Offline(self.pool));
    }
}
