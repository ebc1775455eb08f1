// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The page-table test's machine on KVM.
//!
//! `build` makes memory, VM, memslots, vCPUs and guest program from a [`KvmConfig`];
//! [`KvmMachine`] is the resulting [`Machine`](crate::machine::Machine).

mod build;
mod machine;
mod vcpu;
/// Guest mode, vCPU registers and exits, by architecture.
mod arch {
    #[cfg(target_arch = "aarch64")]
    mod aarch64;
    #[cfg(target_arch = "x86_64")]
    mod x86_64;

    #[cfg(target_arch = "aarch64")]
    pub(super) use aarch64::*;
    #[cfg(target_arch = "x86_64")]
    pub(super) use x86_64::*;
}

use std::error::Error;

use crate::{config::GuestMap, machine::MachineError};
use granule_types::{
    backing::Backing,
    guest_mode::GuestMode,
    units::{Bytes, GuestAddress},
};
use granule_vmm::kvm::memslot::DirtyMode;

pub use machine::KvmMachine;

/// Configuration of a machine for the page-table test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvmConfig {
    /// Backing of the region under test.
    pub backing: Backing,
    /// Size of the region, rounded up to the backing's page and the guest's granule.
    pub memory: Bytes,
    /// Number of vCPUs, at least one.
    pub vcpus: u32,
    /// Address widths and granule of the guest; `None` for the host's default.
    pub mode: Option<GuestMode>,
    /// Mapping of the region by the guest's stage-1 tables.
    pub guest_map: GuestMap,
    /// Start of the region, rounded down to the backing's page and the guest's granule; `None` for
    /// the top of the mode's physical addresses, as in the kernel's test.
    pub phys_offset: Option<GuestAddress>,
    /// Population of the region by the host before the guest accesses it.
    pub prefault: bool,
    /// Permission to continue when the host provides other pages than configured.
    pub accept_fallback: bool,
    /// Host CPUs to pin the vCPUs to, one for each in order; empty for no pinning.
    pub pin: Vec<usize>,
    /// Width of the VM's guest-physical addresses; `None` for the smallest that fits.
    pub ipa_bits: Option<u8>,
    /// Mode of dirty logging.
    pub dirty: DirtyMode,
    /// Chunk size of eager page splitting when logging starts; `None` for splits on write faults.
    pub eager_split: Option<Bytes>,
    /// Counting of the kernel's events, which takes time.
    pub events: bool,
}

impl KvmConfig {
    /// Returns a configuration with defaults for all but backing, size and number of vCPUs.
    pub const fn new(backing: Backing, memory: Bytes, vcpus: u32) -> Self {
        Self {
            backing,
            memory,
            vcpus,
            mode: None,
            guest_map: GuestMap::Blocks,
            phys_offset: None,
            prefault: false,
            accept_fallback: false,
            pin: Vec::new(),
            ipa_bits: None,
            dirty: DirtyMode::Plain,
            eager_split: None,
            events: true,
        }
    }
}

/// Returns the conversion of an error that occurred while doing `what`.
fn doing<E: Error + Send + Sync + 'static>(what: &'static str) -> impl Fn(E) -> MachineError {
    move |error| MachineError::new(what, error)
}
