// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables of other crates: aarch64-paging with a table that is not active, so that it invalidates
//! nothing; page-table-generic and page_table_multiarch with three levels, entries in arm64's
//! format and no TLB.

use std::ptr::NonNull;

use aarch64_paging::{
    Mapping, descriptor,
    descriptor::{PhysicalAddress, Stage2Attributes},
    paging::{Constraints, MemoryRegion, PageTable, Stage2, Translation},
};
use memory_addr::{PhysAddr, VirtAddr};
use page_table_generic as generic;
use page_table_multiarch::{
    GenericPTE, MappingFlags, PageSize, PageTable64, PagingHandler, PagingMetaData,
};

use crate::{
    BLOCK, BenchTable, PAGE, PHYS,
    pages::{return_page, take_page, take_zeroed_page},
};

/// Pages from the pool.
#[derive(Debug, Clone)]
pub struct Pages;

impl Translation<Stage2Attributes> for Pages {
    fn allocate_table(&mut self) -> (NonNull<PageTable<Stage2Attributes>>, PhysicalAddress) {
        let page = take_zeroed_page();
        (self.physical_to_virtual(PhysicalAddress(page)), PhysicalAddress(page))
    }

    unsafe fn deallocate_table(&mut self, page_table: NonNull<PageTable<Stage2Attributes>>) {
        return_page(page_table.as_ptr() as usize);
    }

    fn physical_to_virtual(&self, pa: PhysicalAddress) -> NonNull<PageTable<Stage2Attributes>> {
        NonNull::new(pa.0 as *mut PageTable<Stage2Attributes>).expect("no page has address 0")
    }
}

pub struct Aarch64Paging(Mapping<Pages, Stage2>);

fn region(ipa: u64, size: u64) -> MemoryRegion {
    MemoryRegion::new(ipa as usize, (ipa + size) as usize)
}

impl BenchTable for Aarch64Paging {
    const NAME: &'static str = "aarch64-paging";
    const CAN_COALESCE: bool = false;

    fn new() -> Self {
        Self(Mapping::new(Pages, 1, Stage2))
    }

    fn map(&mut self, ipa: u64, size: u64, blocks: bool) {
        let attributes = Stage2Attributes::VALID
            | Stage2Attributes::MEMATTR_NORMAL_INNER_WB
            | Stage2Attributes::MEMATTR_NORMAL_OUTER_WB
            | Stage2Attributes::S2AP_ACCESS_RW
            | Stage2Attributes::SH_INNER
            | Stage2Attributes::ACCESS_FLAG
            | Stage2Attributes::XN;
        let constraints =
            if blocks { Constraints::empty() } else { Constraints::NO_BLOCK_MAPPINGS };
        let phys = PhysicalAddress((PHYS + ipa) as usize);
        self.0.map_range(&region(ipa, size), phys, attributes, constraints).expect("a valid range");
    }

    #[inline(always)]
    fn translate(&self, ipa: u64) -> u64 {
        let mut found = 0;
        let mut see = |region: &MemoryRegion, entry: &descriptor::Descriptor<_>, _| {
            found = entry.output_address().0 as u64 + ipa - region.start().0 as u64;
            Ok(())
        };
        let _ = self.0.walk_range(&region(ipa & !(PAGE - 1), PAGE), &mut see);
        found
    }

    fn protect(&mut self, ipa: u64, size: u64) {
        self.0
            .modify_range(&region(ipa, size), &|_, entry| {
                if entry.is_table() {
                    return Ok(());
                }
                entry.modify_flags(Stage2Attributes::empty(), Stage2Attributes::S2AP_ACCESS_WO)
            })
            .expect("a valid range");
    }

    fn split(&mut self, ipa: u64) {
        self.0.modify_range(&region(ipa, PAGE), &|_, _| Ok(())).expect("a valid range");
    }

    fn unmap(&mut self, ipa: u64, size: u64) {
        let (nowhere, nothing) = (PhysicalAddress(0), Stage2Attributes::empty());
        self.0
            .map_range(&region(ipa, size), nowhere, nothing, Constraints::empty())
            .expect("a valid range");
    }
}

/// An entry in arm64's format.
#[derive(Debug, Clone, Copy)]
pub struct Entry(u64);

const ADDRESS: u64 = 0x0000_ffff_ffff_f000;
const LEAF: u64 = 0x0040_0000_0000_077c;
const WRITE: u64 = 1 << 7;

impl Entry {
    #[inline]
    fn leaf(phys: usize, writable: bool, is_huge: bool) -> Self {
        let kind = if is_huge { 1 } else { 3 };
        Self(phys as u64 | LEAF | if writable { WRITE } else { 0 } | kind)
    }
}

impl generic::PageTableEntry for Entry {
    type PteConfig = bool;
    fn new_page(paddr: generic::PhysAddr, writable: bool, is_huge: bool) -> Self {
        Self::leaf(paddr.as_usize(), writable, is_huge)
    }
    fn new_table(paddr: generic::PhysAddr) -> Self {
        Self(paddr.as_usize() as u64 | 3)
    }
    fn paddr(&self, _: bool) -> generic::PhysAddr {
        generic::PhysAddr::from((self.0 & ADDRESS) as usize)
    }
    fn config(&self, _: bool) -> bool {
        self.0 & WRITE != 0
    }
    fn present(&self) -> bool {
        self.0 & 1 != 0
    }
    fn huge(&self, is_dir: bool) -> bool {
        is_dir && self.0 & 3 == 1
    }
    fn unused(&self) -> bool {
        self.0 == 0
    }
    fn clear(&mut self) {
        self.0 = 0;
    }
}

impl GenericPTE for Entry {
    fn new_page(paddr: PhysAddr, _: MappingFlags, is_huge: bool) -> Self {
        Self::leaf(paddr.as_usize(), true, is_huge)
    }
    fn new_table(paddr: PhysAddr) -> Self {
        Self(paddr.as_usize() as u64 | 3)
    }
    fn paddr(&self) -> PhysAddr {
        PhysAddr::from((self.0 & ADDRESS) as usize)
    }
    fn flags(&self) -> MappingFlags {
        MappingFlags::READ | MappingFlags::WRITE
    }
    fn set_paddr(&mut self, paddr: PhysAddr) {
        self.0 = self.0 & !ADDRESS | paddr.as_usize() as u64;
    }
    fn set_flags(&mut self, flags: MappingFlags, _: bool) {
        let writable = if flags.contains(MappingFlags::WRITE) { WRITE } else { 0 };
        self.0 = self.0 & !WRITE | writable;
    }
    fn bits(self) -> usize {
        self.0 as usize
    }
    fn is_unused(&self) -> bool {
        self.0 == 0
    }
    fn is_present(&self) -> bool {
        self.0 & 1 != 0
    }
    fn is_huge(&self) -> bool {
        self.0 & 2 == 0
    }
    fn clear(&mut self) {
        self.0 = 0;
    }
}

/// Three levels of 512 entries, 39 address bits.
#[derive(Clone, Copy)]
pub struct ThreeLevels;

impl generic::TableMeta for ThreeLevels {
    type P = Entry;
    const PAGE_SIZE: usize = 4096;
    const LEVEL_BITS: &[usize] = &[9, 9, 9];
    /// Level of the largest blocks, 2M as with the other crates.
    const MAX_BLOCK_LEVEL: usize = 2;
    fn flush(_: Option<generic::VirtAddr>) {}
}

impl PagingMetaData for ThreeLevels {
    const LEVELS: usize = 3;
    const PA_MAX_BITS: usize = 48;
    const VA_MAX_BITS: usize = 39;
    type VirtAddr = VirtAddr;
    fn flush_tlb(_: Option<VirtAddr>) {}
}

impl generic::FrameAllocator for Pages {
    fn alloc_frame(&self) -> Option<generic::PhysAddr> {
        Some(generic::PhysAddr::from(take_page()))
    }
    fn dealloc_frame(&self, frame: generic::PhysAddr) {
        return_page(frame.as_usize());
    }
    fn phys_to_virt(&self, paddr: generic::PhysAddr) -> *mut u8 {
        paddr.as_usize() as *mut u8
    }
}

impl PagingHandler for Pages {
    fn alloc_frames(num: usize, _: usize) -> Option<PhysAddr> {
        (num == 1).then(|| PhysAddr::from(take_page()))
    }
    fn dealloc_frames(paddr: PhysAddr, _: usize) {
        return_page(paddr.as_usize());
    }
    fn phys_to_virt(paddr: PhysAddr) -> VirtAddr {
        VirtAddr::from(paddr.as_usize())
    }
}

pub struct PageTableGeneric {
    table: generic::PageTable<ThreeLevels, Pages>,
    /// Results of the splits, in order of the blocks.
    splits: Vec<generic::InstalledHugeSplit<ThreeLevels>>,
}

impl BenchTable for PageTableGeneric {
    const NAME: &'static str = "page-table-generic";

    fn new() -> Self {
        let table = generic::PageTable::new(Pages).expect("a free page");
        Self { table, splits: Vec::with_capacity(1024) }
    }

    fn map(&mut self, ipa: u64, size: u64, blocks: bool) {
        let config = generic::MapConfig {
            vaddr: generic::VirtAddr::from(ipa as usize),
            paddr: generic::PhysAddr::from((PHYS + ipa) as usize),
            size: size as usize,
            pte: true,
            allow_huge: blocks,
            flush: false,
        };
        self.table.map(&config).expect("a valid range");
    }

    #[inline(always)]
    fn translate(&self, ipa: u64) -> u64 {
        let found = self.table.translate_phys(generic::VirtAddr::from(ipa as usize));
        found.map_or(0, |phys| phys.as_usize() as u64)
    }

    fn protect(&mut self, ipa: u64, size: u64) {
        let at = generic::VirtAddr::from(ipa as usize);
        self.table.protect_region(at, size as usize, false).expect("mapped");
    }

    fn split(&mut self, ipa: u64) {
        let at = generic::VirtAddr::from(ipa as usize);
        let deposit = self.table.prepare_huge_split(at).expect("a block maps the address");
        let split = self.table.split_huge_page_with(deposit).expect("a prepared split");
        self.splits.push(split);
    }

    fn coalesce_each(&mut self, count: u64) {
        for split in self.splits.drain(..count as usize) {
            self.table.restore_huge_split(split).expect("a split block");
        }
    }

    fn unmap(&mut self, ipa: u64, size: u64) {
        self.table.unmap(generic::VirtAddr::from(ipa as usize), size as usize).expect("mapped");
    }
}

pub struct PageTableMultiarch(PageTable64<ThreeLevels, Entry, Pages>);

const READ_WRITE: MappingFlags = MappingFlags::READ.union(MappingFlags::WRITE);

impl BenchTable for PageTableMultiarch {
    const NAME: &'static str = "page_table_multiarch";
    const CAN_SPLIT: bool = false;
    const CAN_COALESCE: bool = false;

    fn new() -> Self {
        Self(PageTable64::try_new().expect("a free page"))
    }

    fn map(&mut self, ipa: u64, size: u64, blocks: bool) {
        let (at, size) = (VirtAddr::from(ipa as usize), size as usize);
        let phys = |at: VirtAddr| PhysAddr::from(at.as_usize() + PHYS as usize);
        self.0.cursor().map_region(at, phys, size, READ_WRITE, blocks).expect("a valid range");
    }

    fn map_each<const SIZE: u64>(&mut self, count: u64) {
        let page_size = if SIZE == BLOCK { PageSize::Size2M } else { PageSize::Size4K };
        let mut cursor = self.0.cursor();
        for at in (0..count).map(|n| n * SIZE) {
            let (at, phys) = (VirtAddr::from(at as usize), PhysAddr::from((PHYS + at) as usize));
            cursor.map(at, phys, page_size, READ_WRITE).expect("unmapped");
        }
    }

    #[inline(always)]
    fn translate(&self, ipa: u64) -> u64 {
        let found = self.0.query(VirtAddr::from(ipa as usize));
        found.map_or(0, |(phys, ..)| phys.as_usize() as u64)
    }

    fn protect(&mut self, ipa: u64, size: u64) {
        let at = VirtAddr::from(ipa as usize);
        self.0.cursor().protect_region(at, size as usize, MappingFlags::READ).expect("mapped");
    }

    fn unmap(&mut self, ipa: u64, size: u64) {
        let at = VirtAddr::from(ipa as usize);
        self.0.cursor().unmap_region(at, size as usize).expect("mapped");
    }
}
