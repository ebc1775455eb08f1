// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memslots: guest-physical ranges backed by memory of this process.

use std::sync::Arc;

use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;

use super::error::KvmError;
use crate::memory::GuestRam;

/// A memslot. It keeps its memory mapped; close the VM's file descriptor before dropping it.
#[derive(Debug)]
pub struct Memslot {
    number: u32,
    ram: Arc<GuestRam>,
}

impl Memslot {
    /// Registers `ram` as memslot `number` of `vm`.
    ///
    /// # Errors
    /// The memslot overlaps another one or exceeds the VM's address width.
    pub fn new(vm: &VmFd, number: u32, ram: Arc<GuestRam>) -> Result<Self, KvmError> {
        let slot = Self { number, ram };
        slot.set(vm, 0)?;
        Ok(slot)
    }

    /// Returns the memslot's number.
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// Returns the memory behind the memslot.
    pub const fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// Starts or stops dirty logging of the memslot.
    ///
    /// # Errors
    /// The kernel's error.
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
        // SAFETY: the range is a mapping of this process that `ram` keeps alive; this process reads
        // what the guest writes to it through volatile accesses only.
        unsafe { vm.set_user_memory_region(region) }
            .map_err(|error| KvmError::call("KVM_SET_USER_MEMORY_REGION", error))
    }
}
