// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Entries of the guest's page tables (Intel SDM volume 3, 5.5, and AMD manual volume 2, 5.3: 4-level
//! paging).
//!
//! Blocks are of 2M, as not every CPU supports 1G. All mappings are in the lower half of the virtual
//! addresses, below bit 47.

use crate::guest::tables::{Entry, Format, MemoryType};

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
/// Write-through and cache-disable: strong uncacheable by the reset value of the PAT.
const UNCACHED: u64 = 1 << 3 | 1 << 4;
/// Set in advance, so that no walk writes to the tables.
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
/// A block at a level above the last.
const PAGE_SIZE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Four levels with entries of 8 bytes and pages of 4K.
#[derive(Debug, Clone, Copy)]
pub struct LongMode;

impl Format for LongMode {
    fn page_shift(&self) -> u8 {
        12
    }

    fn address_bits(&self) -> u8 {
        47
    }

    fn block_at(&self, level: u8) -> bool {
        level == 2
    }

    fn leaf(&self, physical: u64, level: u8, kind: MemoryType) -> u64 {
        let size = if level == 3 { 0 } else { PAGE_SIZE };
        let memory = match kind {
            MemoryType::Normal => 0,
            MemoryType::Device => UNCACHED | NO_EXECUTE,
        };
        physical & ADDRESS | memory | size | DIRTY | ACCESSED | WRITABLE | PRESENT
    }

    fn table(&self, physical: u64) -> u64 {
        physical & ADDRESS | ACCESSED | WRITABLE | PRESENT
    }

    fn decode(&self, entry: u64, level: u8) -> Entry {
        if entry & PRESENT == 0 {
            Entry::Empty
        } else if level == 3 || entry & PAGE_SIZE != 0 {
            Entry::Leaf
        } else {
            Entry::Table(entry & ADDRESS)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{config::GuestMap, guest::tables::Tables};
    use granule_types::units::{Bytes, GuestAddress};

    const BASE: GuestAddress = GuestAddress(0x10_0000);

    /// Returns the output address and the leaf entry that a walk reaches; written from the manual,
    /// independent of the builder.
    fn walk(tables: &Tables, address: u64) -> Option<(u64, u64)> {
        let mut table = BASE.0;
        for shift in [39, 30, 21, 12] {
            let index = (address >> shift) & 511;
            let word = usize::try_from((table - BASE.0) / 8 + index).unwrap();
            let entry = tables.words()[word];
            if entry & 1 == 0 {
                return None;
            }
            table = entry & 0x000f_ffff_ffff_f000;
            if shift == 12 || entry & (1 << 7) != 0 {
                return Some((table | address & ((1 << shift) - 1), entry));
            }
        }
        None
    }

    #[test]
    fn every_page_of_the_range_is_mapped_and_none_outside() {
        for map in [GuestMap::Blocks, GuestMap::Pages] {
            let start = (1 << 46) - 0x1000 - (5 << 20);
            let mut tables = Tables::new(BASE, Arc::new(LongMode));
            tables.map_by(map);

            tables
                .map(
                    start,
                    GuestAddress(start),
                    Bytes::mib(5),
                    MemoryType::Normal,
                )
                .unwrap();

            for offset in (0..5 << 20).step_by(0x1000) {
                assert_eq!(
                    walk(&tables, start + offset + 8).unwrap().0,
                    start + offset + 8
                );
            }
            assert_eq!(walk(&tables, start - 8), None);
            assert_eq!(walk(&tables, start + (5 << 20)), None);
        }
    }

    #[test]
    fn leaves_are_writable_and_executable_with_accessed_and_dirty_set() {
        let mut tables = Tables::new(BASE, Arc::new(LongMode));

        tables
            .map(
                2 << 20,
                GuestAddress(2 << 20),
                Bytes::mib(2),
                MemoryType::Normal,
            )
            .unwrap();

        let (_, leaf) = walk(&tables, 3 << 20).unwrap();
        // P, R/W, A, D, PS; not PWT, PCD, XD.
        assert_eq!(leaf & (1 << 63 | 0xff), 0b1110_0011);
    }
}
