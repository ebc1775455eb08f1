// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The system calls that make, populate and drop a mapping, each wrapped once.
//!
//! A [`Mapping`] owns a reservation of address space (`PROT_NONE`) and, inside it, the memory
//! itself, put there with `MAP_FIXED`. Dropping it unmaps both.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd},
    ptr,
};

use granule_types::units::Bytes;

use super::{
    align::{congruent_from, reservation},
    plan::Plan,
};

/// A failed call and its purpose.
#[derive(Debug)]
pub struct CallError {
    pub doing: &'static str,
    pub source: io::Error,
}

fn failed(doing: &'static str) -> CallError {
    CallError {
        doing,
        source: io::Error::last_os_error(),
    }
}

fn too_large(doing: &'static str) -> CallError {
    CallError {
        doing,
        source: io::Error::from_raw_os_error(libc::ENOMEM),
    }
}

/// Memory in this process, its place chosen by us.
#[derive(Debug)]
pub struct Mapping {
    reserved: *mut libc::c_void,
    reserved_len: usize,
    memory: *mut libc::c_void,
    len: usize,
    file: Option<File>,
}

// SAFETY: the pointers are addresses of memory that lives as long as the value; every access
// through them is volatile or a system call, both fine from any thread.
unsafe impl Send for Mapping {}
// SAFETY: as for Send; no method gives out a reference to the memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reserves address space and maps `size` bytes in it as `plan` says, at an address congruent
    /// to `guest` modulo `block`, at least the plan's page.
    pub fn new(plan: &Plan, size: Bytes, guest: u64, block: Bytes) -> Result<Self, CallError> {
        const RESERVE: &str = "reserving address space (mmap)";
        let base = plan.base_page().0;
        let length = reservation(size.0, block.0, base).ok_or_else(|| too_large(RESERVE))?;
        let reserved_len = usize::try_from(length).map_err(|_| too_large(RESERVE))?;
        let len = usize::try_from(size.0).map_err(|_| too_large(RESERVE))?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let reserved = unsafe {
            libc::mmap(
                ptr::null_mut(),
                reserved_len,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if reserved == libc::MAP_FAILED {
            return Err(failed(RESERVE));
        }
        // From here on, dropping `mapping` gives the reservation back.
        let mut mapping = Self {
            reserved,
            reserved_len,
            memory: reserved,
            len,
            file: None,
        };
        let at = congruent_from(reserved.addr() as u64 + base, guest, block.0)
            .and_then(|at| usize::try_from(at).ok())
            .ok_or_else(|| too_large(RESERVE))?;
        mapping.memory = reserved.with_addr(at);
        mapping.file = plan
            .memfd_flags()
            .map(|flags| memory_file(flags, size))
            .transpose()?;
        mapping.map(plan)?;
        Ok(mapping)
    }

    /// Maps the memory, in place of what is there.
    pub fn map(&self, plan: &Plan) -> Result<(), CallError> {
        let fd = self.file.as_ref().map_or(-1, File::as_raw_fd);
        // SAFETY: the range lies inside the reservation this value owns; nothing else uses it.
        let memory = unsafe {
            libc::mmap(
                self.memory,
                self.len,
                libc::PROT_READ | libc::PROT_WRITE,
                plan.map_flags() | libc::MAP_FIXED,
                fd,
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(failed("mapping the memory (mmap)"));
        }
        plan.advice().map_or(Ok(()), |advice| self.advise(advice))
    }

    /// Gives advice on the whole memory. A kernel without transparent huge pages refuses advice on
    /// them; advice against what it cannot do is then carried out already.
    fn advise(&self, advice: i32) -> Result<(), CallError> {
        match self.madvise(advice) {
            Err(error)
                if advice == libc::MADV_NOHUGEPAGE
                    && error.raw_os_error() == Some(libc::EINVAL) =>
            {
                Ok(())
            }
            result => result.map_err(|source| CallError {
                doing: "advising on huge pages (madvise)",
                source,
            }),
        }
    }

    fn madvise(&self, advice: i32) -> io::Result<()> {
        self.madvise_part(0, self.len, advice)
    }

    /// Gives advice on `len` bytes from `offset` on, which must lie in the memory.
    fn madvise_part(&self, offset: usize, len: usize, advice: i32) -> io::Result<()> {
        let at = self.memory.wrapping_byte_add(offset);
        // SAFETY: the range is this value's own, and none of the advice used here does more than
        // populate or discard its contents.
        match unsafe { libc::madvise(at, len, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Has the memory come from one NUMA node only; before it is touched.
    pub fn bind(&self, node: u32) -> Result<(), CallError> {
        const DOING: &str = "binding the memory to a NUMA node (mbind)";
        const BITS: u32 = u64::BITS;
        let mut mask = [0u64; 16];
        let word = mask
            .get_mut(usize::try_from(node / BITS).unwrap_or(usize::MAX))
            .ok_or_else(|| too_large(DOING))?;
        *word = 1 << (node % BITS);
        // The kernel takes one bit less than it is told.
        let bits = mask.len() * 64 + 1;
        // SAFETY: the range is this value's own and the mask holds as many bits as told; the call
        // changes where pages come from, not what they hold.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.memory,
                self.len,
                libc::MPOL_BIND,
                mask.as_ptr(),
                bits,
                0,
            )
        };
        match result {
            0 => Ok(()),
            _ => Err(failed(DOING)),
        }
    }

    /// Populates the memory, writable, by `threads` threads, each a part of its own; it must be
    /// fresh, as a kernel that cannot do it by itself (before Linux 5.14) has it done by writing a
    /// zero to every page.
    pub fn populate(&self, plan: &Plan, threads: usize) -> Result<(), CallError> {
        let page = usize::try_from(plan.page().0).unwrap_or(usize::MAX);
        let part = self.len.div_ceil(threads.max(1)).next_multiple_of(page);
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..self.len)
                .step_by(part)
                .skip(1)
                .map(|at| scope.spawn(move || self.populate_part(plan, at, part)))
                .collect();
            let first = self.populate_part(plan, 0, part);
            workers.into_iter().fold(first, |result, worker| {
                result.and(worker.join().unwrap_or_else(|_| {
                    Err(too_large("populating the memory: a thread of its own"))
                }))
            })
        })
    }

    fn populate_part(&self, plan: &Plan, offset: usize, part: usize) -> Result<(), CallError> {
        let len = part.min(self.len - offset);
        match self.madvise_part(offset, len, libc::MADV_POPULATE_WRITE) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                let page = if plan.is_hugetlb() {
                    plan.page()
                } else {
                    plan.base_page()
                };
                self.touch(offset, len, page);
                Ok(())
            }
            result => result.map_err(|source| CallError {
                doing: "populating the memory (MADV_POPULATE_WRITE)",
                source,
            }),
        }
    }

    /// Writes a zero to every page of a part. Nothing is read first: a read would fix the zero
    /// page, and a huge zero page is broken into small ones by the write behind it.
    fn touch(&self, offset: usize, len: usize, page: Bytes) {
        let Ok(step) = usize::try_from(page.0) else {
            return;
        };
        for offset in (offset..offset + len).step_by(step) {
            let at = self.memory.cast::<u8>().wrapping_add(offset);
            // SAFETY: `offset` is less than the length of the mapping, which is writable.
            unsafe { at.write_volatile(0) };
        }
    }

    /// Has the kernel put what is resident into huge pages, as far as it can. False where it does
    /// not know how.
    pub fn collapse(&self) -> Result<bool, CallError> {
        /// Since Linux 6.1; the C libraries do not all have it.
        const MADV_COLLAPSE: i32 = 25;
        if self.madvise_part(0, 0, MADV_COLLAPSE).is_err() {
            return Ok(false);
        }
        match self.madvise(MADV_COLLAPSE) {
            Ok(()) => Ok(true),
            // Some of it could not be: it is not there, is pinned or changes, or huge pages are
            // short. What was done is read back.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EINVAL | libc::EAGAIN | libc::EBUSY | libc::ENOMEM)
                ) =>
            {
                Ok(true)
            }
            Err(source) => Err(CallError {
                doing: "collapsing pages into huge ones (MADV_COLLAPSE)",
                source,
            }),
        }
    }

    /// Discards the contents with `MADV_DONTNEED`.
    pub fn discard(&self) -> Result<(), CallError> {
        self.madvise(libc::MADV_DONTNEED)
            .map_err(|source| CallError {
                doing: "dropping the memory (MADV_DONTNEED)",
                source,
            })
    }

    /// Discards a part's contents: by a hole in the file, or by advice.
    pub fn discard_range(&self, offset: u64, length: u64, hole: bool) -> Result<(), CallError> {
        const DOING: &str = "dropping a part of the memory";
        let outside = || too_large(DOING);
        let (start, size) = (usize::try_from(offset), usize::try_from(length));
        let (Ok(start), Ok(size)) = (start, size) else {
            return Err(outside());
        };
        if start.checked_add(size).is_none_or(|end| end > self.len) {
            return Err(outside());
        }
        let result = if hole {
            let fd = self.file.as_ref().map_or(-1, File::as_raw_fd);
            let offset = libc::off_t::try_from(offset).map_err(|_| outside())?;
            let length = libc::off_t::try_from(length).map_err(|_| outside())?;
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            // SAFETY: fallocate takes numbers only; the descriptor is this value's own.
            unsafe { libc::fallocate(fd, mode, offset, length) }
        } else {
            let at = self.memory.wrapping_byte_add(start);
            // SAFETY: the range lies inside the mapping, and the advice discards its contents.
            unsafe { libc::madvise(at, size, libc::MADV_DONTNEED) }
        };
        match result {
            0 => Ok(()),
            _ => Err(failed(DOING)),
        }
    }

    /// Discards the contents by a hole in the file as large as the file.
    pub fn punch_hole(&self) -> Result<(), CallError> {
        const DOING: &str = "dropping the memory (fallocate with a hole)";
        let fd = self.file.as_ref().map_or(-1, File::as_raw_fd);
        let len = libc::off_t::try_from(self.len).map_err(|_| too_large(DOING))?;
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: fallocate takes numbers only; the descriptor is this value's own.
        match unsafe { libc::fallocate(fd, mode, 0, len) } {
            0 => Ok(()),
            _ => Err(failed(DOING)),
        }
    }

    /// The first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.cast()
    }

    /// The size in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the whole range was reserved by this value and is given back once; users of the
        // memory hold the value.
        unsafe { libc::munmap(self.reserved, self.reserved_len) };
    }
}

/// A new file in memory of `size` bytes.
fn memory_file(flags: u32, size: Bytes) -> Result<File, CallError> {
    // SAFETY: the name is a C string and lives as long as the program.
    let fd = unsafe { libc::memfd_create(c"granule-memory".as_ptr(), flags) };
    if fd < 0 {
        return Err(failed("making a file in memory (memfd_create)"));
    }
    // SAFETY: the descriptor is new, valid and nobody else's.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(size.0).map_err(|source| CallError {
        doing: "sizing the file in memory (ftruncate)",
        source,
    })?;
    Ok(file)
}
