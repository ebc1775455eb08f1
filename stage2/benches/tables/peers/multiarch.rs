// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! page_table_multiarch, with three levels and entries of arm64's shape, and no TLB.

use std::fmt;

use memory_addr::{PhysAddr, VirtAddr};
use page_table_multiarch::{
    GenericPTE, MappingFlags, PageSize, PageTable64, PagingHandler, PagingMetaData,
};

use super::{BLOCK, PHYS, Table, page, put_back};

/// An entry of arm64's shape.
#[derive(Clone, Copy)]
pub struct Entry(u64);

const ADDRESS: u64 = 0x0000_ffff_ffff_f000;
const LEAF: u64 = 0x0040_0000_0000_07fc;
const WRITE: u64 = 1 << 7;

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

#[rustfmt::skip]
impl GenericPTE for Entry {
    fn new_page(paddr: PhysAddr, _: MappingFlags, is_huge: bool) -> Self {
        Self(paddr.as_usize() as u64 | LEAF | if is_huge { 1 } else { 3 })
    }
    fn new_table(paddr: PhysAddr) -> Self { Self(paddr.as_usize() as u64 | 3) }
    fn paddr(&self) -> PhysAddr { PhysAddr::from((self.0 & ADDRESS) as usize) }
    fn flags(&self) -> MappingFlags { MappingFlags::READ | MappingFlags::WRITE }
    fn set_paddr(&mut self, paddr: PhysAddr) { self.0 = self.0 & !ADDRESS | paddr.as_usize() as u64; }
    fn set_flags(&mut self, flags: MappingFlags, _: bool) {
        let writable = if flags.contains(MappingFlags::WRITE) { WRITE } else { 0 };
        self.0 = self.0 & !WRITE | writable;
    }
    fn bits(self) -> usize { self.0 as usize }
    fn is_unused(&self) -> bool { self.0 == 0 }
    fn is_present(&self) -> bool { self.0 & 1 != 0 }
    fn is_huge(&self) -> bool { self.0 & 2 == 0 }
    fn clear(&mut self) { self.0 = 0; }
}

/// Three levels, 39 address bits.
pub struct Shape;

impl PagingMetaData for Shape {
    const LEVELS: usize = 3;
    const PA_MAX_BITS: usize = 48;
    const VA_MAX_BITS: usize = 39;
    type VirtAddr = VirtAddr;
    fn flush_tlb(_: Option<VirtAddr>) {}
}

/// Frames from the pool.
pub struct Pages;

impl PagingHandler for Pages {
    fn alloc_frames(num: usize, _: usize) -> Option<PhysAddr> {
        (num == 1).then(|| PhysAddr::from(page()))
    }
    fn dealloc_frames(paddr: PhysAddr, _: usize) {
        put_back(paddr.as_usize());
    }
    fn phys_to_virt(paddr: PhysAddr) -> VirtAddr {
        VirtAddr::from(paddr.as_usize())
    }
}

/// Table of page_table_multiarch.
pub struct Multiarch(PageTable64<Shape, Entry, Pages>);

impl Table for Multiarch {
    const NAME: &'static str = "page_table_multiarch";

    fn new() -> Self {
        Self(PageTable64::try_new().expect("a root"))
    }

    fn map(&mut self, ipa: u64, size: u64, blocks: bool) {
        let flags = MappingFlags::READ | MappingFlags::WRITE;
        let at = VirtAddr::from(ipa as usize);
        self.0
            .cursor()
            .map_region(
                at,
                |at| PhysAddr::from(at.as_usize() + PHYS as usize),
                size as usize,
                flags,
                blocks,
            )
            .expect("a range");
    }

    fn map_each<const SIZE: u64>(&mut self, count: u64) {
        let flags = MappingFlags::READ | MappingFlags::WRITE;
        let page_size = if SIZE == BLOCK { PageSize::Size2M } else { PageSize::Size4K };
        let mut cursor = self.0.cursor();
        for at in (0..count).map(|n| n * SIZE) {
            let (at, phys) = (at as usize, (PHYS + at) as usize);
            cursor
                .map(VirtAddr::from(at), PhysAddr::from(phys), page_size, flags)
                .expect("nothing is there");
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
