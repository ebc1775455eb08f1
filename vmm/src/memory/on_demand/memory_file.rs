// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A memory file of hugetlb pages that is filled through a second mapping, and whose pages are then mapped
//! for the guest (`UFFDIO_CONTINUE`). So a page is read to its place, where other memory takes a buffer and a
//! copy. Base pages gain nothing: each takes a fault in the second mapping, which costs more than its copy.
//!
//! ```text
//! absent ── claim ──▶ being read ── read ──▶ there, and mapped
//!    ▲───────────────── error ─┘
//! ```
//!
//! The kernel does not refuse to read a page once more, which would undo what the guest has written, so
//! each page is claimed, and read by the thread that has claimed it. Accesses to it wait until it is
//! mapped. When all data is there, the second mapping is closed: what the kernel then maps is not read over.

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
    GuestMemory, GuestRam, MemoryError, image::file_offsets, mapping::Mapping, parts,
    user_faults::UserFaults,
};

/// Memory files that are read to their place, by the offset of their region in the image.
pub(super) type MemoryFiles = BTreeMap<u64, MemoryFile>;

/// A memory file, and the states of its pages. Offsets are those in the file.
#[derive(Debug)]
pub(super) struct MemoryFile {
    page_size: u64,
    /// Second mapping, until it is closed.
    second: RwLock<Option<Mapping>>,
    pages: Mutex<Vec<PageState>>,
}

/// State of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PageState {
    Absent,
    /// Accesses continue when the thread that reads the page maps it.
    BeingRead,
    /// The file has the contents.
    There,
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
        // devices have no page of it until it is there, so nothing else accesses these bytes.
        Ok(unsafe { slice::from_raw_parts_mut(second.as_ptr().wrapping_add(start), end - start) })
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let state = if self.is_there { PageState::There } else { PageState::Absent };
        let numbers = self.file.numbers(&self.part);
        self.file.pages.lock()[numbers].fill(state);
    }
}

impl MemoryFile {
    /// Maps the file of a region once more. Returns `None` for private memory.
    ///
    /// # Errors
    /// The kernel refuses the mapping.
    pub(super) fn of(ram: &GuestRam) -> Result<Option<Self>, MemoryError> {
        let Some(second) = ram.map_again()? else { return Ok(None) };
        let page_size = page_size(ram);
        let count = usize::try_from(ram.size().0 / page_size).unwrap_or(0);
        let pages = Mutex::new(vec![PageState::Absent; count]);
        Ok(Some(Self { page_size, second: RwLock::new(Some(second)), pages }))
    }

    /// Returns the state of the page that contains an offset.
    pub(super) fn state(&self, offset: u64) -> PageState {
        self.pages.lock()[self.numbers(&(offset..offset)).start]
    }

    /// Reads the absent pages of a part by `read`, which gets an offset, and maps them by `map`. Returns
    /// `None` if the second mapping is closed.
    ///
    /// # Errors
    /// One of the two fails. Threads that wait for these pages must be woken: a fault that was read
    /// meanwhile was left to this call.
    fn fill(
        &self,
        part: &Range<u64>,
        read: impl Fn(&mut [u8], u64) -> io::Result<()>,
        map: impl Fn(&Range<u64>) -> io::Result<()>,
    ) -> io::Result<Option<()>> {
        let second = self.second.read();
        let Some(second) = &*second else { return Ok(None) };
        for mut claim in self.claim(part) {
            let part = claim.part.clone();
            read(claim.bytes(second)?, part.start).map_err(with_reason)?;
            claim.is_there = true;
            // Before the pages are mapped: what is mapped, the guest may write.
            drop(claim);
            // The CPU that finds the new entry of the page table must see the bytes, so a full barrier is
            // between the stores of the read, which this thread made, and the one of the entry. The kernel
            // promises it for this call from 6.10 on.
            fence(Ordering::SeqCst);
            map(&part)?;
        }
        Ok(Some(()))
    }

    /// Closes the second mapping when no thread reads to it.
    pub(super) fn close(&self) {
        *self.second.write() = None;
    }

    /// Claims the absent pages of a part.
    fn claim(&self, part: &Range<u64>) -> Vec<Claim<'_>> {
        let mut pages = self.pages.lock();
        let mut parts = Vec::new();
        for number in self.numbers(part) {
            if pages[number] == PageState::Absent {
                pages[number] = PageState::BeingRead;
                let start = number as u64 * self.page_size;
                parts::push(&mut parts, start..start + self.page_size);
            }
        }
        parts.into_iter().map(|part| Claim { file: self, part, is_there: false }).collect()
    }

    fn numbers(&self, part: &Range<u64>) -> Range<usize> {
        let number = |offset| usize::try_from(offset / self.page_size).unwrap_or(usize::MAX);
        number(part.start)..number(part.end)
    }
}

/// Returns an error of a read to the second mapping with its reason: the kernel could not allocate the page.
fn with_reason(error: io::Error) -> io::Error {
    match Errno::from_io_error(&error) {
        Some(Errno::FAULT) => io::Error::other("the host has no free hugetlb page for it"),
        _ => error,
    }
}

/// Returns the files that are read to their place, if the kernel can map their pages then.
///
/// # Errors
/// As for [`MemoryFile::of`].
pub(super) fn memory_files(
    faults: &UserFaults,
    memory: &GuestMemory,
) -> Result<MemoryFiles, MemoryError> {
    let mut files = MemoryFiles::new();
    let is_read = |ram: &GuestRam| faults.can_map() && ram.plan().is_hugetlb();
    for (start, ram) in file_offsets(memory).filter(|(_, ram)| is_read(ram)) {
        if let Some(file) = MemoryFile::of(ram)? {
            files.insert(start, file);
        }
    }
    Ok(files)
}

impl Source {
    /// Reads what is absent of a part of a memory file to its place, and maps it. Returns `None` if the
    /// file is closed.
    ///
    /// # Errors
    /// As for [`MemoryFile::fill`].
    pub(super) fn fill_file(
        &self,
        file: &MemoryFile,
        start: u64,
        ram: &GuestRam,
        part: &Range<u64>,
    ) -> io::Result<Option<()>> {
        let read = |bytes: &mut [u8], offset| self.image.read_exact_at(bytes, start + offset);
        file.fill(part, read, |part| self.map(ram, part))
    }

    /// Maps pages that are there.
    pub(super) fn map(&self, ram: &GuestRam, part: &Range<u64>) -> io::Result<()> {
        let mut at = part.start;
        while at < part.end {
            at = match self.faults.map_pages(&host_range(ram, &(at..part.end))) {
                Ok(mapped) => at + mapped as u64,
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::EXIST) => page_at(ram, at).end,
                    // The mappings of the process have changed meanwhile.
                    Some(Errno::AGAIN) => at,
                    // The range is no longer registered: the kernel maps its pages.
                    Some(Errno::NOENT) => return Ok(()),
                    _ => return Err(error),
                },
            };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, iter, ptr, thread, time::Duration};

    use granule_types::units::GuestAddress;
    use vm_memory::Bytes as _;

    use super::*;
    use crate::memory::on_demand::{
        CLUSTER, OnDemand,
        tests::{START, check_contents, fail, image_and_faults, memory, source_of_file},
    };

    const PAGE: u64 = 4096;

    fn file() -> (GuestMemory, MemoryFile) {
        let memory = memory("shmem").unwrap();
        let file = MemoryFile::of(&memory.regions()[0]).unwrap().unwrap();
        (memory, file)
    }

    #[test]
    fn private_memory_has_no_second_mapping() {
        let memory = memory("anonymous").unwrap();

        assert!(MemoryFile::of(&memory.regions()[0]).unwrap().is_none());
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
            file.fill(&(pages.start * PAGE..pages.end * PAGE), read, map).unwrap().unwrap();
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
        let fails = |_: &mut [u8], _| Err(Errno::FAULT.into());

        let error = file.fill(&(0..2 * PAGE), fails, |_| Ok(())).unwrap_err();

        assert!(error.to_string().contains("no free hugetlb page"), "{error}");
        assert_eq!(file.state(PAGE), PageState::Absent);
    }

    #[test]
    fn a_page_that_is_read_and_cannot_be_mapped_is_not_read_again() {
        let (_memory, file) = file();
        let fails = |_: &Range<u64>| Err(io::Error::other("not mapped"));

        let error = file.fill(&(0..PAGE), |_, _| Ok(()), fails).unwrap_err();

        assert_eq!(error.to_string(), "not mapped");
        assert_eq!(file.state(0), PageState::There);
    }

    #[test]
    fn a_page_that_the_guest_has_written_after_the_end_of_the_faults_is_not_read_over() {
        let Some((image, faults)) = image_and_faults() else { return };
        let Some(source) = source_of_file(image, faults, CLUSTER) else { return };
        let memory = source.memory.clone();
        source.register().unwrap();

        source.end_faults(&|| true).unwrap();
        memory.map().write_obj(7_u64, GuestAddress(START)).unwrap();
        source.fill(0, &memory.regions()[0], 0..CLUSTER, &mut Vec::new()).unwrap();

        assert_eq!(memory.map().read_obj::<u64>(GuestAddress(START)).unwrap(), 7);
    }

    #[test]
    fn a_page_that_the_kernel_unmaps_keeps_what_is_written() {
        let Some((image, faults)) = image_and_faults() else { return };
        let Some(source) = source_of_file(image, faults, 0) else { return };
        let memory = source.memory.clone();
        let demand = OnDemand::fill_from(source, fail).unwrap();

        memory.map().write_obj(7_u64, GuestAddress(START)).unwrap();
        let start = memory.regions()[0].host_address();
        let pointer = ptr::with_exposed_provenance_mut(usize::try_from(start.0).unwrap());
        // SAFETY: the page is one of a shared file, which keeps its contents.
        assert_eq!(unsafe { libc::madvise(pointer, 4096, libc::MADV_DONTNEED) }, 0);

        check_contents(&memory, iter::once(3));
        assert_eq!(memory.map().read_obj::<u64>(GuestAddress(START)).unwrap(), 7);
        drop(demand);
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
            file.fill(&(0..PAGE), read, |_| Ok(())).unwrap().unwrap();
        });
        let filled = file.fill(&(PAGE..2 * PAGE), |_, _| panic!("closed"), |_| Ok(())).unwrap();

        assert_eq!(memory.map().read_obj::<u8>(GuestAddress(START)).unwrap(), 7);
        assert_eq!((filled, file.state(PAGE)), (None, PageState::Absent));
    }
}
