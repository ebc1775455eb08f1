// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Dirty rings (`KVM_CAP_DIRTY_LOG_RING_ACQ_REL`): each vCPU has a ring of the pages that it
//! dirties, so the cost of harvesting depends on the number of dirty pages, not on the memory size.
//!
//! The kernel sets the flags of a filled entry to `DIRTY`, and harvesting sets them to `RESET`.
//! `KVM_RESET_DIRTY_RINGS` write-protects the harvested pages and returns the entries to the
//! kernel. All harvesting threads, vCPU threads included, share one bitmap for each memslot. A page
//! is write-protected before the bitmap reports it, so data read afterwards is at least as new as
//! the log.
//!
//! The kernel forces an exit to user space before a ring is full. If the exit is late, the kernel
//! overwrites entries and loses pages, so a ring without a free entry is an error.
//!
//! Writes outside a vCPU context (saving ITS tables on arm64) use no ring. A kernel that logs them
//! in a bitmap requires `KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP`. `POST /v1/snapshot` saves them, so
//! `GET /v1/dirty` lacks these pages when rings are the log; snapshots that use a log refuse rings.

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

/// Maximum size of a ring in bytes (64 Ki entries).
const MAX_RING_SIZE: u64 = 1 << 20;
/// Offset of the ring in a vCPU's file, in pages (`KVM_DIRTY_LOG_PAGE_OFFSET`).
const RING_PAGE_OFFSET: u64 = 64;
/// Flags of an entry (`KVM_DIRTY_GFN_F_DIRTY`, `KVM_DIRTY_GFN_F_RESET`).
const FLAG_DIRTY: u32 = 1;
const FLAG_RESET: u32 = 2;

/// The dirty rings of a VM.
#[derive(Debug)]
pub struct DirtyRings {
    vm: OwnedFd,
    ring_size: usize,
    state: Mutex<HarvestState>,
}

#[derive(Debug, Default)]
struct HarvestState {
    rings: Vec<VcpuRing>,
    /// Harvested pages that [`DirtyRings::take_bitmap`] has not returned, one bit each, by memslot.
    bitmaps: BTreeMap<u32, Vec<u64>>,
    /// Harvested entries that the kernel has not reset.
    unreset: usize,
}

/// Writes of the kernel outside a vCPU context, which use no ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutsideWrites {
    /// Logged in the memslot's bitmap, if the kernel can (`KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP`).
    InBitmap,
    /// Not logged: memslots have no bitmap.
    Unlogged,
}

/// The mapped ring of one vCPU.
#[derive(Debug)]
struct VcpuRing {
    entries: *mut kvm_dirty_gfn,
    size: usize,
    next_entry: usize,
}

// SAFETY: the value owns its mapping, which is accessed under one lock.
unsafe impl Send for VcpuRing {}

impl DirtyRings {
    /// Enables dirty rings. The VM must not have vCPUs or memslots yet.
    pub fn enable(vm: &VmFd, writes: OutsideWrites) -> Result<Self, KvmError> {
        let supported = vm.check_extension_raw(KVM_CAP_DIRTY_LOG_RING_ACQ_REL.into());
        let bytes = u64::try_from(supported).unwrap_or(0).min(MAX_RING_SIZE);
        if bytes == 0 {
            return Err(KvmError::no_dirty_rings());
        }
        let enable_dirty_ring = |number: u32, argument: u64| {
            enable_capability(vm, number, argument)
                .map_err(|error| KvmError::call("KVM_ENABLE_CAP (dirty rings)", error))
        };
        enable_dirty_ring(KVM_CAP_DIRTY_LOG_RING_ACQ_REL, bytes)?;
        if writes == OutsideWrites::InBitmap
            && vm.check_extension_raw(KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP.into()) > 0
        {
            enable_dirty_ring(KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP, 0)?;
        }
        // SAFETY: `vm` keeps the file descriptor open during the call.
        let fd = unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) };
        Ok(Self {
            vm: rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(|error| KvmError::Call {
                call: "F_DUPFD_CLOEXEC of the VM",
                source: error.into(),
            })?,
            ring_size: usize::try_from(bytes).unwrap_or(0),
            state: Mutex::default(),
        })
    }

    /// Maps the ring of a vCPU.
    pub fn add_vcpu(&self, vcpu: &VcpuFd) -> Result<(), KvmError> {
        let offset = RING_PAGE_OFFSET * rustix::param::page_size() as u64;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let offset = libc::off_t::try_from(offset).unwrap_or(0);
        let fd = vcpu.as_raw_fd();
        // SAFETY: a new mapping at an address that the kernel chooses overlaps no other memory.
        let entries = unsafe {
            libc::mmap(ptr::null_mut(), self.ring_size, protection, libc::MAP_SHARED, fd, offset)
        };
        if entries == libc::MAP_FAILED {
            return Err(KvmError::Call {
                call: "mmap of a dirty ring",
                source: io::Error::last_os_error(),
            });
        }
        self.state.lock().rings.push(VcpuRing {
            entries: entries.cast(),
            size: self.ring_size,
            next_entry: 0,
        });
        Ok(())
    }

    /// Harvests all rings, so that a vCPU with a full ring can continue.
    pub fn harvest(&self) -> Result<(), KvmError> {
        self.harvest_locked(&mut self.state.lock())
    }

    /// Returns the pages of memslot `slot` that were written since the last call, one bit each.
    pub fn take_bitmap(&self, slot: u32) -> Result<Vec<u64>, KvmError> {
        let mut state = self.state.lock();
        self.harvest_locked(&mut state)?;
        Ok(state.bitmaps.remove(&slot).unwrap_or_default())
    }

    fn harvest_locked(&self, state: &mut HarvestState) -> Result<(), KvmError> {
        let HarvestState { rings, bitmaps, unreset } = state;
        for ring in rings {
            let before = ring.next_entry;
            while let Some((slot, page)) = ring.pop() {
                let bitmap = bitmaps.entry(slot).or_default();
                let word = usize::try_from(page / 64).unwrap_or(usize::MAX);
                if bitmap.len() <= word {
                    bitmap.resize(word + 1, 0);
                }
                bitmap[word] |= 1 << (page % 64);
                *unreset += 1;
            }
            if ring.next_entry - before >= ring.capacity() {
                return Err(KvmError::DirtyRingOverrun { entries: ring.capacity() });
            }
        }
        reset_all(unreset, || reset_dirty_rings(self.vm.as_fd()))
            .map_err(|error| KvmError::call("KVM_RESET_DIRTY_RINGS", error))
    }
}

/// Resets harvested entries until none is left. A signal ends a call after some of them (since Linux 6.17).
fn reset_all<E>(unreset: &mut usize, reset: impl Fn() -> Result<usize, E>) -> Result<(), E> {
    /// Calls in a row that reset nothing: each has handled a signal.
    const MAX_IDLE_CALLS: usize = 1000;
    let mut idle_calls = 0;
    while *unreset > 0 && idle_calls < MAX_IDLE_CALLS {
        let done = reset()?;
        *unreset = unreset.saturating_sub(done);
        idle_calls = if done == 0 { idle_calls + 1 } else { 0 };
    }
    Ok(())
}

impl VcpuRing {
    const fn capacity(&self) -> usize {
        self.size / size_of::<kvm_dirty_gfn>()
    }

    /// Harvests the next entry and returns its memslot and page.
    fn pop(&mut self) -> Option<(u32, u64)> {
        let entry = self.entries.wrapping_add(self.next_entry % self.capacity());
        // SAFETY: the entry lies in the mapping; only the kernel accesses its first word
        // concurrently.
        let flags = unsafe { AtomicU32::from_ptr(entry.cast()) };
        if flags.load(Ordering::Acquire) & FLAG_DIRTY == 0 {
            return None;
        }
        // SAFETY: the entry lies in the mapping, and the kernel does not access it while DIRTY.
        let kvm_dirty_gfn { slot, offset, .. } = unsafe { entry.read_volatile() };
        flags.store(FLAG_RESET, Ordering::Release);
        self.next_entry += 1;
        Some((slot, offset))
    }
}

impl Drop for VcpuRing {
    fn drop(&mut self) {
        // SAFETY: `add_vcpu` created the mapping, and only this drop unmaps it.
        unsafe { libc::munmap(self.entries.cast(), self.size) };
    }
}

#[cfg(test)]
mod tests {
    use std::mem::ManuallyDrop;

    use super::*;

    #[test]
    fn a_reset_that_a_signal_ends_is_continued() {
        let results = std::cell::RefCell::new(vec![3_usize, 0, 2]);
        let (mut unreset, mut unresettable) = (5, 1);

        reset_all(&mut unreset, || Ok::<_, ()>(results.borrow_mut().pop().unwrap())).unwrap();
        reset_all(&mut unresettable, || Ok::<_, ()>(0)).unwrap();

        assert_eq!((unreset, unresettable), (0, 1));
        assert!(results.borrow().is_empty());
        assert_eq!(reset_all(&mut unresettable, || Err("refused")), Err("refused"));
    }

    #[test]
    fn pop_harvests_each_entry_once_and_wraps() {
        let mut memory = [kvm_dirty_gfn::default(); 4];
        let (entries, size) = (memory.as_mut_ptr(), size_of_val(&memory));
        // Dropping the ring would unmap `memory`, which is not a mapping.
        let mut ring = ManuallyDrop::new(VcpuRing { entries, size, next_entry: 0 });
        let put = |ring: &VcpuRing, at: usize, offset: u64| {
            let entry = kvm_dirty_gfn { flags: FLAG_DIRTY, slot: 7, offset };
            // SAFETY: `at` indexes one of the four entries, which only this test accesses.
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
