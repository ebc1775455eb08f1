// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtual machine for tests: one stage-2 table, and memory in blocks of 2M that the host adds,
//! writes and reuses.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicU64, Ordering},
};

use granule_stage2::{
    Access, Features, Ipa, PhysAddr, Policy,
    check::{Action, Recorder, Setup, Sink},
    epoch::EpochReclaim,
    fault::{Host, Mmu, Page},
    geometry::{Geometry, Granule},
};
use lock_api::{RawRwLock, RwLock, RwLockWriteGuard};

use super::{BLOCK, Cpu, MEMORY, PAGE, Pool, pool, setup, stage2};

/// Host state: the memory that the guest has and the dirty bitmap.
#[derive(Debug, Default)]
pub struct HostState {
    /// Blocks of 2M by number; true if host memory is contiguous there.
    pub blocks: BTreeMap<u64, bool>,
    pub logging: bool,
    pub dirty: BTreeSet<u64>,
}

/// Guest and host; `L` is the kind of lock that both use.
#[derive(Debug)]
pub struct TestVm<L: RawRwLock = parking_lot::RawRwLock> {
    pub pool: Pool,
    pub reclaim: EpochReclaim,
    pub mmu: Mmu<L>,
    pub setup: Setup,
    pub blocks: u64,
    pub sequence: AtomicU64,
    host: RwLock<L, HostState>,
}

impl<L: RawRwLock> TestVm<L> {
    pub fn new(policy: Policy, features: Features, cpus: u8, blocks: u64) -> Self {
        let geometry = Geometry::new(Granule::K4, 40).unwrap();
        let pool = pool(&geometry, tables(cpus, blocks));
        Self {
            reclaim: EpochReclaim::new(cpus.into()),
            mmu: Mmu::new(stage2(geometry, features, policy, &pool)),
            setup: setup(geometry, features, &pool, cpus),
            blocks,
            sequence: AtomicU64::new(0),
            host: RwLock::new(HostState::default()),
            pool,
        }
    }

    pub fn host(&self) -> RwLockWriteGuard<'_, L, HostState> {
        self.host.write()
    }

    pub fn size(&self) -> u64 {
        self.blocks * BLOCK
    }

    /// Panics unless every table but the two of the root is back in the pool.
    pub fn assert_no_table_lost(&self, name: &str) {
        let tables = tables(self.setup.cpus, self.blocks);
        assert_eq!(self.pool.available(), tables - 2, "{name}: tables are lost");
    }
}

/// Returns a number of tables that suffices for every memcache and for the guest's blocks, twice.
fn tables(cpus: u8, blocks: u64) -> usize {
    64 + 64 * usize::from(cpus) + 4 * usize::try_from(blocks).unwrap()
}

/// Returns whether a block consists of scattered pages in the host: each fourth does.
pub const fn is_small(block: u64) -> bool {
    block % 4 == 3
}

pub fn phys_of(ipa: Ipa) -> PhysAddr {
    MEMORY + ipa.0
}

/// The host of a fault on one CPU; it records its actions.
pub struct VmHost<'a, S, L: RawRwLock> {
    pub vm: &'a TestVm<L>,
    pub recorder: &'a Recorder<'a, Cpu<'a>, S>,
}

impl<S: Sink, L: RawRwLock> Host for VmHost<'_, S, L> {
    fn page(&self, ipa: Ipa, _: Access) -> Option<Page> {
        let block = ipa.0 / BLOCK;
        if block >= self.vm.blocks {
            return None;
        }
        self.vm.host().blocks.entry(block).or_insert_with(|| {
            let ipa = Ipa(block * BLOCK);
            self.recorder.record(Action::AddMemory {
                ipa,
                phys: phys_of(ipa),
                size: BLOCK,
                device: false,
            });
            !is_small(block)
        });
        let size = if is_small(block) { PAGE } else { BLOCK };
        let ipa = ipa.align_down(size);
        Some(Page { ipa, phys: phys_of(ipa), size, writable: true })
    }

    fn logging(&self, _: Ipa) -> bool {
        self.vm.host().logging
    }

    fn sequence(&self) -> u64 {
        self.vm.sequence.load(Ordering::SeqCst)
    }

    fn mark_dirty(&self, ipa: Ipa, size: u64) {
        let mut host = self.vm.host();
        if host.logging {
            host.dirty.extend((ipa.0..ipa.0 + size).step_by(4096));
        }
    }
}
