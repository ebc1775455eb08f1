// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! aarch64-paging, with a table that no CPU uses, so that it invalidates nothing.

use std::ptr::NonNull;

use aarch64_paging::{
    Mapping,
    descriptor::{PhysicalAddress, Stage2Attributes},
    paging::{Constraints, MemoryRegion, PageTable, Stage2, Translation},
};

use super::{BLOCK, PAGE, PHYS, Table, page, put_back};

#[derive(Debug)]
struct Pages;

impl Translation<Stage2Attributes> for Pages {
    fn allocate_table(&mut self) -> (NonNull<PageTable<Stage2Attributes>>, PhysicalAddress) {
        let page = page();
        // SAFETY: the page came from the pool and has no other owner.
        unsafe { std::ptr::write_bytes(page as *mut u8, 0, 4096) };
        (self.physical_to_virtual(PhysicalAddress(page)), PhysicalAddress(page))
    }

    unsafe fn deallocate_table(&mut self, page_table: NonNull<PageTable<Stage2Attributes>>) {
        put_back(page_table.as_ptr() as usize);
    }

    fn physical_to_virtual(&self, pa: PhysicalAddress) -> NonNull<PageTable<Stage2Attributes>> {
        NonNull::new(pa.0 as *mut PageTable<Stage2Attributes>).expect("no page is at 0")
    }
}

/// Table of aarch64-paging.
pub struct Aarch64Paging(Mapping<Pages, Stage2>);

fn region(ipa: u64, size: u64) -> MemoryRegion {
    MemoryRegion::new(ipa as usize, (ipa + size) as usize)
}

impl Table for Aarch64Paging {
    const NAME: &'static str = "aarch64-paging";

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
        self.0.map_range(&region(ipa, size), phys, attributes, constraints).expect("a range");
    }

    fn map_each<const SIZE: u64>(&mut self, count: u64) {
        (0..count).for_each(|n| self.map(n * SIZE, SIZE, SIZE == BLOCK));
    }

    #[inline(always)]
    fn translate(&self, ipa: u64) -> u64 {
        let mut found = 0;
        let mut see = |region: &MemoryRegion,
                       entry: &aarch64_paging::descriptor::Descriptor<Stage2Attributes>,
                       _| {
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
            .expect("a range");
    }

    const SPLITS: bool = true;

    fn split(&mut self, ipa: u64) {
        self.0.modify_range(&region(ipa, PAGE), &|_, _| Ok(())).expect("a range");
    }

    fn unmap(&mut self, ipa: u64, size: u64) {
        self.0
            .map_range(
                &region(ipa, size),
                PhysicalAddress(0),
                Stage2Attributes::empty(),
                Constraints::empty(),
            )
            .expect("a range");
    }
}
