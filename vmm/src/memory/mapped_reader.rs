// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reader that copies a file to guest memory from a mapping of it.
//!
//! `read()` looks each page up and copies it with stores of 8 bytes, as the kernel does not use vector
//! registers. In a mapping, one fault maps the neighbours that are in the page cache, and the copy uses
//! vector registers. Pages are dropped from the mapping when they are copied, so that the resident memory
//! grows by [`CHUNK`] at most. A file of a file system without mappings is read.
//!
//! An access behind the end of a file that becomes shorter meanwhile is a SIGBUS, whose handler ends the
//! process with a message.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    ptr,
};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use vm_memory::{ReadVolatile, VolatileMemoryError, VolatileSlice, bitmap::BitmapSlice};

use super::copy::copy;

/// Bytes that are copied before their pages are dropped, a multiple of each page size.
const CHUNK: usize = 128 << 10;

/// Reader of a file from its position on.
#[derive(Debug)]
pub struct MappedReader<'a>(&'a File);

impl<'a> MappedReader<'a> {
    /// Creates a reader that shares the position of `file`.
    pub const fn new(file: &'a File) -> Self {
        Self(file)
    }

    /// Copies the bytes at a position to `target`, up to the end of either. Returns their number.
    fn copy_mapped<B: BitmapSlice>(
        &self,
        position: u64,
        target: &VolatileSlice<'_, B>,
    ) -> io::Result<usize> {
        let rest = usize::try_from(self.0.metadata()?.len().saturating_sub(position));
        let length = target.len().min(rest.unwrap_or(usize::MAX));
        if length == 0 {
            return Ok(0);
        }
        let skipped = usize::try_from(position % CHUNK as u64).unwrap_or(0);
        let pages = MappedPages::new(self.0, position - skipped as u64, skipped + length)?;
        let memory = target.ptr_guard_mut();
        for start in (0..skipped + length).step_by(CHUNK) {
            let end = (skipped + length).min(start + CHUNK);
            let first = start.max(skipped);
            let from = pages.start.cast::<u8>().wrapping_add(first);
            let to = memory.as_ptr().wrapping_add(first - skipped);
            // SAFETY: both ranges are in the mapping and the target; guest memory is no part of a mapping
            // that this function creates.
            unsafe { copy(from, to, end - first) };
            pages.drop_part(start, end - start)?;
        }
        target.bitmap().mark_dirty(0, length);
        Ok(length)
    }
}

impl Read for MappedReader<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Seek for MappedReader<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.0.seek(to)
    }
}

impl ReadVolatile for MappedReader<'_> {
    /// Reads up to the end of the slice or the file, because `GuestMemory` reads a region by one call.
    fn read_volatile<B: BitmapSlice>(
        &mut self,
        slice: &mut VolatileSlice<'_, B>,
    ) -> Result<usize, VolatileMemoryError> {
        let start = self.0.stream_position().map_err(VolatileMemoryError::IOError)?;
        if let Ok(copied) = self.copy_mapped(start, slice) {
            let end = SeekFrom::Start(start + copied as u64);
            self.0.seek(end).map_err(VolatileMemoryError::IOError)?;
            return Ok(copied);
        }
        // The file system has no mappings, or the process may have no more.
        let mut read = 0;
        loop {
            match self.0.read_volatile(&mut slice.offset(read)?)? {
                0 => return Ok(read),
                more => read += more,
            }
        }
    }
}

/// Mapped part of a file.
struct MappedPages {
    start: *mut libc::c_void,
    length: usize,
}

impl MappedPages {
    /// Maps `length` bytes from an offset on, a multiple of the page size.
    fn new(file: &File, offset: u64, length: usize) -> io::Result<Self> {
        let (protection, flags) = (ProtFlags::READ, MapFlags::PRIVATE);
        // SAFETY: a mapping at an address that the kernel chooses overlaps no other memory.
        let start = unsafe { mmap(ptr::null_mut(), length, protection, flags, file, offset) }?;
        let pages = Self { start, length };
        // A dropped page does not count as used once more, and more is read ahead from a disk.
        // SAFETY: the range is mapped; the advice changes no contents.
        unsafe { madvise(start, length, Advice::Sequential) }?;
        Ok(pages)
    }

    /// Drops the pages of a part from the mapping; an access maps them again.
    fn drop_part(&self, offset: usize, length: usize) -> io::Result<()> {
        let start = self.start.wrapping_byte_add(offset);
        // SAFETY: the part is mapped and was not written to.
        Ok(unsafe { madvise(start, length, Advice::LinuxDontNeed) }?)
    }
}

impl Drop for MappedPages {
    fn drop(&mut self) {
        // SAFETY: this value owns the range and unmaps it once.
        let _ = unsafe { munmap(self.start, self.length) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use granule_types::testing::skip;
    use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

    use super::*;

    const SIZE: usize = 2 * CHUNK + 12_345;

    /// Returns a file whose bytes differ from chunk to chunk.
    fn file() -> (File, Vec<u8>) {
        let bytes: Vec<_> = (0..SIZE).map(|at| u8::try_from(at % 251).unwrap()).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        (file, bytes)
    }

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4 * CHUNK)]).unwrap()
    }

    #[test]
    fn bytes_from_any_position_are_copied_to_any_address() {
        let (mut file, bytes) = file();
        for (from, to) in [(0, 0), (1, 0), (4096, 17), (CHUNK - 1, 4095), (SIZE - 300, 1)] {
            let memory = memory();
            file.seek(SeekFrom::Start(from as u64)).unwrap();

            let at = GuestAddress(to);
            memory
                .read_exact_volatile_from(at, &mut MappedReader::new(&file), SIZE - from)
                .unwrap();

            let mut copied = vec![0; SIZE - from + 1];
            memory.read_slice(&mut copied, at).unwrap();
            assert_eq!(copied[..SIZE - from], bytes[from..]);
            assert_eq!(copied[SIZE - from], 0, "nothing is written behind the end");
            assert_eq!(file.stream_position().unwrap(), SIZE as u64);
        }
    }

    #[test]
    fn a_read_stops_at_the_end_of_the_file() {
        let (mut file, _) = file();
        file.rewind().unwrap();

        let all =
            memory().read_volatile_from(GuestAddress(0), &mut MappedReader::new(&file), 3 * CHUNK);

        assert_eq!(all.unwrap(), SIZE);
    }

    #[test]
    fn a_file_without_mappings_is_read() {
        // Files of this file system have a size, and cannot be mapped.
        let path = "/sys/kernel/mm/transparent_hugepage/enabled";
        let Ok(mut file) = File::open(path) else {
            return skip(format_args!("{path} cannot be opened"));
        };
        assert!(MappedPages::new(&file, 0, 4096).is_err());
        let memory = memory();

        let read =
            memory.read_volatile_from(GuestAddress(0), &mut MappedReader::new(&file), 100).unwrap();

        let mut bytes = vec![0; read];
        memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        assert!(bytes.contains(&b'['), "{bytes:?}");
        assert_eq!(file.stream_position().unwrap(), read as u64);
    }
}
