// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Entries of the guest's stage-1 tables (Arm manual, D8.2 and D8.3: VMSAv8-64, one privilege level
//! in use).

use crate::guest::tables::{Entry, Format, MemoryType};

/// A valid entry.
const VALID: u64 = 1 << 0;
/// A table at levels 0 to 2, a page at level 3; a block where clear.
const TABLE_OR_PAGE: u64 = 1 << 1;
/// The access flag, set so that no access takes an access flag fault.
const ACCESSED: u64 = 1 << 10;
/// Inner shareable.
const INNER_SHAREABLE: u64 = 3 << 8;
/// Execute-never at EL1.
const PRIVILEGED_EXECUTE_NEVER: u64 = 1 << 53;
/// Output address bits 47:12 in an entry; 64K granules hold bits 51:48 in 15:12.
const ADDRESS: u64 = 0x0000_ffff_ffff_f000;

/// Value of `MAIR_EL1`: attribute 0 is Device-nGnRnE, attribute 1 write-back cacheable.
pub const MAIR: u64 = 0xff << 8;

/// A format of stage-1 entries.
#[derive(Debug, Clone, Copy)]
pub struct Stage1 {
    /// Base-2 logarithm of the granule: 12, 14 or 16.
    pub page_shift: u8,
    /// Width of a virtual address, in bits.
    pub va_bits: u8,
}

const fn attributes(kind: MemoryType) -> u64 {
    match kind {
        MemoryType::Device => ACCESSED | PRIVILEGED_EXECUTE_NEVER,
        MemoryType::Normal => 1 << 2 | ACCESSED | INNER_SHAREABLE,
    }
}

impl Stage1 {
    const fn encode(self, address: u64) -> u64 {
        let low = address & ADDRESS & !((1 << self.page_shift) - 1);
        if self.page_shift == 16 { low | ((address >> 48) & 0xf) << 12 } else { low }
    }

    const fn address(self, entry: u64) -> u64 {
        let low = entry & ADDRESS & !((1 << self.page_shift) - 1);
        if self.page_shift == 16 { low | ((entry >> 12) & 0xf) << 48 } else { low }
    }
}

impl Format for Stage1 {
    fn page_shift(&self) -> u8 {
        self.page_shift
    }

    fn address_bits(&self) -> u8 {
        self.va_bits
    }

    /// Without FEAT_LPA2, blocks start at level 1 with 4K granules and at level 2 with others.
    fn block_at(&self, level: u8) -> bool {
        level == 2 || (level == 1 && self.page_shift == 12)
    }

    fn leaf(&self, physical: u64, level: u8, kind: MemoryType) -> u64 {
        let page = if level == 3 { TABLE_OR_PAGE } else { 0 };
        self.encode(physical) | attributes(kind) | page | VALID
    }

    fn table(&self, physical: u64) -> u64 {
        self.encode(physical) | TABLE_OR_PAGE | VALID
    }

    fn decode(&self, entry: u64, level: u8) -> Entry {
        match entry & (VALID | TABLE_OR_PAGE) {
            bits if bits & VALID == 0 => Entry::Empty,
            bits if level < 3 && bits & TABLE_OR_PAGE != 0 => Entry::Table(self.address(entry)),
            _ => Entry::Leaf,
        }
    }
}

#[cfg(test)]
mod tests {
    //! The tables against an independent walker, written from the Arm manual.

    use std::sync::Arc;

    use super::*;
    use crate::{config::GuestMap, guest::tables::Tables};
    use granule_types::units::{Bytes, GuestAddress};

    const BASE: GuestAddress = GuestAddress(0x10_0000);

    fn tables(page_shift: u8, va_bits: u8) -> Tables {
        let format = Stage1 { page_shift, va_bits };
        Tables::new(BASE, Arc::new(format))
    }

    fn map(tables: &mut Tables, address: u64, physical: u64, size: u64) {
        let physical = GuestAddress(physical);
        tables.map(address, physical, Bytes(size), MemoryType::Normal).unwrap();
    }

    /// Returns the output address, the attributes and the size of the leaf that a walk reaches.
    fn walk(tables: &Tables, shift: u32, bits: u32, address: u64) -> Option<(u64, u64, u64)> {
        let mut physical = BASE.0;
        let mut low = shift;
        while low + (shift - 3) < bits {
            low += shift - 3;
        }
        loop {
            let index = (address >> low) % (1 << (shift - 3));
            let word = usize::try_from((physical - BASE.0) / 8 + index).unwrap();
            let entry = tables.words()[word];
            let mut output = entry & 0x0000_ffff_ffff_0000;
            match shift {
                12 => output |= entry & 0xf000,
                14 => output |= entry & 0xc000,
                _ => output |= ((entry >> 12) & 0xf) << 48,
            }
            match (entry & 3, low == shift) {
                (3, true) | (1, false) => {
                    let span = 1 << low;
                    let attributes = entry & 0xfff0_0000_0000_0ffc;
                    return Some((output | (address & (span - 1)), attributes, span));
                }
                (3, false) => {
                    physical = output;
                    low -= shift - 3;
                }
                _ => return None,
            }
        }
    }

    #[test]
    fn every_granule_of_the_range_is_mapped_and_none_outside() {
        for (shift, bits) in [(12, 48), (14, 48), (14, 47), (16, 48)] {
            let granule = 1u64 << shift;
            let start = (1 << bits) - 40 * granule;
            let physical = 0x40_0000_0000 - 40 * granule;
            let mut tables = tables(shift, bits);

            map(&mut tables, start, physical, 39 * granule);

            let (s, b) = (u32::from(shift), u32::from(bits));
            for offset in (0..39 * granule).step_by(1 << shift) {
                let (output, ..) = walk(&tables, s, b, start + offset + 8).unwrap();
                assert_eq!(output, physical + offset + 8);
            }
            assert_eq!(walk(&tables, s, b, start - 8), None);
            assert_eq!(walk(&tables, s, b, start + 39 * granule), None);
        }
    }

    #[test]
    fn mapping_by_pages_uses_the_last_level_only() {
        for shift in [12, 14, 16] {
            let mut tables = tables(shift, 48);
            tables.map_by(GuestMap::Pages);

            map(&mut tables, 0x4000_0000, 0x4000_0000, 1 << (shift + 10));

            let (output, _, span) = walk(&tables, u32::from(shift), 48, 0x4000_2348).unwrap();
            assert_eq!((output, span), (0x4000_2348, 1 << shift));
        }
    }

    #[test]
    fn aligned_ranges_are_mapped_by_blocks() {
        for (shift, block) in [(12, 1 << 30), (12, 2 << 20), (14, 32 << 20), (16, 512 << 20)] {
            let mut tables = tables(shift, 48);

            map(&mut tables, block, block, block);

            let (output, _, span) = walk(&tables, u32::from(shift), 48, block + 0x12_3458).unwrap();
            assert_eq!((output, span), (block + 0x12_3458, block));
        }
    }

    #[test]
    fn an_unaligned_range_uses_pages_at_its_ends_and_blocks_between() {
        let mut tables = tables(12, 48);
        let start = (2 << 20) - 0x1000;

        map(&mut tables, start, start, (2 << 20) + 0x2000);

        let span = |address| walk(&tables, 12, 48, address).unwrap().2;
        assert_eq!(span(start), 0x1000);
        assert_eq!(span(2 << 20), 2 << 20);
        assert_eq!(span(4 << 20), 0x1000);
    }

    #[test]
    fn attributes_differ_between_normal_and_device_memory() {
        let mut tables = tables(12, 48);
        tables.map(0, GuestAddress(0), Bytes::kib(4), MemoryType::Device).unwrap();
        map(&mut tables, 0x1000, 0x1000, 0x1000);

        let (_, device, _) = walk(&tables, 12, 48, 0).unwrap();
        let (_, normal, _) = walk(&tables, 12, 48, 0x1000).unwrap();

        // AttrIndx[4:2], AP[7:6], SH[9:8], AF[10], PXN[53] of Arm manual D8.3.
        assert_eq!((device >> 2) & 7, 0);
        assert_eq!(MAIR & 0xff, 0x00);
        assert_eq!((device >> 53) & 1, 1);
        assert_eq!((normal >> 2) & 7, 1);
        assert_eq!((MAIR >> 8) & 0xff, 0xff);
        assert_eq!((normal >> 8) & 3, 3);
        assert_eq!((normal >> 53) & 1, 0);
        for entry in [device, normal] {
            assert_eq!((entry >> 10) & 1, 1);
            assert_eq!((entry >> 6) & 3, 0);
        }
    }

    #[test]
    fn entries_with_64k_granules_hold_52_bit_addresses() {
        let mut tables = tables(16, 48);
        let physical = 0xf_fff0_0000_0000;

        map(&mut tables, 0x10_0000, physical, 0x1_0000);

        assert_eq!(walk(&tables, 16, 48, 0x10_0000).unwrap().0, physical);
    }

    #[test]
    fn unaligned_unreachable_and_mapped_ranges_are_refused() {
        let mut tables = tables(12, 48);
        let normal = MemoryType::Normal;
        map(&mut tables, 2 << 20, 2 << 20, 2 << 20);

        for (address, reason) in
            [(0x10, "not aligned"), (1 << 48, "exceed"), ((2 << 20) + 0x1000, "already mapped")]
        {
            let error = tables.map(address, GuestAddress(0), Bytes::kib(4), normal);
            assert!(error.unwrap_err().to_string().contains(reason), "{reason}");
        }
    }
}
