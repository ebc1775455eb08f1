// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a KVM machine is asked to be.

use crate::config::GuestMap;
use granule_types::{
    backing::Backing,
    guest_mode::GuestMode,
    units::{Bytes, GuestAddress},
};

use granule_vmm::kvm::dirty::DirtyMode;

/// A machine for the page-table test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvmConfig {
    /// What stands behind the region under test.
    pub backing: Backing,
    /// The region's size; rounded up to the backing's page and the guest's granule.
    pub memory: Bytes,
    /// How many vCPUs, at least one.
    pub vcpus: u32,
    /// Address widths and granule of the guest; `None` for the host's default.
    pub mode: Option<GuestMode>,
    /// How the guest's own tables map the region.
    pub guest_map: GuestMap,
    /// Where the region begins; `None` for the top of the mode's physical addresses, as the
    /// kernel's test does. Rounded down to the backing's page and the guest's granule.
    pub phys_offset: Option<GuestAddress>,
    /// Whether the host populates the region before the guest touches it.
    pub prefault: bool,
    /// Whether other pages than those asked for will do.
    pub accept_fallback: bool,
    /// Host CPUs to pin vCPUs to, one for each vCPU in order; empty for no pinning.
    pub pin: Vec<usize>,
    /// Width of the VM's guest-physical addresses; `None` for the smallest that fits.
    pub ipa_bits: Option<u8>,
    /// How dirty pages are logged.
    pub dirty: DirtyMode,
    /// Blocks are split where logging begins, in chunks of this size.
    pub eager_split: Option<Bytes>,
    /// Whether the kernel's events are counted; counting costs time.
    pub events: bool,
}

impl KvmConfig {
    /// A machine with everything but backing, size and vCPUs left to the defaults.
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
