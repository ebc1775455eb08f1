// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Test support: pools of tables, operations of one CPU, CPU features, seeded generators. The
//! virtual machine of the random tests is in [`test_vm`].
#![allow(dead_code, reason = "each test uses some of the items")]
#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

pub mod checked;
pub mod machine;
pub mod script;
pub mod test_vm;

use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use granule_stage2::{
    BbmLevel, Features, Memcache, NoMaintenance, Operations, PhysAddr, Policy, Stage2,
    check::{Call, Hook, HookedOperations, Reply, Setup},
    epoch::EpochReclaim,
    geometry::{Geometry, Granule},
    operations::Vmid,
    pool::{TablePool, zeroed_words},
};
use rand_core::{Rng, SeedableRng};
use rand_xoshiro::SplitMix64;

pub const BLOCK: u64 = 2 << 20;
pub const PAGE: u64 = 4096;
pub const TABLES: PhysAddr = PhysAddr(0x8000_0000);
pub const MEMORY: PhysAddr = PhysAddr(0x1_0000_0000);
pub const VMID: Vmid = Vmid(7);

pub type Pool = TablePool<Box<[AtomicU64]>>;

/// Operations of one CPU on a pool; barriers, TLBIs and CMOs have no effect.
pub type PoolOps<'a> = HookedOperations<NoMaintenance<'a, Box<[AtomicU64]>>, CpuHook<'a>>;

/// State of one CPU: shared walks, deferred frees and the VMID.
#[derive(Debug)]
pub struct CpuHook<'a> {
    reclaim: &'a EpochReclaim,
    index: usize,
    vmid: AtomicU16,
}

impl<O: Operations> Hook<O> for CpuHook<'_> {
    fn call(&self, inner: &O, call: Call) -> Reply {
        match call {
            Call::DeferFree(unlinked) => self.reclaim.defer_free(unlinked),
            Call::BeginWalk => self.reclaim.begin_walk(self.index),
            Call::EndWalk => self.reclaim.end_walk(self.index),
            Call::SwitchVmid(Vmid(vmid)) => {
                return Reply::Vmid(Vmid(self.vmid.swap(vmid, Ordering::Relaxed)));
            }
            Call::Pause => std::thread::yield_now(),
            _ => return call.run(inner),
        }
        Reply::NoValue
    }
}

pub fn pool_ops<'a>(pool: &'a Pool, reclaim: &'a EpochReclaim, index: u8) -> PoolOps<'a> {
    HookedOperations {
        inner: NoMaintenance(pool),
        hook: CpuHook { reclaim, index: index.into(), vmid: AtomicU16::new(0) },
    }
}

/// Returns a pool of `tables` tables, including the root tables.
pub fn pool(geometry: &Geometry, tables: usize) -> Pool {
    let entries = usize::try_from(geometry.granule().entries()).unwrap();
    Pool::new(TABLES, geometry, zeroed_words(tables * entries), zeroed_words(2 * tables)).unwrap()
}

pub fn stage2(geometry: Geometry, features: Features, policy: Policy, pool: &Pool) -> Stage2 {
    Stage2::new(geometry, features, policy, VMID, pool.root()).unwrap()
}

/// Returns an empty table with its pool and a full memcache.
pub fn fixture_with(
    geometry: Geometry,
    features: Features,
    policy: Policy,
    tables: usize,
) -> (Pool, Stage2, Memcache) {
    let pool = pool(&geometry, tables);
    let table = stage2(geometry, features, policy, &pool);
    let mut memcache = Memcache::new();
    memcache.top_up(&NoMaintenance(&pool), 4, 8);
    (pool, table, memcache)
}

/// Returns a [fixture](fixture_with) with the policy `granule` and [`ALL_FEATURES`].
pub fn fixture(granule: Granule, ipa_bits: u32, tables: usize) -> (Pool, Stage2, Memcache) {
    let geometry = Geometry::new(granule, ipa_bits).unwrap();
    fixture_with(geometry, ALL_FEATURES, Policy::GRANULE, tables)
}

pub fn setup(geometry: Geometry, features: Features, pool: &Pool, cpus: u8) -> Setup {
    Setup { geometry, features, vmid: VMID, root: pool.root(), cpus }
}

/// CPUs that need no CMOs and change block sizes without a break.
pub const ALL_FEATURES: Features =
    Features { fwb: true, dic: true, tlb_range: true, bbm: BbmLevel::L3 };

/// Returns CPU features: none, some, all.
pub fn features() -> [Features; 3] {
    let some = Features { tlb_range: true, bbm: BbmLevel::L1, ..Features::default() };
    [Features::default(), some, ALL_FEATURES]
}

pub fn seeded_generator(seed: u64) -> SplitMix64 {
    SplitMix64::seed_from_u64(seed)
}

pub fn random_below(random: &mut SplitMix64, end: u64) -> u64 {
    random.next_u64() % end
}
