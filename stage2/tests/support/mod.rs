// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest and its host for tests: a table in a pool, memory in blocks of 2M that the host gives,
//! writes and takes back, and CPUs that fault. Every step is told to a sink.
#![allow(dead_code, reason = "each test uses its part")]
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

pub mod pausing;
pub mod recording_checker;
pub mod stepping;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicU64, Ordering},
};

use granule_stage2::{
    Access, EntryAddress, Fault, Features, Ipa, MapError, MapRequest, Memcache, Operations,
    PhysAddr, Policy, Stage2, TableAddress,
    check::{Action, Recorder, Setup, Sink},
    descriptor::{Attributes, Descriptor},
    fault::{FaultError, Host, Mmu, Page, Resolution},
    geometry::{Geometry, Granule},
    grace::Grace,
    operations::{Dsb, Note, Order, Tlbi, Unlinked, Vmid},
    pool::{TablePool, words},
};
use lock_api::{RawRwLock, RwLock, RwLockWriteGuard};
use rand_core::{Rng, SeedableRng};
use rand_xoshiro::SplitMix64;

pub const BLOCK: u64 = 2 << 20;
pub const PAGE: u64 = 4096;
pub const TABLES: PhysAddr = PhysAddr(0x8000_0000);
pub const MEMORY: PhysAddr = PhysAddr(0x1_0000_0000);
pub const VMID: Vmid = Vmid(7);

pub type Pool = TablePool<Box<[AtomicU64]>>;

/// One CPU's operations on a pool; barriers, TLBs and caches are told, not done.
#[derive(Debug)]
pub struct Cpu<'a> {
    pub pool: &'a Pool,
    pub grace: &'a Grace,
    pub index: usize,
    pub vmid: AtomicU64,
}

impl<'a> Cpu<'a> {
    pub fn new(pool: &'a Pool, grace: &'a Grace, index: u8) -> Self {
        Self {
            pool,
            grace,
            index: index.into(),
            vmid: AtomicU64::new(0),
        }
    }
}

/// What a checker of a table over a pool has to know.
pub fn setup(geometry: Geometry, features: Features, pool: &Pool, cpus: u8) -> Setup {
    Setup {
        geometry,
        features,
        vmid: VMID,
        root: pool.root(),
        cpus,
    }
}

impl Operations for Cpu<'_> {
    fn load(&self, entry: EntryAddress) -> Descriptor {
        self.pool.load(entry)
    }
    fn store(&self, entry: EntryAddress, new: Descriptor, order: Order) {
        self.pool.store(entry, new, order);
    }
    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        self.pool.compare_exchange(entry, old, new)
    }
    fn allocate(&self) -> Option<TableAddress> {
        self.pool.allocate()
    }
    fn free(&self, table: TableAddress) {
        self.pool.free(table);
    }
    fn defer(&self, unlinked: Unlinked) {
        self.grace.defer(unlinked);
    }
    fn begin_walk(&self) {
        self.grace.begin(self.index);
    }
    fn end_walk(&self) {
        self.grace.end(self.index);
    }
    fn take_references(&self, table: TableAddress, count: u32) {
        self.pool.take_references(table, count);
    }
    fn drop_references(&self, table: TableAddress, count: u32) -> u32 {
        self.pool.drop_references(table, count)
    }
    fn references(&self, table: TableAddress) -> u32 {
        self.pool.references(table)
    }
    fn dsb(&self, _: Dsb) {}
    fn isb(&self) {}
    fn tlbi(&self, _: Tlbi) {}
    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        let before = self.vmid.swap(vmid.0.into(), Ordering::Relaxed);
        Vmid(u16::try_from(before).unwrap())
    }
    fn clean_invalidate(&self, _: PhysAddr, _: u64) {}
    fn invalidate_instructions(&self, _: Option<(PhysAddr, u64)>) {}
    fn pause(&self) {
        std::thread::yield_now();
    }
}

/// What the host has given to the guest.
#[derive(Debug, Default)]
struct Given {
    /// Blocks of 2M by number; whether they are one piece of host memory.
    blocks: BTreeMap<u64, bool>,
    logging: bool,
    dirty: BTreeSet<u64>,
}

/// Guest and host; `L` is the kind of lock that both use.
#[derive(Debug)]
pub struct TestVm<L: RawRwLock = parking_lot::RawRwLock> {
    pub pool: Pool,
    pub grace: Grace,
    pub mmu: Mmu<L>,
    pub setup: Setup,
    pub blocks: u64,
    sequence: AtomicU64,
    given: RwLock<L, Given>,
}

impl<L: RawRwLock> TestVm<L> {
    pub fn new(policy: Policy, features: Features, cpus: u8, blocks: u64) -> Self {
        let geometry = Geometry::new(Granule::K4, 40).unwrap();
        let count = tables(cpus, blocks);
        let pool = Pool::new(TABLES, &geometry, words(count * 512), words(count * 2)).unwrap();
        let table = Stage2::new(geometry, features, policy, VMID, pool.root());
        Self {
            grace: Grace::new(cpus.into()),
            mmu: Mmu::new(table),
            setup: setup(geometry, features, &pool, cpus),
            blocks,
            sequence: AtomicU64::new(0),
            given: RwLock::new(Given::default()),
            pool,
        }
    }

    pub fn cpu(&self, index: u8) -> Cpu<'_> {
        Cpu::new(&self.pool, &self.grace, index)
    }

    fn given(&self) -> RwLockWriteGuard<'_, L, Given> {
        self.given.write()
    }

    pub fn size(&self) -> u64 {
        self.blocks * BLOCK
    }

    /// Tables in the pool, two of them the root's.
    pub fn tables(&self) -> usize {
        tables(self.setup.cpus, self.blocks)
    }
}

/// Enough for what every CPU puts aside and what the guest's blocks are mapped by, twice.
fn tables(cpus: u8, blocks: u64) -> usize {
    64 + 64 * usize::from(cpus) + 4 * usize::try_from(blocks).unwrap()
}

/// Blocks whose number is 3 modulo 4 are small pages in the host, each elsewhere.
pub const fn is_small(block: u64) -> bool {
    block % 4 == 3
}

pub fn phys_of(ipa: Ipa) -> PhysAddr {
    MEMORY + ipa.0
}

/// One CPU of a vm, and the sink that hears of it. `W` may change the operations.
pub struct Vcpu<'a, O, S, L: RawRwLock = parking_lot::RawRwLock> {
    pub vm: &'a TestVm<L>,
    pub ops: O,
    pub told: Recorder<'a, Cpu<'a>, S>,
    pub memcache: Memcache,
}

struct HostOf<'a, S, L: RawRwLock> {
    vm: &'a TestVm<L>,
    told: &'a Recorder<'a, Cpu<'a>, S>,
}

impl<S: Sink, L: RawRwLock> Host for HostOf<'_, S, L> {
    fn page(&self, ipa: Ipa, _: Access) -> Option<Page> {
        let block = ipa.0 / BLOCK;
        if block >= self.vm.blocks {
            return None;
        }
        let mut given = self.vm.given();
        given.blocks.entry(block).or_insert_with(|| {
            let ipa = Ipa(block * BLOCK);
            let phys = phys_of(ipa);
            self.told.tell(Action::Give {
                ipa,
                phys,
                size: BLOCK,
                device: false,
            });
            !is_small(block)
        });
        let size = if is_small(block) { PAGE } else { BLOCK };
        let ipa = ipa.align_down(size);
        Some(Page {
            ipa,
            phys: phys_of(ipa),
            size,
            writable: true,
        })
    }

    fn logging(&self, _: Ipa) -> bool {
        self.vm.given().logging
    }

    fn sequence(&self) -> u64 {
        self.vm.sequence.load(Ordering::SeqCst)
    }

    fn mark_dirty(&self, ipa: Ipa, size: u64) {
        let mut given = self.vm.given();
        if given.logging {
            given.dirty.extend((ipa.0..ipa.0 + size).step_by(4096));
        }
    }
}

impl<'a, O: Operations, S: Sink, L: RawRwLock> Vcpu<'a, O, S, L> {
    /// A CPU that the guest runs on. `ops` is what the engine is given; host events go to `told`.
    pub fn new(vm: &'a TestVm<L>, ops: O, told: Recorder<'a, Cpu<'a>, S>) -> Self {
        Self {
            vm,
            ops,
            told,
            memcache: Memcache::new(),
        }
    }

    /// Accesses until it works; gives the number of faults.
    pub fn touch(&mut self, ipa: u64, access: Access) -> Result<u32, FaultError> {
        let ipa = Ipa(ipa);
        for faults in 0..10_000 {
            let seen = self.vm.mmu.walker().translate(&self.ops, ipa, access);
            let Err(fault) = seen else {
                self.told.tell(Action::Access {
                    ipa,
                    access,
                    uncached: true,
                });
                return Ok(faults);
            };
            let host = HostOf {
                vm: self.vm,
                told: &self.told,
            };
            let done = self
                .vm
                .mmu
                .fault(&self.ops, &host, &mut self.memcache, fault)?;
            if done == Resolution::Resolved {
                let Fault {
                    ipa,
                    access,
                    status,
                    level,
                } = fault;
                self.told.tell(Action::Resume {
                    ipa,
                    access,
                    status,
                    level,
                });
            } else {
                self.ops.pause();
            }
            self.drain();
        }
        panic!("{ipa:#x}: no progress");
    }

    /// Frees what has waited long enough.
    pub fn drain(&self) {
        self.vm.grace.drain(&self.vm.mmu, &self.ops);
    }

    pub fn set_logging(&self, on: bool) {
        let size = self.vm.size();
        self.vm.mmu.exclusive(&self.ops, |table| {
            // A look-up that sees the new sequence sees the new setting.
            let mut given = self.vm.given();
            self.invalidate_lookups();
            given.logging = on;
            given.dirty.clear();
            if on {
                table.write_protect(&self.ops, Ipa(0), size).unwrap();
            } else if table.policy().recover_blocks {
                for (block, _) in given.blocks.iter().filter(|(_, whole)| **whole) {
                    table
                        .recover_blocks(&self.ops, Ipa(block * BLOCK), BLOCK, BLOCK)
                        .unwrap();
                }
            }
            self.told.tell(Action::Logging {
                ipa: Ipa(0),
                size,
                on,
            });
        });
    }

    pub fn read_log(&self) -> BTreeSet<u64> {
        let size = self.vm.size();
        self.vm.mmu.exclusive(&self.ops, |table| {
            let mut given = self.vm.given();
            if given.logging {
                table.write_protect(&self.ops, Ipa(0), size).unwrap();
                self.told.tell(Action::ReadLog { ipa: Ipa(0), size });
            }
            std::mem::take(&mut given.dirty)
        })
    }

    fn invalidate_lookups(&self) {
        // Told first: who looks a page up between the two is void to the engine, whatever the
        // checker thinks; the other way round the checker would take a look-up that is good for void.
        self.ops.note(Note::Sequence);
        self.vm.sequence.fetch_add(1, Ordering::SeqCst);
    }

    /// The host takes a block back.
    pub fn take_back(&self, block: u64) {
        self.vm.mmu.exclusive(&self.ops, |table| {
            self.invalidate_lookups();
            let mut given = self.vm.given();
            table.unmap(&self.ops, Ipa(block * BLOCK), BLOCK).unwrap();
            if given.blocks.remove(&block).is_some() {
                self.told.tell(Action::TakeBack {
                    ipa: Ipa(block * BLOCK),
                    size: BLOCK,
                });
            }
            self.invalidate_lookups();
        });
    }

    /// Mappings go, the memory stays the guest's.
    pub fn unmap(&self, ipa: u64, size: u64) {
        self.vm.mmu.exclusive(&self.ops, |table| {
            self.invalidate_lookups();
            table.unmap(&self.ops, Ipa(ipa), size).unwrap();
            self.invalidate_lookups();
        });
    }

    pub fn age(&self, ipa: u64, size: u64) {
        self.vm.mmu.exclusive(&self.ops, |table| {
            table.age(&self.ops, Ipa(ipa), size).unwrap();
        });
    }

    pub fn split(&mut self, block: u64) {
        self.memcache.top_up(&self.ops, 8, 8);
        let memcache = &mut self.memcache;
        self.vm.mmu.exclusive(&self.ops, |table| {
            table
                .split(&self.ops, memcache, Ipa(block * BLOCK), BLOCK)
                .unwrap();
        });
    }

    /// The host maps a block of small pages before the guest asks, as the only walker; for policies
    /// that give a run of them the contiguous hint.
    pub fn populate(&mut self, block: u64) {
        self.memcache.top_up(&self.ops, 8, 8);
        let (ops, memcache) = (&self.ops, &mut self.memcache);
        let host = HostOf {
            vm: self.vm,
            told: &self.told,
        };
        self.vm.mmu.exclusive(ops, |table| {
            if !table.policy().contiguous {
                return;
            }
            let ipa = Ipa(block * BLOCK);
            host.page(ipa, Access::Read).unwrap();
            let write = !host.logging(ipa);
            let attributes = Attributes {
                write,
                ..Attributes::READ
            };
            let request = MapRequest {
                largest: PAGE,
                ..MapRequest::new(ipa, phys_of(ipa), BLOCK, attributes)
            };
            let done = table.map(ops, memcache, &request);
            assert!(matches!(done, Ok(()) | Err(MapError::Again)), "{done:?}");
            if write {
                ops.note(Note::MarkDirty { ipa, size: BLOCK });
            }
        });
    }

    /// The host writes through its own mapping; not while a fault is being handled, as what it
    /// writes in that very moment is its own race.
    pub fn host_write(&self, ipa: u64, size: u64) {
        self.vm.mmu.exclusive(&self.ops, |_| {
            let given = self.vm.given();
            if given.blocks.contains_key(&(ipa / BLOCK)) {
                self.told.tell(Action::HostWrite {
                    phys: phys_of(Ipa(ipa)),
                    size,
                });
            }
        });
    }

    /// Everything is unmapped and all tables are given back.
    pub fn finish(&mut self) {
        self.drain();
        self.vm.mmu.exclusive(&self.ops, |table| {
            self.invalidate_lookups();
            table.clear(&self.ops);
        });
        self.memcache.drain(&self.ops);
    }
}

/// Returns the generator of a seed.
pub fn generator(seed: u64) -> SplitMix64 {
    SplitMix64::seed_from_u64(seed)
}

/// Returns a number below `end`.
pub fn below(random: &mut SplitMix64, end: u64) -> u64 {
    random.next_u64() % end
}

/// One random step.
pub fn step<O: Operations, S: Sink, L: RawRwLock>(
    vcpu: &mut Vcpu<'_, O, S, L>,
    random: &mut SplitMix64,
) {
    let block = below(random, vcpu.vm.blocks);
    let ipa = block * BLOCK + below(random, 512) * PAGE;
    match below(random, 100) {
        0..=39 => drop(vcpu.touch(ipa, Access::Read).unwrap()),
        40..=74 => drop(vcpu.touch(ipa, Access::Write).unwrap()),
        75..=84 => drop(vcpu.touch(ipa, Access::Fetch).unwrap()),
        85 => vcpu.set_logging(true),
        86..=87 => vcpu.set_logging(false),
        88..=89 => drop(vcpu.read_log()),
        90..=91 => vcpu.take_back(block),
        92..=93 => vcpu.unmap(ipa, PAGE),
        94..=95 => vcpu.age(ipa, PAGE * 4),
        96 => vcpu.split(block),
        97 => vcpu.populate(block),
        _ => vcpu.host_write(ipa, 64),
    }
}
