// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Contents of guest memory in layers: an [image](super::image), and files of
//! [changes] to it, each of which hides what is below.
//!
//! An index in memory maps each changed part to the newest file that has it. Therefore a page of any
//! size can be read at once, and a hugetlb page has the bytes of several layers.

use std::{collections::BTreeMap, fs::File, io, ops::Range, os::unix::fs::FileExt as _, sync::Arc};

use granule_types::units::{Bytes, GuestAddress};
use vm_memory::Bytes as _;

use super::{
    GuestMemory, MemoryError,
    changes::{self, ChangesData},
    image::{chunks, file_data, file_offsets},
    parts,
};

/// An image, and changes to it.
#[derive(Debug)]
pub struct LayeredImage {
    base: Arc<File>,
    changes: Vec<Arc<File>>,
    /// Changed parts by their first offset; no two overlap.
    parts: BTreeMap<u64, Part>,
}

/// A changed part.
#[derive(Debug, Clone, Copy)]
struct Part {
    end: u64,
    source: Source,
}

/// Source of the bytes of a part.
#[derive(Debug, Clone, Copy)]
enum Source {
    Zeros,
    /// Index of the file of changes, and the offset in it.
    File(usize, u64),
}

impl Source {
    /// Returns the source of the bytes after the first `length`.
    const fn skip(self, length: u64) -> Self {
        match self {
            Self::Zeros => Self::Zeros,
            Self::File(index, offset) => Self::File(index, offset + length),
        }
    }
}

impl From<Arc<File>> for LayeredImage {
    /// Returns an image without changes.
    fn from(base: Arc<File>) -> Self {
        Self { base, changes: Vec::new(), parts: BTreeMap::new() }
    }
}

impl LayeredImage {
    /// Adds a file of changes above the others, which is read to verify it. `size` is that of the
    /// image.
    ///
    /// # Errors
    /// The file is truncated or damaged, or cannot be read.
    pub fn add(&mut self, file: Arc<File>, data: ChangesData, size: Bytes) -> io::Result<()> {
        let index = self.changes.len();
        for record in changes::read(&file, data, size)? {
            let source = record.bytes.map_or(Source::Zeros, |at| Source::File(index, at));
            self.insert(record.range, source);
        }
        self.changes.push(file);
        Ok(())
    }

    /// Inserts a part, which replaces what overlaps it.
    fn insert(&mut self, range: Range<u64>, source: Source) {
        let before = self.parts.range(..range.start).next_back().map(|(at, part)| (*at, *part));
        if let Some((at, part)) = before.filter(|(_, part)| part.end > range.start) {
            self.parts.insert(at, Part { end: range.start, ..part });
            self.insert_rest(at, part, range.end);
        }
        while let Some((at, part)) = self.parts.range(range.clone()).next() {
            let (at, part) = (*at, *part);
            self.parts.remove(&at);
            self.insert_rest(at, part, range.end);
        }
        self.parts.insert(range.start, Part { end: range.end, source });
    }

    /// Inserts what a part that begins at `at` has after `start`.
    fn insert_rest(&mut self, at: u64, part: Part, start: u64) {
        if part.end > start {
            let source = part.source.skip(start - at);
            self.parts.insert(start, Part { source, ..part });
        }
    }

    /// Returns the changed parts of a range, in ascending order.
    fn parts_in(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, Source)> {
        let before = self.parts.range(..range.start).next_back();
        before.into_iter().chain(self.parts.range(range.clone())).filter_map(move |(at, part)| {
            let (start, end) = ((*at).max(range.start), part.end.min(range.end));
            (start < end).then(|| (start..end, part.source.skip(start - at)))
        })
    }

    /// Reads the bytes at an offset.
    pub(super) fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.base.read_exact_at(buffer, offset)?;
        for (part, source) in self.parts_in(offset..offset + buffer.len() as u64) {
            let at = |end: u64| usize::try_from(end - offset).unwrap_or(usize::MAX);
            self.read_part(&mut buffer[at(part.start)..at(part.end)], source)?;
        }
        Ok(())
    }

    fn read_part(&self, bytes: &mut [u8], source: Source) -> io::Result<()> {
        match source {
            Source::Zeros => bytes.fill(0),
            Source::File(index, offset) => self.changes[index].read_exact_at(bytes, offset)?,
        }
        Ok(())
    }

    /// Returns the parts of a range that may have other bytes than zeros.
    pub(super) fn data(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let mut parts = file_data(&self.base, range.clone())?;
        let changed = self.parts_in(range).filter(|(_, source)| matches!(source, Source::File(..)));
        parts.extend(changed.map(|(part, _)| part));
        Ok(parts::join(parts))
    }

    /// Writes the changes to memory that has the contents of the image.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn apply_changes(&self, memory: &GuestMemory) -> Result<(), MemoryError> {
        let failed = |source| MemoryError::Image { operation: "read", source };
        let mut buffer = Vec::new();
        for (start, ram) in file_offsets(memory) {
            for (part, source) in self.parts_in(start..start + ram.size().0) {
                // Only data of the image has to be cleared; a write would populate other pages.
                let written = match source {
                    Source::Zeros => file_data(&self.base, part.clone()).map_err(failed)?,
                    Source::File(..) => vec![part.clone()],
                };
                for (offset, length) in written.into_iter().flat_map(chunks) {
                    buffer.resize(length, 0);
                    self.read_part(&mut buffer, source.skip(offset - part.start))
                        .map_err(failed)?;
                    let address = GuestAddress(ram.start().0 + offset - start);
                    memory
                        .map()
                        .write_slice(&buffer, address)
                        .map_err(|error| failed(io::Error::other(error)))?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::memory::{
        BackingPlan, GuestRam, HostPages, RamOptions, changes::testing::changes_file,
    };

    const PAGE: usize = 4096;
    const PAGES: usize = 64;
    const SIZE: Bytes = Bytes((PAGE * PAGES) as u64);

    /// Returns an image whose pages have these bytes; a page of zeros is a hole.
    fn image(pages: &[u8]) -> LayeredImage {
        let file = tempfile::tempfile().unwrap();
        file.set_len(SIZE.0).unwrap();
        for (page, byte) in pages.iter().enumerate().filter(|(_, byte)| **byte != 0) {
            file.write_all_at(&[*byte; PAGE], (page * PAGE) as u64).unwrap();
        }
        Arc::new(file).into()
    }

    fn add(image: &mut LayeredImage, pages: &[(u64, u8)]) {
        let (file, data) = changes_file(pages);
        image.add(Arc::new(file), data, SIZE).unwrap();
    }

    fn first_bytes(image: &LayeredImage) -> Vec<u8> {
        let mut bytes = vec![0; PAGE * PAGES];
        image.read_exact_at(&mut bytes, 0).unwrap();
        bytes.into_iter().step_by(PAGE).collect()
    }

    #[test]
    fn a_large_page_has_the_bytes_of_all_layers() {
        let mut image = image(&[1, 2, 3, 4, 5]);

        add(&mut image, &[(1, 12), (2, 0), (4, 14), (8, 15)]);
        add(&mut image, &[(2, 23), (4, 0)]);

        assert_eq!(first_bytes(&image)[..10], [1, 12, 23, 4, 0, 0, 0, 0, 15, 0]);
        let page = PAGE as u64;
        assert_eq!(image.data(0..SIZE.0).unwrap(), [0..5 * page, 8 * page..9 * page]);
        assert_eq!(image.data(5 * page..8 * page).unwrap(), []);
    }

    #[test]
    fn changes_are_written_to_memory_and_zeros_only_over_data() {
        let mut image = image(&[1, 2, 3]);
        add(&mut image, &[(1, 0), (2, 9), (5, 0), (7, 8)]);
        let host = HostPages::of_this_host().unwrap();
        let plan = BackingPlan::new("anonymous".parse().unwrap(), &host).unwrap();
        let start = GuestAddress(0x4000_0000);
        let ram = GuestRam::new(plan, &host, start, SIZE, RamOptions::default()).unwrap();
        let memory = GuestMemory::new(vec![ram]).unwrap();
        for page in 0..3 {
            memory.map().write_obj(7_u8, GuestAddress(start.0 + page * PAGE as u64)).unwrap();
        }

        image.apply_changes(&memory).unwrap();

        let resident = memory.regions()[0].resident_pages().unwrap().resident_bytes;
        assert_eq!(resident.values().sum::<u64>(), 4 * PAGE as u64);
        let byte = |page| {
            let address = GuestAddress(start.0 + page * PAGE as u64);
            memory.map().read_obj::<u8>(address).unwrap()
        };
        assert_eq!([0, 1, 2, 7].map(byte), [7, 0, 9, 8]);
    }

    proptest! {
        #[test]
        fn the_newest_layer_counts(
            base in prop::collection::vec(0_u8..3, PAGES),
            layers in prop::collection::vec(
                prop::collection::btree_map(0..PAGES as u64, 0_u8..3, 0..20), 0..4
            ),
        ) {
            let mut image = image(&base);
            let mut expected = base;
            for pages in layers {
                let pages: Vec<_> = pages.into_iter().collect();
                add(&mut image, &pages);
                for (page, byte) in pages {
                    expected[usize::try_from(page).unwrap()] = byte;
                }
            }

            prop_assert_eq!(first_bytes(&image), expected.clone());
            let data = image.data(0..SIZE.0).unwrap();
            for (page, byte) in (0..).step_by(PAGE).zip(expected) {
                prop_assert!(byte == 0 || data.iter().any(|part| part.contains(&page)));
            }
        }
    }
}
