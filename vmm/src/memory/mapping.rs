// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! System calls that create, populate and drop a mapping.
//!
//! A [`Mapping`] owns a reservation of address space (`PROT_NONE`) and the memory mapped inside it
//! with `MAP_FIXED`. Dropping it unmaps both.
//!
//! KVM maps a block of a memslot by one stage-2 entry only if its guest and host addresses are
//! equal modulo the block size (`fault_supports_stage2_huge_mapping` and
//! `kvm_alloc_memslot_metadata` in Linux). The memory is therefore placed at the first address of
//! the reservation that is congruent to the guest address.

use std::{fs::File, io, ops::Range, ptr, sync::Arc};

use granule_types::units::{Bytes, GuestAddress, HostVirtAddr};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};

use super::{
    BackingPlan, MemoryError, block_size, image::file_data, pagemap::PageMap, parts,
    threads::in_threads,
};

/// `madvise` advice of Linux 6.1 and later, which some C libraries do not define.
const MADV_COLLAPSE: i32 = 25;
/// Bytes that are collapsed by one call, unless a huge page is larger.
const COLLAPSED_AT_ONCE: usize = 64 << 20;

/// A mapping of guest memory.
#[derive(Debug)]
pub struct Mapping {
    plan: BackingPlan,
    reservation: *mut libc::c_void,
    reservation_len: usize,
    memory: *mut libc::c_void,
    len: usize,
    memfd: Option<File>,
    /// File with the initial contents, and their offset.
    image: Option<(Arc<File>, u64)>,
}

// SAFETY: the memory behind the pointers is mapped as long as the value exists; every access
// through them is volatile, a system call, or of a caller that rules out others, so it is allowed in any
// thread.
unsafe impl Send for Mapping {}
// SAFETY: as for Send; no method returns a reference to the memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reserves address space and maps `size` bytes in it according to `plan`, at an address
    /// congruent to `guest` modulo `block`, which is at least the plan's page size. Private memory
    /// of base pages may have the contents of a file, from an offset on.
    pub fn new(
        plan: BackingPlan,
        size: Bytes,
        guest: GuestAddress,
        block: Bytes,
        image: Option<(Arc<File>, u64)>,
    ) -> Result<Self, MemoryError> {
        let memfd = plan.memfd_flags().map(|flags| create_memfd(&plan, size, flags)).transpose()?;
        Self::of_file(plan, size, guest, block, memfd, image)
    }

    /// Maps the file of shared memory once more, at an address of its own. Private memory has none.
    pub fn map_again(&self) -> Result<Option<Self>, MemoryError> {
        let Some(file) = &self.memfd else { return Ok(None) };
        let file =
            file.try_clone().map_err(|error| self.error("mapping the memory again", error))?;
        let (size, page) = (Bytes(self.len as u64), self.plan.page_size());
        Self::of_file(self.plan.clone(), size, GuestAddress(0), page, Some(file), None).map(Some)
    }

    fn of_file(
        plan: BackingPlan,
        size: Bytes,
        guest: GuestAddress,
        block: Bytes,
        memfd: Option<File>,
        image: Option<(Arc<File>, u64)>,
    ) -> Result<Self, MemoryError> {
        let base = plan.base_page_size();
        // `mmap` refuses a length beyond the address space.
        let reservation_len = to_usize_saturating(reservation_size(size, block, base).0);
        let len = to_usize_saturating(size.0);
        // SAFETY: a mapping at an address that the kernel chooses overlaps no other memory.
        let reservation = unsafe {
            libc::mmap(
                ptr::null_mut(),
                reservation_len,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if reservation == libc::MAP_FAILED {
            let failed = call_error(&plan, size, "reserving address space (mmap)");
            return Err(failed(io::Error::last_os_error()));
        }
        let address = align_congruent(reservation.addr() as u64 + base.0, guest.0, block.0);
        let memory = reservation.with_addr(to_usize_saturating(address));
        // Dropping `mapping` after an error releases the reservation.
        let mapping = Self { plan, reservation, reservation_len, memory, len, memfd, image };
        mapping.map_fixed()?;
        Ok(mapping)
    }

    pub const fn plan(&self) -> &BackingPlan {
        &self.plan
    }

    fn error(&self, operation: &'static str, source: io::Error) -> MemoryError {
        call_error(&self.plan, Bytes(self.len as u64), operation)(source)
    }

    /// Maps the memory in the reservation, without earlier contents, and applies the plan's advice.
    pub fn map_fixed(&self) -> Result<(), MemoryError> {
        use std::os::fd::AsRawFd as _;
        let image = self.image.as_ref();
        let (fd, offset) = match (&self.memfd, image) {
            (Some(file), _) => (file.as_raw_fd(), 0),
            (None, Some((file, offset))) => (file.as_raw_fd(), *offset),
            (None, None) => (-1, 0),
        };
        let flags = match image {
            Some(_) => libc::MAP_PRIVATE,
            None => self.plan.map_flags(),
        };
        // SAFETY: the range lies inside the reservation that this value owns exclusively.
        let memory = unsafe {
            libc::mmap(
                self.memory,
                self.len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags | libc::MAP_FIXED,
                fd,
                libc::off_t::try_from(offset).unwrap_or(libc::off_t::MAX),
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(self.error("mapping the memory (mmap)", io::Error::last_os_error()));
        }
        let Some(advice) = self.plan.advice() else {
            return Ok(());
        };
        match self.madvise(0, self.len, advice) {
            // A kernel without transparent huge pages refuses `MADV_NOHUGEPAGE`.
            Err(error)
                if advice == libc::MADV_NOHUGEPAGE
                    && error.raw_os_error() == Some(libc::EINVAL) =>
            {
                Ok(())
            }
            result => result.map_err(|error| self.error("advising on huge pages (madvise)", error)),
        }
    }

    /// Applies advice to the `len` bytes at `offset`, which must lie in the memory.
    fn madvise(&self, offset: usize, len: usize, advice: i32) -> io::Result<()> {
        let address = self.memory.wrapping_byte_add(offset);
        // SAFETY: this value owns the range, and the advice used in this module only populates,
        // collapses or discards its contents.
        match unsafe { libc::madvise(address, len, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Binds the memory to one NUMA node; call it before the first touch.
    pub fn bind_to_node(&self, node: u32) -> Result<(), MemoryError> {
        let failed = |source| self.error("binding the memory to a NUMA node (mbind)", source);
        let mut mask = [0u64; 16];
        let word = mask
            .get_mut(usize::try_from(node / u64::BITS).unwrap_or(usize::MAX))
            .ok_or_else(|| failed(io::ErrorKind::OutOfMemory.into()))?;
        *word = 1 << (node % u64::BITS);
        // `mbind` uses one bit less than its argument.
        let bits = mask.len() * 64 + 1;
        // SAFETY: this value owns the range, and the kernel reads no bits beyond the mask; the call
        // changes the node of pages, not their contents.
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

    /// Populates the memory for writing with up to `threads` threads. The memory must hold zeros,
    /// because zeros are written if the kernel lacks `MADV_POPULATE_WRITE` (before Linux 5.14).
    pub fn populate(&self, threads: usize) -> Result<(), MemoryError> {
        self.in_parts(threads, |offset, len| self.populate_range(offset, len))
            .map_err(|error| self.error("populating the memory (MADV_POPULATE_WRITE)", error))
    }

    /// Overwrites the hugetlb pages that exist with zeros, with up to `threads` threads. Nothing else may
    /// access the memory.
    pub fn zero_huge_pages(&self, threads: usize) -> Result<(), MemoryError> {
        let zero = |offset, len| {
            for part in self.huge_pages(offset as u64..(offset + len) as u64)? {
                let start = self.as_ptr().wrapping_add(to_usize_saturating(part.start));
                let len = to_usize_saturating(part.end - part.start);
                // SAFETY: the part lies in the memory, which is writable and has no other user.
                unsafe { start.write_bytes(0, len) };
            }
            Ok(())
        };
        self.in_parts(threads, zero)
            .map_err(|error| self.error("finding the memory's pages (mincore)", error))
    }

    /// Calls `work` with the offset and length of up to `threads` parts of whole pages, each in a thread.
    fn in_parts(
        &self,
        threads: usize,
        work: impl Fn(usize, usize) -> io::Result<()> + Sync,
    ) -> io::Result<()> {
        let page = to_usize_saturating(self.plan.page_size().0);
        let part = self.len.div_ceil(threads.max(1)).next_multiple_of(page);
        let parts = (0..self.len).step_by(part);
        in_threads(parts, |offset| work(offset, part.min(self.len - offset))).map(drop)
    }

    /// Populates `len` bytes at `offset`, which must lie in the memory, without writing to them.
    ///
    /// # Errors
    /// The kernel lacks `MADV_POPULATE_WRITE` (before Linux 5.14), or the host has too few pages.
    pub fn populate_in_use(&self, offset: usize, len: usize) -> Result<(), MemoryError> {
        self.madvise(offset, len, libc::MADV_POPULATE_WRITE)
            .map_err(|error| self.error("populating the memory (MADV_POPULATE_WRITE)", error))
    }

    fn populate_range(&self, offset: usize, len: usize) -> io::Result<()> {
        match self.madvise(offset, len, libc::MADV_POPULATE_WRITE) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                let page = match self.plan.is_hugetlb() {
                    true => self.plan.page_size(),
                    false => self.plan.base_page_size(),
                };
                self.write_zeros(offset, len, page);
                Ok(())
            }
            result => result,
        }
    }

    /// Writes a zero to every page of a range without reading it first: a read would map the huge
    /// zero page, which the write would split.
    fn write_zeros(&self, offset: usize, len: usize, page: Bytes) {
        let Ok(step) = usize::try_from(page.0) else {
            return;
        };
        for offset in (offset..offset + len).step_by(step) {
            let address = self.memory.cast::<u8>().wrapping_add(offset);
            // SAFETY: `offset` is less than the length of the mapping, which is writable.
            unsafe { address.write_volatile(0) };
        }
    }

    /// Collapses resident pages into huge pages as far as the kernel can, until `may_continue` returns
    /// false. Returns whether the host had the memory for all of them.
    ///
    /// The kernel ends a call when it finds no huge page, and for no signal, so each call has a part.
    pub fn collapse(&self, may_continue: &dyn Fn() -> bool) -> Result<bool, MemoryError> {
        if self.madvise(0, 0, MADV_COLLAPSE).is_err() {
            return Err(MemoryError::CollapseUnsupported);
        }
        let block = to_usize_saturating(block_size(self.plan.base_page_size()).0);
        let part = block.max(COLLAPSED_AT_ONCE);
        let (mut offset, mut had_memory) = (0, true);
        while offset < self.len && may_continue() {
            // Parts end at blocks of the address space.
            let length = (part - (self.memory.addr() + offset) % part).min(self.len - offset);
            match self
                .madvise(offset, length, MADV_COLLAPSE)
                .map_err(|error| (error.raw_os_error(), error))
            {
                Ok(()) => {}
                // No huge page is free, or the memory cgroup has no room for one.
                Err((Some(libc::ENOMEM | libc::EBUSY), _)) => had_memory = false,
                // Some pages are absent, pinned or in use.
                Err((Some(libc::EINVAL | libc::EAGAIN), _)) => {}
                Err((_, error)) => {
                    return Err(
                        self.error("collapsing pages into huge ones (MADV_COLLAPSE)", error)
                    );
                }
            }
            offset += length;
        }
        Ok(had_memory)
    }

    /// Drops the contents of the whole mapping.
    pub fn drop_backing(&self) -> Result<(), MemoryError> {
        if self.plan.drops_by_remap() { self.map_fixed() } else { self.discard_range(0, self.len) }
    }

    /// Discards `length` bytes at `offset`, by punching a hole in the memory file or by
    /// `MADV_DONTNEED`. The range must lie in the memory.
    pub fn discard_range(&self, offset: usize, length: usize) -> Result<(), MemoryError> {
        match &self.memfd {
            Some(file) => {
                let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(file, mode, offset as u64, length as u64).map_err(|error| {
                    self.error("dropping the memory (fallocate with a hole)", error.into())
                })
            }
            None => self
                .madvise(offset, length, libc::MADV_DONTNEED)
                .map_err(|error| self.error("dropping the memory (MADV_DONTNEED)", error)),
        }
    }

    /// Returns the parts of a range that have contents, as offsets; others are zero. The ends of the
    /// range are multiples of the base page size.
    pub fn data_ranges(
        &self,
        pages: &PageMap,
        range: Range<u64>,
    ) -> Result<Vec<Range<u64>>, MemoryError> {
        let existing = |range: &Range<u64>| {
            let start = self.memory.addr() as u64;
            let at = HostVirtAddr(start + range.start)..HostVirtAddr(start + range.end);
            let parts = pages.existing_pages(&at, self.plan.base_page_size())?.into_iter();
            Ok(parts.map(|part| range.start + part.start..range.start + part.end).collect())
        };
        if let Some((image, offset)) = &self.image {
            // Private pages are copies of pages of the file, or stand in its holes.
            let data = image_data(image, offset + range.start..offset + range.end)
                .map_err(|error| self.error("finding the data of the mapped file", error))?;
            let mut parts: Vec<_> = existing(&range)?;
            parts.extend(data.into_iter().map(|part| part.start - offset..part.end - offset));
            return Ok(parts::join(parts));
        }
        match &self.memfd {
            // Their files report no holes.
            _ if self.plan.is_hugetlb() => self
                .huge_pages(range)
                .map_err(|error| self.error("finding the memory's pages (mincore)", error)),
            // The page map lacks pages of a file in swap.
            Some(file) => file_data(file, range)
                .map_err(|error| self.error("finding the memory's pages (lseek)", error)),
            None => existing(&range),
        }
    }

    /// Returns the parts of a range that have hugetlb pages, as offsets. The page map lacks a page while
    /// the kernel moves it to another frame; a read of it waits.
    fn huge_pages(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        /// Base pages that are asked for at once.
        const PAGES: usize = 1 << 16;
        let base = to_usize_saturating(self.plan.base_page_size().0);
        let mut found =
            vec![0_u8; to_usize_saturating(range.end - range.start).div_ceil(base).min(PAGES)];
        let mut parts = Vec::new();
        for start in range.clone().step_by(PAGES * base) {
            let length = to_usize_saturating(range.end - start).min(PAGES * base);
            let address = self.memory.wrapping_byte_add(to_usize_saturating(start));
            // SAFETY: the kernel only reads page tables, and `found` has a byte for each base page.
            if unsafe { libc::mincore(address, length, found.as_mut_ptr()) } < 0 {
                return Err(io::Error::last_os_error());
            }
            let pages = (start..start + length as u64).step_by(base).zip(&found);
            for (page, _) in pages.filter(|(_, exists)| **exists & 1 != 0) {
                parts::push(&mut parts, page..page + base as u64);
            }
        }
        Ok(parts)
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.cast()
    }

    pub const fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the whole range and unmaps it once; users of the memory hold the
        // value.
        unsafe { libc::munmap(self.reservation, self.reservation_len) };
    }
}

fn create_memfd(plan: &BackingPlan, size: Bytes, flags: u32) -> Result<File, MemoryError> {
    let failed = |operation| call_error(plan, size, operation);
    let fd = memfd_create(c"granule-memory", MemfdFlags::from_bits_retain(flags))
        .map_err(|error| failed("creating a memory file (memfd_create)")(error.into()))?;
    let file = File::from(fd);
    file.set_len(size.0).map_err(failed("sizing the memory file (ftruncate)"))?;
    Ok(file)
}

/// Returns the conversion of the error of a system call for memory of this size.
fn call_error(
    plan: &BackingPlan,
    size: Bytes,
    operation: &'static str,
) -> impl FnOnce(io::Error) -> MemoryError {
    let backing = plan.backing();
    move |source| MemoryError::Call { operation, size, backing, source }
}

fn to_usize_saturating(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// Rounds `from` up to an address congruent to `to` modulo `block`, a power of two.
const fn align_congruent(from: u64, to: u64, block: u64) -> u64 {
    from + (to.wrapping_sub(from) & (block - 1))
}

/// Returns the size of a reservation that fits `size` bytes at a congruent address with a guard
/// page on each side. The guards prevent a merge with neighbours and fault on an overrun.
const fn reservation_size(size: Bytes, block: Bytes, page: Bytes) -> Bytes {
    Bytes(size.0.saturating_add(block.0).saturating_add(2 * page.0))
}

/// Returns the parts of a mapped file that have data.
///
/// # Errors
/// The file has become shorter: what was behind its end is lost, also in private pages.
fn image_data(file: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    match file.metadata()?.len() {
        length if length < range.end => Err(io::Error::other(format!(
            "the file has become shorter, {} instead of at least {}",
            Bytes(length),
            Bytes(range.end)
        ))),
        _ => file_data(file, range),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_fits_a_congruent_mapping_and_its_guard_pages() {
        let page = Bytes::kib(4);
        for block in [page, Bytes::mib(2), Bytes::mib(32), Bytes::mib(512), Bytes::gib(1)] {
            let size = Bytes(3 * block.0);
            for from in [0, 0x1000, 0x7fff_f7a0_1000, 0xffff_8000_0000] {
                for to in [0, 0x5000, block.0 - page.0, 0xfffb_ff00_0000, 0xffff_fbff_f000] {
                    let address = align_congruent(from + page.0, to, block.0);

                    assert_eq!(address % block.0, to % block.0);
                    assert!(address >= from + page.0 && address - from - page.0 < block.0);
                    let end = from + reservation_size(size, block, page).0;
                    assert!(address + size.0 + page.0 <= end);
                }
            }
        }
    }
}
