// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A machine as it is built, up to vCPUs that stand at the kernel's entry, and why it is not.

use std::{
    fmt, io,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use kvm_ioctls::VmFd;
use parking_lot::Mutex;
use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

use super::{
    attach::AttachError,
    memory_zones::{ObtainError, Obtained},
    platform::PlatformError,
    vcpu::{Crew, Prepare},
};
use crate::{
    arch::{
        linux::{self, GuestError},
        vm::AddressWidthError,
    },
    devices::{
        Bus,
        console_output::ConsoleOutput,
        serial,
        virtio::{balloon::BalloonHandle, console::Console},
    },
    kvm::{KvmError, dirty_ring::DirtyRings, memslot::Memslot, stats::Statistics},
};

/// Why there is no machine.
#[derive(Debug, Error)]
pub enum BuildError {
    /// A file cannot be read.
    #[error("{option} {path}", path = path.display())]
    File {
        /// The option that names it.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// There is no memory.
    #[error("guest memory cannot be had as asked")]
    Memory(#[from] ObtainError),
    /// What only this architecture's guests need.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// KVM refuses.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// KVM refuses the memory's addresses.
    #[error(transparent)]
    Address(#[from] AddressWidthError),
    /// A device has no place.
    #[error(transparent)]
    Platform(#[from] PlatformError),
    /// A disk, network card or the like cannot be had.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// Guest memory cannot be written.
    #[error("{what} cannot be copied into guest memory")]
    Copy {
        /// What.
        what: &'static str,
        /// Why.
        #[source]
        source: vm_memory::GuestMemoryError,
    },
    /// A thread cannot be had.
    #[error("the vCPUs' threads cannot be started")]
    Threads(#[source] io::Error),
}

/// Whom the guest's own words about its progress go to.
pub type Tell = Box<dyn FnMut(u8, Duration) + Send>;

/// What a machine is connected to.
#[allow(missing_debug_implementations, reason = "it holds closures")]
pub struct Ends {
    /// The serial port's output.
    pub output: serial::SerialOutput,
    /// Where it goes in the end: who writes to the port waits for room there.
    pub outlet: ConsoleOutput,
    /// The virtio console, if there is one.
    pub console: Option<Console>,
    /// Who hears of the boot timer.
    pub tell: Tell,
    /// What times count from.
    pub started: Instant,
    /// Written to when the guest ends.
    pub ended: EventFd,
    /// What each vCPU thread does first.
    pub prepare: Prepare,
    /// Whether KVM's own statistics are wanted.
    pub statistics: bool,
}

/// A machine. What uses something stands before it, so that it goes first.
pub struct Machine {
    /// The vCPU threads.
    pub crew: Crew,
    /// The serial port.
    pub serial: Arc<Mutex<dyn serial::SerialPort>>,
    /// Controls the balloon, if there is one.
    pub balloon: Option<BalloonHandle>,
    /// All devices.
    pub bus: Arc<Bus>,
    /// Dirty rings, if that is how dirty pages are logged.
    pub rings: Option<Arc<DirtyRings>>,
    /// Memory slots, in the order of the memory's pieces.
    pub slots: Vec<Memslot>,
    pub(crate) _controller: linux::Controller,
    /// The VM.
    pub vm: Arc<VmFd>,
    /// Width of its physical addresses.
    pub ipa_bits: u8,
    /// Its memory.
    pub memory: Obtained,
    /// KVM's statistics of it.
    pub statistics: Statistics,
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine")
            .field("bus", &self.bus)
            .field("slots", &self.slots)
            .field("ipa_bits", &self.ipa_bits)
            .finish_non_exhaustive()
    }
}
