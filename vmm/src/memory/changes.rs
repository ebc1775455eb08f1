// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! File of changes to an [image](super::image) of guest memory: the pages that were written since the
//! image or the last file of changes.
//!
//! The file is a sequence of records, each with a header of two little-endian words:
//!
//! | word | contents |
//! |---|---|
//! | first | offset in the image, a multiple of 4096 |
//! | second | length in bytes, a multiple of 4096; bit 0 is set if all of them are zero |
//!
//! The bytes follow unless they are zero. The file has no holes, because its zeros replace data of the
//! image: a copy that makes holes of zeros, or fills holes, does not change it.

use std::{
    fs::File,
    io::{self, BufRead as _, BufReader, BufWriter, Read as _, Seek as _, Write as _},
    ops::Range,
};

use flate2::Crc;
use granule_types::units::{Bytes, GuestAddress};
use vm_memory::Bytes as _;

use super::{
    GuestMemory, MemoryError, PageMap, PageSet,
    image::{CHUNK, MayContinue, PAGE, chunks, file_offsets, is_zero},
};

/// Bit of the second word of a record without bytes.
const IS_ZERO: u64 = 1;
const HEADER_SIZE: usize = 16;

/// Length and checksum of a file of changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangesData {
    /// Length of the file.
    pub bytes: Bytes,
    /// CRC-32 of the file.
    pub crc: u32,
}

/// Changed parts of guest memory.
#[derive(Debug)]
pub struct Changes<'a> {
    memory: &'a GuestMemory,
    parts: Vec<Part>,
}

/// A changed part, within a region.
#[derive(Debug)]
struct Part {
    /// Offset in the image.
    offset: u64,
    address: GuestAddress,
    length: u64,
    /// Set if the pages exist; others are zero, and a read would populate them.
    exists: bool,
}

impl<'a> Changes<'a> {
    /// Finds the changed parts; `pages` has a set of base pages for each region.
    ///
    /// # Errors
    /// The pages that exist cannot be determined.
    pub fn find(
        memory: &'a GuestMemory,
        pages: &[PageSet],
        page_map: &PageMap,
    ) -> Result<Self, MemoryError> {
        let mut parts = Vec::new();
        for ((start, ram), pages) in file_offsets(memory).zip(pages) {
            let mut add = |range: Range<u64>, exists| {
                let address = GuestAddress(ram.start().0 + range.start);
                let (offset, length) = (start + range.start, range.end - range.start);
                if length > 0 {
                    parts.push(Part { offset, address, length, exists });
                }
            };
            let changed = pages.parts(ram.plan().base_page_size().0, ram.size().0);
            for changed in windows(&changed) {
                let span = changed[0].start..changed[changed.len() - 1].end;
                split_at_data(changed, &ram.data_ranges(page_map, span)?, &mut add);
            }
        }
        Ok(Self { memory, parts })
    }

    /// Returns the size of the pages that exist, which their data does not exceed.
    pub fn existing_bytes(&self) -> Bytes {
        let parts = self.parts.iter().filter(|part| part.exists);
        Bytes(parts.map(|part| part.length).sum())
    }

    /// Writes the parts to an empty file.
    ///
    /// # Errors
    /// The file cannot be written, or `may_continue` returned an error.
    pub fn save(
        &self,
        file: &File,
        may_continue: MayContinue<'_>,
    ) -> Result<ChangesData, MemoryError> {
        self.write(file, may_continue)
            .map_err(|source| MemoryError::Image { operation: "written", source })
    }

    fn write(&self, file: &File, may_continue: MayContinue<'_>) -> io::Result<ChangesData> {
        let mut output =
            Output { file: BufWriter::with_capacity(CHUNK, file), crc: Crc::new(), bytes: 0 };
        let mut buffer = vec![0; CHUNK];
        for part in &self.parts {
            if !part.exists {
                output.header(part.offset, part.length | IS_ZERO)?;
                continue;
            }
            for (at, length) in chunks(0..part.length) {
                may_continue()?;
                let bytes = &mut buffer[..length];
                let address = GuestAddress(part.address.0 + at);
                self.memory.map().read_slice(bytes, address).map_err(io::Error::other)?;
                output.records(part.offset + at, bytes)?;
            }
        }
        output.file.flush()?;
        Ok(ChangesData { bytes: Bytes(output.bytes), crc: output.crc.sum() })
    }
}

/// Divides parts into groups, each with the parts that start within a window. The pages of a group are
/// looked up at once.
fn windows(mut parts: &[Range<u64>]) -> impl Iterator<Item = &[Range<u64>]> {
    const WINDOW: u64 = 32 << 20;
    std::iter::from_fn(move || {
        let end = parts.first()?.start + WINDOW;
        let (window, others) = parts.split_at(parts.partition_point(|part| part.start < end));
        parts = others;
        Some(window)
    })
}

/// Calls `add` with each piece of the parts, and with whether it has data.
fn split_at_data(parts: &[Range<u64>], data: &[Range<u64>], mut add: impl FnMut(Range<u64>, bool)) {
    let mut data = data.iter().peekable();
    for part in parts {
        let mut at = part.start;
        while let Some(found) = data.peek().filter(|found| found.start < part.end) {
            let (start, end) = (found.start.max(at), found.end.min(part.end));
            if start < end {
                add(at..start, false);
                add(start..end, true);
                at = end;
            }
            if found.end > part.end {
                break;
            }
            data.next();
        }
        add(at..part.end, false);
    }
}

/// A file of changes that is written.
struct Output<'a> {
    file: BufWriter<&'a File>,
    crc: Crc,
    bytes: u64,
}

impl Output<'_> {
    /// Writes the records of some pages: one for each sequence that is zero or is not.
    fn records(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let are_zero: Vec<bool> = bytes.chunks(PAGE).map(is_zero).collect();
        let mut start = 0;
        for run in are_zero.chunk_by(|one, next| one == next) {
            let end = start + run.len() * PAGE;
            let (offset, length) = (offset + start as u64, (end - start) as u64);
            match run[0] {
                true => self.header(offset, length | IS_ZERO)?,
                false => {
                    self.header(offset, length)?;
                    self.put(&bytes[start..end])?;
                }
            }
            start = end;
        }
        Ok(())
    }

    fn header(&mut self, offset: u64, length: u64) -> io::Result<()> {
        self.put([offset, length].map(u64::to_le_bytes).as_flattened())
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.crc.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes)
    }
}

/// A record of a file of changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Record {
    /// The part of the image that it replaces.
    pub(super) range: Range<u64>,
    /// Offset of the bytes in the file; `None` for zeros.
    pub(super) bytes: Option<u64>,
}

/// Reads a whole file and returns its records. `size` is that of the image.
///
/// # Errors
/// The file is truncated or damaged, or cannot be read.
pub(super) fn read(file: &File, expected: ChangesData, size: Bytes) -> io::Result<Vec<Record>> {
    let damaged = |what: String| io::Error::other(format!("it is truncated or damaged: {what}"));
    let (Bytes(length), actual) = (expected.bytes, file.metadata()?.len());
    if actual != length {
        return Err(damaged(format!("it has {actual} bytes instead of {length}")));
    }
    let mut input = BufReader::with_capacity(CHUNK, file);
    input.rewind()?;
    let (mut records, mut crc, mut at) = (Vec::<Record>::new(), Crc::new(), 0);
    while at < length {
        let start = at;
        let invalid = || damaged(format!("there is no record at {start}"));
        let mut header = [0; HEADER_SIZE];
        if length - at < HEADER_SIZE as u64 {
            return Err(invalid());
        }
        input.read_exact(&mut header)?;
        crc.update(&header);
        let record = parse_header(header, at + HEADER_SIZE as u64, size);
        let end = records.last().map_or(0, |last| last.range.end);
        let record = record.filter(|record| record.range.start >= end).ok_or_else(invalid)?;
        at += HEADER_SIZE as u64;
        if record.bytes.is_some() {
            at += record.range.end - record.range.start;
            if at > length {
                return Err(invalid());
            }
            skip(&mut input, record.range.end - record.range.start, &mut crc)?;
        }
        records.push(record);
    }
    if crc.sum() != expected.crc {
        let text = format!("its checksum is {:08x} instead of {:08x}", crc.sum(), expected.crc);
        return Err(damaged(text));
    }
    Ok(records)
}

fn parse_header(header: [u8; HEADER_SIZE], bytes: u64, size: Bytes) -> Option<Record> {
    let (words, _) = header.as_chunks();
    let [offset, length] = [words[0], words[1]].map(u64::from_le_bytes);
    let (length, is_zero) = (length & !IS_ZERO, length & IS_ZERO != 0);
    let end = offset.checked_add(length)?;
    let are_pages = [offset, length].iter().all(|number| number.is_multiple_of(PAGE as u64));
    let is_valid = are_pages && length > 0 && end <= size.0;
    is_valid.then_some(Record { range: offset..end, bytes: (!is_zero).then_some(bytes) })
}

/// Skips bytes, which the checksum covers.
fn skip(input: &mut BufReader<&File>, mut length: u64, crc: &mut Crc) -> io::Result<()> {
    while length > 0 {
        let bytes = input.fill_buf()?;
        let count = usize::try_from(length).unwrap_or(usize::MAX).min(bytes.len());
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        crc.update(&bytes[..count]);
        input.consume(count);
        length -= count as u64;
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod testing {
    use std::os::unix::fs::FileExt as _;

    use super::*;

    /// Returns a file of changes: for each, its page and the byte that fills the page.
    pub fn changes_file(pages: &[(u64, u8)]) -> (File, ChangesData) {
        let file = tempfile::tempfile().unwrap();
        let mut output = Output { file: BufWriter::new(&file), crc: Crc::new(), bytes: 0 };
        for (page, byte) in pages {
            output.records(page * PAGE as u64, &[*byte; PAGE]).unwrap();
        }
        output.file.flush().unwrap();
        let data = ChangesData { bytes: Bytes(output.bytes), crc: output.crc.sum() };
        drop(output);
        (file, data)
    }

    /// Changes a byte of a file.
    pub fn damage(file: &File, at: u64) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    }
}

#[cfg(test)]
mod tests {
    use super::{
        testing::{changes_file, damage},
        *,
    };
    use crate::memory::{BackingPlan, GuestRam, HostPages, RamOptions};

    const START: u64 = 0x4000_0000;
    const SIZE: Bytes = Bytes::mib(4);

    /// Returns memory of two regions.
    fn memory() -> GuestMemory {
        let host = HostPages::of_this_host().unwrap();
        let plan = BackingPlan::new("anonymous".parse().unwrap(), &host).unwrap();
        let ram = |start| {
            let options = RamOptions::default();
            GuestRam::new(plan.clone(), &host, GuestAddress(start), SIZE, options).unwrap()
        };
        GuestMemory::new(vec![ram(START), ram(START + SIZE.0)]).unwrap()
    }

    fn resident(memory: &GuestMemory) -> u64 {
        let regions = memory.regions().iter();
        let resident = regions.map(|ram| ram.resident_pages().unwrap().resident_bytes);
        resident.map(|sizes| sizes.values().sum::<u64>()).sum()
    }

    #[test]
    fn changed_pages_are_written_and_zeros_and_absent_pages_have_no_bytes() {
        let memory = memory();
        let page = PAGE as u64;
        for (number, byte) in [(1, 5_u8), (2, 0), (3, 7)] {
            memory.map().write_obj(byte, GuestAddress(START + number * page)).unwrap();
        }
        memory.map().write_obj(9_u8, GuestAddress(START + SIZE.0)).unwrap();
        let before = resident(&memory);
        let mut pages = [PageSet::default(), PageSet::default()];
        pages[0].add(&[0b11_1110]);
        pages[1].add(&[0b1]);
        let file = tempfile::tempfile().unwrap();

        let changes = Changes::find(&memory, &pages, &PageMap::open().unwrap()).unwrap();
        let data = changes.save(&file, &|| Ok(())).unwrap();
        let records = read(&file, data, Bytes(2 * SIZE.0)).unwrap();

        let record = |pages: Range<u64>, bytes| Record {
            range: pages.start * page..pages.end * page,
            bytes,
        };
        let second = SIZE.0 / page;
        assert_eq!(
            records,
            [
                record(1..2, Some(16)),
                record(2..3, None),
                record(3..4, Some(48 + page)),
                record(4..6, None),
                record(second..second + 1, Some(80 + 2 * page)),
            ]
        );
        assert_eq!(data.bytes, Bytes(80 + 3 * page));
        assert_eq!(changes.existing_bytes(), Bytes(4 * page));
        assert_eq!(resident(&memory), before);
    }

    #[test]
    fn parts_are_split_where_data_begins_and_ends() {
        let mut found = Vec::new();
        let data = [0..2, 3..6, 8..12, 14..15];

        split_at_data(&[1..4, 5..7, 9..11, 11..16], &data, |piece, has_data| {
            if !piece.is_empty() {
                found.push((piece, has_data));
            }
        });

        let expected = [
            (1..2, true),
            (2..3, false),
            (3..4, true),
            (5..6, true),
            (6..7, false),
            (9..11, true),
            (11..12, true),
            (12..14, false),
            (14..15, true),
            (15..16, false),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn parts_far_from_each_other_are_in_different_windows() {
        let parts = [0..1, 5..9, 40 << 20..90 << 20, 91 << 20..92 << 20];

        let lengths: Vec<_> = windows(&parts).map(<[_]>::len).collect();

        assert_eq!(lengths, [2, 1, 1]);
        assert_eq!(windows(&[]).count(), 0);
    }

    #[test]
    fn a_truncated_or_damaged_file_is_refused() {
        let expect_damage = |what: &str, change: &dyn Fn(&File), size: Bytes| {
            let (file, data) = changes_file(&[(1, 5), (2, 0), (3, 7)]);
            change(&file);
            let error = read(&file, data, size).unwrap_err().to_string();
            assert!(error.contains("truncated or damaged"), "{what}: {error}");
        };

        expect_damage("length", &|file| file.set_len(100).unwrap(), SIZE);
        expect_damage("data", &|file| damage(file, 500), SIZE);
        expect_damage("offset", &|file| damage(file, 1), SIZE);
        expect_damage("length of a record", &|file| damage(file, 9), SIZE);
        expect_damage("length of the last record", &|file| damage(file, 4096 + 43), SIZE);
        expect_damage("beyond the image", &|_| {}, Bytes(3 * PAGE as u64));
        for pages in [[(3, 5), (1, 0)], [(1, 5), (1, 5)]] {
            let (file, data) = changes_file(&pages);
            let error = read(&file, data, SIZE).unwrap_err().to_string();
            assert!(error.contains("there is no record"), "{error}");
        }
    }
}
