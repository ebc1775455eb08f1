// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtual machine for tests: one stage-2 table, and memory in 2M blocks that the host adds,
//! writes and reuses. The vCPUs access memory and take faults. Their threads also change the table
//! as a host does. A sink receives every step.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use granule_stage2::{
    Access, Fault, Features, Ipa, MapError, MapRequest, Memcache, Operations, PhysAddr, Policy,
    check::{Action, Recorder, Setup, Sink},
    descriptor::Attributes,
    epoch::EpochReclaim,
    fault::{FaultError, HostMemory, HostPage, Mmu, Resolution},
    geometry::{Geometry, Granule, Level},
    operations::Note,
};
use parking_lot::{RawRwLock, RwLock, RwLockWriteGuard};
use rand_xoshiro::SplitMix64;

use super::{BLOCK, MEMORY, PAGE, Pool, PoolOps, pool, pool_ops, random_below, setup, stage2};

/// Maximum number of faults of one access; more indicate a livelock.
const MAX_FAULTS: u32 = 1_000_000;

#[derive(Debug, Default)]
pub struct HostState {
    /// Flags of the 2M blocks by number; a set flag marks contiguous host memory.
    pub blocks: BTreeMap<u64, bool>,
    pub is_logging: bool,
    pub dirty: BTreeSet<u64>,
}

#[derive(Debug)]
pub struct TestVm {
    pub pool: Pool,
    pub reclaim: EpochReclaim,
    pub mmu: Mmu<RawRwLock>,
    pub setup: Setup,
    pub block_count: u64,
    pub sequence: AtomicU64,
    host: RwLock<HostState>,
    /// The faults that CPUs handle.
    faults: Mutex<BTreeMap<u8, Fault>>,
}

impl TestVm {
    pub fn new(policy: Policy, features: Features, cpus: u8, blocks: u64) -> Self {
        let geometry = Geometry::new(Granule::K4, 40).unwrap();
        let pool = pool(&geometry, table_count(cpus, blocks));
        Self {
            reclaim: EpochReclaim::new(cpus.into()),
            mmu: Mmu::new(stage2(geometry, features, policy, &pool)),
            setup: setup(geometry, features, &pool, cpus),
            block_count: blocks,
            sequence: AtomicU64::new(0),
            host: RwLock::new(HostState::default()),
            faults: Mutex::new(BTreeMap::new()),
            pool,
        }
    }

    pub fn host(&self) -> RwLockWriteGuard<'_, HostState> {
        self.host.write()
    }

    /// Returns the fault that a CPU handles, if any.
    pub fn fault_of(&self, cpu: u8) -> Option<Fault> {
        self.faults.lock().unwrap().get(&cpu).copied()
    }

    pub fn size(&self) -> u64 {
        self.block_count * BLOCK
    }

    /// Panics unless all tables except the two root tables are free.
    pub fn assert_no_table_lost(&self, name: &str) {
        let tables = table_count(self.setup.cpus, self.block_count);
        assert_eq!(self.pool.free_tables(), tables - 2, "{name}: tables are lost");
    }
}

/// Returns the pool size: enough for all memcaches and four tables for each block.
fn table_count(cpus: u8, blocks: u64) -> usize {
    64 + 64 * usize::from(cpus) + 4 * usize::try_from(blocks).unwrap()
}

/// Returns whether a block consists of scattered host pages, as every fourth block does.
pub const fn is_scattered(block: u64) -> bool {
    block % 4 == 3
}

pub fn host_address(ipa: Ipa) -> PhysAddr {
    MEMORY + ipa.0
}

/// The host side of a fault on one CPU. Records its actions.
pub struct TestHost<'a, S> {
    pub vm: &'a TestVm,
    pub recorder: &'a Recorder<'a, PoolOps<'a>, S>,
}

impl<S: Sink> HostMemory for TestHost<'_, S> {
    fn look_up_page(&self, ipa: Ipa, _: Access) -> Option<HostPage> {
        let block = ipa.0 / BLOCK;
        if block >= self.vm.block_count {
            return None;
        }
        self.vm.host().blocks.entry(block).or_insert_with(|| {
            let ipa = Ipa(block * BLOCK);
            self.recorder.record(Action::AddMemory {
                ipa,
                phys: host_address(ipa),
                size: BLOCK,
                is_device: false,
            });
            !is_scattered(block)
        });
        let size = if is_scattered(block) { PAGE } else { BLOCK };
        let ipa = ipa.align_down(size);
        Some(HostPage { ipa, phys: host_address(ipa), size, is_writable: true })
    }

    fn is_logging(&self, _: Ipa) -> bool {
        self.vm.host().is_logging
    }

    fn invalidation_sequence(&self) -> u64 {
        self.vm.sequence.load(Ordering::SeqCst)
    }

    fn mark_dirty(&self, ipa: Ipa, size: u64) {
        let mut host = self.vm.host();
        if host.is_logging {
            host.dirty.extend((ipa.0..ipa.0 + size).step_by(4096));
        }
    }
}

/// A vCPU and the host thread that runs it; `O` may change the operations.
pub struct TestVcpu<'a, O, S> {
    pub vm: &'a TestVm,
    index: u8,
    pub ops: O,
    pub recorder: Recorder<'a, PoolOps<'a>, S>,
    pub memcache: Memcache,
}

impl TestVm {
    /// Returns a vCPU whose operations and host events are recorded to `sink`.
    pub fn vcpu<'a, S: Sink>(
        &'a self,
        index: u8,
        sink: &'a Mutex<S>,
    ) -> TestVcpu<'a, Recorder<'a, PoolOps<'a>, S>, S> {
        self.vcpu_with(index, sink, |recorder| recorder)
    }

    pub fn vcpu_with<'a, O: Operations, S: Sink>(
        &'a self,
        index: u8,
        sink: &'a Mutex<S>,
        wrap: impl FnOnce(Recorder<'a, PoolOps<'a>, S>) -> O,
    ) -> TestVcpu<'a, O, S> {
        let recorder = || Recorder::new(pool_ops(&self.pool, &self.reclaim, index), index, sink);
        let (ops, memcache) = (wrap(recorder()), Memcache::new());
        TestVcpu { vm: self, index, ops, recorder: recorder(), memcache }
    }
}

impl<'a, O: Operations, S: Sink> TestVcpu<'a, O, S> {
    /// Accesses an address until the access succeeds. Returns the number of faults.
    pub fn touch(&mut self, ipa: u64, access: Access) -> Result<u32, FaultError> {
        let ipa = Ipa(ipa);
        let host = TestHost { vm: self.vm, recorder: &self.recorder };
        for faults in 0..MAX_FAULTS {
            let translated = self.vm.mmu.walker().translate(&self.ops, ipa, access);
            let Err(fault) = translated else { return Ok(faults) };
            self.vm.faults.lock().unwrap().insert(self.index, fault);
            let handled = self.vm.mmu.fault(&self.ops, &host, &mut self.memcache, fault);
            self.vm.faults.lock().unwrap().remove(&self.index);
            if handled? == Resolution::Resolved {
                let Fault { ipa, access, status, level } = fault;
                self.recorder.record(Action::Resume { ipa, access, status, level });
            } else {
                self.ops.pause();
                // On a busy machine, the walker that has locked the entry may be preempted while
                // threads that only yield run.
                if faults % 64 == 63 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            self.drain();
        }
        panic!("{ipa:#x}: no progress in {MAX_FAULTS} faults");
    }

    pub fn drain(&self) {
        self.vm.reclaim.drain(&self.vm.mmu, &self.ops);
    }

    pub fn set_logging(&self, on: bool) {
        let size = self.vm.size();
        self.vm.mmu.with_exclusive(&self.ops, |table| {
            // A lookup that reads the new sequence also reads the new setting.
            let mut host = self.vm.host();
            self.invalidate_lookups();
            host.is_logging = on;
            host.dirty.clear();
            if on {
                table.write_protect(&self.ops, Ipa(0), size).unwrap();
            } else if table.policy().recovers_blocks {
                let level_2 = Level::new(2).unwrap();
                for (block, _) in host.blocks.iter().filter(|(_, contiguous)| **contiguous) {
                    let ipa = Ipa(block * BLOCK);
                    table.recover_blocks(&self.ops, ipa, BLOCK, level_2).unwrap();
                }
            }
            self.recorder.record(Action::SetLogging { ipa: Ipa(0), size, is_enabled: on });
        });
    }

    pub fn read_log(&self) -> BTreeSet<u64> {
        let size = self.vm.size();
        self.vm.mmu.with_exclusive(&self.ops, |table| {
            let mut host = self.vm.host();
            if host.is_logging {
                table.write_protect(&self.ops, Ipa(0), size).unwrap();
                self.recorder.record(Action::ReadLog { ipa: Ipa(0), size });
            }
            std::mem::take(&mut host.dirty)
        })
    }

    fn invalidate_lookups(&self) {
        // The note comes first: a lookup between the two is then invalid only for the engine. In
        // the other order, the checker would reject a valid lookup.
        self.ops.note(Note::InvalidationSequence);
        self.vm.sequence.fetch_add(1, Ordering::SeqCst);
    }

    /// Unmaps a block whose memory the host reuses.
    pub fn remove_memory(&self, block: u64) {
        self.vm.mmu.with_exclusive(&self.ops, |table| {
            self.invalidate_lookups();
            let mut host = self.vm.host();
            let (ipa, size) = (Ipa(block * BLOCK), BLOCK);
            table.unmap(&self.ops, ipa, size).unwrap();
            if host.blocks.remove(&block).is_some() {
                self.recorder.record(Action::RemoveMemory { ipa, size });
            }
            self.invalidate_lookups();
        });
    }

    /// Unmaps a range, whose memory remains in the guest.
    pub fn unmap(&self, ipa: u64, size: u64) {
        self.vm.mmu.with_exclusive(&self.ops, |table| {
            self.invalidate_lookups();
            table.unmap(&self.ops, Ipa(ipa), size).unwrap();
            self.invalidate_lookups();
        });
    }

    pub fn age(&self, ipa: u64, size: u64) {
        self.vm.mmu.with_exclusive(&self.ops, |table| {
            table.age(&self.ops, Ipa(ipa), size).unwrap();
        });
    }

    pub fn split(&mut self, block: u64) {
        self.memcache.top_up(&self.ops, 8, 8);
        let memcache = &mut self.memcache;
        self.vm.mmu.with_exclusive(&self.ops, |table| {
            table.split(&self.ops, memcache, Ipa(block * BLOCK), BLOCK).unwrap();
        });
    }

    /// Maps the pages of a block in an exclusive walk if the policy sets the Contiguous bit.
    pub fn populate(&mut self, block: u64) {
        self.memcache.top_up(&self.ops, 8, 8);
        let (ops, memcache) = (&self.ops, &mut self.memcache);
        let host = TestHost { vm: self.vm, recorder: &self.recorder };
        self.vm.mmu.with_exclusive(ops, |table| {
            if !table.policy().sets_contiguous {
                return;
            }
            let ipa = Ipa(block * BLOCK);
            host.look_up_page(ipa, Access::Read).unwrap();
            let write = !host.is_logging(ipa);
            let attributes = Attributes { write, ..Attributes::READ };
            let request = MapRequest {
                max_leaf_size: PAGE,
                ..MapRequest::new(ipa, host_address(ipa), BLOCK, attributes)
            };
            let done = table.map(ops, memcache, &request);
            assert!(matches!(done, Ok(()) | Err(MapError::Again)), "{done:?}");
            if write {
                ops.note(Note::MarkDirty { ipa, size: BLOCK });
            }
        });
    }

    /// Writes as the host. The lock excludes faults, during which a write would be a race in the
    /// host.
    pub fn host_write(&self, ipa: u64, size: u64) {
        self.vm.mmu.with_exclusive(&self.ops, |_| {
            if self.vm.host().blocks.contains_key(&(ipa / BLOCK)) {
                let phys = host_address(Ipa(ipa));
                self.recorder.record(Action::HostWrite { phys, size });
            }
        });
    }

    /// Unmaps everything and frees all tables.
    pub fn finish(&mut self) {
        self.drain();
        self.vm.mmu.with_exclusive(&self.ops, |table| {
            self.invalidate_lookups();
            table.clear(&self.ops);
        });
        self.memcache.drain(&self.ops);
    }

    pub fn random_step(&mut self, random: &mut SplitMix64) {
        let block = random_below(random, self.vm.block_count);
        let ipa = block * BLOCK + random_below(random, 512) * PAGE;
        match random_below(random, 100) {
            0..=39 => drop(self.touch(ipa, Access::Read).unwrap()),
            40..=74 => drop(self.touch(ipa, Access::Write).unwrap()),
            75..=84 => drop(self.touch(ipa, Access::Fetch).unwrap()),
            85 => self.set_logging(true),
            86..=87 => self.set_logging(false),
            88..=89 => drop(self.read_log()),
            90..=91 => self.remove_memory(block),
            92..=93 => self.unmap(ipa, PAGE),
            94..=95 => self.age(ipa, PAGE * 4),
            96 => self.split(block),
            97 => self.populate(block),
            _ => self.host_write(ipa, 64),
        }
    }
}
