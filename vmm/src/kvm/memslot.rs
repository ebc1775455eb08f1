// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory slots: which guest-physical addresses are backed by which of this process.

use std::sync::Arc;

use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;

use super::KvmError;
use crate::memory::GuestRam;

/// A slot. It keeps its memory mapped; the VM's descriptor must be closed with or before it.
#[derive(Debug)]
pub struct Memslot {
    number: u32,
    ram: Arc<GuestRam>,
}

impl Memslot {
    /// Makes `ram` slot `number` of `vm`.
    ///
    /// # Errors
    /// The kernel refuses: the slot overlaps another or leaves the VM's addresses.
    pub fn new(vm: &VmFd, number: u32, ram: Arc<GuestRam>) -> Result<Self, KvmError> {
        let slot = Self { number, ram };
        slot.set(vm, 0)?;
        Ok(slot)
    }

    /// Its number.
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// Its memory.
    pub const fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// Switches dirty logging of the slot on or off.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn set_logging(&self, vm: &VmFd, on: bool) -> Result<(), KvmError> {
        self.set(vm, if on { KVM_MEM_LOG_DIRTY_PAGES } else { 0 })
    }

    fn set(&self, vm: &VmFd, flags: u32) -> Result<(), KvmError> {
        let region = kvm_userspace_memory_region {
            slot: self.number,
            flags,
            guest_phys_addr: self.ram.start().0,
            memory_size: self.ram.size().0,
            userspace_addr: self.ram.host_address().0,
        };
        // SAFETY: the range is a mapping of this process that lives as long as this value; what
        // the guest does to it is only ever read through volatile accesses.
        unsafe { vm.set_user_memory_region(region) }.map_err(|error| {
            KvmError::call("setting a memory slot (KVM_SET_USER_MEMORY_REGION)", error)
        })
    }
}
