// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The memory under test: anonymous memory of this process, populated, at an address that is
//! aligned as the guest's.

use std::{io, ptr, sync::atomic::AtomicU64};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Memory that lives as long as the value. Its words are accessed by any number of threads, as
/// atomics.
#[derive(Debug)]
pub(super) struct Memory {
    mapped: *mut u8,
    mapped_len: usize,
    start: *mut u8,
    len: usize,
}

// SAFETY: the pointers are addresses of memory that lives as long as the value, and every access to
// it is atomic or a system call.
unsafe impl Send for Memory {}
// SAFETY: as for Send.
unsafe impl Sync for Memory {}

impl Memory {
    /// `len` bytes at a multiple of `align`, a power of two not smaller than a page.
    pub(super) fn new(len: usize, align: usize) -> io::Result<Self> {
        let mapped_len = len
            .checked_add(align)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
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
        let memory = Self {
            mapped,
            mapped_len,
            start,
            len,
        };
        memory.populate()?;
        Ok(memory)
    }

    fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: the range is this value's own; the advice used here populates it or discards its
        // contents.
        unsafe { madvise(self.start.cast(), self.len, advice) }.map_err(io::Error::from)
    }

    /// Has the host give every page.
    pub(super) fn populate(&self) -> io::Result<()> {
        match self.advise(Advice::LinuxPopulateWrite) {
            // Before Linux 5.14.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                for offset in (0..self.len).step_by(4096) {
                    self.word(offset)
                        .fetch_or(0, std::sync::atomic::Ordering::Relaxed);
                }
                Ok(())
            }
            result => result,
        }
    }

    /// Has the host take every page: the next access finds zeroes.
    pub(super) fn discard(&self) -> io::Result<()> {
        self.advise(Advice::LinuxDontNeed)
    }

    /// The first byte's address.
    pub(super) fn address(&self) -> u64 {
        self.start.addr() as u64
    }

    /// The word at an offset, a multiple of 8.
    ///
    /// # Panics
    /// When it is outside: tables that lead there are wrong, and nothing may be touched.
    pub(super) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(
            offset.is_multiple_of(8) && offset < self.len,
            "{offset:#x} is outside"
        );
        let at = self.start.wrapping_add(offset).cast::<u64>();
        // SAFETY: it lies within the mapping, which is aligned and lives as long as the reference;
        // nobody accesses it otherwise than atomically.
        unsafe { AtomicU64::from_ptr(at) }
    }

    /// A part's address and length for cache maintenance; cut to the memory.
    pub(super) fn part(&self, offset: usize, len: usize) -> (*const u8, usize) {
        let offset = offset.min(self.len);
        (self.start.wrapping_add(offset), len.min(self.len - offset))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the whole range was mapped by this value and is given back once.
        let unmapped = unsafe { munmap(self.mapped.cast(), self.mapped_len) };
        if let Err(error) = unmapped {
            log::debug!("munmap: {error}");
        }
    }
}
