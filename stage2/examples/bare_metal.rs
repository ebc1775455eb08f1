// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A hypervisor without an allocator: tables in a `static`, one CPU. It prints the instructions
//! that a hypervisor executes at EL2. `cargo run -p granule-stage2 --example bare_metal`
#![no_std]
extern crate std; // for println and the runtime of main()
use core::sync::atomic::AtomicU64;
use granule_stage2::{descriptor::*, geometry::*, operations::*, pool::TablePool, *};
use std::println;

const TABLES: usize = 16;
static WORDS: [AtomicU64; TABLES * 512] = [const { AtomicU64::new(0) }; TABLES * 512];
static META: [AtomicU64; TABLES * 2] = [const { AtomicU64::new(0) }; TABLES * 2];

/// The tables' memory, and the instructions that EL2 executes.
struct El2<'a>(NoMaintenance<'a, &'static [AtomicU64]>);

impl Operations for El2<'_> {
    fn load(&self, e: EntryAddress) -> Descriptor {
        self.0.load(e)
    }
    fn store(&self, e: EntryAddress, new: Descriptor, order: Order) {
        self.0.store(e, new, order);
    }
    fn compare_exchange(
        &self,
        e: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        self.0.compare_exchange(e, old, new)
    }
    fn allocate(&self) -> Option<TableAddress> {
        self.0.allocate()
    }
    fn free(&self, table: TableAddress) {
        self.0.free(table);
    }
    fn defer_free(&self, _: UnlinkedTable) {
        unreachable!("only shared walks defer frees")
    }
    fn take_references(&self, table: TableAddress, n: u32) {
        self.0.take_references(table, n);
    }
    fn drop_references(&self, table: TableAddress, n: u32) -> u32 {
        self.0.drop_references(table, n)
    }
    fn references(&self, table: TableAddress) -> u32 {
        self.0.references(table)
    }
    fn dsb(&self, kind: Dsb) {
        println!("  dsb {kind:?}");
    }
    fn isb(&self) {
        println!("  isb");
    }
    fn tlbi(&self, kind: Tlbi) {
        println!("  tlbi {kind:?}");
    }
    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        println!("  msr vttbr_el2 {vmid:?}");
        Vmid(0)
    }
    fn clean_invalidate(&self, phys: PhysAddr, size: u64) {
        println!("  dc civac {phys:#x}, {size:#x} bytes");
    }
    fn invalidate_icache(&self, range: Option<(PhysAddr, u64)>) {
        println!("  ic {range:x?}");
    }
}

fn main() -> Result<(), MapError> {
    let geometry = const { Geometry::new(Granule::K4, 40) }.expect("a valid IPA width");
    let pool = TablePool::new(PhysAddr(0x8000_0000), &geometry, &WORDS[..], &META[..]);
    let pool = pool.expect("an aligned root, and enough tables for it");
    let (ops, root, mut memcache) = (El2(NoMaintenance(&pool)), pool.root(), Memcache::new());
    let (cpus, policy) = (Features::default(), Policy::GRANULE);
    let guest = Stage2::new(geometry, cpus, policy, Vmid(1), root);
    let mut guest = guest.expect("an aligned root");
    let request = |ipa: u64, size| {
        let phys = PhysAddr(ipa + 0xc000_0000);
        MapRequest::new(Ipa(ipa), phys, size, Attributes::READ_WRITE)
    };

    memcache.top_up(&ops, 4, 8);
    println!("map 2M in one block");
    guest.map(&ops, &mut memcache, &request(0x4000_0000, 2 << 20))?;
    println!("start dirty logging; the first write splits the block");
    guest.write_protect(&ops, Ipa(0x4000_0000), 2 << 20)?;
    println!("  {:?}", guest.walker().translate(&ops, Ipa(0x4000_5000), Access::Write));
    guest.map(&ops, &mut memcache, &request(0x4000_5000, 4096))?;
    println!("stop dirty logging: recover the block");
    let level = guest.geometry().largest_leaf_within(2 << 20).expect("a block of 2M");
    guest.recover_blocks(&ops, Ipa(0x4000_0000), 2 << 20, level)?;
    println!("  {:?}", guest.walker().translate(&ops, Ipa(0x4000_5000), Access::Read));
    Ok(())
}
