// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A page that the guest can only read, beside its memory.

use granule_types::units::GuestAddress;
use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;
use vm_memory::{Bytes as _, MmapRegion, VolatileMemory as _};

use super::KvmError;

/// A page of this process. Create it before the VM in which it is mapped, and drop it after that.
///
/// The contents do not change: without FEAT_S2FWB, KVM cleans them to the PoC when the guest first reads
/// them, and not again.
#[derive(Debug)]
pub struct ReadOnlyPage {
    memory: MmapRegion,
}

impl ReadOnlyPage {
    /// Allocates a page that begins with these bytes.
    ///
    /// # Errors
    /// The kernel refuses the memory.
    pub fn new(contents: &[u8; 16]) -> Result<Self, KvmError> {
        let failed = |error| KvmError::Call { call: "mmap", source: std::io::Error::other(error) };
        let memory = MmapRegion::new(rustix::param::page_size()).map_err(failed)?;
        let written = memory.as_volatile_slice().write_obj(*contents, 0);
        written.map_err(|error| KvmError::Call {
            call: "write to a new page",
            source: std::io::Error::other(error),
        })?;
        Ok(Self { memory })
    }

    /// Maps the page as memslot `number` of `vm`. A store of the guest to it is an exit.
    ///
    /// # Errors
    /// The memslot overlaps another one.
    pub fn map(&self, vm: &VmFd, number: u32, start: GuestAddress) -> Result<(), KvmError> {
        let region = kvm_userspace_memory_region {
            slot: number,
            flags: KVM_MEM_READONLY,
            guest_phys_addr: start.0,
            memory_size: self.memory.size() as u64,
            userspace_addr: self.memory.as_ptr() as u64,
        };
        // SAFETY: the range is a mapping of this process that outlives the VM, and the guest cannot
        // write to it.
        unsafe { vm.set_user_memory_region(region) }
            .map_err(|error| KvmError::call("KVM_SET_USER_MEMORY_REGION", error))
    }
}
