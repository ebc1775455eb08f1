// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The interface between the harness and a machine under test.
//!
//! A [`Machine`] holds one region of guest memory under test and hands out its vCPUs once. Each
//! [`Vcpu`] moves to a thread of its own ([`crate::vcpu_threads`]), is bound to it, and then
//! executes one [`Task`] in each phase: it enters the guest, performs the accesses, and exits. The
//! host's part of a phase (dirty logging, dropping the backing) runs on the harness's thread while
//! no vCPU runs.

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
    record::{EventCounts, Host, ResidentPages},
    units::{Bytes, GuestAddress, HostVirtAddr, Nanoseconds},
};

/// The failure of one vCPU, with the state that identifies its cause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VcpuFailure {
    /// Index of the vCPU.
    pub vcpu: usize,
    /// The guest's program counter, where it can be read.
    pub pc: Option<u64>,
    /// The exit reason by its name in the interface (`KVM_EXIT_FAIL_ENTRY`).
    pub exit: String,
    /// The syndrome or error code of a guest exception.
    pub syndrome: Option<u64>,
    /// The faulting guest address.
    pub address: Option<GuestAddress>,
    /// The cause in words.
    pub detail: String,
}

impl VcpuFailure {
    /// Returns a failure without program counter, syndrome and address.
    pub fn new(vcpu: usize, exit: impl Into<String>, detail: impl Into<String>) -> Self {
        let (exit, detail) = (exit.into(), detail.into());
        Self { vcpu, pc: None, exit, syndrome: None, address: None, detail }
    }
}

impl fmt::Display for VcpuFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vCPU {} failed: {}", self.vcpu, self.exit)?;
        if let Some(pc) = self.pc {
            write!(f, ", PC {pc:#x}")?;
        }
        if let Some(syndrome) = self.syndrome {
            write!(f, ", syndrome {syndrome:#x}")?;
        }
        if let Some(address) = self.address {
            write!(f, ", address {:#x}", address.0)?;
        }
        write!(f, ": {}", self.detail)
    }
}

impl Error for VcpuFailure {}

/// A vCPU; [`Vcpu::bind`] binds it to a thread of its own.
pub trait Vcpu: Send {
    /// Prepares the calling thread to run this vCPU (name, CPU affinity, identity) and returns the
    /// handle that forces the vCPU out of the guest. Called once, on that thread.
    ///
    /// # Errors
    /// The thread cannot be set up as configured, for example pinned to a CPU that does not exist.
    fn bind(&mut self) -> Result<Box<dyn Kick>, MachineError>;

    /// Enters the guest, executes `task` and returns when it is done.
    ///
    /// # Errors
    /// The guest crashed, was kicked by [`Kick::kick`], or exited for an unexpected reason.
    fn run(&mut self, task: &Task) -> Result<(), VcpuFailure>;
}

/// Forces one vCPU out of the guest, from any thread. The interrupted [`Vcpu::run`] fails and
/// reports the guest's program counter.
pub trait Kick: fmt::Debug + Send + Sync {
    /// Kicks the vCPU, which never enters the guest again.
    fn kick(&self);
}

/// A flag that the vCPU polls.
impl Kick for Arc<AtomicBool> {
    fn kick(&self) {
        self.store(true, Ordering::SeqCst);
    }
}

/// Error of a machine: the operation that failed, with the machine's own error as the source.
#[derive(Debug, Error)]
#[error("{operation}")]
pub struct MachineError {
    operation: String,
    #[source]
    source: Box<dyn Error + Send + Sync>,
}

impl MachineError {
    /// Wraps `source`, an error of `operation` ("reading the dirty bitmap").
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
    /// Size, a multiple of `backing_page`.
    pub size: Bytes,
    /// Base page size of the host.
    pub host_page: Bytes,
    /// Page size of the backing: the largest block that stage 2 can map.
    pub backing_page: Bytes,
    /// Address of the region's mapping in this process.
    pub host_address: HostVirtAddr,
}

/// A machine under test.
///
/// # Errors
/// An operation fails if the host refuses it, reading counters if the host no longer offers them,
/// the dirty bitmap if logging is off, and a read if it is outside the region.
pub trait Machine {
    /// Returns the provenance of results: kernel, CPU, emulator.
    fn host(&self) -> &Host;

    /// Returns the engine's name in results: `kvm` or `model`.
    fn engine(&self) -> &'static str;

    /// Returns the region under test.
    fn region(&self) -> Region;

    /// Hands out the vCPUs.
    ///
    /// # Panics
    /// Called a second time.
    fn take_vcpus(&mut self) -> Vec<Box<dyn Vcpu>>;

    /// Reads the page sizes that back the region from the host.
    fn obtained(&self) -> Result<ResidentPages, MachineError>;

    /// Switches dirty logging of the region on or off and returns the time of the call.
    fn set_dirty_logging(&mut self, on: bool) -> Result<Nanoseconds, MachineError>;

    /// Returns the dirty bitmap since logging began: one bit for each host page, lowest address
    /// first.
    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError>;

    /// Drops the region's backing, so that the next access is a first touch, and returns the time
    /// of the call.
    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError>;

    /// Prepares the region for a first touch after [`Machine::drop_backing`] (advice, prefault
    /// where configured). Not timed.
    fn restore_backing(&mut self) -> Result<(), MachineError>;

    /// Reads 8 bytes of the region through the host's mapping.
    fn read_u64(&self, address: GuestAddress) -> Result<u64, MachineError>;

    /// Returns event counts since the machine's creation, by name, without events that the host
    /// does not count.
    fn events(&mut self) -> Result<EventCounts, MachineError>;

    /// Returns current gauges (such as pages mapped by size), by name, without those that the host
    /// does not report.
    fn gauges(&mut self) -> Result<EventCounts, MachineError> {
        Ok(EventCounts::new())
    }

    /// Returns the operations for migration while vCPUs run, if the machine supports them.
    fn migration_ops(&mut self) -> Option<&mut dyn MigrationOps> {
        None
    }
}

/// Operations of a live migration, on a machine whose vCPUs execute
/// [`TaskAccess::WriteAtRandom`](crate::task::TaskAccess::WriteAtRandom). Errors: as [`Machine`].
pub trait MigrationOps {
    /// Sets or clears the request that the vCPUs stop writing. Before the vCPUs start, `false` also
    /// resets their write counts.
    fn set_stopping(&mut self, stop: bool) -> Result<(), MachineError>;

    /// Returns the number of writes of each vCPU; for a running vCPU the count may lag by a few.
    fn writes(&self) -> Result<Vec<u64>, MachineError>;

    /// Reads and clears the dirty bitmap: one bit for each host page written since logging began
    /// or since the previous call, lowest address first. Every later write is in the next bitmap.
    fn collect_dirty_log(&mut self) -> Result<Vec<u64>, MachineError>;

    /// Reads memory of the region through the host's mapping. A concurrent write may or may not be
    /// seen; if it is not, the next dirty bitmap contains its page.
    fn read(&self, address: GuestAddress, into: &mut [u8]) -> Result<(), MachineError>;
}
