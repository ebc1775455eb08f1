// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The interface between the harness and a machine under test.
//!
//! A [`Machine`] has one region of guest memory under test. Each [`TestVcpu`] of it is bound to its
//! own thread ([`crate::vcpu_threads`]) and executes one [`Task`] in each phase: it enters the
//! guest, performs the accesses, and exits. Host phases (dirty logging, dropping the backing) run
//! on the harness's thread while no vCPU runs.

use std::{
    error::Error,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use thiserror::Error;

use crate::task::Task;
use granule_types::{
    record::{EventCounts, HostInfo, ResidentPages},
    units::{Bytes, GuestAddress, HostVirtAddr, Nanoseconds},
};

/// Failure of one vCPU, with the vCPU's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VcpuFailure {
    /// Index of the vCPU.
    pub vcpu: usize,
    /// The guest's program counter, if it can be read.
    pub pc: Option<u64>,
    /// Name of the exit reason, such as `KVM_EXIT_FAIL_ENTRY`.
    pub exit: String,
    /// The syndrome or error code of a guest exception.
    pub syndrome: Option<u64>,
    /// The faulting guest address.
    pub address: Option<GuestAddress>,
    /// Description of the cause.
    pub detail: String,
}

impl VcpuFailure {
    /// Returns a failure without program counter, syndrome or address.
    pub fn new(vcpu: usize, exit: impl Into<String>, detail: impl Into<String>) -> Self {
        let (exit, detail) = (exit.into(), detail.into());
        Self { vcpu, pc: None, exit, syndrome: None, address: None, detail }
    }
}

impl fmt::Display for VcpuFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vCPU {} failed: {}", self.vcpu, self.exit)?;
        let address = self.address.map(|address| address.0);
        for (name, value) in [("PC", self.pc), ("syndrome", self.syndrome), ("address", address)] {
            if let Some(value) = value {
                write!(f, ", {name} {value:#x}")?;
            }
        }
        write!(f, ": {}", self.detail)
    }
}

impl Error for VcpuFailure {}

/// A vCPU under test.
pub trait TestVcpu: Send {
    /// Prepares the calling thread to run this vCPU (name, CPU affinity), and returns a handle that
    /// forces the vCPU out of the guest. Called once, on the vCPU's thread.
    ///
    /// # Errors
    /// The thread cannot be set up as configured; for example, the CPU to pin it to does not exist.
    fn bind(&mut self) -> Result<Box<dyn Kick>, MachineError>;

    /// Enters the guest, executes `task` and returns when it is done.
    ///
    /// # Errors
    /// The guest crashed, was kicked by [`Kick::kick`], or exited for an unexpected reason.
    fn run(&mut self, task: &Task) -> Result<(), VcpuFailure>;
}

/// Handle that forces one vCPU out of the guest, from any thread. The interrupted
/// [`TestVcpu::run`] fails and reports the guest's program counter.
pub trait Kick: fmt::Debug + Send + Sync {
    /// Kicks the vCPU, which never enters the guest again.
    fn kick(&self);
}

/// Flag that the vCPU polls.
impl Kick for Arc<AtomicBool> {
    fn kick(&self) {
        self.store(true, Ordering::SeqCst);
    }
}

/// Error of a machine: the failed operation, with its cause as the source.
#[derive(Debug, Error)]
#[error("{operation}")]
pub struct MachineError {
    operation: String,
    #[source]
    source: Box<dyn Error + Send + Sync>,
}

impl MachineError {
    /// Returns the error of `operation` ("reading the dirty bitmap") with the cause `source`.
    pub fn new(
        operation: impl Into<String>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self { operation: operation.into(), source: source.into() }
    }
}

/// The region of guest memory under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// First guest-physical address.
    pub start: GuestAddress,
    /// Size, a multiple of `backing_page_size`.
    pub size: Bytes,
    /// Base page size of the host.
    pub host_page_size: Bytes,
    /// Page size of the backing: the largest block that stage 2 can map.
    pub backing_page_size: Bytes,
    /// Address of the region's mapping in this process.
    pub host_address: HostVirtAddr,
}

/// A machine under test.
///
/// # Errors
/// The host refused the operation or does not have the counters, dirty logging is off, or an
/// address is outside the region.
pub trait Machine {
    /// Returns the provenance of results: kernel, CPU, emulator.
    fn host(&self) -> &HostInfo;

    /// Returns the engine's name in results: `kvm`, or `model` for the software machine.
    fn engine(&self) -> &'static str;

    /// Returns the region under test.
    fn region(&self) -> Region;

    /// Moves the vCPUs out of the machine.
    ///
    /// # Panics
    /// The caller has already taken the vCPUs.
    fn take_vcpus(&mut self) -> Vec<Box<dyn TestVcpu>>;

    /// Reads from the host which page sizes back the region.
    fn resident_pages(&self) -> Result<ResidentPages, MachineError>;

    /// Switches dirty logging of the region on or off and returns the time of the call.
    fn set_dirty_logging(&mut self, on: bool) -> Result<Nanoseconds, MachineError>;

    /// Returns the dirty bitmap since dirty logging was enabled: one bit for each host page, lowest
    /// address first.
    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError>;

    /// Drops the region's backing, so that the next access to a page is its first touch, and
    /// returns the time of the call.
    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError>;

    /// Prepares the region for a first touch after [`Machine::drop_backing`] (`madvise`, prefault
    /// if configured). Not timed.
    fn restore_backing(&mut self) -> Result<(), MachineError>;

    /// Reads 8 bytes of the region through the host's mapping.
    fn read_u64(&self, address: GuestAddress) -> Result<u64, MachineError>;

    /// Returns the counts, since the machine's creation, of all events that the host counts.
    fn events(&mut self) -> Result<EventCounts, MachineError>;

    /// Returns all gauges that the host reports, such as pages mapped by size.
    fn gauges(&mut self) -> Result<EventCounts, MachineError> {
        Ok(EventCounts::new())
    }

    /// Returns the migration operations, if the machine supports them.
    fn migration_ops(&mut self) -> Option<&mut dyn MigrationOps> {
        None
    }
}

/// Operations of a live migration, while the vCPUs execute
/// [`TaskAccess::WriteAtRandom`](crate::task::TaskAccess::WriteAtRandom). Errors: as [`Machine`].
pub trait MigrationOps {
    /// Sets or clears the request to the vCPUs to stop writing. Clearing it, before the vCPUs
    /// start, also resets their write counts.
    fn set_stop_request(&mut self, stop: bool) -> Result<(), MachineError>;

    /// Returns the number of writes of each vCPU; the count of a running vCPU may lag.
    fn write_counts(&self) -> Result<Vec<u64>, MachineError>;

    /// Reads and clears the dirty bitmap: one bit for each host page, lowest address first, set if
    /// the page was written since dirty logging was enabled or since the previous call.
    fn collect_dirty_log(&mut self) -> Result<Vec<u64>, MachineError>;

    /// Reads memory of the region through the host's mapping. If it misses a concurrent write, the
    /// next dirty bitmap contains the page of that write.
    fn read(&self, address: GuestAddress, buffer: &mut [u8]) -> Result<(), MachineError>;
}
