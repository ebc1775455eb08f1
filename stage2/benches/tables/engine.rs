// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The engine's table. It accesses entries through pointers, as the other crates do.

use std::{
    slice::from_raw_parts,
    sync::atomic::{AtomicU64, Ordering},
};

use granule_stage2::{
    Access, BbmLevel, EntryAddress, Features, Ipa, MapRequest, Memcache, Operations, PhysAddr,
    Policy, Stage2, TableAddress,
    descriptor::{Attributes, Descriptor},
    geometry::{Geometry, Granule},
    operations::{Dsb, Order, Tlbi, UnlinkedTable, Vmid},
    pool::store_adjacent,
};

use crate::{
    BLOCK, BenchTable, PAGE, PHYS,
    pages::{return_page, return_pages, take_zeroed_page},
};

/// Operations on pages of the pool, without barriers, TLBIs and CMOs.
struct DirectOperations;

fn entry_word(entry: EntryAddress) -> &'static AtomicU64 {
    // SAFETY: the entry is in a page of the pool, which is never freed.
    unsafe { AtomicU64::from_ptr(entry.0 as *mut u64) }
}

impl Operations for DirectOperations {
    #[inline]
    fn load(&self, entry: EntryAddress) -> Descriptor {
        Descriptor(entry_word(entry).load(Ordering::Acquire))
    }
    #[inline]
    fn store(&self, entry: EntryAddress, new: Descriptor, _: Order) {
        entry_word(entry).store(new.0, Ordering::Release);
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
            entry_word(entry).compare_exchange(old.0, new.0, Ordering::AcqRel, Ordering::Acquire);
        swap.map(drop).map_err(Descriptor)
    }
    fn allocate(&self) -> Option<TableAddress> {
        Some(TableAddress(take_zeroed_page() as u64))
    }
    fn free(&self, table: TableAddress) {
        return_page(table.0 as usize);
    }
    fn free_all(&self, tables: &[TableAddress]) {
        return_pages(tables.iter().map(|table| table.0 as usize));
    }
    fn defer_free(&self, _: UnlinkedTable) {}
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
    fn invalidate_icache(&self, _: Option<(PhysAddr, u64)>) {}
}

/// Number of tables that a map may need. A top-up allocates few tables, so that a zeroed table is
/// still in the L1 cache when a map links it, as with the other crates.
const MIN_TABLES: usize = 2;
const MAX_TABLES: usize = 4;

/// The engine's table for CPUs that need no CMOs, and with `BBM` no break to change sizes. The other crates
/// perform none.
pub struct Engine<const BBM: bool> {
    table: Stage2,
    memcache: Memcache,
}

fn request(ipa: u64, size: u64, max_leaf_size: u64) -> MapRequest {
    let request = MapRequest::new(Ipa(ipa), PhysAddr(PHYS + ipa), size, Attributes::READ_WRITE);
    MapRequest { max_leaf_size, ..request }
}

impl<const BBM: bool> BenchTable for Engine<BBM> {
    const NAME: &'static str = if BBM { "granule, FEAT_BBM" } else { "granule" };

    fn new() -> Self {
        let geometry = Geometry::new(Granule::K4, 39).expect("a valid width");
        let bbm = if BBM { BbmLevel::L3 } else { BbmLevel::L0 };
        let features = Features { fwb: true, dic: true, tlb_range: true, bbm };
        let root = TableAddress(take_zeroed_page() as u64);
        let table = Stage2::new(geometry, features, Policy::GRANULE, Vmid(1), root);
        let table = table.expect("an aligned page");
        Self { table, memcache: Memcache::new() }
    }

    fn map(&mut self, ipa: u64, size: u64, blocks: bool) {
        // One chunk needs no more tables than the memcache holds.
        const CHUNK: u64 = 32 * BLOCK;
        let max_leaf_size = if blocks { BLOCK } else { PAGE };
        for at in (ipa..ipa + size).step_by(CHUNK as usize) {
            let chunk = CHUNK.min(ipa + size - at);
            self.memcache.top_up(&DirectOperations, 34, 36);
            self.table
                .map(&DirectOperations, &mut self.memcache, &request(at, chunk, max_leaf_size))
                .expect("unmapped");
        }
    }

    fn map_each<const SIZE: u64>(&mut self, count: u64) {
        let mut mapper = self.table.mapper(&DirectOperations);
        for ipa in (0..count).map(|n| n * SIZE) {
            self.memcache.top_up(&DirectOperations, MIN_TABLES, MAX_TABLES);
            mapper.map(&mut self.memcache, &request(ipa, SIZE, SIZE)).expect("unmapped");
        }
    }

    fn map_shared(&mut self, count: u64) {
        let mut mapper = self.table.mapper_shared(&DirectOperations);
        for ipa in (0..count).map(|n| n * PAGE) {
            self.memcache.top_up(&DirectOperations, MIN_TABLES, MAX_TABLES);
            mapper.map(&mut self.memcache, &request(ipa, PAGE, PAGE)).expect("unmapped");
        }
    }

    #[inline(always)]
    fn translate(&self, ipa: u64) -> u64 {
        let found = self.table.walker().translate(&DirectOperations, Ipa(ipa), Access::Read);
        found.map_or(0, |found| found.phys.0)
    }

    fn protect(&mut self, ipa: u64, size: u64) {
        self.table.write_protect(&DirectOperations, Ipa(ipa), size).expect("a valid range");
    }

    fn split(&mut self, ipa: u64) {
        self.memcache.top_up(&DirectOperations, 1, 1 + MIN_TABLES);
        let done = self.table.split(&DirectOperations, &mut self.memcache, Ipa(ipa), BLOCK);
        done.expect("a block maps the address");
    }

    fn coalesce_each(&mut self, count: u64) {
        let mut mapper = self.table.mapper(&DirectOperations);
        for ipa in (0..count).map(|n| n * BLOCK) {
            mapper.map(&mut self.memcache, &request(ipa, BLOCK, BLOCK)).expect("a split block");
        }
        drop(mapper);
        self.memcache.free_retired(&DirectOperations);
    }

    fn unmap(&mut self, ipa: u64, size: u64) {
        self.table.unmap(&DirectOperations, Ipa(ipa), size).expect("a valid range");
    }
}

impl<const BBM: bool> Drop for Engine<BBM> {
    fn drop(&mut self) {
        self.memcache.drain(&DirectOperations);
        self.table.clear(&DirectOperations);
        DirectOperations.free(self.table.root());
    }
}
