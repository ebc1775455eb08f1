// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Dirty rings (`KVM_CAP_DIRTY_LOG_RING_ACQ_REL`): each vCPU has a ring of the pages that it
//! dirties, so the cost of harvesting depends on the pages written, not on the size of memory.
//!
//! An entry belongs to the kernel until its flags are `DIRTY`. Harvesting sets them to `RESET`, and
//! `KVM_RESET_DIRTY_RINGS` write-protects the harvested pages and returns the entries. A vCPU whose
//! ring is full exits to user space until then. Every thread that harvests, vCPU threads included,
//! sets bits in one bitmap for each memslot. A harvested page is write-protected before the bitmap
//! reports it, so data read from it afterwards is at least as new as the log.
//!
//! The kernel forces an exit while some entries are still free. If the exit is late, the kernel
//! overwrites entries and the lost pages cannot be identified, so a ring without a free entry is an
//! error.
//!
//! Writes outside a vCPU context (saving the tables of an interrupt controller) use no ring. A
//! kernel that logs them in a bitmap (arm64) requires `KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP`; this
//! VMM saves no such state, so the bitmap stays empty.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
    ptr,
    sync::atomic::{AtomicU32, Ordering},
};

use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP, kvm_dirty_gfn,
};
use kvm_ioctls::{VcpuFd, VmFd};
use parking_lot::Mutex;

use super::{
    KvmError,
    ioctls::{enable_capability, reset_dirty_rings},
};

/// Upper limit of a ring's size in bytes: 64 Ki entries.
const MAX_RING_SIZE: u64 = 1 << 20;
/// Offset of the ring in a vCPU's file, in pages (`KVM_DIRTY_LOG_PAGE_OFFSET`).
const PAGE_OFFSET: u64 = 64;
/// Flags of an entry (`KVM_DIRTY_GFN_F_DIRTY`, `KVM_DIRTY_GFN_F_RESET`).
const DIRTY: u32 = 1;
const RESET: u32 = 2;

/// The dirty rings of a VM.
#[derive(Debug)]
pub struct DirtyRings {
    vm: OwnedFd,
    bytes: usize,
    harvest: Mutex<Harvest>,
}

#[derive(Debug, Default)]
struct Harvest {
    rings: Vec<VcpuRing>,
    /// Harvested pages that [`DirtyRings::take`] has not returned, one bit each, by memslot.
    dirty: BTreeMap<u32, Vec<u64>>,
}

/// The mapped ring of one vCPU.
#[derive(Debug)]
struct VcpuRing {
    entries: *mut kvm_dirty_gfn,
    bytes: usize,
    next: usize,
}

// SAFETY: the value owns its mapping, which is accessed under one lock.
unsafe impl Send for VcpuRing {}

impl DirtyRings {
    /// Enables dirty rings; call it before the VM has vCPUs or memslots.
    pub fn enable(vm: &VmFd) -> Result<Self, KvmError> {
        let supported = vm.check_extension_raw(KVM_CAP_DIRTY_LOG_RING_ACQ_REL.into());
        let bytes = u64::try_from(supported).unwrap_or(0).min(MAX_RING_SIZE);
        if bytes == 0 {
            return Err(KvmError::no_dirty_rings());
        }
        let enable = |number: u32, argument: u64| {
            enable_capability(vm, number, argument)
                .map_err(|error| KvmError::call("KVM_ENABLE_CAP (dirty rings)", error))
        };
        enable(KVM_CAP_DIRTY_LOG_RING_ACQ_REL, bytes)?;
        if vm.check_extension_raw(KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP.into()) > 0 {
            enable(KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP, 0)?;
        }
        // SAFETY: `vm` keeps the file descriptor open during the call.
        let fd = unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) };
        Ok(Self {
            vm: rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(|error| KvmError::Call {
                call: "F_DUPFD_CLOEXEC of the VM",
                source: error.into(),
            })?,
            bytes: usize::try_from(bytes).unwrap_or(0),
            harvest: Mutex::default(),
        })
    }

    /// Maps the ring of a vCPU.
    pub fn add_vcpu(&self, vcpu: &VcpuFd) -> Result<(), KvmError> {
        let offset = PAGE_OFFSET * rustix::param::page_size() as u64;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let offset = libc::off_t::try_from(offset).unwrap_or(0);
        let fd = vcpu.as_raw_fd();
        // SAFETY: a new mapping at an address that the kernel chooses overlaps no other memory.
        let entries = unsafe {
            libc::mmap(ptr::null_mut(), self.bytes, protection, libc::MAP_SHARED, fd, offset)
        };
        if entries == libc::MAP_FAILED {
            return Err(KvmError::Call {
                call: "mmap of a dirty ring",
                source: io::Error::last_os_error(),
            });
        }
        self.harvest.lock().rings.push(VcpuRing {
            entries: entries.cast(),
            bytes: self.bytes,
            next: 0,
        });
        Ok(())
    }

    /// Harvests all rings, so that a vCPU with a full ring can continue.
    pub fn drain(&self) -> Result<(), KvmError> {
        self.collect(&mut self.harvest.lock())
    }

    /// Returns the pages of memslot `slot` that were written since the last call, one bit each.
    pub fn take(&self, slot: u32) -> Result<Vec<u64>, KvmError> {
        let mut harvest = self.harvest.lock();
        self.collect(&mut harvest)?;
        Ok(harvest.dirty.remove(&slot).unwrap_or_default())
    }

    fn collect(&self, harvest: &mut Harvest) -> Result<(), KvmError> {
        let Harvest { rings, dirty } = harvest;
        let mut harvested = 0;
        for ring in rings {
            let before = ring.next;
            while let Some((slot, page)) = ring.pop() {
                let bitmap = dirty.entry(slot).or_default();
                let word = usize::try_from(page / 64).unwrap_or(usize::MAX);
                if bitmap.len() <= word {
                    bitmap.resize(word + 1, 0);
                }
                bitmap[word] |= 1 << (page % 64);
                harvested += 1;
            }
            if ring.next - before >= ring.entries() {
                return Err(KvmError::DirtyRingOverrun { entries: ring.entries() });
            }
        }
        if harvested == 0 {
            return Ok(());
        }
        reset_dirty_rings(self.vm.as_fd())
            .map_err(|error| KvmError::call("KVM_RESET_DIRTY_RINGS", error))
    }
}

impl VcpuRing {
    const fn entries(&self) -> usize {
        self.bytes / size_of::<kvm_dirty_gfn>()
    }

    /// Harvests the next entry and returns its memslot and page.
    fn pop(&mut self) -> Option<(u32, u64)> {
        let entry = self.entries.wrapping_add(self.next % self.entries());
        // SAFETY: the entry lies in the mapping; only the kernel accesses its first word
        // concurrently.
        let flags = unsafe { AtomicU32::from_ptr(entry.cast()) };
        if flags.load(Ordering::Acquire) & DIRTY == 0 {
            return None;
        }
        // SAFETY: the entry lies in the mapping, and the kernel does not access it while DIRTY.
        let kvm_dirty_gfn { slot, offset, .. } = unsafe { entry.read_volatile() };
        flags.store(RESET, Ordering::Release);
        self.next += 1;
        Some((slot, offset))
    }
}

impl Drop for VcpuRing {
    fn drop(&mut self) {
        // SAFETY: `add_vcpu` created the mapping, and only this drop unmaps it.
        unsafe { libc::munmap(self.entries.cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use std::mem::ManuallyDrop;

    use super::*;

    #[test]
    fn pop_harvests_each_entry_once_and_wraps() {
        let mut memory = [kvm_dirty_gfn::default(); 4];
        let (entries, bytes) = (memory.as_mut_ptr(), size_of_val(&memory));
        // The memory is not a mapping, so the ring is not dropped.
        let mut ring = ManuallyDrop::new(VcpuRing { entries, bytes, next: 0 });
        let put = |ring: &VcpuRing, at: usize, offset: u64| {
            let entry = kvm_dirty_gfn { flags: DIRTY, slot: 7, offset };
            // SAFETY: `at` is one of the four entries, which only this test accesses.
            unsafe { ring.entries.wrapping_add(at).write_volatile(entry) };
        };

        (0..4).for_each(|at| put(&ring, at, at as u64));
        let first: Vec<_> = std::iter::from_fn(|| ring.pop()).collect();
        put(&ring, 0, 40);
        let second: Vec<_> = std::iter::from_fn(|| ring.pop()).collect();

        assert_eq!(first, [(7, 0), (7, 1), (7, 2), (7, 3)]);
        assert_eq!(second, [(7, 40)]);
    }
}
