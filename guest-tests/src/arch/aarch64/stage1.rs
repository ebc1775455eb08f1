// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's own translation tables, built by the host before the guest runs (Arm ARM D8.2,
//! VMSAv8-64 stage 1, single privilege level in use).
//!
//! A table fills one granule; each level resolves `granule bits - 3` bits of the address, the last
//! level is 3. Unless asked otherwise everything is mapped by the largest blocks that fit, so that the
//! guest's own walks touch few pages: what is measured is stage 2 of the region, not of these tables.

use thiserror::Error;

use crate::{
    config::GuestMap,
    units::{Bytes, GuestAddress},
};

/// A valid entry.
const VALID: u64 = 1 << 0;
/// At levels 0 to 2 a table, at level 3 a page; without it a block.
const TABLE_OR_PAGE: u64 = 1 << 1;
/// The access flag: set, so that no access ever faults for it.
const ACCESSED: u64 = 1 << 10;
/// Inner shareable.
const INNER_SHAREABLE: u64 = 3 << 8;
/// Execute-never at EL1.
const PRIVILEGED_EXECUTE_NEVER: u64 = 1 << 53;
/// Output address bits 47:12 in an entry; with 64K granules bits 51:48 lie in 15:12.
const ADDRESS: u64 = 0x0000_ffff_ffff_f000;

/// What lies behind a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Normal, write-back cacheable, inner shareable, executable memory.
    Normal,
    /// Device-nGnRnE without execution.
    Device,
}

impl MemoryKind {
    /// The value of `MAIR_EL1` that `index` indexes.
    pub const MAIR: u64 = 0xff << 8;

    const fn index(self) -> u64 {
        match self {
            Self::Device => 0,
            Self::Normal => 1,
        }
    }

    const fn attributes(self) -> u64 {
        let index = self.index() << 2;
        match self {
            Self::Normal => index | ACCESSED | INNER_SHAREABLE,
            Self::Device => index | ACCESSED | PRIVILEGED_EXECUTE_NEVER,
        }
    }
}

/// Why an address range cannot be mapped.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Stage1Error {
    /// A range does not begin and end at a granule.
    #[error("{size} at {address:#x} is not aligned to the guest's granule of {granule}")]
    Unaligned {
        /// Where it begins.
        address: u64,
        /// Its size.
        size: Bytes,
        /// The granule.
        granule: Bytes,
    },
    /// A range leaves the guest's virtual addresses.
    #[error("{size} at {address:#x} leaves the guest's {bits} bits of virtual address")]
    OutOfReach {
        /// Where it begins.
        address: u64,
        /// Its size.
        size: Bytes,
        /// The width of a virtual address.
        bits: u8,
    },
    /// Something is mapped there already.
    #[error("{address:#x} is mapped already")]
    Mapped {
        /// The address mapped twice.
        address: u64,
    },
}

/// A set of tables under construction. Tables lie one behind the other from [`Tables::base`] on,
/// the root first.
#[derive(Debug, Clone)]
pub struct Tables {
    base: GuestAddress,
    page_shift: u8,
    va_bits: u8,
    map: GuestMap,
    words: Vec<u64>,
}

impl Tables {
    /// Empty tables at guest-physical `base`, which must be aligned to the granule.
    pub fn new(base: GuestAddress, page_shift: u8, va_bits: u8) -> Self {
        Self {
            base,
            page_shift,
            va_bits,
            map: GuestMap::Blocks,
            words: vec![0; 1 << (page_shift - 3)],
        }
    }

    /// Maps what follows by blocks or by pages.
    pub const fn map_by(&mut self, map: GuestMap) {
        self.map = map;
    }

    /// Where the root lies (`TTBR0_EL1`).
    pub const fn base(&self) -> GuestAddress {
        self.base
    }

    /// All tables, to be copied to [`Tables::base`].
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Their size, a multiple of the granule.
    pub fn size(&self) -> Bytes {
        Bytes(self.words.len() as u64 * 8)
    }

    const fn index_bits(&self) -> u8 {
        self.page_shift - 3
    }

    /// The level a walk begins at: 3 less one for each further set of index bits needed.
    const fn start_level(&self) -> u8 {
        4 - (self.va_bits - self.page_shift).div_ceil(self.index_bits())
    }

    /// How many address bits lie below one entry of a level.
    const fn level_shift(&self, level: u8) -> u8 {
        self.page_shift + (3 - level) * self.index_bits()
    }

    /// Whether an entry of a level can be a page, or a block (without FEAT_LPA2): 4K granules from
    /// level 1, 16K and 64K from level 2.
    const fn leaf_at(&self, level: u8) -> bool {
        let block = level == 2 || (level == 1 && self.page_shift == 12);
        level == 3 || (block && matches!(self.map, GuestMap::Blocks))
    }

    fn entry_index(&self, address: u64, level: u8) -> usize {
        let index = (address >> self.level_shift(level)) & ((1 << self.index_bits()) - 1);
        usize::try_from(index).unwrap_or(usize::MAX)
    }

    const fn encode_address(&self, address: u64) -> u64 {
        let low = address & ADDRESS & !((1 << self.page_shift) - 1);
        if self.page_shift == 16 {
            low | ((address >> 48) & 0xf) << 12
        } else {
            low
        }
    }

    const fn decode_address(&self, entry: u64) -> u64 {
        let low = entry & ADDRESS & !((1 << self.page_shift) - 1);
        if self.page_shift == 16 {
            low | ((entry >> 12) & 0xf) << 48
        } else {
            low
        }
    }

    /// Maps `size` bytes of guest-physical memory from `physical` at guest-virtual `address`.
    ///
    /// # Errors
    /// The range is not aligned to the granule, leaves the virtual addresses or is mapped.
    pub fn map(
        &mut self,
        address: u64,
        physical: GuestAddress,
        size: Bytes,
        kind: MemoryKind,
    ) -> Result<(), Stage1Error> {
        let granule = Bytes(1 << self.page_shift);
        if (address | physical.0 | size.0) & (granule.0 - 1) != 0 {
            return Err(Stage1Error::Unaligned {
                address,
                size,
                granule,
            });
        }
        let end = address.checked_add(size.0);
        if end.is_none_or(|end| end > 1 << self.va_bits) {
            return Err(Stage1Error::OutOfReach {
                address,
                size,
                bits: self.va_bits,
            });
        }
        let mut done = 0;
        while done < size.0 {
            done += self.map_largest(address + done, physical.0 + done, size.0 - done, kind)?;
        }
        Ok(())
    }

    /// Maps the largest block that begins at `address` and fits in `left`; gives its size.
    fn map_largest(
        &mut self,
        address: u64,
        physical: u64,
        left: u64,
        kind: MemoryKind,
    ) -> Result<u64, Stage1Error> {
        let mut table = 0;
        let mut level = self.start_level();
        loop {
            let span = 1 << self.level_shift(level);
            let fits = (address | physical) & (span - 1) == 0 && left >= span;
            let at = table + self.entry_index(address, level);
            let entry = self.words[at];
            if fits && self.leaf_at(level) && entry & VALID == 0 {
                let page = if level == 3 { TABLE_OR_PAGE } else { 0 };
                self.words[at] = self.encode_address(physical) | kind.attributes() | page | VALID;
                return Ok(span);
            }
            if level == 3 || entry & (VALID | TABLE_OR_PAGE) == VALID {
                return Err(Stage1Error::Mapped { address });
            }
            table = if entry & VALID == 0 {
                self.new_table(at)
            } else {
                self.table_at(entry)
            };
            level += 1;
        }
    }

    /// Appends an empty table and links it at word `at`; gives its first word.
    fn new_table(&mut self, at: usize) -> usize {
        let table = self.words.len();
        self.words.resize(table + (1 << self.index_bits()), 0);
        let address = self.base.0 + table as u64 * 8;
        self.words[at] = self.encode_address(address) | TABLE_OR_PAGE | VALID;
        table
    }

    /// The first word of the table an entry links.
    fn table_at(&self, entry: u64) -> usize {
        let offset = self.decode_address(entry) - self.base.0;
        usize::try_from(offset / 8).unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests;
