// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Image of guest memory: a sparse file with the contents of all regions, one behind the other.
//!
//! Only pages that exist are read, because a read would populate others, and only those of them that
//! are not zero are written. The checksum covers the written pages with their offsets, so it does not
//! depend on where the file system has holes.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt as _};

use flate2::Crc;
use granule_types::units::{Bytes, GuestAddress};
use rustix::{fs::SeekFrom, io::Errno};
use vm_memory::Bytes as _;

use super::{GuestMemory, GuestRam, MemoryError, PageMap, parts, threads::in_threads};

/// Granule in which zeros are recognised. Offsets in the file are multiples of it.
pub(super) const PAGE: usize = 4096;
/// Bytes that are copied at once.
pub(super) const CHUNK: usize = 1 << 20;

/// Amount and checksum of the data in an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageData {
    /// Bytes of the pages that are not zero.
    pub bytes: Bytes,
    /// CRC-32 of these pages, each preceded by its offset (64 bits, little-endian).
    pub crc: u32,
}

/// Function that is called before each chunk is written, and whose error ends the writing.
pub type MayContinue<'a> = &'a dyn Fn() -> io::Result<()>;

/// Writes the contents of all regions to an empty file.
///
/// # Errors
/// The file cannot be written, `may_continue` returned an error, or the pages that exist cannot be
/// determined.
pub fn save(
    memory: &GuestMemory,
    page_map: &PageMap,
    file: &File,
    may_continue: MayContinue<'_>,
) -> Result<ImageData, MemoryError> {
    let failed = |source| MemoryError::Image { operation: "written", source };
    file.set_len(memory.size().0).map_err(failed)?;
    let mut pages = Pages::default();
    let mut buffer = vec![0; CHUNK];
    for (start, ram) in file_offsets(memory) {
        for part in ram.data_ranges(page_map, 0..ram.size().0)? {
            for (offset, length) in chunks(part) {
                may_continue().map_err(failed)?;
                let bytes = &mut buffer[..length];
                memory
                    .map()
                    .read_slice(bytes, GuestAddress(ram.start().0 + offset))
                    .map_err(|error| failed(io::Error::other(error)))?;
                for data in pages.add(start + offset, bytes) {
                    file.write_all_at(&bytes[data.clone()], start + offset + data.start as u64)
                        .map_err(failed)?;
                }
            }
        }
    }
    Ok(pages.data())
}

/// Copies an image to memory that holds zeros, by up to `threads` threads.
///
/// # Errors
/// The file cannot be read, or has another size.
pub fn load(memory: &GuestMemory, file: &File, threads: usize) -> Result<ImageData, MemoryError> {
    let failed = |source| MemoryError::Image { operation: "read", source };
    check_size(memory, file)?;
    let mut parts = Vec::new();
    for (start, ram) in file_offsets(memory) {
        for data in file_data(file, start..start + ram.size().0).map_err(failed)? {
            let address = |offset| GuestAddress(ram.start().0 + offset - start);
            parts.extend(chunks(data).map(|(offset, length)| (address(offset), offset, length)));
        }
    }
    let of_thread = parts.len().div_ceil(threads.max(1)).max(1);
    let loaded = in_threads(parts.chunks(of_thread), |parts| load_parts(memory, file, parts));
    let mut pages = Pages::default();
    loaded.map_err(failed)?.iter().for_each(|next| pages.append(next));
    Ok(pages.data())
}

/// Copies parts of an image: each has its guest address, its offset in the file and its length.
fn load_parts(
    memory: &GuestMemory,
    file: &File,
    parts: &[(GuestAddress, u64, usize)],
) -> io::Result<Pages> {
    let mut pages = Pages::default();
    let mut buffer = vec![0; CHUNK];
    for &(address, offset, length) in parts {
        let bytes = &mut buffer[..length];
        file.read_exact_at(bytes, offset)?;
        for data in pages.add(offset, bytes) {
            let address = GuestAddress(address.0 + data.start as u64);
            memory.map().write_slice(&bytes[data], address).map_err(io::Error::other)?;
        }
    }
    Ok(pages)
}

/// Checks that a file has the size of an image of this memory.
///
/// # Errors
/// It has not.
pub fn check_size(memory: &GuestMemory, file: &File) -> Result<(), MemoryError> {
    let failed = |source| MemoryError::Image { operation: "read", source };
    let (expected, actual) = (memory.size(), Bytes(file.metadata().map_err(failed)?.len()));
    if actual != expected {
        let text = format!("it has {} bytes instead of {}", actual.0, expected.0);
        return Err(failed(io::Error::other(text)));
    }
    Ok(())
}

/// Returns the offset of each region in the file.
pub fn file_offsets(memory: &GuestMemory) -> impl Iterator<Item = (u64, &GuestRam)> {
    memory.regions().iter().scan(0, |end, ram| {
        let start = *end;
        *end += ram.size().0;
        Some((start, ram.as_ref()))
    })
}

/// Returns the whole pages of a range of a file that are not holes.
pub(super) fn file_data(file: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let mut parts = Vec::new();
    let mut at = range.start;
    while at < range.end {
        at = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            // No data follows.
            Err(Errno::NXIO) => break,
            found => found?,
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(at))?.min(range.end);
        if at < end {
            parts.push(at..end);
        }
        at = at.max(end);
    }
    Ok(whole_pages(parts))
}

/// Extends parts to whole pages. Some file systems have blocks, and so holes, below a page.
fn whole_pages(parts: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let page = PAGE as u64;
    let rounded = |part: Range<u64>| part.start / page * page..part.end.next_multiple_of(page);
    parts::join(parts.into_iter().map(rounded).collect())
}

/// Splits a range, whose ends are multiples of [`PAGE`], into offsets and lengths of chunks.
pub(super) fn chunks(Range { start, end }: Range<u64>) -> impl Iterator<Item = (u64, usize)> {
    (start..end)
        .step_by(CHUNK)
        .map(move |offset| (offset, usize::try_from(end - offset).unwrap_or(CHUNK).min(CHUNK)))
}

/// Compares 64 bytes at a time by words of 16, which need no optimisation to be fast: a hugetlb page that the
/// guest has hardly used consists of zeros, and is read while the guest is stopped.
pub(super) fn is_zero(page: &[u8]) -> bool {
    let (blocks, rest) = page.as_chunks::<64>();
    let is_zero = |block: &[u8; 64]| {
        let words = block.as_chunks::<16>().0.iter().map(|word| u128::from_ne_bytes(*word));
        words.fold(0, |bits, word| bits | word) == 0
    };
    blocks.iter().all(is_zero) && rest.iter().all(|byte| *byte == 0)
}

/// Sum of the pages that are not zero.
#[derive(Default)]
struct Pages {
    count: u64,
    crc: Crc,
}

impl Pages {
    /// Adds the bytes at an offset. Returns the parts that are not zero.
    fn add(&mut self, offset: u64, bytes: &[u8]) -> Vec<Range<usize>> {
        let mut parts: Vec<Range<usize>> = Vec::new();
        for (index, page) in bytes.chunks(PAGE).enumerate() {
            if is_zero(page) {
                continue;
            }
            let start = index * PAGE;
            self.count += 1;
            self.crc.update(&(offset + start as u64).to_le_bytes());
            self.crc.update(page);
            parts::push(&mut parts, start..start + page.len());
        }
        parts
    }

    /// Adds pages that follow these.
    fn append(&mut self, next: &Self) {
        self.count += next.count;
        self.crc.combine(&next.crc);
    }

    fn data(&self) -> ImageData {
        ImageData { bytes: Bytes(self.count * PAGE as u64), crc: self.crc.sum() }
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, sync::Arc};

    use granule_types::testing::skip;

    use super::*;
    use crate::memory::{BackingPlan, HostPages, RamOptions};

    const START: GuestAddress = GuestAddress(0x4000_0000);

    fn page_map() -> PageMap {
        PageMap::open().unwrap()
    }

    /// Returns memory of 8M, or skips the backing if the host lacks it.
    fn memory(backing: &str) -> Option<GuestMemory> {
        let host = HostPages::of_this_host().unwrap();
        let plan = BackingPlan::new(backing.parse().unwrap(), &host).and_then(|plan| {
            GuestRam::new(plan, &host, START, Bytes::mib(8), RamOptions::default())
        });
        match plan {
            Ok(ram) => Some(GuestMemory::new(vec![ram]).unwrap()),
            Err(error) => {
                skip(format_args!("{backing}: {error}"));
                None
            }
        }
    }

    #[test]
    fn a_page_with_one_byte_is_not_zero() {
        let mut page = vec![0; PAGE + 1];
        assert!(is_zero(&page) && is_zero(&[]));

        for at in 0..page.len() {
            page[at] = 0x80;
            assert!(!is_zero(&page), "{at}");
            page[at] = 0;
        }
    }

    #[test]
    fn pages_whose_blocks_are_apart_in_the_file_are_listed_once() {
        let blocks = vec![0x0..0x400, 0x800..0xc00, 0x2200..0x2600, 0x2f00..0x3800];

        assert_eq!(whole_pages(blocks), [0x0..0x1000, 0x2000..0x4000]);
    }

    #[test]
    fn an_image_has_the_pages_that_are_not_zero_on_each_backing() {
        for backing in ["anonymous", "anonymous_thp", "anonymous_hugetlb_2mb", "shmem"] {
            let Some(saved) = memory(backing) else { continue };
            for (offset, value) in
                [(0x1000, 7_u64), (0x20_2008, 9), (0x40_0000, 11), (0x7f_f000, 1)]
            {
                saved.map().write_obj(value, GuestAddress(START.0 + offset)).unwrap();
            }
            let file = tempfile::tempfile().unwrap();
            let mut before = vec![0; 8 << 20];
            saved.map().read_slice(&mut before, START).unwrap();

            let written = save(&saved, &page_map(), &file, &|| Ok(())).unwrap();

            // Four pages in four chunks.
            for threads in [1, 3, 8] {
                let Some(restored) = memory(backing) else { continue };
                let read = load(&restored, &file, threads).unwrap();
                assert_eq!((written.bytes, written), (Bytes(4 * PAGE as u64), read), "{backing}");
                let mut after = vec![0; 8 << 20];
                restored.map().read_slice(&mut after, START).unwrap();
                assert!(before == after, "{backing}, {threads} threads");
            }
        }
    }

    #[test]
    fn a_writing_that_may_not_continue_ends_before_the_next_chunk() {
        let memory = memory("anonymous").unwrap();
        for chunk in 0..4 {
            let at = GuestAddress(START.0 + chunk * 2 * CHUNK as u64);
            memory.map().write_obj(1_u8, at).unwrap();
        }
        let file = tempfile::tempfile().unwrap();
        let calls = Cell::new(0);
        let may_continue = || {
            calls.set(calls.get() + 1);
            if calls.get() < 3 { Ok(()) } else { Err(io::Error::other("asked to end")) }
        };

        let error = save(&memory, &page_map(), &file, &may_continue).unwrap_err();

        assert_eq!(std::error::Error::source(&error).unwrap().to_string(), "asked to end");
        let data = file_data(&file, 0..8 << 20).unwrap();
        assert!(data.last().unwrap().end <= 3 * CHUNK as u64, "{data:?}");
    }

    #[test]
    fn pages_that_do_not_exist_are_not_populated() {
        let memory = memory("anonymous").unwrap();
        memory.map().write_obj(1_u8, START).unwrap();

        save(&memory, &page_map(), &tempfile::tempfile().unwrap(), &|| Ok(())).unwrap();

        let resident = memory.regions()[0].resident_pages().unwrap().resident_bytes;
        assert_eq!(resident.values().sum::<u64>(), PAGE as u64);
    }

    #[test]
    fn a_file_of_another_size_or_content_is_recognised() {
        let memory = memory("anonymous").unwrap();
        memory.map().write_obj(1_u8, START).unwrap();
        let file = tempfile::tempfile().unwrap();
        let written = save(&memory, &page_map(), &file, &|| Ok(())).unwrap();

        file.write_all_at(&[5], 0x3000).unwrap();
        let changed = load(&memory, &file, 2).unwrap();
        file.set_len(4096).unwrap();
        let error = load(&memory, &file, 2).unwrap_err();

        assert_ne!(written.crc, changed.crc);
        let text = std::error::Error::source(&error).unwrap().to_string();
        assert!(text.contains("4096 bytes instead of 8388608"), "{text}");
    }

    fn mapped_memory(file: &Arc<File>) -> GuestMemory {
        let host = HostPages::of_this_host().unwrap();
        let plan = BackingPlan::new("anonymous".parse().unwrap(), &host).unwrap();
        let image = (Arc::clone(file), 0);
        let ram = GuestRam::mapped(plan, START, Bytes::mib(8), RamOptions::default(), image);
        GuestMemory::new(vec![ram.unwrap()]).unwrap()
    }

    #[test]
    fn memory_mapped_from_an_image_has_its_contents_and_leaves_the_file_as_it_is() {
        let saved = memory("anonymous").unwrap();
        saved.map().write_obj(3_u64, GuestAddress(START.0 + 0x5000)).unwrap();
        let file = Arc::new(tempfile::tempfile().unwrap());
        let written = save(&saved, &page_map(), &file, &|| Ok(())).unwrap();

        let mapped = mapped_memory(&file);
        let value: u64 = mapped.map().read_obj(GuestAddress(START.0 + 0x5000)).unwrap();
        mapped.map().write_obj(4_u64, START).unwrap();

        assert_eq!(value, 3);
        assert_eq!(load(&saved, &file, 2).unwrap(), written);
        // An image of mapped memory also has pages that were not touched.
        let file = tempfile::tempfile().unwrap();
        let again = save(&mapped, &page_map(), &file, &|| Ok(())).unwrap();
        assert_eq!(again.bytes, Bytes(2 * PAGE as u64));
    }

    #[test]
    fn holes_of_a_mapped_image_are_not_read_and_a_shorter_one_is_refused() {
        let saved = memory("anonymous").unwrap();
        for offset in [0x5000, 0x70_0000] {
            saved.map().write_obj(3_u64, GuestAddress(START.0 + offset)).unwrap();
        }
        let image = Arc::new(tempfile::tempfile().unwrap());
        save(&saved, &page_map(), &image, &|| Ok(())).unwrap();
        let mapped = mapped_memory(&image);
        mapped.map().write_obj(4_u64, START).unwrap();
        let file = tempfile::tempfile().unwrap();

        let again = save(&mapped, &page_map(), &file, &|| Ok(())).unwrap();
        let resident = mapped.regions()[0].resident_pages().unwrap().resident_bytes;
        image.set_len(4 << 20).unwrap();
        let error = save(&mapped, &page_map(), &file, &|| Ok(())).unwrap_err();

        assert_eq!(again.bytes, Bytes(3 * PAGE as u64));
        assert!(resident.values().sum::<u64>() < 1 << 20, "{resident:?}");
        let error = granule_types::error_text(&error);
        assert!(error.contains("shorter, 4M instead of at least 8M"), "{error}");
    }
}
