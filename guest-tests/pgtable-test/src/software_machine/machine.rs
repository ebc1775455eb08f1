// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The software machine in real time, as the harness uses it.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use granule_stage2::{
    Features, Ipa, MapError, PhysAddr, Stage2,
    epoch::EpochReclaim,
    fault::Mmu,
    geometry::{Geometry, Granule},
    operations::Vmid,
    pool::{TablePool, words},
};

use super::{
    PAGE, START, SoftwareMachineConfig, SoftwareMachineError,
    arch::CacheMaintenance,
    cpu_features,
    host_memory::HostMemory,
    most_tables,
    operations::{CpuOperations, MachineState},
    page_size,
    vcpu::SoftwareVcpu,
};
use crate::{
    clock,
    machine::{Machine, MachineError, Region, Vcpu},
};
use granule_types::{
    record::{EventCounts, Host, ResidentPages},
    units::{Bytes, GuestAddress, Nanoseconds},
};

/// A machine whose vCPUs are threads on the stage-2 engine.
#[derive(Debug)]
pub struct SoftwareMachine {
    state: Arc<MachineState>,
    ops: CpuOperations,
    host: Host,
    vcpus: usize,
}

impl SoftwareMachine {
    /// Makes the machine and populates its memory.
    ///
    /// # Errors
    /// The configuration is not supported, or the host provides no memory.
    pub fn new(config: &SoftwareMachineConfig) -> Result<Self, SoftwareMachineError> {
        config.check()?;
        let policy = config.parse_policy()?;
        let size = config.size()?;
        let vcpus = index(config.vcpus.into());
        let memory = HostMemory::new(index(size), 1 << 30)
            .map_err(|source| SoftwareMachineError::Memory(Bytes(size), source))?;
        let geometry = Geometry::new(Granule::K4, 40).map_err(|_| config.too_large())?;
        let tables = most_tables(size, vcpus);
        let (entries, references) = (words(tables * 512), words(tables * 2));
        let pool = TablePool::new(PhysAddr(1 << 46), &geometry, entries, references)
            .ok_or_else(|| config.too_large())?;
        let table = Stage2::new(geometry, Features::default(), policy, Vmid(1), pool.root());
        let state = Arc::new(MachineState {
            memory,
            cache: CacheMaintenance::of_this_cpu(),
            pool,
            // One more for the host's thread.
            reclaim: EpochReclaim::new(vcpus + 1),
            mmu: Mmu::new(table),
            size,
            backing_page: page_size(config.backing)?,
            logging: AtomicBool::new(false),
            dirty: words(index(size / PAGE).div_ceil(64)),
            sequence: AtomicU64::new(0),
            frees: AtomicU64::new(0),
            counts: Default::default(),
        });
        Ok(Self {
            ops: CpuOperations::new(Arc::clone(&state), vcpus),
            host: Host {
                series: Some(config.series()),
                // Times are real, even in an emulated host.
                emulator: None,
                features: cpu_features(),
                page_size: Some(Bytes(PAGE)),
                ..Host::of_this_machine().map_err(SoftwareMachineError::Host)?
            },
            state,
            vcpus,
        })
    }

    /// Changes the tables under the exclusive lock.
    fn exclusive<T>(
        &self,
        change: impl FnOnce(&mut Stage2) -> Result<T, MapError>,
    ) -> Result<T, SoftwareMachineError> {
        let changed = self.state.mmu.exclusive(&self.ops, change);
        changed.map_err(SoftwareMachineError::Engine)
    }
}

fn index(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

impl Machine for SoftwareMachine {
    fn host(&self) -> &Host {
        &self.host
    }

    fn engine(&self) -> &'static str {
        "model"
    }

    fn region(&self) -> Region {
        Region {
            start: GuestAddress(START),
            size: Bytes(self.state.size),
            host_page: Bytes(PAGE),
            backing_page: Bytes(self.state.backing_page),
            host_address: Some(self.state.memory.address()),
        }
    }

    fn take_vcpus(&mut self) -> Vec<Box<dyn Vcpu>> {
        assert!(self.vcpus > 0, "the vCPUs are handed out once");
        (0..std::mem::take(&mut self.vcpus))
            .map(|index| {
                let vcpu = SoftwareVcpu::new(index, Arc::clone(&self.state));
                Box::new(vcpu) as Box<dyn Vcpu>
            })
            .collect()
    }

    /// Returns the page size that the fault path sees, not that of this process's memory.
    fn obtained(&self) -> Result<ResidentPages, MachineError> {
        Ok(ResidentPages { resident: [(self.state.backing_page, self.state.size)].into() })
    }

    fn set_dirty_logging(&mut self, on: bool) -> Result<Nanoseconds, MachineError> {
        let state = &self.state;
        let switch = |table: &mut Stage2| {
            state.sequence.fetch_add(1, Ordering::AcqRel);
            state.logging.store(on, Ordering::Release);
            if on {
                for word in &state.dirty {
                    word.store(0, Ordering::Relaxed);
                }
                table.write_protect(&self.ops, Ipa(START), state.size)
            } else if table.policy().recover_blocks {
                let largest = state.backing_page;
                table.recover_blocks(&self.ops, Ipa(START), state.size, largest)
            } else {
                Ok(())
            }
        };
        clock::timed(|| self.exclusive(switch))
            .map_err(|error| MachineError::new("switching dirty logging", error))
    }

    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let state = &self.state;
        let read = |table: &mut Stage2| {
            let words = state.dirty.iter();
            let log = words.map(|word| word.swap(0, Ordering::Relaxed)).collect();
            table.write_protect(&self.ops, Ipa(START), state.size)?;
            Ok(log)
        };
        let log = match state.logging.load(Ordering::Acquire) {
            true => self.exclusive(read),
            false => Err(SoftwareMachineError::LoggingOff),
        };
        log.map_err(|error| MachineError::new("reading the dirty bitmap", error))
    }

    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError> {
        let state = &self.state;
        let drop = || {
            self.ops.drain();
            self.exclusive(|table| {
                state.sequence.fetch_add(1, Ordering::AcqRel);
                table.unmap(&self.ops, Ipa(START), state.size)
            })?;
            let discarded = state.memory.discard();
            discarded.map_err(|source| SoftwareMachineError::Memory(Bytes(state.size), source))
        };
        clock::timed(drop)
            .map_err(|error| MachineError::new("dropping the memory under test", error))
    }

    fn restore_backing(&mut self) -> Result<(), MachineError> {
        let populated = self.state.memory.populate();
        populated.map_err(|error| MachineError::new("populating the memory under test", error))
    }

    fn read_u64(&self, address: GuestAddress) -> Result<u64, MachineError> {
        let outside = || {
            let error = SoftwareMachineError::Outside(address.0);
            MachineError::new("reading guest memory", error)
        };
        let offset = address
            .0
            .checked_sub(START)
            .filter(|at| *at < self.state.size && at.is_multiple_of(8))
            .ok_or_else(outside)?;
        let word = self.state.memory.word(index(offset));
        Ok(word.load(Ordering::Relaxed))
    }

    fn events(&mut self) -> Result<EventCounts, MachineError> {
        Ok(self.state.events())
    }
}
