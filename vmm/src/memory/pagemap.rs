// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where the pages behind a range really are: `/proc/self/pagemap` and `/proc/kpageflags`
//! (`Documentation/admin-guide/mm/pagemap.rst`).
//!
//! `smaps` tells how the kernel maps a range; this tells whether each block is one aligned piece of
//! physical memory and one huge page, which is what stage 2 needs. Physical addresses are for
//! privileged processes only; others get `None` here and rely on `smaps`.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt};

use granule_types::units::Bytes;

/// An entry's page is in memory.
const PRESENT: u64 = 1 << 63;
/// An entry's physical page number.
const NUMBER: u64 = (1 << 55) - 1;
/// `KPF_HUGE`, `KPF_THP` and `KPF_ZERO_PAGE` of `linux/kernel-page-flags.h`.
const HUGE: u64 = 1 << 17;
const TRANSPARENT: u64 = 1 << 22;
const ZERO: u64 = 1 << 24;

/// What blocks of a range are made of, in blocks. BlockBacking nothing of which is present are left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockBacking {
    /// One aligned piece of physical memory, in one huge page.
    pub whole: u64,
    /// The zero page: read, never written.
    pub zero: u64,
    /// Anything else.
    pub broken: u64,
}

impl BlockBacking {
    /// Looks at `range` block by block; `None` where this process may not know.
    pub fn of_range(range: Range<u64>, block: Bytes, base: Bytes) -> Option<Self> {
        match Self::look(range, block, base) {
            Ok(blocks) => blocks,
            Err(error) => {
                log::debug!("physical pages are not checked: {error}");
                None
            }
        }
    }

    fn look(range: Range<u64>, block: Bytes, base: Bytes) -> io::Result<Option<Self>> {
        let map = File::open("/proc/self/pagemap")?;
        let flags = File::open("/proc/kpageflags")?;
        let per_block = usize::try_from(block.0 / base.0).map_err(io::Error::other)?;
        let mut bytes = vec![0; per_block * 8];
        let mut blocks = Self::default();
        let mut address = range.start;
        while address < range.end {
            map.read_exact_at(&mut bytes, address / base.0 * 8)?;
            let entries: Vec<u64> = bytes
                .as_chunks()
                .0
                .iter()
                .copied()
                .map(u64::from_ne_bytes)
                .collect();
            match first_number(&entries) {
                Some(0) => return Ok(None),
                Some(number) => {
                    let mut word = [0; 8];
                    flags.read_exact_at(&mut word, number * 8)?;
                    blocks.count(&entries, u64::from_ne_bytes(word));
                }
                None => {}
            }
            address += block.0;
        }
        Ok(Some(blocks))
    }

    /// Counts one block by its entries and the flags of its first page present.
    fn count(&mut self, entries: &[u64], flags: u64) {
        if flags & ZERO != 0 {
            self.zero += 1;
        } else if flags & (HUGE | TRANSPARENT) != 0 && is_one_piece(entries) {
            self.whole += 1;
        } else {
            self.broken += 1;
        }
    }
}

/// The physical page number of the first page present; 0 where the kernel hides it.
fn first_number(entries: &[u64]) -> Option<u64> {
    entries
        .iter()
        .find(|entry| *entry & PRESENT != 0)
        .map(|entry| entry & NUMBER)
}

/// Whether every page is present and they follow one another from a number aligned to them all.
fn is_one_piece(entries: &[u64]) -> bool {
    let first = entries.first().map_or(0, |entry| entry & NUMBER);
    first.is_multiple_of(entries.len() as u64)
        && (first..)
            .zip(entries)
            .all(|(number, entry)| entry & PRESENT != 0 && entry & NUMBER == number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(first: u64) -> Vec<u64> {
        (first..first + 512)
            .map(|number| PRESENT | number)
            .collect()
    }

    fn counted(entries: &[u64], flags: u64) -> BlockBacking {
        let mut blocks = BlockBacking::default();
        blocks.count(entries, flags);
        blocks
    }

    #[test]
    fn an_aligned_piece_in_one_huge_page_is_whole() {
        for flags in [HUGE, TRANSPARENT] {
            assert_eq!(counted(&piece(1024), flags).whole, 1);
        }
    }

    #[test]
    fn gaps_misalignment_and_small_pages_break_a_block() {
        let mut gap = piece(1024);
        gap[7] = 0;

        assert_eq!(counted(&gap, TRANSPARENT).broken, 1);
        assert_eq!(counted(&piece(1025), TRANSPARENT).broken, 1);
        assert_eq!(counted(&piece(1024), 0).broken, 1);
    }

    #[test]
    fn the_zero_page_is_known_by_its_flag() {
        assert_eq!(counted(&piece(512), ZERO | TRANSPARENT).zero, 1);
    }

    #[test]
    fn a_hidden_number_is_told_from_an_absent_page() {
        assert_eq!(first_number(&[0, PRESENT]), Some(0));
        assert_eq!(first_number(&[0, 0]), None);
    }
}
