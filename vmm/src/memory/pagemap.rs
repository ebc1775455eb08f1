// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Transparent huge pages smaller than a block, which `/proc/self/smaps` reports as base pages.
//!
//! `/proc/self/pagemap` (admin-guide/mm/pagemap.rst) has a word for each base page of the address space: bit
//! 63 indicates a present page, and the lower 55 bits are its frame number, which the kernel shows only to
//! processes with CAP_SYS_ADMIN. A page of a size is an aligned range of present base pages whose frames are
//! aligned and contiguous.

use std::{fs::File, ops::Range, os::unix::fs::FileExt, path::PathBuf};

use granule_types::units::{Bytes, HostVirtAddr};

use super::MemoryError;

const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;
const WORD: usize = size_of::<u64>();

/// Returns the bytes of a range that are in pages of a size, a multiple of the base pages.
///
/// # Errors
/// The file cannot be read, or the kernel hides the frames of resident pages.
pub fn bytes_in_pages(
    range: &Range<HostVirtAddr>,
    base: Bytes,
    size: Bytes,
) -> Result<Bytes, MemoryError> {
    let path = PathBuf::from("/proc/self/pagemap");
    let unreadable = |source| MemoryError::Read { path: path.clone(), source };
    let file = File::open(&path).map_err(unreadable)?;
    let mut buffer = vec![0; usize::try_from(size.0 / base.0).unwrap_or(usize::MAX) * WORD];
    let mut pages = 0;
    for page in range.start.0.div_ceil(size.0)..range.end.0 / size.0 {
        let first = page * size.0 / base.0;
        file.read_exact_at(&mut buffer, first * WORD as u64).map_err(unreadable)?;
        let entries: Vec<u64> = buffer
            .chunks_exact(WORD)
            .filter_map(|word| Some(u64::from_ne_bytes(word.try_into().ok()?)))
            .collect();
        if entries.iter().any(|entry| entry & PRESENT != 0 && entry & FRAME == 0) {
            return Err(MemoryError::Unavailable(
                "the sizes of transparent huge pages smaller than a block can be checked only with \
                 CAP_SYS_ADMIN: run as root"
                    .to_owned(),
            ));
        }
        pages += u64::from(is_one_page(&entries));
    }
    Ok(Bytes(pages * size.0))
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
    use super::*;

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
