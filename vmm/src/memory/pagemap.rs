// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Physical contiguity of a range, from `/proc/self/pagemap` and `/proc/kpageflags`
//! (`Documentation/admin-guide/mm/pagemap.rst`).
//!
//! `smaps` reports how the kernel maps a range. This module checks that each block is one huge page
//! in aligned, contiguous physical memory, which a stage-2 block needs. Only privileged processes can
//! read physical addresses; others get `None` and rely on `smaps`.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt};

use granule_types::units::{Bytes, HostVirtAddr};

/// Flag of an entry whose page is present.
const PRESENT: u64 = 1 << 63;
/// Mask of the page frame number in an entry.
const FRAME: u64 = (1 << 55) - 1;
/// `KPF_HUGE`, `KPF_THP` and `KPF_ZERO_PAGE` of `linux/kernel-page-flags.h`.
const HUGE: u64 = 1 << 17;
const TRANSPARENT: u64 = 1 << 22;
const ZERO: u64 = 1 << 24;

/// Numbers of blocks in a range by their physical pages, without absent blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct BlockBacking {
    /// Blocks of one huge page.
    pub(super) whole: u64,
    /// Blocks of the zero page: read and never written.
    pub(super) zero: u64,
    /// Blocks of other pages.
    pub(super) broken: u64,
}

impl BlockBacking {
    /// Examines `range` block by block. Returns `None` if this process may not read physical addresses.
    pub(super) fn of_range(range: Range<HostVirtAddr>, block: Bytes, base: Bytes) -> Option<Self> {
        match Self::read(range, block, base) {
            Ok(blocks) => blocks,
            Err(error) => {
                log::debug!("physical pages are not checked: {error}");
                None
            }
        }
    }

    fn read(range: Range<HostVirtAddr>, block: Bytes, base: Bytes) -> io::Result<Option<Self>> {
        let map = File::open("/proc/self/pagemap")?;
        let flags = File::open("/proc/kpageflags")?;
        let per_block = usize::try_from(block.0 / base.0).map_err(io::Error::other)?;
        let mut bytes = vec![0; per_block * 8];
        let mut blocks = Self::default();
        let mut address = range.start.0;
        while address < range.end.0 {
            map.read_exact_at(&mut bytes, address / base.0 * 8)?;
            let entries: Vec<u64> =
                bytes.as_chunks().0.iter().copied().map(u64::from_ne_bytes).collect();
            match first_frame(&entries) {
                Some(0) => return Ok(None),
                Some(frame) => {
                    let mut word = [0; 8];
                    flags.read_exact_at(&mut word, frame * 8)?;
                    blocks.count(&entries, u64::from_ne_bytes(word));
                }
                None => {}
            }
            address += block.0;
        }
        Ok(Some(blocks))
    }

    /// Counts a block by its entries and the flags of its first present page.
    fn count(&mut self, entries: &[u64], flags: u64) {
        if flags & ZERO != 0 {
            self.zero += 1;
        } else if flags & (HUGE | TRANSPARENT) != 0 && is_contiguous(entries) {
            self.whole += 1;
        } else {
            self.broken += 1;
        }
    }
}

/// Returns the page frame number of the first present page, or 0 if the kernel hides it.
fn first_frame(entries: &[u64]) -> Option<u64> {
    entries.iter().find(|entry| *entry & PRESENT != 0).map(|entry| entry & FRAME)
}

/// Returns whether all pages are present and contiguous from an aligned frame on.
fn is_contiguous(entries: &[u64]) -> bool {
    let first = entries.first().map_or(0, |entry| entry & FRAME);
    first.is_multiple_of(entries.len() as u64)
        && (first..)
            .zip(entries)
            .all(|(frame, entry)| entry & PRESENT != 0 && entry & FRAME == frame)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contiguous(first: u64) -> Vec<u64> {
        (first..first + 512).map(|frame| PRESENT | frame).collect()
    }

    fn counted(entries: &[u64], flags: u64) -> BlockBacking {
        let mut blocks = BlockBacking::default();
        blocks.count(entries, flags);
        blocks
    }

    #[test]
    fn an_aligned_huge_page_is_whole() {
        for flags in [HUGE, TRANSPARENT] {
            assert_eq!(counted(&contiguous(1024), flags).whole, 1);
        }
    }

    #[test]
    fn gaps_misalignment_and_small_pages_break_a_block() {
        let mut gap = contiguous(1024);
        gap[7] = 0;

        assert_eq!(counted(&gap, TRANSPARENT).broken, 1);
        assert_eq!(counted(&contiguous(1025), TRANSPARENT).broken, 1);
        assert_eq!(counted(&contiguous(1024), 0).broken, 1);
    }

    #[test]
    fn the_zero_page_is_counted_by_its_flag() {
        assert_eq!(counted(&contiguous(512), ZERO | TRANSPARENT).zero, 1);
    }

    #[test]
    fn a_hidden_frame_differs_from_an_absent_page() {
        assert_eq!(first_frame(&[0, PRESENT]), Some(0));
        assert_eq!(first_frame(&[0, 0]), None);
    }
}
