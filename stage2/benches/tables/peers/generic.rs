// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! page-table-generic, with three levels and entries of arm64's shape, and no TLB.

use page_table_generic::{
    FrameAllocator, InstalledHugeSplit, MapConfig, PageTable, PageTableEntry, PhysAddr, TableMeta,
    VirtAddr,
};

use super::{BLOCK, PHYS, Table, page, put_back};

/// An entry of arm64's shape.
#[derive(Debug, Clone, Copy)]
pub struct Entry(u64);

const ADDRESS: u64 = 0x0000_ffff_ffff_f000;
const LEAF: u64 = 0x0040_0000_0000_077c;
const WRITE: u64 = 1 << 7;

#[rustfmt::skip]
impl PageTableEntry for Entry {
    /// Write permission.
    type PteConfig = bool;
    fn new_page(paddr: PhysAddr, writable: bool, is_huge: bool) -> Self {
        let kind = if is_huge { 1 } else { 3 };
        Self(paddr.as_usize() as u64 | LEAF | if writable { WRITE } else { 0 } | kind)
    }
    fn new_table(paddr: PhysAddr) -> Self { Self(paddr.as_usize() as u64 | 3) }
    fn paddr(&self, _: bool) -> PhysAddr { PhysAddr::from((self.0 & ADDRESS) as usize) }
    fn config(&self, _: bool) -> bool { self.0 & WRITE != 0 }
    fn present(&self) -> bool { self.0 & 1 != 0 }
    fn huge(&self, is_dir: bool) -> bool { is_dir && self.0 & 3 == 1 }
    fn unused(&self) -> bool { self.0 == 0 }
    fn clear(&mut self) { self.0 = 0; }
}

/// Three levels of 512 entries.
#[derive(Clone, Copy)]
pub struct Shape;

impl TableMeta for Shape {
    type P = Entry;
    const PAGE_SIZE: usize = 4096;
    const LEVEL_BITS: &[usize] = &[9, 9, 9];
    /// Blocks of 2M, as with the other crates.
    const MAX_BLOCK_LEVEL: usize = 2;
    fn flush(_: Option<VirtAddr>) {}
}

/// Frames from the pool.
#[derive(Clone)]
pub struct Pages;

impl FrameAllocator for Pages {
    fn alloc_frame(&self) -> Option<PhysAddr> {
        Some(PhysAddr::from(page()))
    }
    fn dealloc_frame(&self, frame: PhysAddr) {
        put_back(frame.as_usize());
    }
    fn phys_to_virt(&self, paddr: PhysAddr) -> *mut u8 {
        paddr.as_usize() as *mut u8
    }
}

/// Table of page-table-generic.
pub struct Generic {
    table: PageTable<Shape, Pages>,
    /// Receipts of splits, by block number.
    splits: Vec<Option<InstalledHugeSplit<Shape>>>,
}

impl Table for Generic {
    const NAME: &'static str = "page-table-generic";

    fn new() -> Self {
        Self { table: PageTable::new(Pages).expect("a root"), splits: Vec::with_capacity(1024) }
    }

    fn map(&mut self, ipa: u64, size: u64, blocks: bool) {
        let config = MapConfig {
            vaddr: VirtAddr::from(ipa as usize),
            paddr: PhysAddr::from((PHYS + ipa) as usize),
            size: size as usize,
            pte: true,
            allow_huge: blocks,
            flush: false,
        };
        self.table.map(&config).expect("a range");
    }

    fn map_each<const SIZE: u64>(&mut self, count: u64) {
        (0..count).for_each(|n| self.map(n * SIZE, SIZE, SIZE == BLOCK));
    }

    #[inline(always)]
    fn translate(&self, ipa: u64) -> u64 {
        let found = self.table.translate_phys(VirtAddr::from(ipa as usize));
        found.map_or(0, |phys| phys.as_usize() as u64)
    }

    fn protect(&mut self, ipa: u64, size: u64) {
        self.table
            .protect_region(VirtAddr::from(ipa as usize), size as usize, false)
            .expect("mapped");
    }

    const SPLITS: bool = true;

    fn split(&mut self, ipa: u64) {
        let deposit =
            self.table.prepare_huge_split(VirtAddr::from(ipa as usize)).expect("a block is there");
        let split = self.table.split_huge_page_with(deposit).expect("it fits");
        self.splits.push(Some(split));
    }

    const COALESCES: bool = true;

    fn coalesce(&mut self, ipa: u64) {
        let split = self.splits[(ipa / BLOCK) as usize].take();
        self.table.restore_huge_split(split.expect("it was split")).expect("a table is there");
    }

    fn coalesce_each(&mut self, count: u64) {
        for split in &mut self.splits[..count as usize] {
            self.table
                .restore_huge_split(split.take().expect("it was split"))
                .expect("a table is there");
        }
    }

    fn unmap(&mut self, ipa: u64, size: u64) {
        self.table.unmap(VirtAddr::from(ipa as usize), size as usize).expect("mapped");
    }
}
