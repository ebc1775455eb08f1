// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A hypervisor without an allocator: tables in a `static`, one CPU. Where a comment stands for an
//! instruction, a hypervisor at EL2 executes it. `cargo run -p granule-stage2 --example bare_metal`

use std::sync::atomic::AtomicU64;

use granule_stage2::{
    Access, Features, MapRequest, Memcache, Operations, Policy, Stage2,
    descriptor::{Attributes, Descriptor},
    geometry::{Geometry, Granule},
    operations::{Dsb, EntryAddress, Order, TableAddress, Tlbi, Unlinked, Vmid},
    pool::TablePool,
};

const TABLES: usize = 16;
static WORDS: [AtomicU64; TABLES * 512] = [const { AtomicU64::new(0) }; TABLES * 512];
static META: [AtomicU64; TABLES * 2] = [const { AtomicU64::new(0) }; TABLES * 2];

struct El2(TablePool<&'static [AtomicU64]>);

#[rustfmt::skip]
impl Operations for El2 {
    fn load(&self, e: EntryAddress) -> Descriptor { self.0.load(e) }
    fn store(&self, e: EntryAddress, new: Descriptor, order: Order) { self.0.store(e, new, order); }
    fn compare_exchange(&self, e: EntryAddress, old: Descriptor, new: Descriptor) -> Result<(), Descriptor> { self.0.compare_exchange(e, old, new) }
    fn allocate(&self) -> Option<TableAddress> { self.0.allocate() }
    fn free(&self, table: TableAddress) { self.0.free(table); }
    fn defer(&self, _: Unlinked) { unreachable!("only shared walkers defer") }
    fn take_references(&self, table: TableAddress, n: u32) { self.0.take_references(table, n); }
    fn drop_references(&self, table: TableAddress, n: u32) -> u32 { self.0.drop_references(table, n) }
    fn references(&self, table: TableAddress) -> u32 { self.0.references(table) }
    fn dsb(&self, kind: Dsb) { println!("  dsb {kind:?}"); }
    fn isb(&self) { println!("  isb"); }
    fn tlbi(&self, kind: Tlbi) { println!("  tlbi {kind:?}"); }
    fn switch_vmid(&self, vmid: Vmid) -> Vmid { println!("  msr vttbr_el2 {vmid:?}"); Vmid(0) }
    fn clean_invalidate(&self, phys: u64, size: u64) { println!("  dc civac {phys:#x}, {size:#x} bytes"); }
    fn invalidate_instructions(&self, range: Option<(u64, u64)>) { println!("  ic {range:x?}"); }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let geometry = Geometry::new(Granule::K4, 40)?;
    let pool =
        TablePool::new(0x8000_0000, &geometry, &WORDS[..], &META[..]).ok_or("too few tables")?;
    let (ops, mut memcache) = (El2(pool), Memcache::new());
    let mut guest = Stage2::new(
        geometry,
        Features::default(),
        Policy::GRANULE,
        Vmid(1),
        ops.0.root(),
    );
    memcache.top_up(&ops, 4, 8);
    println!("the guest gets 2M, in one block");
    guest.map(
        &ops,
        &mut memcache,
        &MapRequest::new(0x4000_0000, 0x1_0000_0000, 2 << 20, Attributes::READ_WRITE),
    )?;
    println!("its writes are logged, its first one splits the block");
    guest.write_protect(&ops, 0x4000_0000, 2 << 20)?;
    println!("  {:?}", guest.translate(&ops, 0x4000_5000, Access::Write));
    guest.map(
        &ops,
        &mut memcache,
        &MapRequest::new(0x4000_5000, 0x1_0000_5000, 4096, Attributes::READ_WRITE),
    )?;
    println!("enough logged: a block again");
    guest.recover_blocks(&ops, 0x4000_0000, 2 << 20, 2 << 20)?;
    println!("  {:?}", guest.translate(&ops, 0x4000_5000, Access::Read));
    Ok(())
}
