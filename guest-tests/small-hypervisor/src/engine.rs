// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's table by the engine of granule-stage2.

use core::sync::atomic::AtomicU64;

use granule_stage2::{
    Access, BbmLevel, EntryAddress, Features, Ipa, MapError, MapRequest, Memcache, NoMaintenance,
    Operations, PhysAddr, Policy, Stage2, TableAddress,
    descriptor::{Attributes, Descriptor},
    geometry::{Geometry, Granule, Level},
    operations::{Dsb, Order, Scope, Tlbi, UnlinkedTable, Vmid},
    pool::TablePool,
};

use crate::{
    cpu,
    guest_table::{BLOCK, GuestTable, Memory, PAGE, Use, VMID, VTCR},
    instruction,
    once::Once,
    read_register,
};

const TABLES: usize = 16;

#[repr(C, align(4096))]
struct Aligned([AtomicU64; TABLES * 512]);

static TABLE_WORDS: Aligned = Aligned([const { AtomicU64::new(0) }; TABLES * 512]);
static METADATA: [AtomicU64; TABLES * 2] = [const { AtomicU64::new(0) }; TABLES * 2];

type Pool = TablePool<&'static [AtomicU64]>;

static POOL: Once<Pool> = Once::empty();

/// The operations of a CPU. Without `INVALIDATES`, they omit invalidations of stage-2 entries, which
/// is a defect.
#[derive(Debug)]
struct El2<const INVALIDATES: bool>(NoMaintenance<'static, &'static [AtomicU64]>);

impl<const INVALIDATES: bool> Operations for El2<INVALIDATES> {
    fn load(&self, entry: EntryAddress) -> Descriptor {
        self.0.load(entry)
    }
    fn store(&self, entry: EntryAddress, new: Descriptor, order: Order) {
        self.0.store(entry, new, order);
    }
    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        self.0.compare_exchange(entry, old, new)
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
    fn take_references(&self, table: TableAddress, count: u32) {
        self.0.take_references(table, count);
    }
    fn drop_references(&self, table: TableAddress, count: u32) -> u32 {
        self.0.drop_references(table, count)
    }
    fn references(&self, table: TableAddress) -> u32 {
        self.0.references(table)
    }
    fn dsb(&self, kind: Dsb) {
        match kind {
            Dsb::NshSt => instruction!("dsb nshst"),
            Dsb::Nsh => instruction!("dsb nsh"),
            Dsb::IshSt => instruction!("dsb ishst"),
            Dsb::Ish => instruction!("dsb ish"),
        }
    }
    fn isb(&self) {
        instruction!("isb");
    }
    /// Invalidates without a TTL hint, as CPUs without FEAT_TTL require.
    fn tlbi(&self, kind: Tlbi) {
        if !INVALIDATES && matches!(kind, Tlbi::Ipa { .. }) {
            return;
        }
        let page = |ipa: Ipa| ipa.0 >> 12;
        match kind {
            Tlbi::Ipa { ipa, leaf_only: false, scope: Scope::Local, .. } => {
                instruction!("tlbi ipas2e1, {}", page(ipa));
            }
            Tlbi::Ipa { ipa, leaf_only: false, scope: Scope::Broadcast, .. } => {
                instruction!("tlbi ipas2e1is, {}", page(ipa));
            }
            Tlbi::Ipa { ipa, leaf_only: true, scope: Scope::Local, .. } => {
                instruction!("tlbi ipas2le1, {}", page(ipa));
            }
            Tlbi::Ipa { ipa, leaf_only: true, scope: Scope::Broadcast, .. } => {
                instruction!("tlbi ipas2le1is, {}", page(ipa));
            }
            Tlbi::Range { .. } => unreachable!("the features have no range invalidations"),
            Tlbi::Stage1 { scope: Scope::Local } => instruction!("tlbi vmalle1"),
            Tlbi::Stage1 { scope: Scope::Broadcast } => instruction!("tlbi vmalle1is"),
            Tlbi::All { scope: Scope::Local } => instruction!("tlbi vmalls12e1"),
            Tlbi::All { scope: Scope::Broadcast } => instruction!("tlbi vmalls12e1is"),
        }
    }
    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        let vttbr = read_register!("vttbr_el2");
        let root = vttbr & 0x0000_ffff_ffff_ffff;
        instruction!("msr vttbr_el2, {}", u64::from(vmid.0) << 48 | root);
        Vmid((vttbr >> 48) as u16)
    }
    fn clean_invalidate(&self, phys: PhysAddr, size: u64) {
        cpu::clean_invalidate(phys, size);
    }
    fn invalidate_icache(&self, _: Option<(PhysAddr, u64)>) {
        instruction!("ic ialluis");
    }
}

/// The table of the guest.
#[derive(Debug)]
pub struct EngineTable<const INVALIDATES: bool> {
    ops: El2<INVALIDATES>,
    memcache: Memcache,
    stage2: Stage2,
}

fn attributes(used_for: Use) -> Attributes {
    match used_for {
        Use::Code => Attributes { execute: true, ..Attributes::READ },
        Use::Data => Attributes::READ_WRITE,
    }
}

impl<const INVALIDATES: bool> EngineTable<INVALIDATES> {
    /// Creates the table.
    ///
    /// # Panics
    /// The table exists.
    pub fn create() -> Self {
        let geometry = const { Geometry::new(Granule::K4, 39) }.expect("a valid IPA width");
        // Addresses of 40 bits, inner shareable, write-back: the CPU walks what the engine stores.
        assert_eq!(VTCR, 0x8002_3500 | geometry.vtcr_fields());
        let base = PhysAddr((&raw const TABLE_WORDS) as u64);
        let pool = TablePool::new(base, &geometry, &TABLE_WORDS.0[..], &METADATA[..]);
        let pool: &'static Pool =
            POOL.create(pool.expect("an aligned root, and enough tables for it"));
        let features = Features {
            dic: read_register!("ctr_el0") >> 29 & 1 != 0,
            bbm: BbmLevel::of_id_register(read_register!("id_aa64mmfr2_el1")),
            ..Features::default()
        };
        let stage2 = Stage2::new(geometry, features, Policy::GRANULE, Vmid(VMID), pool.root());
        let stage2 = stage2.expect("an aligned root");
        Self { ops: El2(NoMaintenance(pool)), memcache: Memcache::new(), stage2 }
    }

    fn check(result: Result<(), MapError>) {
        result.expect("the engine accepts the range");
    }

    fn map_as(&mut self, ipa: Ipa, phys: PhysAddr, size: u64, attributes: Attributes) {
        self.memcache.top_up(&self.ops, 2, 4);
        let request = MapRequest::new(ipa, phys, size, attributes);
        Self::check(self.stage2.map(&self.ops, &mut self.memcache, &request));
    }
}

impl<const INVALIDATES: bool> GuestTable for EngineTable<INVALIDATES> {
    fn root(&self) -> PhysAddr {
        PhysAddr(self.stage2.root().0)
    }

    fn permits(&self, ipa: Ipa, writes: bool) -> Option<bool> {
        let walker = self.stage2.walker();
        walker.translate(&self.ops, ipa, Access::Read).ok()?;
        Some(!writes || walker.translate(&self.ops, ipa, Access::Write).is_ok())
    }

    fn map(&mut self, memory: Memory) {
        let Memory { ipa, phys, size, used_for } = memory;
        self.map_as(ipa, phys, size, attributes(used_for));
    }

    fn write_protect(&mut self, ipa: Ipa, size: u64) {
        Self::check(self.stage2.write_protect(&self.ops, ipa, size));
    }

    fn make_page_writable(&mut self, page: Ipa, memory: Memory) {
        let phys = memory.phys + (page.0 - memory.ipa.0);
        let attributes = attributes(memory.used_for);
        // Relaxing also invalidates what this CPU holds of the leaf without the permission, which may
        // have been added for another CPU. A block that is not writable is split by the map.
        let is_writable = self.permits(page, true) == Some(true);
        let block = self.stage2.geometry().largest_leaf_within(BLOCK).filter(|_| is_writable);
        let mut levels = [Some(Level::PAGE), block].into_iter().flatten();
        if !levels.any(|level| self.stage2.relax(&self.ops, page, level, attributes).is_ok()) {
            self.map_as(page, phys, PAGE, attributes);
        }
    }

    fn recover_block(&mut self, memory: Memory) {
        let Memory { ipa, phys, size, used_for } = memory;
        let level = self.stage2.geometry().largest_leaf_within(BLOCK).expect("a block");
        // Leaves that are write-protected are not equivalent to a writable block.
        self.map_as(ipa, phys, size, attributes(used_for));
        Self::check(self.stage2.recover_blocks(&self.ops, ipa, size, level));
    }

    fn unmap(&mut self, range: Memory) {
        Self::check(self.stage2.unmap(&self.ops, range.ipa, range.size));
    }
}
