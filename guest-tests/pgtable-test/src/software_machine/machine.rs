// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The machine on the stage-2 engine, as the harness uses it, in real and in virtual time.

use std::{
    collections::BTreeMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use granule_stage2::{
    Features, Ipa, MapError, PhysAddr, Policy, Stage2,
    epoch::EpochReclaim,
    fault::Mmu,
    geometry::{Geometry, Granule},
    operations::Vmid,
    pool::{TablePool, words},
};

use super::{
    PAGE, START, SoftwareMachineConfig, SoftwareMachineError,
    operations::{CpuOperations, Initiator, MachineState, Platform},
    page_size,
    vcpu::SoftwareVcpu,
};
use crate::machine::{Machine, MachineError, Region, Vcpu};
use granule_types::{
    record::{EventCounts, Host, ResidentPages},
    units::{Bytes, GuestAddress, HostVirtAddr, Nanoseconds},
};

/// The parts of [`Machine`] that differ in real and in virtual time.
pub trait TimedPlatform: Platform {
    /// Name of the engine in results.
    const ENGINE: &'static str;

    /// Returns the address of the region in this process, where it is in memory.
    fn host_address(&self) -> Option<HostVirtAddr>;

    /// Returns the resident bytes by page size.
    fn resident(state: &MachineState<Self>) -> BTreeMap<u64, u64>;

    /// Reads 8 bytes at an offset in the region.
    fn read(state: &MachineState<Self>, offset: u64) -> u64;

    /// Measures an operation of the host's thread.
    fn timed<T>(&self, act: impl FnOnce() -> T) -> (T, Nanoseconds);

    /// Coalesces blocks when dirty logging stops.
    fn recover_blocks(ops: &CpuOperations<Self>, table: &mut Stage2) -> Result<(), MapError>;

    /// Discards the contents of the memory.
    fn discard(&self) -> io::Result<()>;

    /// Prepares discarded memory for the next iteration.
    fn restore(&self) -> io::Result<()>;

    /// Adds the platform's own events to those of the engine.
    fn add_events(&self, _events: &mut EventCounts) {}

    /// Moves the vCPUs out, for threads; none where the machine executes tasks itself.
    fn take_vcpus(vcpus: &mut Vec<SoftwareVcpu<Self>>) -> Vec<Box<dyn Vcpu>>;
}

/// A machine whose hypervisor is the stage-2 engine.
#[derive(Debug)]
pub struct EngineMachine<P: Platform> {
    /// Operations of the host's thread.
    pub(super) ops: CpuOperations<P>,
    pub(super) vcpus: Vec<SoftwareVcpu<P>>,
    host: Host,
}

pub(super) fn index(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// Returns the maximum number of stage-2 tables below the root: one for each 2M, as many that wait
/// to be freed, and the memcaches of the vCPUs.
fn max_tables(size: u64, vcpus: usize) -> usize {
    index(2 * (size >> 21) + 2 * (size >> 30) + 64) + 48 * vcpus
}

impl<P: Platform> EngineMachine<P> {
    /// Creates the machine; series, features and page size of `host` are those of the engine.
    pub(super) fn on(
        platform: P,
        config: &SoftwareMachineConfig,
        policy: Policy,
        host: Host,
    ) -> Result<Self, SoftwareMachineError> {
        let (size, vcpus) = (config.size()?, index(config.vcpus.into()));
        let geometry = Geometry::new(Granule::K4, 40).map_err(|_| config.too_large())?;
        let tables = index(geometry.root_tables()) + max_tables(size, vcpus);
        let (entries, references) = (words(tables * 512), words(tables * 2));
        let pool = TablePool::new(PhysAddr(1 << 46), &geometry, entries, references)
            .ok_or_else(|| config.too_large())?;
        let table = Stage2::new(geometry, Features::default(), policy, Vmid(1), pool.root());
        let state = Arc::new(MachineState {
            platform,
            pool,
            // One more for the host's thread.
            reclaim: EpochReclaim::new(vcpus + 1),
            mmu: Mmu::new(table),
            size,
            backing_page: page_size(config.backing)?,
            logging: AtomicBool::new(false),
            dirty: words(index(size / PAGE).div_ceil(64)),
            sequence: AtomicU64::new(0),
            invalidating: AtomicU64::new(0),
            frees: AtomicU64::new(0),
            counts: Default::default(),
        });
        // CPU features that would avoid maintenance: all absent.
        let features = ["bbm", "dic", "fwb", "tlbirange"].map(|name| (name.to_owned(), 0));
        Ok(Self {
            ops: CpuOperations::new(&state, vcpus, Initiator::Host),
            vcpus: (0..vcpus).map(|vcpu| SoftwareVcpu::new(vcpu, &state)).collect(),
            host: Host {
                series: Some(config.series()),
                features: features.into(),
                page_size: Some(Bytes(PAGE)),
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
        table.write_protect(&self.ops, Ipa(START), state.size)?;
        Ok(state.dirty.iter().map(|word| word.swap(0, Ordering::Relaxed)).collect())
    }
}

impl<P: TimedPlatform> Machine for EngineMachine<P> {
    fn host(&self) -> &Host {
        &self.host
    }

    fn engine(&self) -> &'static str {
        P::ENGINE
    }

    fn region(&self) -> Region {
        let state = &self.ops.state;
        Region {
            start: GuestAddress(START),
            size: Bytes(state.size),
            host_page: Bytes(PAGE),
            backing_page: Bytes(state.backing_page),
            host_address: state.platform.host_address(),
        }
    }

    fn take_vcpus(&mut self) -> Vec<Box<dyn Vcpu>> {
        P::take_vcpus(&mut self.vcpus)
    }

    fn obtained(&self) -> Result<ResidentPages, MachineError> {
        Ok(ResidentPages { resident: P::resident(&self.ops.state) })
    }

    fn set_dirty_logging(&mut self, on: bool) -> Result<Nanoseconds, MachineError> {
        let state = &self.ops.state;
        let switch = |table: &mut Stage2| {
            state.logging.store(on, Ordering::Release);
            if on {
                self.take_dirty_log(table).map(drop)
            } else if table.policy().recover_blocks {
                P::recover_blocks(&self.ops, table)
            } else {
                Ok(())
            }
        };
        let (result, time) = state.platform.timed(|| self.exclusive(switch));
        result.map_err(|error| MachineError::new("switching dirty logging", error))?;
        Ok(time)
    }

    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let operation = "reading the dirty bitmap";
        let state = &self.ops.state;
        if !state.logging.load(Ordering::Acquire) {
            return Err(MachineError::new(operation, "dirty logging is off"));
        }
        let read = || self.exclusive(|table| self.take_dirty_log(table));
        let (log, _) = state.platform.timed(read);
        log.map_err(|error| MachineError::new(operation, error))
    }

    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError> {
        let state = &self.ops.state;
        let (result, time) = state.platform.timed(|| {
            self.ops.drain();
            self.exclusive(|table| {
                state.sequence.fetch_add(1, Ordering::AcqRel);
                table.unmap(&self.ops, Ipa(START), state.size)
            })?;
            let discarded = state.platform.discard();
            discarded.map_err(|source| SoftwareMachineError::Memory(Bytes(state.size), source))
        });
        result.map_err(|error| MachineError::new("dropping the memory under test", error))?;
        Ok(time)
    }

    fn restore_backing(&mut self) -> Result<(), MachineError> {
        let restored = self.ops.state.platform.restore();
        restored.map_err(|error| MachineError::new("populating the memory under test", error))
    }

    fn read_u64(&self, address: GuestAddress) -> Result<u64, MachineError> {
        let state = &self.ops.state;
        let inside = |at: &u64| *at < state.size && at.is_multiple_of(8);
        let offset = address.0.checked_sub(START).filter(inside).ok_or_else(|| {
            let outside = format!("{:#x} is outside the memory under test", address.0);
            MachineError::new("reading guest memory", outside)
        })?;
        Ok(P::read(state, offset))
    }

    fn events(&mut self) -> Result<EventCounts, MachineError> {
        let state = &self.ops.state;
        let mut events = state.events();
        state.platform.add_events(&mut events);
        Ok(events)
    }
}
