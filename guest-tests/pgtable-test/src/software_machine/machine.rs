// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! [`Machine`] on the stage-2 engine.
//!
//! The host's thread changes the tables under the exclusive lock, while no vCPU runs. Like an
//! mmu_notifier, it unmaps the region before it discards the memory.

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
    pool::{TablePool, zeroed_words},
};

use super::{
    PAGE_SIZE, REGION_START, SoftwareMachineConfig, SoftwareMachineError, backing_page_size,
    memory::TestMemory, operations::CpuOperations, state::MachineState, to_usize,
    vcpu::SoftwareVcpu,
};
use crate::{
    clock,
    machine::{Machine, MachineError, Region, TestVcpu},
};
use granule_types::{
    record::{EventCounts, HostInfo, ResidentPages},
    units::{Bytes, GuestAddress, Nanoseconds},
};

/// A machine whose hypervisor is the stage-2 engine and whose vCPUs are threads.
#[derive(Debug)]
pub struct SoftwareMachine {
    /// Operations for the host's thread.
    ops: CpuOperations,
    vcpus: Vec<SoftwareVcpu>,
    host: HostInfo,
}

/// Returns the maximum number of stage-2 tables below the root: one for each 2M, the same number
/// that wait for reclaim, and those in the vCPUs' memcaches.
fn max_tables(size: u64, vcpus: usize) -> usize {
    to_usize(2 * (size >> 21) + 2 * (size >> 30) + 64) + 48 * vcpus
}

impl SoftwareMachine {
    /// Creates the machine and populates its memory.
    ///
    /// # Errors
    /// The configuration is not supported, or the host provides no memory.
    pub fn new(config: &SoftwareMachineConfig) -> Result<Self, SoftwareMachineError> {
        config.check()?;
        let policy = config.parse_policy()?;
        let (size, vcpus) = (config.size()?, to_usize(config.vcpus.into()));
        let memory = TestMemory::new(size)
            .map_err(|source| SoftwareMachineError::Allocation(Bytes(size), source))?;
        let host = HostInfo::of_this_host().map_err(SoftwareMachineError::HostInfo)?;
        let geometry = Geometry::new(Granule::K4, 40).map_err(|_| config.too_large_error())?;
        let tables = to_usize(geometry.root_tables()) + max_tables(size, vcpus);
        let (entries, references) = (zeroed_words(tables * 512), zeroed_words(tables * 2));
        let pool = TablePool::new(PhysAddr(1 << 46), &geometry, entries, references)
            .map_err(|_| config.too_large_error())?;
        let table = Stage2::new(geometry, Features::default(), policy, Vmid(1), pool.root())
            .map_err(|_| config.too_large_error())?;
        let state = Arc::new(MachineState {
            memory,
            pool,
            // The host's thread is an additional CPU.
            reclaim: EpochReclaim::new(vcpus + 1),
            mmu: Mmu::new(table),
            backing_page_size: backing_page_size(config.backing)?,
            is_logging: AtomicBool::new(false),
            dirty_bitmap: zeroed_words(to_usize(size / PAGE_SIZE).div_ceil(64)),
            invalidation_sequence: AtomicU64::new(0),
            freed_table_count: AtomicU64::new(0),
            counts: Default::default(),
        });
        // All CPU features that would avoid CMOs are absent.
        let features = ["bbm", "dic", "fwb", "tlbirange"].map(|name| (name.to_owned(), 0));
        Ok(Self {
            ops: CpuOperations::new(&state, vcpus),
            vcpus: (0..vcpus).map(|vcpu| SoftwareVcpu::new(vcpu, &state)).collect(),
            host: HostInfo {
                series: Some(config.series()),
                features: features.into(),
                page_size: Some(Bytes(PAGE_SIZE)),
                // Times are real, even on an emulated host.
                emulator: None,
                ..host
            },
        })
    }

    /// Changes the tables under the exclusive lock.
    fn change_tables<T>(
        &self,
        change: impl FnOnce(&mut Stage2) -> Result<T, MapError>,
    ) -> Result<T, SoftwareMachineError> {
        let changed = self.ops.state.mmu.with_exclusive(&self.ops, change);
        changed.map_err(SoftwareMachineError::Engine)
    }

    /// Write-protects the region; returns and clears the dirty bitmap.
    fn take_dirty_log(&self, table: &mut Stage2) -> Result<Vec<u64>, MapError> {
        let state = &self.ops.state;
        table.write_protect(&self.ops, Ipa(REGION_START), state.memory.size())?;
        Ok(state.dirty_bitmap.iter().map(|word| word.swap(0, Ordering::Relaxed)).collect())
    }
}

impl Machine for SoftwareMachine {
    fn host(&self) -> &HostInfo {
        &self.host
    }

    fn engine(&self) -> &'static str {
        "model"
    }

    fn region(&self) -> Region {
        let state = &self.ops.state;
        Region {
            start: GuestAddress(REGION_START),
            size: Bytes(state.memory.size()),
            host_page_size: Bytes(PAGE_SIZE),
            backing_page_size: Bytes(state.backing_page_size),
            host_address: state.memory.host_address(),
        }
    }

    fn take_vcpus(&mut self) -> Vec<Box<dyn TestVcpu>> {
        assert!(!self.vcpus.is_empty(), "take_vcpus is called once");
        self.vcpus.drain(..).map(|vcpu| Box::new(vcpu) as Box<dyn TestVcpu>).collect()
    }

    /// Returns the page size that the fault path uses, not the size of this process's pages.
    fn resident_pages(&self) -> Result<ResidentPages, MachineError> {
        let state = &self.ops.state;
        Ok(ResidentPages {
            resident_bytes: [(state.backing_page_size, state.memory.size())].into(),
        })
    }

    fn set_dirty_logging(&mut self, on: bool) -> Result<Nanoseconds, MachineError> {
        let state = &self.ops.state;
        let switch = |table: &mut Stage2| {
            state.is_logging.store(on, Ordering::Release);
            if on {
                self.take_dirty_log(table).map(drop)
            } else if table.policy().recovers_blocks
                && let Some(level) = table.geometry().largest_leaf_within(state.backing_page_size)
            {
                table.recover_blocks(&self.ops, Ipa(REGION_START), state.memory.size(), level)
            } else {
                Ok(())
            }
        };
        clock::time_call(|| self.change_tables(switch))
            .map_err(|error| MachineError::new("switching dirty logging", error))
    }

    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let operation = "reading the dirty bitmap";
        if !self.ops.state.is_logging.load(Ordering::Acquire) {
            return Err(MachineError::new(operation, "dirty logging is off"));
        }
        let log = self.change_tables(|table| self.take_dirty_log(table));
        log.map_err(|error| MachineError::new(operation, error))
    }

    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError> {
        let state = &self.ops.state;
        let size = state.memory.size();
        let dropping = || {
            self.ops.drain();
            self.change_tables(|table| {
                state.invalidation_sequence.fetch_add(1, Ordering::AcqRel);
                table.unmap(&self.ops, Ipa(REGION_START), size)
            })?;
            let discarded = state.memory.discard();
            discarded.map_err(|source| SoftwareMachineError::Allocation(Bytes(size), source))
        };
        clock::time_call(dropping)
            .map_err(|error| MachineError::new("dropping the memory under test", error))
    }

    fn restore_backing(&mut self) -> Result<(), MachineError> {
        let restored = self.ops.state.memory.populate();
        restored.map_err(|error| MachineError::new("populating the memory under test", error))
    }

    fn read_u64(&self, address: GuestAddress) -> Result<u64, MachineError> {
        let memory = &self.ops.state.memory;
        let inside = |at: &u64| *at < memory.size() && at.is_multiple_of(8);
        let offset = address.0.checked_sub(REGION_START).filter(inside).ok_or_else(|| {
            let outside = format!("{:#x} is outside the memory under test", address.0);
            MachineError::new("reading guest memory", outside)
        })?;
        Ok(memory.load(TestMemory::output_address(offset)))
    }

    fn events(&mut self) -> Result<EventCounts, MachineError> {
        Ok(self.ops.state.events())
    }
}
