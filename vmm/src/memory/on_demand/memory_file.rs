// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A memory file of hugetlb pages that is filled through a second mapping, and whose pages are then mapped
//! for the guest (`UFFDIO_CONTINUE`). So a page is read to its place, where other memory takes a buffer and a
//! copy. Base pages gain nothing: each takes a fault in the second mapping, which costs more than its copy.
//!
//! ```text
//! absent ── claim ──▶ being read ── map ──▶ there
//!    ▲───────────────── error ─┘
//! ```
//!
//! The kernel does not refuse to read a page once more, which would undo what the guest has written, so
//! each page is claimed, and read by the thread that has claimed it. Accesses to it wait until it is
//! mapped. When all data is there, the second mapping is closed: what the kernel then maps
//! is not read over.

use std::{
    collections::BTreeMap,
    io,
    ops::Range,
    slice,
    sync::atomic::{Ordering, fence},
};

use parking_lot::{Mutex, RwLock};

use rustix::io::Errno;

use super::{Source, host_range, page_at, page_size};
use crate::memory::{
    GuestMemory, GuestRam, MemoryError, PageSet, image::file_offsets, mapping::Mapping, parts,
    user_faults::UserFaults,
};

/// A memory file, and what is known of its pages. Offsets are those in the file.
#[derive(Debug)]
pub(super) struct MemoryFile {
    page_size: u64,
    /// Second mapping, until it is closed.
    second: RwLock<Option<Mapping>>,
    pages: Mutex<Pages>,
}

#[derive(Debug, Default)]
struct Pages {
    /// Pages that are being read or there.
    claimed: PageSet,
    there: PageSet,
}

/// Pages that one thread reads. Those that are not there in the end are absent again.
struct Claim<'a> {
    file: &'a MemoryFile,
    part: Range<u64>,
    is_there: bool,
}

impl Claim<'_> {
    /// Returns the bytes of these pages in the second mapping.
    fn bytes<'a>(&'a mut self, second: &'a Mapping) -> io::Result<&'a mut [u8]> {
        let number = |offset| usize::try_from(offset).map_err(io::Error::other);
        let (start, end) = (number(self.part.start)?, number(self.part.end)?);
        if start > end || end > second.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the part is in the mapping, which is writable. A page is in one claim, and the guest and
        // devices have no page of it until its owner maps it, so nothing else accesses these bytes.
        Ok(unsafe { slice::from_raw_parts_mut(second.as_ptr().wrapping_add(start), end - start) })
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let numbers = self.file.number(self.part.start)..self.file.number(self.part.end);
        let mut pages = self.file.pages.lock();
        match self.is_there {
            true => pages.there.insert(numbers),
            false => pages.claimed.remove(numbers),
        }
    }
}

/// State of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PageState {
    Absent,
    /// Accesses continue when another thread maps the page.
    BeingRead,
    There,
}

impl MemoryFile {
    /// Maps the file of a region once more. Returns `None` for private memory.
    ///
    /// # Errors
    /// The kernel refuses the mapping.
    fn of(ram: &GuestRam, page_size: u64) -> Result<Option<Self>, MemoryError> {
        let second = ram.map_again()?;
        let file =
            |second| Self { page_size, second: RwLock::new(Some(second)), pages: Mutex::default() };
        Ok(second.map(file))
    }

    /// Returns the state of the page that contains an offset.
    pub(super) fn state(&self, offset: u64) -> PageState {
        let page = self.number(offset);
        let pages = self.pages.lock();
        match (pages.claimed.contains(page), pages.there.contains(page)) {
            (false, _) => PageState::Absent,
            (true, false) => PageState::BeingRead,
            (true, true) => PageState::There,
        }
    }

    /// Reads the absent pages of a part by `read`, which gets an offset, and maps them by `map`.
    ///
    /// # Errors
    /// One of the two fails. These pages are absent again, and threads that wait for them must be woken:
    /// a fault that was read meanwhile was left to this call.
    fn fill(
        &self,
        part: &Range<u64>,
        read: impl Fn(&mut [u8], u64) -> io::Result<()>,
        map: impl Fn(&Range<u64>) -> io::Result<()>,
    ) -> io::Result<()> {
        let second = self.second.read();
        let Some(second) = &*second else { return Ok(()) };
        for mut claim in self.claim(part) {
            let start = claim.part.start;
            read(claim.bytes(second)?, start)?;
            // The CPU that finds the new entry of the page table must see the bytes, so a full barrier is
            // between the stores of the read, which this thread made, and the one of the entry. Kernels
            // before 6.10 have none in this call.
            fence(Ordering::SeqCst);
            map(&claim.part)?;
            claim.is_there = true;
        }
        Ok(())
    }

    /// Closes the second mapping when no thread reads to it.
    pub(super) fn close(&self) {
        *self.second.write() = None;
    }

    /// Claims the absent pages of a part.
    fn claim(&self, part: &Range<u64>) -> Vec<Claim<'_>> {
        let mut pages = self.pages.lock();
        let mut parts = Vec::new();
        for page in self.number(part.start)..self.number(part.end) {
            if !pages.claimed.contains(page) {
                pages.claimed.insert(page..page + 1);
                let start = page as u64 * self.page_size;
                parts::push(&mut parts, start..start + self.page_size);
            }
        }
        parts.into_iter().map(|part| Claim { file: self, part, is_there: false }).collect()
    }

    fn number(&self, offset: u64) -> usize {
        usize::try_from(offset / self.page_size).unwrap_or(usize::MAX)
    }
}

/// Returns whether the memory of a region, if it is a file, is read to its place. Most hosts of unit tests
/// have no hugetlb pages, so these use base pages.
const fn is_read_to_its_place(ram: &GuestRam) -> bool {
    ram.plan().is_hugetlb() || cfg!(test)
}

/// Returns the memory files that are read to their place, if the kernel can map them then.
pub(super) fn memory_files(
    faults: &UserFaults,
    memory: &GuestMemory,
) -> Result<BTreeMap<u64, MemoryFile>, MemoryError> {
    let mut files = BTreeMap::new();
    let is_read = |ram| faults.can_map() && is_read_to_its_place(ram);
    for (start, ram) in file_offsets(memory).filter(|(_, ram)| is_read(ram)) {
        if let Some(file) = MemoryFile::of(ram, page_size(ram))? {
            files.insert(start, file);
        }
    }
    Ok(files)
}

impl Source {
    /// Reads what is absent of a part of a memory file to its place, and maps it.
    ///
    /// # Errors
    /// As for [`MemoryFile::fill`].
    pub(super) fn fill_file(
        &self,
        file: &MemoryFile,
        start: u64,
        ram: &GuestRam,
        part: &Range<u64>,
    ) -> io::Result<()> {
        let read = |bytes: &mut [u8], offset| self.image.read_exact_at(bytes, start + offset);
        let map = |part: &Range<u64>| self.map(start, ram, part, &mut Vec::new());
        file.fill(part, read, map)
    }

    /// Maps pages of a memory file. Those that the balloon has returned are copied.
    pub(super) fn map(
        &self,
        start: u64,
        ram: &GuestRam,
        part: &Range<u64>,
        buffer: &mut Vec<u8>,
    ) -> io::Result<()> {
        let mut at = part.start;
        while at < part.end {
            let page = page_at(ram, at);
            at = match self.faults.map_pages(&host_range(ram, &(at..part.end))) {
                Ok(mapped) => at + mapped as u64,
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::EXIST) => page.end,
                    Some(Errno::AGAIN) => at,
                    Some(Errno::NOENT) => return Ok(()),
                    Some(Errno::FAULT) => {
                        self.copy_part(start, ram, &page, buffer)?;
                        page.end
                    }
                    _ => return Err(error),
                },
            };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, thread, time::Duration};

    use granule_types::units::GuestAddress;
    use vm_memory::Bytes as _;

    use super::*;
    use crate::memory::{
        GuestMemory,
        on_demand::tests::{START, memory},
    };

    const PAGE: u64 = 4096;

    fn file() -> (GuestMemory, MemoryFile) {
        let memory = memory("shmem").unwrap();
        let file = MemoryFile::of(&memory.regions()[0], PAGE).unwrap().unwrap();
        (memory, file)
    }

    #[test]
    fn private_memory_has_no_second_mapping() {
        let memory = memory("anonymous").unwrap();

        assert!(MemoryFile::of(&memory.regions()[0], PAGE).unwrap().is_none());
    }

    #[test]
    fn each_page_is_read_once_and_to_its_place() {
        let (memory, file) = file();
        let calls = RefCell::new(Vec::new());
        let read = |bytes: &mut [u8], offset: u64| {
            for (page, bytes) in (offset / PAGE..).zip(bytes.chunks_mut(4096)) {
                bytes.fill(u8::try_from(page).unwrap());
            }
            Ok(())
        };
        let map = |part: &Range<u64>| {
            calls.borrow_mut().push(part.start / PAGE..part.end / PAGE);
            Ok(())
        };

        for pages in [3..5, 2..8, 0..8] {
            file.fill(&(pages.start * PAGE..pages.end * PAGE), read, map).unwrap();
        }

        assert_eq!(*calls.borrow(), [3..5, 2..3, 5..8, 0..2]);
        let byte = |page| memory.map().read_obj::<u8>(GuestAddress(START + page * PAGE)).unwrap();
        assert_eq!([0, 2, 4, 7, 8].map(byte), [0, 2, 4, 7, 0]);
        assert_eq!(
            [7, 8].map(|page| file.state(page * PAGE)),
            [PageState::There, PageState::Absent]
        );
    }

    #[test]
    fn a_page_that_cannot_be_read_is_absent_again() {
        let (_memory, file) = file();
        let fails = |_: &mut [u8], _| Err(io::Error::other("no page"));

        let error = file.fill(&(0..2 * PAGE), fails, |_| Ok(())).unwrap_err();

        assert_eq!(error.to_string(), "no page");
        assert_eq!(file.state(PAGE), PageState::Absent);
    }

    #[test]
    fn a_mapping_is_closed_when_no_page_is_being_read() {
        let (memory, file) = file();
        let is_read = Mutex::new(false);
        let read = |bytes: &mut [u8], _| {
            assert_eq!(file.state(0), PageState::BeingRead);
            // The other thread can close only after that.
            thread::sleep(Duration::from_millis(20));
            bytes.fill(7);
            *is_read.lock() = true;
            Ok(())
        };

        thread::scope(|scope| {
            scope.spawn(|| {
                while file.state(0) == PageState::Absent {
                    thread::yield_now();
                }
                file.close();
                assert!(*is_read.lock());
            });
            file.fill(&(0..PAGE), read, |_| Ok(())).unwrap();
        });
        file.fill(&(PAGE..2 * PAGE), |_, _| panic!("closed"), |_| Ok(())).unwrap();

        assert_eq!(memory.map().read_obj::<u8>(GuestAddress(START)).unwrap(), 7);
        assert_eq!(file.state(PAGE), PageState::Absent);
    }
}
