// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! System calls that create, populate and drop a mapping.
//!
//! A [`Mapping`] owns a reservation of address space (`PROT_NONE`) and the memory mapped inside it
//! with `MAP_FIXED`. Dropping it unmaps both.

mod populate;

use std::{fs::File, io, ptr};

use granule_types::units::{Bytes, GuestAddress};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};

use super::{
    DropMethod, MemoryError, Plan,
    align::{congruent_from, reservation},
};

/// Since Linux 6.1; some C libraries lack it.
const MADV_COLLAPSE: i32 = 25;

/// Mapping of guest memory.
#[derive(Debug)]
pub struct Mapping {
    plan: Plan,
    reserved: *mut libc::c_void,
    reserved_len: usize,
    memory: *mut libc::c_void,
    len: usize,
    file: Option<File>,
}

// SAFETY: the pointers are addresses of memory that exists as long as the value; every access
// through them is volatile or a system call, which any thread may do.
unsafe impl Send for Mapping {}
// SAFETY: as for Send; no method returns a reference to the memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reserves address space and maps `size` bytes in it as `plan` determines, at an address
    /// congruent to `guest` modulo `block`, which is at least the page of the plan.
    pub fn new(
        plan: Plan,
        size: Bytes,
        guest: GuestAddress,
        block: Bytes,
    ) -> Result<Self, MemoryError> {
        let failed = |source| call_error(&plan, size, "reserving address space (mmap)", source);
        let too_large = || failed(io::ErrorKind::OutOfMemory.into());
        let base = plan.base_page().0;
        let length = reservation(size.0, block.0, base).ok_or_else(too_large)?;
        let reserved_len = usize::try_from(length).map_err(|_| too_large())?;
        let len = usize::try_from(size.0).map_err(|_| too_large())?;
        // SAFETY: a mapping at an address that the kernel chooses overlaps no other memory.
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
            return Err(failed(io::Error::last_os_error()));
        }
        // From here on, dropping `mapping` releases the reservation.
        let mut mapping = Self { plan, reserved, reserved_len, memory: reserved, len, file: None };
        let address = congruent_from(reserved.addr() as u64 + base, guest.0, block.0)
            .and_then(|address| usize::try_from(address).ok())
            .ok_or_else(|| {
                mapping.error("placing the memory", io::ErrorKind::OutOfMemory.into())
            })?;
        mapping.memory = reserved.with_addr(address);
        if let Some(flags) = mapping.plan.memfd_flags() {
            mapping.file = Some(mapping.memory_file(flags)?);
        }
        mapping.map()?;
        Ok(mapping)
    }

    /// Returns the plan.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    fn error(&self, doing: &'static str, source: io::Error) -> MemoryError {
        call_error(&self.plan, Bytes(self.len as u64), doing, source)
    }

    /// Creates a memory file of the size of the mapping.
    fn memory_file(&self, flags: u32) -> Result<File, MemoryError> {
        let fd = memfd_create(c"granule-memory", MemfdFlags::from_bits_retain(flags))
            .map_err(|error| self.error("creating a memory file (memfd_create)", error.into()))?;
        let file = File::from(fd);
        file.set_len(self.len as u64)
            .map_err(|error| self.error("sizing the memory file (ftruncate)", error))?;
        Ok(file)
    }

    /// Maps the memory in place of the present contents and applies the advice of the plan.
    pub fn map(&self) -> Result<(), MemoryError> {
        use std::os::fd::AsRawFd as _;
        let fd = self.file.as_ref().map_or(-1, File::as_raw_fd);
        // SAFETY: the range lies inside the reservation that this value owns exclusively.
        let memory = unsafe {
            libc::mmap(
                self.memory,
                self.len,
                libc::PROT_READ | libc::PROT_WRITE,
                self.plan.map_flags() | libc::MAP_FIXED,
                fd,
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(self.error("mapping the memory (mmap)", io::Error::last_os_error()));
        }
        let Some(advice) = self.plan.advice() else {
            return Ok(());
        };
        match self.madvise(0, self.len, advice) {
            // A kernel without transparent huge pages refuses advice against them.
            Err(error)
                if advice == libc::MADV_NOHUGEPAGE
                    && error.raw_os_error() == Some(libc::EINVAL) =>
            {
                Ok(())
            }
            result => result.map_err(|error| self.error("advising on huge pages (madvise)", error)),
        }
    }

    /// Applies advice to `len` bytes from `offset` on, which must lie in the memory.
    fn madvise(&self, offset: usize, len: usize, advice: i32) -> io::Result<()> {
        let address = self.memory.wrapping_byte_add(offset);
        // SAFETY: this value owns the range, and the advice used in this module only populates,
        // collapses or discards its contents.
        match unsafe { libc::madvise(address, len, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Restricts the memory to one NUMA node, before it is touched.
    pub fn bind(&self, node: u32) -> Result<(), MemoryError> {
        let failed = |source| self.error("binding the memory to a NUMA node (mbind)", source);
        let mut mask = [0u64; 16];
        let word = mask
            .get_mut(usize::try_from(node / u64::BITS).unwrap_or(usize::MAX))
            .ok_or_else(|| failed(io::ErrorKind::OutOfMemory.into()))?;
        *word = 1 << (node % u64::BITS);
        // The kernel uses one bit less than the argument.
        let bits = mask.len() * 64 + 1;
        // SAFETY: this value owns the range, and the mask has as many bits as the argument says;
        // the call changes where pages come from, not what they hold.
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
            _ => Err(failed(io::Error::last_os_error())),
        }
    }

    /// Collapses resident pages into huge pages as far as the kernel can.
    ///
    /// # Errors
    /// [`MemoryError::NoCollapse`] on kernels without the call.
    pub fn collapse(&self) -> Result<(), MemoryError> {
        if self.madvise(0, 0, MADV_COLLAPSE).is_err() {
            return Err(MemoryError::NoCollapse);
        }
        match self.madvise(0, self.len, MADV_COLLAPSE) {
            // A part is absent, pinned or changing, or huge pages are short; the caller reads back
            // what has been collapsed.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EINVAL | libc::EAGAIN | libc::EBUSY | libc::ENOMEM)
                ) =>
            {
                Ok(())
            }
            result => result.map_err(|error| {
                self.error("collapsing pages into huge ones (MADV_COLLAPSE)", error)
            }),
        }
    }

    /// Drops the contents of the whole mapping.
    pub fn drop_backing(&self) -> Result<(), MemoryError> {
        match self.plan.drop_method() {
            DropMethod::Remap => self.map(),
            DropMethod::Advice | DropMethod::Hole => self.discard_range(0, self.len as u64),
        }
    }

    /// Discards `length` bytes from `offset` on, by a hole in the file or by advice.
    pub fn discard_range(&self, offset: u64, length: u64) -> Result<(), MemoryError> {
        let end = offset.checked_add(length);
        let range = (usize::try_from(offset), usize::try_from(length));
        let (true, (Ok(start), Ok(size))) = (end.is_some_and(|end| end <= self.len as u64), range)
        else {
            return Err(
                self.error("dropping a part of the memory", io::ErrorKind::InvalidInput.into())
            );
        };
        match &self.file {
            Some(file) => {
                let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(file, mode, offset, length).map_err(|error| {
                    self.error("dropping the memory (fallocate with a hole)", error.into())
                })
            }
            None => self
                .madvise(start, size, libc::MADV_DONTNEED)
                .map_err(|error| self.error("dropping the memory (MADV_DONTNEED)", error)),
        }
    }

    /// Returns the address of the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.cast()
    }

    /// Returns the size in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the whole range and unmaps it once; users of the memory hold the
        // value.
        unsafe { libc::munmap(self.reserved, self.reserved_len) };
    }
}

fn call_error(plan: &Plan, size: Bytes, doing: &'static str, source: io::Error) -> MemoryError {
    MemoryError::Call { doing, size, backing: plan.backing(), source }
}
