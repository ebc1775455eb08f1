// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The machine on the stage-2 engine, as the harness uses it.
//!
//! The host's thread changes the tables under the exclusive lock, while no vCPU runs. Dropping the
//! backing unmaps the region before the memory is discarded, as an mmu_notifier does.

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
    PAGE, START, SoftwareMachineConfig, SoftwareMachineError, index, memory::TestMemory,
    operations::CpuOperations, page_size, state::MachineState, vcpu::SoftwareVcpu,
};
use crate::{
    clock,
    machine::{Machine, MachineError, Region, Vcpu},
};
use granule_types::{
    record::{EventCounts, Host, ResidentPages},
    units::{Bytes, GuestAddress, Nanoseconds},
};

/// A machine whose hypervisor is the stage-2 engine and whose vCPUs are threads.
#[derive(Debug)]
pub struct SoftwareMachine {
    /// Operations of the host's thread.
    ops: CpuOperations,
    vcpus: Vec<SoftwareVcpu>,
    host: Host,
}

/// Returns the maximum number of stage-2 tables below the root: one for each 2M, as many that wait
/// for reclaim, and those in the vCPUs' memcaches.
fn max_tables(size: u64, vcpus: usize) -> usize {
    index(2 * (size >> 21) + 2 * (size >> 30) + 64) + 48 * vcpus
}

impl SoftwareMachine {
    /// Creates the machine and populates its memory.
    ///
    /// # Errors
    /// The configuration is not supported, or the host provides no memory.
    pub fn new(config: &SoftwareMachineConfig) -> Result<Self, SoftwareMachineError> {
        config.check()?;
        let policy = config.parse_policy()?;
        let (size, vcpus) = (config.size()?, index(config.vcpus.into()));
        let memory = TestMemory::new(size)
            .map_err(|source| SoftwareMachineError::Memory(Bytes(size), source))?;
        let host = Host::of_this_machine().map_err(SoftwareMachineError::Host)?;
        let geometry = Geometry::new(Granule::K4, 40).map_err(|_| config.too_large())?;
        let tables = index(geometry.root_tables()) + max_tables(size, vcpus);
        let (entries, references) = (words(tables * 512), words(tables * 2));
        let pool = TablePool::new(PhysAddr(1 << 46), &geometry, entries, references)
            .ok_or_else(|| config.too_large())?;
        let table = Stage2::new(geometry, Features::default(), policy, Vmid(1), pool.root());
        let state = Arc::new(MachineState {
            memory,
            pool,
            // One more for the host's thread.
            reclaim: EpochReclaim::new(vcpus + 1),
            mmu: Mmu::new(table),
            backing_page: page_size(config.backing)?,
            logging: AtomicBool::new(false),
            dirty: words(index(size / PAGE).div_ceil(64)),
            sequence: AtomicU64::new(0),
            frees: AtomicU64::new(0),
            counts: Default::default(),
        });
        // CPU features that would avoid maintenance: all absent.
        let features = ["bbm", "dic", "fwb", "tlbirange"].map(|name| (name.to_owned(), 0));
        Ok(Self {
            ops: CpuOperations::new(&state, vcpus),
            vcpus: (0..vcpus).map(|vcpu| SoftwareVcpu::new(vcpu, &state)).collect(),
            host: Host {
                series: Some(config.series()),
                features: features.into(),
                page_size: Some(Bytes(PAGE)),
                // Times are real, even in an emulated host.
                emulator: None,
                ..host
            },
        })
    }

    /// Changes the tables under the exclusive lock.
    fn exclusive<T>(
        &self,
        change: impl FnOnce(&mut Stage2) -> Result<T, MapError>,
    ) -> Result<T, SoftwareMachineError> {
        let changed = self.ops.state.mmu.exclusive(&self.ops, change);
        changed.map_err(SoftwareMachineError::Engine)
    }

    /// Write-protects the region and returns the dirty bitmap, which it clears.
    fn take_dirty_log(&self, table: &mut Stage2) -> Result<Vec<u64>, MapError> {
        let state = &self.ops.state;
        table.write_protect(&self.ops, Ipa(START), state.memory.size())?;
        Ok(state.dirty.iter().map(|word| word.swap(0, Ordering::Relaxed)).collect())
    }
}

impl Machine for SoftwareMachine {
    fn host(&self) -> &Host {
        &self.host
    }

    fn engine(&self) -> &'static str {
        "model"
    }

    fn region(&self) -> Region {
        let state = &self.ops.state;
        Region {
            start: GuestAddress(START),
            size: Bytes(state.memory.size()),
            host_page: Bytes(PAGE),
            backing_page: Bytes(state.backing_page),
            host_address: state.memory.host_address(),
        }
    }

    fn take_vcpus(&mut self) -> Vec<Box<dyn Vcpu>> {
        assert!(!self.vcpus.is_empty(), "the vCPUs are handed out once");
        self.vcpus.drain(..).map(|vcpu| Box::new(vcpu) as Box<dyn Vcpu>).collect()
    }

    /// Returns the page size that the fault path sees, not that of this process's memory.
    fn obtained(&self) -> Result<ResidentPages, MachineError> {
        let state = &self.ops.state;
        Ok(ResidentPages { resident: [(state.backing_page, state.memory.size())].into() })
    }

    fn set_dirty_logging(&mut self, on: bool) -> Result<Nanoseconds, MachineError> {
        let state = &self.ops.state;
        let switch = |table: &mut Stage2| {
            state.logging.store(on, Ordering::Release);
            if on {
                self.take_dirty_log(table).map(drop)
            } else if table.policy().recover_blocks {
                let size = state.memory.size();
                table.recover_blocks(&self.ops, Ipa(START), size, state.backing_page)
            } else {
                Ok(())
            }
        };
        clock::timed(|| self.exclusive(switch))
            .map_err(|error| MachineError::new("switching dirty logging", error))
    }

    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let operation = "reading the dirty bitmap";
        if !self.ops.state.logging.load(Ordering::Acquire) {
            return Err(MachineError::new(operation, "dirty logging is off"));
        }
        let log = self.exclusive(|table| self.take_dirty_log(table));
        log.map_err(|error| MachineError::new(operation, error))
    }

    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError> {
        let state = &self.ops.state;
        let size = state.memory.size();
        let dropping = || {
            self.ops.drain();
            self.exclusive(|table| {
                state.sequence.fetch_add(1, Ordering::AcqRel);
                table.unmap(&self.ops, Ipa(START), size)
            })?;
            let discarded = state.memory.discard();
            discarded.map_err(|source| SoftwareMachineError::Memory(Bytes(size), source))
        };
        clock::timed(dropping)
            .map_err(|error| MachineError::new("dropping the memory under test", error))
    }

    fn restore_backing(&mut self) -> Result<(), MachineError> {
        let restored = self.ops.state.memory.populate();
        restored.map_err(|error| MachineError::new("populating the memory under test", error))
    }

    fn read_u64(&self, address: GuestAddress) -> Result<u64, MachineError> {
        let memory = &self.ops.state.memory;
        let inside = |at: &u64| *at < memory.size() && at.is_multiple_of(8);
        let offset = address.0.checked_sub(START).filter(inside).ok_or_else(|| {
            let outside = format!("{:#x} is outside the memory under test", address.0);
            MachineError::new("reading guest memory", outside)
        })?;
        Ok(memory.load(TestMemory::phys(offset)))
    }

    fn events(&mut self) -> Result<EventCounts, MachineError> {
        Ok(self.ops.state.events())
    }
}
