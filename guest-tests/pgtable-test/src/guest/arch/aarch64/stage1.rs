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
        if self.page_shift == 16 {
            low | ((address >> 48) & 0xf) << 12
        } else {
            low
        }
    }

    const fn address(self, entry: u64) -> u64 {
        let low = entry & ADDRESS & !((1 << self.page_shift) - 1);
        if self.page_shift == 16 {
            low | ((entry >> 12) & 0xf) << 48
        } else {
            low
        }
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
mod tests;
