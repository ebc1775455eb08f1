// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's table by `Mapping` of the crate aarch64-paging, which stays active while it changes.
//!
//! The crate invalidates TLBs. It refuses to split a live block, and performs no CMO: its user unmaps
//! the block first, and cleans and invalidates memory itself.

use core::ptr::NonNull;

use aarch64_paging::{
    Mapping,
    descriptor::{PhysicalAddress, Stage2Attributes, UpdatableDescriptor},
    paging::{Constraints, MemoryRegion, PageTable, Stage2, Translation},
};
use granule_stage2::{Ipa, PhysAddr};

use crate::{
    cpu,
    guest_table::{GuestTable, Memory, PAGE, Use},
    instruction,
};

type Table = PageTable<Stage2Attributes>;

const TABLES: usize = 16;
const WRITE: Stage2Attributes = Stage2Attributes::S2AP_ACCESS_WO;

/// Free pages of tables.
#[derive(Debug)]
struct Tables {
    free: [Option<NonNull<Table>>; TABLES],
}

// SAFETY: the pages have no other user.
unsafe impl Send for Tables {}

#[repr(transparent)]
struct Memories(core::cell::UnsafeCell<[Table; TABLES]>);

// SAFETY: only the owner of `Tables` accesses the pages.
unsafe impl Sync for Memories {}

static MEMORY: Memories = Memories(core::cell::UnsafeCell::new([Table::EMPTY; TABLES]));

impl Tables {
    fn new() -> Self {
        let first = MEMORY.0.get().cast::<Table>();
        Self { free: core::array::from_fn(|index| NonNull::new(first.wrapping_add(index))) }
    }
}

impl Translation<Stage2Attributes> for Tables {
    fn allocate_table(&mut self) -> (NonNull<Table>, PhysicalAddress) {
        let table = self.free.iter_mut().find_map(Option::take).expect("a free table");
        // SAFETY: the page is free, and an entry of a table may have any value.
        unsafe { table.write_bytes(0, 1) };
        (table, PhysicalAddress(table.as_ptr() as usize))
    }

    unsafe fn deallocate_table(&mut self, table: NonNull<Table>) {
        let place = self.free.iter_mut().find(|place| place.is_none());
        *place.expect("the table was allocated") = Some(table);
    }

    fn physical_to_virtual(&self, address: PhysicalAddress) -> NonNull<Table> {
        NonNull::new(address.0 as *mut Table).expect("no table has address 0")
    }
}

/// The table of the guest. With `COMPLETES`, it also invalidates the entries that combine both stages,
/// which the crate does not.
#[derive(Debug)]
pub struct LiveTable<const COMPLETES: bool>(Mapping<Tables, Stage2>);

fn region(ipa: Ipa, size: u64) -> MemoryRegion {
    MemoryRegion::new(ipa.0 as usize, (ipa.0 + size) as usize)
}

fn attributes(used_for: Use) -> Stage2Attributes {
    let memory = Stage2Attributes::VALID
        | Stage2Attributes::MEMATTR_NORMAL_INNER_WB
        | Stage2Attributes::MEMATTR_NORMAL_OUTER_WB
        | Stage2Attributes::SH_INNER
        | Stage2Attributes::ACCESS_FLAG;
    match used_for {
        Use::Code => memory | Stage2Attributes::S2AP_ACCESS_RO,
        Use::Data => memory | Stage2Attributes::S2AP_ACCESS_RW | Stage2Attributes::XN,
    }
}

impl<const COMPLETES: bool> LiveTable<COMPLETES> {
    /// Creates the table, which is active from now on: `Mapping::activate` would select VMID 0.
    pub fn create() -> Self {
        let mapping = Mapping::new(Tables::new(), 1, Stage2);
        mapping.mark_active();
        Self(mapping)
    }

    fn change(&mut self, ipa: Ipa, phys: PhysAddr, size: u64, attributes: Stage2Attributes) {
        let phys = PhysicalAddress(phys.0 as usize);
        let changed = self.0.map_range(&region(ipa, size), phys, attributes, Constraints::empty());
        changed.expect("the crate accepts the change");
        Self::complete();
    }

    fn set_flags(
        &mut self,
        (ipa, size): (Ipa, u64),
        set: Stage2Attributes,
        clear: Stage2Attributes,
    ) {
        let change = |_: &MemoryRegion, entry: &mut UpdatableDescriptor<'_, Stage2Attributes>| {
            if entry.flags().contains(Stage2Attributes::VALID) {
                entry.modify_flags(set, clear)?;
            }
            Ok(())
        };
        self.0.modify_range(&region(ipa, size), &change).expect("the crate accepts the change");
        Self::complete();
    }

    fn complete() {
        if COMPLETES {
            instruction!("tlbi vmalle1is");
            instruction!("dsb ish");
            instruction!("isb");
        }
    }

    fn remove(&mut self, ipa: Ipa, size: u64) {
        self.change(ipa, PhysAddr(0), size, Stage2Attributes::empty());
    }

    /// Returns whether the leaf of an address is writable, and whether it is a block.
    fn leaf(&self, ipa: Ipa) -> Option<(bool, bool)> {
        let mut leaf = None;
        let page = region(Ipa(ipa.0 & !(PAGE - 1)), PAGE);
        let walk = self.0.walk_range(&page, &mut |_, entry, level| {
            leaf = entry.is_valid().then(|| (entry.flags().contains(WRITE), level < 3));
            Ok(())
        });
        walk.expect("an address of the table");
        leaf
    }
}

impl<const COMPLETES: bool> GuestTable for LiveTable<COMPLETES> {
    fn root(&self) -> PhysAddr {
        PhysAddr(self.0.root_address().0 as u64)
    }

    fn permits(&self, ipa: Ipa, writes: bool) -> Option<bool> {
        self.leaf(ipa).map(|(is_writable, _)| is_writable || !writes)
    }

    fn map(&mut self, memory: Memory) {
        let Memory { ipa, phys, size, used_for } = memory;
        cpu::clean_invalidate(phys, size);
        instruction!("dsb ish");
        if used_for == Use::Code {
            instruction!("ic ialluis");
            instruction!("dsb ish");
        }
        self.change(ipa, phys, size, attributes(used_for));
    }

    fn write_protect(&mut self, ipa: Ipa, size: u64) {
        self.set_flags((ipa, size), Stage2Attributes::empty(), WRITE);
    }

    fn make_page_writable(&mut self, page: Ipa, memory: Memory) {
        // Each change is invalidated on all CPUs, so that none holds an earlier permission.
        if self.permits(page, true) == Some(true) {
            return;
        }
        if self.leaf(page).is_some_and(|(_, is_block)| !is_block) {
            return self.set_flags((page, PAGE), WRITE, Stage2Attributes::empty());
        }
        let Memory { ipa, phys, size, used_for } = memory;
        let writable = attributes(used_for);
        let (before, behind) = (page.0 - ipa.0, page.0 + PAGE - ipa.0);
        self.remove(ipa, size);
        self.change(ipa, phys, before, writable - WRITE);
        self.change(page, phys + before, PAGE, writable);
        self.change(page + PAGE, phys + behind, size - behind, writable - WRITE);
    }

    fn recover_block(&mut self, memory: Memory) {
        let Memory { ipa, phys, size, used_for } = memory;
        self.remove(ipa, size);
        self.change(ipa, phys, size, attributes(used_for));
    }

    fn unmap(&mut self, range: Memory) {
        self.remove(range.ipa, range.size);
        cpu::clean_invalidate(range.phys, range.size);
        instruction!("dsb ish");
    }
}
