// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Dirty rings (`KVM_CAP_DIRTY_LOG_RING_ACQ_REL`): each vCPU writes the pages that it dirties into a
//! ring of its own, so collecting costs as much as was written and not as much as there is memory.
//!
//! An entry belongs to the kernel until it says `DIRTY`; whoever harvests it says `RESET`, and one
//! call (`KVM_RESET_DIRTY_RINGS`) then write-protects all these pages again and gives the entries
//! back. A vCPU whose ring is full leaves the guest until that is done. So everybody harvests, the
//! vCPUs' own threads too, into one bitmap for each slot, and a page whose bit is taken from there was
//! protected after it was harvested: what is read of it from then on is no older than the log.
//!
//! The kernel has a vCPU leave before its ring is full, and keeps some entries in reserve. A kernel
//! that has it leave too late writes over entries, and nobody can tell which pages those were: a ring
//! found without a single free entry is an error, and what it held is no log.
//!
//! Writes of no vCPU (an interrupt controller's tables that are saved) have no ring. Where the kernel
//! keeps a bitmap for them beside the rings (`KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP`, arm64) it is asked
//! to; a machine that saves no such state has nothing in it.

use std::{
    collections::BTreeMap,
    fmt, io,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
    ptr,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP, kvm_dirty_gfn,
    kvm_enable_cap,
};
use kvm_ioctls::{VcpuFd, VmFd};
use parking_lot::Mutex;

use super::{KvmError, ioctls::VmExt as _, ioctls::reset_dirty_rings};

/// Bytes of a ring where the host gives that much: 64 Ki pages.
const MOST: u64 = 1 << 20;
/// Where a vCPU's ring lies behind its file (`KVM_DIRTY_LOG_PAGE_OFFSET`), in pages.
const PAGE_OFFSET: u64 = 64;
/// An entry's flags (`KVM_DIRTY_GFN_F_DIRTY`, `KVM_DIRTY_GFN_F_RESET`).
const DIRTY: u32 = 1;
const RESET: u32 = 2;

/// The rings of a VM.
pub struct DirtyRings {
    vm: OwnedFd,
    bytes: usize,
    state: Mutex<State>,
    /// How often a vCPU had to leave the guest because its ring was full.
    full: AtomicU64,
}

#[derive(Default)]
struct State {
    rings: Vec<Ring>,
    /// By slot: what was harvested and not taken yet, a bit for each page.
    dirty: BTreeMap<u32, Vec<u64>>,
}

impl fmt::Debug for DirtyRings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirtyRings")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// One vCPU's.
struct Ring {
    entries: *mut kvm_dirty_gfn,
    bytes: usize,
    next: usize,
}

// SAFETY: the mapping lives as long as the value, and is used under one lock.
unsafe impl Send for Ring {}

impl DirtyRings {
    /// Has the kernel log into rings; before the VM has vCPUs or memory.
    ///
    /// # Errors
    /// It cannot.
    pub fn enable(vm: &VmFd) -> Result<Self, KvmError> {
        let offered = vm.check_extension_raw(KVM_CAP_DIRTY_LOG_RING_ACQ_REL.into());
        let bytes = u64::try_from(offered).unwrap_or(0).min(MOST);
        if bytes == 0 {
            return Err(KvmError::NoRing);
        }
        let enable = |number: u32, argument: u64| {
            let mut cap = kvm_enable_cap {
                cap: number,
                ..kvm_enable_cap::default()
            };
            cap.args[0] = argument;
            vm.enable_capability(&cap)
                .map_err(|error| KvmError::call("enabling dirty rings (KVM_ENABLE_CAP)", error))
        };
        enable(KVM_CAP_DIRTY_LOG_RING_ACQ_REL, bytes)?;
        if vm.check_extension_raw(KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP.into()) > 0 {
            enable(KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP, 0)?;
        }
        // SAFETY: the descriptor is the VM's and open during the call.
        let fd = unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) };
        Ok(Self {
            vm: rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(|error| KvmError::Call {
                doing: "copying the VM's descriptor",
                source: error.into(),
            })?,
            bytes: usize::try_from(bytes).unwrap_or(0),
            state: Mutex::default(),
            full: AtomicU64::new(0),
        })
    }

    /// Maps the ring of a vCPU.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn add(&self, vcpu: &VcpuFd) -> Result<(), KvmError> {
        let offset = PAGE_OFFSET * rustix::param::page_size() as u64;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let offset = libc::off_t::try_from(offset).unwrap_or(0);
        let fd = vcpu.as_raw_fd();
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let entries = unsafe {
            libc::mmap(
                ptr::null_mut(),
                self.bytes,
                protection,
                libc::MAP_SHARED,
                fd,
                offset,
            )
        };
        if entries == libc::MAP_FAILED {
            return Err(KvmError::Call {
                doing: "mapping a vCPU's dirty ring (mmap)",
                source: io::Error::last_os_error(),
            });
        }
        self.state.lock().rings.push(Ring {
            entries: entries.cast(),
            bytes: self.bytes,
            next: 0,
        });
        Ok(())
    }

    /// A vCPU's ring is full: makes room.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn make_room(&self) -> Result<(), KvmError> {
        self.full.fetch_add(1, Ordering::Relaxed);
        self.harvest(&mut self.state.lock())
    }

    /// How often a vCPU had to leave the guest because its ring was full.
    pub fn full(&self) -> u64 {
        self.full.load(Ordering::Relaxed)
    }

    /// The pages of a slot written since they were last taken, a bit each; takes them.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn take(&self, slot: u32) -> Result<Vec<u64>, KvmError> {
        let mut state = self.state.lock();
        self.harvest(&mut state)?;
        Ok(state.dirty.remove(&slot).unwrap_or_default())
    }

    fn harvest(&self, state: &mut State) -> Result<(), KvmError> {
        let State { rings, dirty } = state;
        let mut found = 0;
        for ring in rings {
            let before = ring.next;
            while let Some((slot, page)) = ring.next() {
                let bits = dirty.entry(slot).or_default();
                let word = usize::try_from(page / 64).unwrap_or(usize::MAX);
                if bits.len() <= word {
                    bits.resize(word + 1, 0);
                }
                bits[word] |= 1 << (page % 64);
                found += 1;
            }
            if ring.next - before >= ring.entries() {
                return Err(KvmError::RingOverrun {
                    entries: ring.entries(),
                });
            }
        }
        if found == 0 {
            return Ok(());
        }
        reset_dirty_rings(self.vm.as_fd())
            .map_err(|error| KvmError::call("emptying dirty rings (KVM_RESET_DIRTY_RINGS)", error))
    }
}

impl Ring {
    const fn entries(&self) -> usize {
        self.bytes / size_of::<kvm_dirty_gfn>()
    }

    /// Harvests the next entry: its slot and its page within the slot.
    fn next(&mut self) -> Option<(u32, u64)> {
        let entry = self.entries.wrapping_add(self.next % self.entries());
        // SAFETY: the entry lies in the mapping; its first field is a word that the kernel changes
        // too, and nobody else.
        let flags = unsafe { AtomicU32::from_ptr(entry.cast()) };
        if flags.load(Ordering::Acquire) & DIRTY == 0 {
            return None;
        }
        // SAFETY: the entry lies in the mapping and is ours while it says DIRTY.
        let kvm_dirty_gfn { slot, offset, .. } = unsafe { entry.read_volatile() };
        flags.store(RESET, Ordering::Release);
        self.next += 1;
        Some((slot, offset))
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: mapped by this value's maker, and given back once.
        unsafe { libc::munmap(self.entries.cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_harvested_once_and_around_the_end() {
        let bytes = 4 * size_of::<kvm_dirty_gfn>();
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let memory = unsafe {
            libc::mmap(
                ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        let mut ring = Ring {
            entries: memory.cast(),
            bytes,
            next: 0,
        };
        let put = |ring: &Ring, at: usize, offset: u64| {
            let entry = kvm_dirty_gfn {
                flags: DIRTY,
                slot: 7,
                offset,
            };
            // SAFETY: there are four entries, and nobody else uses them.
            unsafe { ring.entries.wrapping_add(at).write_volatile(entry) };
        };

        (0..4).for_each(|at| put(&ring, at, at as u64));
        let first: Vec<_> = std::iter::from_fn(|| ring.next()).collect();
        put(&ring, 0, 40);
        let second: Vec<_> = std::iter::from_fn(|| ring.next()).collect();

        assert_eq!(first, [(7, 0), (7, 1), (7, 2), (7, 3)]);
        assert_eq!(second, [(7, 40)]);
    }
}
