// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Pages of this process: which exist, and transparent huge pages smaller than a block, which
//! `/proc/self/smaps` reports as base pages.
//!
//! `/proc/self/pagemap` (admin-guide/mm/pagemap.rst) has a word for each base page of the address space: bit
//! 63 indicates a present page, bit 62 a page in swap, and the lower 55 bits are its frame number, which the
//! kernel shows only to processes with CAP_SYS_ADMIN. A page of a size is an aligned range of present base
//! pages whose frames are aligned and contiguous. Linux 6.7 and newer find the parts of a range that have
//! pages (`PAGEMAP_SCAN`) without a word for each page that has never existed.

#![allow(missing_docs, reason = "the ioctl macro defines undocumented functions")]

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt};

use granule_types::units::{Bytes, HostVirtAddr};

use vmm_sys_util::{ioctl::ioctl_with_mut_ref, ioctl_iowr_nr};

use super::{MemoryError, parts};

const PATH: &str = "/proc/self/pagemap";
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const FRAME: u64 = (1 << 55) - 1;
const WORD: usize = size_of::<u64>();
/// Words that are read at once, a multiple of those of a page.
const WORDS: usize = 1 << 13;

/// Parts that one call of `PAGEMAP_SCAN` returns.
const SCANNED_PARTS: usize = 512;
/// `PAGE_IS_PRESENT` and `PAGE_IS_SWAPPED`.
const SCANNED_PAGES: u64 = 1 << 3 | 1 << 4;

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ScannedPart {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct ScanRequest {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    parts: u64,
    parts_len: u64,
    max_pages: u64,
    inverted: u64,
    all_of: u64,
    any_of: u64,
    returned: u64,
}

ioctl_iowr_nr!(PAGEMAP_SCAN, b'f' as u32, 16, ScanRequest);

/// Returns the bytes of a range that are in pages of a size, or `None` if the kernel hides the frames,
/// or the file from a process that has changed its user. The size is a power of two, at most that of a
/// block.
///
/// # Errors
/// The file cannot be read.
pub fn bytes_in_pages(
    range: &Range<HostVirtAddr>,
    base: Bytes,
    size: Bytes,
) -> Result<Option<Bytes>, MemoryError> {
    let words_of_page = usize::try_from(size.0 / base.0).unwrap_or(usize::MAX);
    let (mut pages, mut is_hidden) = (0, false);
    let map = match PageMap::open() {
        // The file is that of the user who started the process; its frames would be hidden, too.
        Err(MemoryError::Read { source, .. })
            if source.kind() == io::ErrorKind::PermissionDenied =>
        {
            return Ok(None);
        }
        opened => opened?,
    };
    for part in map.existing_pages(range, base)? {
        let first = (range.start.0 + part.start).next_multiple_of(size.0) / base.0;
        let end = (range.start.0 + part.end) / size.0 * size.0 / base.0;
        map.read_words(first..end, |_, entries| {
            is_hidden |= entries.iter().any(|entry| entry & PRESENT != 0 && entry & FRAME == 0);
            let whole = entries.chunks_exact(words_of_page).filter(|entries| is_one_page(entries));
            pages += whole.count() as u64;
        })?;
        if is_hidden {
            break;
        }
    }
    Ok((!is_hidden).then_some(Bytes(pages * size.0)))
}

/// The page map of this process. A process that has changed its user can read one that it has opened
/// before, and not open another one.
#[derive(Debug)]
pub struct PageMap(File);

impl PageMap {
    /// Opens the page map.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn open() -> Result<Self, MemoryError> {
        File::open(PATH).map(Self).map_err(unreadable)
    }

    /// Returns the parts of a range that have pages, present or in swap, as offsets from its start.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn existing_pages(
        &self,
        range: &Range<HostVirtAddr>,
        base: Bytes,
    ) -> Result<Vec<Range<u64>>, MemoryError> {
        match self.scan(range) {
            // Linux 6.6 and older.
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                self.existing_words(range, base)
            }
            scanned => scanned.map_err(unreadable),
        }
    }

    /// Returns the parts of a range that have pages by `PAGEMAP_SCAN`.
    fn scan(&self, range: &Range<HostVirtAddr>) -> io::Result<Vec<Range<u64>>> {
        let mut found = [ScannedPart::default(); SCANNED_PARTS];
        let mut all = Vec::new();
        let mut start = range.start.0;
        while start < range.end.0 {
            let mut request = ScanRequest {
                size: size_of::<ScanRequest>() as u64,
                start,
                end: range.end.0,
                parts: found.as_mut_ptr().expose_provenance() as u64,
                parts_len: found.len() as u64,
                any_of: SCANNED_PAGES,
                returned: SCANNED_PAGES,
                ..ScanRequest::default()
            };
            // SAFETY: the kernel writes this request, and to `found` at most as many parts as it has.
            let count = unsafe { ioctl_with_mut_ref(&self.0, PAGEMAP_SCAN(), &mut request) };
            let Ok(count) = usize::try_from(count) else {
                return Err(io::Error::last_os_error());
            };
            for part in found.iter().take(count) {
                parts::push(&mut all, part.start - range.start.0..part.end - range.start.0);
            }
            start = request.walk_end;
        }
        Ok(all)
    }

    /// Returns the parts of a range that have pages by the words of all of its pages.
    fn existing_words(
        &self,
        range: &Range<HostVirtAddr>,
        base: Bytes,
    ) -> Result<Vec<Range<u64>>, MemoryError> {
        let first = range.start.0 / base.0;
        let mut parts: Vec<Range<u64>> = Vec::new();
        self.read_words(first..range.end.0 / base.0, |word, entries| {
            for (page, entry) in (word - first..).zip(entries) {
                if entry & (PRESENT | SWAPPED) != 0 {
                    let start = page * base.0;
                    parts::push(&mut parts, start..start + base.0);
                }
            }
        })?;
        Ok(parts)
    }

    /// Reads the words of a range of pages, and passes them on in parts, each with its first page.
    fn read_words(
        &self,
        pages: Range<u64>,
        mut use_words: impl FnMut(u64, &[u64]),
    ) -> Result<(), MemoryError> {
        let count_from =
            |word: u64| usize::try_from(pages.end.saturating_sub(word)).unwrap_or(WORDS).min(WORDS);
        let mut buffer = vec![0; count_from(pages.start) * WORD];
        for word in pages.clone().step_by(WORDS) {
            let count = count_from(word);
            let bytes = &mut buffer[..count * WORD];
            self.0.read_exact_at(bytes, word * WORD as u64).map_err(unreadable)?;
            let (words, _) = bytes.as_chunks();
            let entries: Vec<u64> = words.iter().map(|word| u64::from_ne_bytes(*word)).collect();
            use_words(word, &entries);
        }
        Ok(())
    }
}

fn unreadable(source: io::Error) -> MemoryError {
    MemoryError::Read { path: PATH.into(), source }
}

/// Returns whether words of the page map are those of one page.
fn is_one_page(entries: &[u64]) -> bool {
    let Some(first) = entries.first().filter(|first| **first & PRESENT != 0) else { return false };
    let first = first & FRAME;
    first.is_multiple_of(entries.len() as u64)
        && (first..).zip(entries).all(|(frame, entry)| entry & (PRESENT | FRAME) == PRESENT | frame)
}

#[cfg(test)]
mod tests {
    use granule_types::{testing::skip, units::GuestAddress};

    use super::*;
    use crate::memory::{BackingPlan, HostPages, mapping::Mapping};

    #[test]
    fn a_scan_finds_the_pages_that_have_words() {
        let host = HostPages::of_this_host().unwrap();
        let plan = BackingPlan::new("anonymous".parse().unwrap(), &host).unwrap();
        let base = host.base_page_size;
        let size = Bytes(4096 * base.0);
        let memory = Mapping::new(plan, size, GuestAddress(0), base, None).unwrap();
        let start = memory.as_ptr().addr() as u64;
        let page = usize::try_from(base.0).unwrap();
        // More parts than one call returns.
        for offset in (0..memory.len()).step_by(3 * page).chain([4 * page]) {
            let page = memory.as_ptr().wrapping_add(offset);
            // SAFETY: the offset is in the memory.
            unsafe { page.write_volatile(1) };
        }
        let map = PageMap::open().unwrap();
        let range = HostVirtAddr(start)..HostVirtAddr(start + size.0);

        let scanned = match map.scan(&range) {
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                return skip("the kernel has no PAGEMAP_SCAN: that takes Linux 6.7");
            }
            scanned => scanned.unwrap(),
        };

        assert!(scanned.len() > SCANNED_PARTS);
        assert_eq!(scanned[1].end - scanned[1].start, 2 * base.0);
        assert_eq!(scanned, map.existing_words(&range, base).unwrap());
    }

    #[test]
    fn a_page_has_aligned_and_contiguous_frames() {
        let present = |frames: [u64; 4]| frames.map(|frame| PRESENT | frame);

        assert!(is_one_page(&present([8, 9, 10, 11])));
        assert!(!is_one_page(&present([9, 10, 11, 12])));
        assert!(!is_one_page(&present([8, 9, 11, 10])));
        assert!(!is_one_page(&[PRESENT | 8, PRESENT | 9, 10, PRESENT | 11]));
        assert!(!is_one_page(&[0; 4]));
    }
}
