// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's own translation tables, built by the host before the guest runs.
//!
//! A table fills one granule; each level resolves `granule bits - 3` bits of the address, the last
//! level is 3. What an entry looks like is the architecture's ([`Format`]). Unless asked otherwise
//! everything is mapped by the largest blocks that fit, so that the guest's own walks touch few
//! pages: what is measured is stage 2 of the region, not of these tables.

use std::{fmt, sync::Arc};

use thiserror::Error;

use crate::config::GuestMap;
use granule_types::units::{Bytes, GuestAddress};

/// What lies behind a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Normal, write-back cacheable, shareable, executable memory.
    Normal,
    /// Device memory: uncached, unbuffered, without execution.
    Device,
}

/// What an entry says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// Nothing is mapped.
    Empty,
    /// A block or a page is.
    Leaf,
    /// The table at this guest-physical address goes on.
    Table(u64),
}

/// How an architecture translates and what its entries look like.
pub trait Format: fmt::Debug + Send + Sync {
    /// The granule as a power of two.
    fn page_shift(&self) -> u8;

    /// How many bits of a virtual address there are.
    fn address_bits(&self) -> u8;

    /// Whether an entry of a level above the last can be a block.
    fn block_at(&self, level: u8) -> bool;

    /// An entry that maps a block, or at level 3 a page.
    fn leaf(&self, physical: u64, level: u8, kind: MemoryKind) -> u64;

    /// An entry that links a table.
    fn table(&self, physical: u64) -> u64;

    /// What an entry of a level says.
    fn decode(&self, entry: u64, level: u8) -> Entry;
}

/// Why an address range cannot be mapped.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TableError {
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
    format: Arc<dyn Format>,
    map: GuestMap,
    words: Vec<u64>,
}

impl Tables {
    /// Empty tables at guest-physical `base`, which must be aligned to the granule.
    pub fn new(base: GuestAddress, format: Arc<dyn Format>) -> Self {
        Self {
            base,
            map: GuestMap::Blocks,
            words: vec![0; 1 << (format.page_shift() - 3)],
            format,
        }
    }

    /// Maps what follows by blocks or by pages.
    pub const fn map_by(&mut self, map: GuestMap) {
        self.map = map;
    }

    /// Where the root lies.
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

    fn index_bits(&self) -> u8 {
        self.format.page_shift() - 3
    }

    /// The level a walk begins at: 3 less one for each further set of index bits needed.
    fn start_level(&self) -> u8 {
        let resolved = self.format.address_bits() - self.format.page_shift();
        4 - resolved.div_ceil(self.index_bits())
    }

    /// How many address bits lie below one entry of a level.
    fn level_shift(&self, level: u8) -> u8 {
        self.format.page_shift() + (3 - level) * self.index_bits()
    }

    /// Whether what is mapped now may end at a level.
    fn leaf_at(&self, level: u8) -> bool {
        level == 3 || (self.format.block_at(level) && self.map == GuestMap::Blocks)
    }

    fn entry_index(&self, address: u64, level: u8) -> usize {
        let index = (address >> self.level_shift(level)) & ((1 << self.index_bits()) - 1);
        usize::try_from(index).unwrap_or(usize::MAX)
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
    ) -> Result<(), TableError> {
        let granule = Bytes(1 << self.format.page_shift());
        if (address | physical.0 | size.0) & (granule.0 - 1) != 0 {
            return Err(TableError::Unaligned {
                address,
                size,
                granule,
            });
        }
        let bits = self.format.address_bits();
        let end = address.checked_add(size.0);
        if end.is_none_or(|end| end > 1 << bits) {
            return Err(TableError::OutOfReach {
                address,
                size,
                bits,
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
    ) -> Result<u64, TableError> {
        let mut table = 0;
        let mut level = self.start_level();
        loop {
            let span = 1 << self.level_shift(level);
            let fits = (address | physical) & (span - 1) == 0 && left >= span;
            let at = table + self.entry_index(address, level);
            let entry = self.format.decode(self.words[at], level);
            if fits && self.leaf_at(level) && entry == Entry::Empty {
                self.words[at] = self.format.leaf(physical, level, kind);
                return Ok(span);
            }
            table = match entry {
                Entry::Table(linked) => self.table_at(linked),
                Entry::Empty if level < 3 => self.new_table(at),
                Entry::Empty | Entry::Leaf => return Err(TableError::Mapped { address }),
            };
            level += 1;
        }
    }

    /// Appends an empty table and links it at word `at`; gives its first word.
    fn new_table(&mut self, at: usize) -> usize {
        let table = self.words.len();
        self.words.resize(table + (1 << self.index_bits()), 0);
        let address = self.base.0 + table as u64 * 8;
        self.words[at] = self.format.table(address);
        table
    }

    /// The first word of the table at a physical address.
    fn table_at(&self, physical: u64) -> usize {
        usize::try_from((physical - self.base.0) / 8).unwrap_or(usize::MAX)
    }
}
