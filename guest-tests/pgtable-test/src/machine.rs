// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the harness asks of a machine, whatever runs it.
//!
//! A [`Machine`] holds one region of guest memory under test and gives out its vCPUs once. Each
//! [`Vcpu`] moves to a thread of the [`crew`](crate::vcpu_threads), is bound to it, and from then on
//! executes one [`Task`] for each phase: enter the guest, walk the region as told, come back. The
//! host's part of a phase (dirty logging, dropping the backing) is the machine's own and runs on
//! the harness's thread while every vCPU stands still.

use std::{error::Error, fmt, time::Duration};

use thiserror::Error;

use crate::vcpu_threads::RoundTimes;
use granule_types::{
    record::{EventCounts, Host, Obtained},
    units::{Bytes, GuestAddress, Nanoseconds},
};

/// What a vCPU does at each place it visits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Come back at once: the vCPU has started.
    Nothing,
    /// Read 8 bytes.
    Read,
    /// Write [`Task::value_at`] as 8 bytes.
    Write,
    /// Write at the place, then read at [`Task::inner_count`] places behind it.
    WriteThenRead,
    /// Write a "return" instruction behind the place, whose own 8 bytes stay, and make it visible to
    /// instruction fetch; not timed.
    Plant,
    /// Call the instruction planted behind the place.
    Execute,
    /// Read and compare with [`Task::value_at`]; the first difference ends the task as a failure.
    Verify,
    /// Write at the places that [`Places`](crate::guest::random_walk::RandomWalk) of [`Task::seed`] and
    /// [`Task::count`] names, one after another, each write the number of those so far, from 1;
    /// come back when [`Live::set_stopping`] says so. Only for a machine that is [`Live`].
    WriteAtRandom,
}

/// One vCPU's work in one phase: `count` places, `stride` apart, from `start` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Task {
    /// What to do at each place.
    pub access: Access,
    /// The first place.
    pub start: GuestAddress,
    /// How many places.
    pub count: u64,
    /// From one place to the next.
    pub stride: Bytes,
    /// [`Access::WriteThenRead`]: from the place to the first read behind it.
    pub inner_first: Bytes,
    /// [`Access::WriteThenRead`]: how many reads behind each place.
    pub inner_count: u64,
    /// [`Access::WriteThenRead`]: from one of these reads to the next.
    pub inner_stride: Bytes,
    /// What written values derive from.
    pub seed: u64,
}

impl Task {
    /// The value written at, and expected from, an address: `seed ^ address`.
    pub const fn value_at(seed: u64, address: GuestAddress) -> u64 {
        seed ^ address.0
    }
}

/// How a vCPU came to a bad end: enough to find out why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VcpuFailure {
    /// Which vCPU.
    pub vcpu: usize,
    /// The guest's program counter, if it could be read.
    pub pc: Option<u64>,
    /// Why the guest was left, in the interface's own words (`KVM_EXIT_FAIL_ENTRY`).
    pub exit: String,
    /// What the CPU says of the exception, where the guest took one.
    pub syndrome: Option<u64>,
    /// The address at fault, where there is one.
    pub address: Option<GuestAddress>,
    /// What that means, for people.
    pub detail: String,
}

impl fmt::Display for VcpuFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vCPU {} ended with {}", self.vcpu, self.exit)?;
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

/// A vCPU, on its own thread from [`Vcpu::bind`] on.
pub trait Vcpu: Send {
    /// Called once on the thread that will run this vCPU: pin it, note its identity. Gives what
    /// another thread uses to get the vCPU out of the guest.
    ///
    /// # Errors
    /// The thread cannot be set up as asked (a CPU to pin to that does not exist).
    fn bind(&mut self) -> Result<Box<dyn Kick>, MachineError>;

    /// Enters the guest, lets it do `task` and comes back when it is done.
    ///
    /// # Errors
    /// The guest crashed, was kicked out by [`Kick::kick`], or left for a reason nobody expected.
    fn run(&mut self, task: &Task) -> Result<(), VcpuFailure>;
}

/// Gets one vCPU out of the guest, from any thread; its [`Vcpu::run`] then fails and says where the
/// guest was.
pub trait Kick: Send + Sync {
    /// Kicks the vCPU. Once kicked it never enters the guest again.
    fn kick(&self);
}

/// What went wrong in a machine, with the machine's own error as the source.
#[derive(Debug, Error)]
#[error("{doing}")]
pub struct MachineError {
    doing: String,
    #[source]
    source: Box<dyn Error + Send + Sync>,
}

impl MachineError {
    /// `source` happened while `doing`.
    pub fn new(doing: impl Into<String>, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            doing: doing.into(),
            source: source.into(),
        }
    }
}

/// The region of guest memory under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Its first byte.
    pub start: GuestAddress,
    /// Its size, a multiple of `backing_page`.
    pub size: Bytes,
    /// The host's base page.
    pub host_page: Bytes,
    /// The page size the backing is made of: the largest block KVM can map.
    pub backing_page: Bytes,
    /// Where the region is mapped in the machine's own process; `None` where it is not.
    pub host_address: Option<u64>,
}

/// A machine under test.
pub trait Machine {
    /// Where results come from: kernel, CPU, emulator.
    fn host(&self) -> &Host;

    /// The name of what runs the guest: `kvm`, `model` or `simulation`.
    fn engine(&self) -> &'static str;

    /// The region under test.
    fn region(&self) -> Region;

    /// Runs one task on each vCPU and gives the times, on machines whose time is not this one's;
    /// `None` on all others, where each vCPU has its thread. `seed` staggers the vCPUs' starts, and
    /// in real time it may take as long as `deadline`.
    fn run_round(
        &mut self,
        _tasks: &[Task],
        _seed: u64,
        _deadline: Duration,
    ) -> Option<Result<RoundTimes, VcpuFailure>> {
        None
    }

    /// The vCPUs, once; none from a machine with a [`Machine::run_round`] of its own.
    ///
    /// # Panics
    /// When called again.
    fn take_vcpus(&mut self) -> Vec<Box<dyn Vcpu>>;

    /// Reads back what backs the region now, page by page.
    ///
    /// # Errors
    /// The host does not tell, or does not back the region as asked.
    fn obtained(&self) -> Result<Obtained, MachineError>;

    /// Switches dirty logging of the region on or off and gives the time this took.
    ///
    /// # Errors
    /// The host refuses.
    fn set_dirty_logging(&mut self, on: bool) -> Result<Nanoseconds, MachineError>;

    /// The host pages written since logging began, as one bit each, lowest address first.
    ///
    /// # Errors
    /// The host refuses, or logging is off.
    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError>;

    /// Drops everything behind the region, so that the next touch is a first one, and gives the
    /// time this took.
    ///
    /// # Errors
    /// The host refuses.
    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError>;

    /// After [`Machine::drop_backing`]: makes the region ready for a first touch again (advice,
    /// prefault where asked for). Not timed.
    ///
    /// # Errors
    /// The host refuses.
    fn restore_backing(&mut self) -> Result<(), MachineError>;

    /// Reads 8 bytes of the region through the host's mapping.
    ///
    /// # Errors
    /// The address is outside the region.
    fn read_u64(&self, address: GuestAddress) -> Result<u64, MachineError>;

    /// Event counts since the machine was made, by name; what the host does not count is absent.
    ///
    /// # Errors
    /// A counter that was opened can no longer be read.
    fn events(&mut self) -> Result<EventCounts, MachineError>;

    /// What rises and falls, as it stands now (pages mapped by size), by name; what the host does
    /// not tell is absent.
    ///
    /// # Errors
    /// What was told before can no longer be read.
    fn gauges(&mut self) -> Result<EventCounts, MachineError>;

    /// What can be done while the vCPUs run; `None` where nothing can.
    fn live(&mut self) -> Option<&mut dyn Live> {
        None
    }
}

/// A machine whose vCPUs can be told to stop and whose memory and log can be read meanwhile.
pub trait Live {
    /// Says whether vCPUs at [`Access::WriteAtRandom`] shall stop. Saying that they shall not, before
    /// they are let into the guest, also counts their writes from 0 again.
    ///
    /// # Errors
    /// They cannot be told.
    fn set_stopping(&mut self, stop: bool) -> Result<(), MachineError>;

    /// How often each vCPU has written in its [`Access::WriteAtRandom`]; of one that runs, a few
    /// may be missing.
    ///
    /// # Errors
    /// They cannot be asked.
    fn writes(&self) -> Result<Vec<u64>, MachineError>;

    /// The host pages written since logging began or since this was called last, as one bit each,
    /// lowest address first. Every write from here on is in the next log.
    ///
    /// # Errors
    /// The host refuses, or logging is off.
    fn collect_dirty_log(&mut self) -> Result<Vec<u64>, MachineError>;

    /// Reads memory of the region through the host's mapping. What a vCPU writes meanwhile is read
    /// or not, and is in the next log.
    ///
    /// # Errors
    /// The range is not within the region.
    fn read(&self, address: GuestAddress, into: &mut [u8]) -> Result<(), MachineError>;
}
