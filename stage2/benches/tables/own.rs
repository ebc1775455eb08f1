// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The engine's table, with one walker and with many. Its pages come from the pool of the other
//! crates and are accessed through pointers as in those crates ([`Direct`]), or come from the
//! crate's own pool, which needs no `unsafe` and checks bounds ([`Pooled`]).

use std::{
    ptr::write_bytes,
    slice::from_raw_parts,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use granule_stage2::{
    Access, EntryAddress, Features, Ipa, MapError, MapRequest, Memcache, NoMaintenance, Operations,
    PhysAddr, Policy, Stage2, TableAddress,
    descriptor::{Attributes, Descriptor},
    geometry::{Geometry, Granule},
    operations::{Dsb, Order, Tlbi, Unlinked, Vmid},
    pool::{TablePool, store_adjacent, words},
};

use super::table::{BLOCK, PAGE, PHYS, TABLES, Table, memory, page, return_page, return_pages};

type Pool = TablePool<&'static [AtomicU64]>;
/// Tables from the crate's own pool.
pub type Pooled = NoMaintenance<'static, &'static [AtomicU64]>;

/// Operations with a name in the results.
pub trait NamedOperations: Operations {
    const NAME: &'static str;
    fn get() -> Self;
    /// Allocates the root.
    fn root(&self) -> TableAddress;
    /// Frees the root.
    fn close(&self, root: TableAddress);
}

impl NamedOperations for Pooled {
    const NAME: &'static str = "granule, from its pool";

    fn get() -> Self {
        static POOL: OnceLock<Pool> = OnceLock::new();
        Self(POOL.get_or_init(|| {
            let meta = Box::leak(words(TABLES * 2));
            Pool::new(PhysAddr(1 << 40), &geometry(), memory(), meta).expect("a pool")
        }))
    }

    fn root(&self) -> TableAddress {
        self.0.root()
    }

    fn close(&self, _: TableAddress) {}
}

/// Operations through pointers, as in the other crates.
#[derive(Debug)]
pub struct Direct;

impl Direct {
    #[inline]
    fn word(entry: EntryAddress) -> &'static AtomicU64 {
        // SAFETY: the entry is in a page of the pool, which is never freed.
        unsafe { AtomicU64::from_ptr(entry.0 as *mut u64) }
    }
}

impl NamedOperations for Direct {
    const NAME: &'static str = "granule";

    fn get() -> Self {
        Self
    }

    fn root(&self) -> TableAddress {
        self.allocate().expect("a page")
    }

    fn close(&self, root: TableAddress) {
        self.free(root);
    }
}

impl Operations for Direct {
    #[inline]
    fn load(&self, entry: EntryAddress) -> Descriptor {
        Descriptor(Self::word(entry).load(Ordering::Acquire))
    }
    #[inline]
    fn store(&self, entry: EntryAddress, new: Descriptor, _: Order) {
        Self::word(entry).store(new.0, Ordering::Release);
    }
    fn store_adjacent(
        &self,
        first: EntryAddress,
        count: u64,
        leaf: Descriptor,
        span: u64,
        order: Order,
    ) {
        // SAFETY: a run lies in one page of the pool, which is never freed.
        let entries = unsafe { from_raw_parts(first.0 as *const AtomicU64, count as usize) };
        store_adjacent(entries, leaf, span, order);
    }
    #[inline]
    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        let swap =
            Self::word(entry).compare_exchange(old.0, new.0, Ordering::AcqRel, Ordering::Acquire);
        swap.map(drop).map_err(Descriptor)
    }
    fn allocate(&self) -> Option<TableAddress> {
        let page = page();
        // SAFETY: the page came from the pool and has no other owner.
        unsafe { write_bytes(page as *mut u8, 0, 4096) };
        Some(TableAddress(page as u64))
    }
    fn free(&self, table: TableAddress) {
        return_page(table.0 as usize);
    }
    fn free_all(&self, tables: &[TableAddress]) {
        return_pages(tables.iter().map(|table| table.0 as usize));
    }
    fn defer(&self, _: Unlinked) {}
    fn take_references(&self, _: TableAddress, _: u32) {}
    fn drop_references(&self, _: TableAddress, _: u32) -> u32 {
        1
    }
    fn references(&self, _: TableAddress) -> u32 {
        1
    }
    #[inline]
    fn dsb(&self, _: Dsb) {}
    #[inline]
    fn isb(&self) {}
    #[inline]
    fn tlbi(&self, _: Tlbi) {}
    #[inline]
    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        vmid
    }
    fn clean_invalidate(&self, _: PhysAddr, _: u64) {}
    fn invalidate_instructions(&self, _: Option<(PhysAddr, u64)>) {}
}

/// CPUs that need no cache maintenance, as the other crates do none; every change of a size is by
/// break-before-make.
const CPUS: Features = Features { fwb: true, dic: true, tlb_range: true, bbm: 0 };

/// Number of tables that a map may need, and of further tables fetched at once: few, so that a
/// zeroed table is still in the L1 cache when it is used, as with the other crates.
const MIN_TABLES: usize = 2;
const EXTRA_TABLES: usize = 2;

fn geometry() -> Geometry {
    Geometry::new(Granule::K4, 39).expect("a width")
}

fn table<P: NamedOperations>(operations: &P, cpus: Features) -> Stage2 {
    Stage2::new(geometry(), cpus, Policy::GRANULE, Vmid(1), operations.root())
}

fn request(ipa: u64, size: u64, largest: u64) -> MapRequest {
    let mut request = MapRequest::new(Ipa(ipa), PhysAddr(PHYS + ipa), size, Attributes::READ_WRITE);
    request.largest = largest;
    request
}

/// The memcache of a thread.
pub struct ThreadMemcache<P: NamedOperations> {
    operations: P,
    memcache: Memcache,
}

impl<P: NamedOperations> Default for ThreadMemcache<P> {
    fn default() -> Self {
        Self { operations: P::get(), memcache: Memcache::new() }
    }
}

impl<P: NamedOperations> ThreadMemcache<P> {
    /// Tops the memcache up.
    fn top_up(&mut self, least: usize) {
        let full = self.memcache.top_up(&self.operations, least, least + EXTRA_TABLES);
        assert!(full, "the pool is large enough");
    }
}

impl<P: NamedOperations> Drop for ThreadMemcache<P> {
    fn drop(&mut self) {
        self.memcache.drain(&self.operations);
    }
}

/// A table with a sole walker.
pub struct ExclusiveTable<P: NamedOperations> {
    operations: P,
    table: Stage2,
}

impl<P: NamedOperations> ExclusiveTable<P> {
    fn on(cpus: Features) -> Self {
        let operations = P::get();
        Self { table: table(&operations, cpus), operations }
    }

    /// Creates a table for CPUs with FEAT_BBM.
    pub fn with_bbm() -> Self {
        Self::on(Features { bbm: 3, ..CPUS })
    }

    /// Coalesces as [`Table::coalesce_each`], in a walk each.
    pub fn coalesce_in_walks(&mut self, state: &mut ThreadMemcache<P>, count: u64) {
        (0..count).for_each(|n| self.coalesce(state, n * BLOCK));
        state.memcache.free_retired(&self.operations);
    }

    /// Maps as [`Table::map_each`], in a walk each.
    pub fn walk_each<const SIZE: u64>(&mut self, state: &mut ThreadMemcache<P>, count: u64) {
        for ipa in (0..count).map(|n| n * SIZE) {
            state.memcache.top_up(&self.operations, MIN_TABLES, MIN_TABLES + EXTRA_TABLES);
            self.table
                .map(&self.operations, &mut state.memcache, &request(ipa, SIZE, SIZE))
                .expect("nothing is there");
        }
    }
}

impl<P: NamedOperations> Table for ExclusiveTable<P> {
    const NAME: &'static str = P::NAME;
    const CAN_SPLIT: bool = true;
    const CAN_COALESCE: bool = true;
    const CONCURRENT_WALKS: bool = true;
    type ThreadState = ThreadMemcache<P>;

    fn ready(state: &mut ThreadMemcache<P>, tables: usize) {
        state.top_up(tables);
    }

    fn new() -> Self {
        Self::on(CPUS)
    }

    fn map(&mut self, state: &mut ThreadMemcache<P>, ipa: u64, size: u64, blocks: bool) {
        // Needs at most as many tables as the memcache holds.
        const PIECE: u64 = 32 * BLOCK;
        let largest = if blocks { BLOCK } else { PAGE };
        let mut at = ipa;
        while at < ipa + size {
            let piece = PIECE.min(ipa + size - at);
            state.top_up(if piece == PIECE { 34 } else { MIN_TABLES });
            self.table
                .map(&self.operations, &mut state.memcache, &request(at, piece, largest))
                .expect("nothing is there");
            at += piece;
        }
    }

    fn map_each<const SIZE: u64>(&mut self, state: &mut ThreadMemcache<P>, count: u64) {
        let mut mapper = self.table.mapper(&self.operations);
        for ipa in (0..count).map(|n| n * SIZE) {
            state.memcache.top_up(&self.operations, MIN_TABLES, MIN_TABLES + EXTRA_TABLES);
            mapper.map(&mut state.memcache, &request(ipa, SIZE, SIZE)).expect("nothing is there");
        }
    }

    #[inline(always)]
    fn translate(&self, ipa: u64) -> u64 {
        let seen = self.table.translate(&self.operations, Ipa(ipa), Access::Read);
        seen.map_or(0, |seen| seen.phys.0)
    }

    fn protect(&mut self, ipa: u64, size: u64) {
        self.table.write_protect(&self.operations, Ipa(ipa), size).expect("a range");
    }

    fn split(&mut self, state: &mut ThreadMemcache<P>, ipa: u64) {
        state.top_up(1);
        let done = self.table.split(&self.operations, &mut state.memcache, Ipa(ipa), BLOCK);
        done.expect("a block is there");
    }

    fn coalesce(&mut self, state: &mut ThreadMemcache<P>, ipa: u64) {
        let request = request(ipa, BLOCK, BLOCK);
        let done = self.table.map(&self.operations, &mut state.memcache, &request);
        done.expect("a table is there");
    }

    fn coalesce_each(&mut self, state: &mut ThreadMemcache<P>, count: u64) {
        let mut mapper = self.table.mapper(&self.operations);
        for ipa in (0..count).map(|n| n * BLOCK) {
            mapper.map(&mut state.memcache, &request(ipa, BLOCK, BLOCK)).expect("a table is there");
        }
        drop(mapper);
        state.memcache.free_retired(&self.operations);
    }

    fn unmap(&mut self, ipa: u64, size: u64) {
        self.table.unmap(&self.operations, Ipa(ipa), size).expect("a range");
    }
}

impl<P: NamedOperations> Drop for ExclusiveTable<P> {
    fn drop(&mut self) {
        self.table.clear(&self.operations);
        self.operations.close(self.table.root());
    }
}

/// A table with many walkers.
pub struct SharedTable(Stage2);

impl SharedTable {
    pub fn new() -> Self {
        Self(table(&Direct, CPUS))
    }

    /// Maps pages or blocks (`SIZE`), each in a walk of its own as faults do. A map that races with
    /// another may have to be retried.
    pub fn map_each<const SIZE: u64>(
        &self,
        state: &mut ThreadMemcache<Direct>,
        leaves: impl Iterator<Item = u64>,
    ) {
        for ipa in leaves {
            state.memcache.top_up(&Direct, MIN_TABLES, MIN_TABLES + EXTRA_TABLES);
            let request = request(ipa, SIZE, SIZE);
            let result = self.0.map_shared(&Direct, &mut state.memcache, &request);
            assert!(matches!(result, Ok(()) | Err(MapError::Again)));
        }
    }

    /// Maps pages in one walk.
    pub fn map_all(&self, state: &mut ThreadMemcache<Direct>, pages: impl Iterator<Item = u64>) {
        let mut mapper = self.0.mapper_shared(&Direct);
        for ipa in pages {
            state.memcache.top_up(&Direct, MIN_TABLES, MIN_TABLES + EXTRA_TABLES);
            let result = mapper.map(&mut state.memcache, &request(ipa, PAGE, PAGE));
            assert!(matches!(result, Ok(()) | Err(MapError::Again)));
        }
    }
}

impl Drop for SharedTable {
    fn drop(&mut self) {
        self.0.clear(&Direct);
        Direct.close(self.0.root());
    }
}
