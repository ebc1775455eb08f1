// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The memory under test: populated anonymous memory of this process, aligned as in the guest.

use std::{io, ptr, sync::atomic::AtomicU64};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// A mapping of anonymous memory, whose words any number of threads access as atomics.
#[derive(Debug)]
pub(super) struct HostMemory {
    mapped: *mut u8,
    mapped_len: usize,
    start: *mut u8,
    len: usize,
}

// SAFETY: the pointers are addresses of a mapping that exists as long as the value, and every access
// to it is atomic or a system call.
unsafe impl Send for HostMemory {}
// SAFETY: as for Send.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Maps and populates `len` bytes at a multiple of `align`, a power of two not below a page.
    pub(super) fn new(len: usize, align: usize) -> io::Result<Self> {
        let mapped_len =
            len.checked_add(align).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps no other mapping.
        let mapped = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                mapped_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?
        .cast::<u8>();
        let start = mapped.wrapping_add(mapped.align_offset(align));
        let memory = Self { mapped, mapped_len, start, len };
        memory.populate()?;
        Ok(memory)
    }

    fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: the range belongs to this value; the advice populates it or discards its contents.
        unsafe { madvise(self.start.cast(), self.len, advice) }.map_err(io::Error::from)
    }

    /// Populates every page.
    pub(super) fn populate(&self) -> io::Result<()> {
        match self.advise(Advice::LinuxPopulateWrite) {
            // Linux before 5.14 has no such advice.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                for offset in (0..self.len).step_by(4096) {
                    self.word(offset).fetch_or(0, std::sync::atomic::Ordering::Relaxed);
                }
                Ok(())
            }
            result => result,
        }
    }

    /// Discards every page; the next access reads zeroes.
    pub(super) fn discard(&self) -> io::Result<()> {
        self.advise(Advice::LinuxDontNeed)
    }

    /// Returns the address of the first byte.
    pub(super) fn address(&self) -> u64 {
        self.start.addr() as u64
    }

    /// Returns the word at an offset, a multiple of 8.
    ///
    /// # Panics
    /// The offset is outside the memory: the tables that lead there are wrong.
    pub(super) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(
            offset.is_multiple_of(8) && offset < self.len,
            "offset {offset:#x} is outside the memory"
        );
        let at = self.start.wrapping_add(offset).cast::<u64>();
        // SAFETY: the word is within the mapping, which is aligned and exists as long as the
        // reference; all accesses are atomic.
        unsafe { AtomicU64::from_ptr(at) }
    }

    /// Returns address and length of a range for cache maintenance, truncated to the memory.
    pub(super) fn part(&self, offset: usize, len: usize) -> (*const u8, usize) {
        let offset = offset.min(self.len);
        (self.start.wrapping_add(offset), len.min(self.len - offset))
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: this value mapped the whole range and unmaps it once.
        let unmapped = unsafe { munmap(self.mapped.cast(), self.mapped_len) };
        if let Err(error) = unmapped {
            log::debug!("munmap: {error}");
        }
    }
}
