// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's stage-1 tables, built by the host before the guest runs.
//!
//! A table fills one granule. Each level translates `granule bits - 3` bits of the address; the last
//! level is 3. The architecture defines the entries ([`Format`]). By default all memory is mapped by
//! the largest blocks that fit, so the guest's walks touch few pages and nearly all stage-2 faults
//! are of the region under test.

use std::{fmt, sync::Arc};

use thiserror::Error;

use crate::config::GuestMap;
use granule_types::units::{Bytes, GuestAddress};

/// The memory type of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryType {
    /// Normal, write-back cacheable, shareable, executable memory.
    Normal,
    /// Device memory: uncached, unbuffered, not executable.
    Device,
}

/// A decoded entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// An invalid entry.
    Empty,
    /// A block or a page.
    Leaf,
    /// A table at this guest-physical address.
    Table(u64),
}

/// An architecture's format of table entries.
pub trait Format: fmt::Debug + Send + Sync {
    /// Returns the base-2 logarithm of the granule.
    fn page_shift(&self) -> u8;

    /// Returns the width of a virtual address, in bits.
    fn address_bits(&self) -> u8;

    /// Returns whether an entry at a level above the last can be a block.
    fn block_at(&self, level: u8) -> bool;

    /// Returns an entry that maps a block, or a page at level 3.
    fn leaf(&self, physical: u64, level: u8, kind: MemoryType) -> u64;

    /// Returns an entry that links a table.
    fn table(&self, physical: u64) -> u64;

    /// Decodes an entry of a level.
    fn decode(&self, entry: u64, level: u8) -> Entry;
}

/// Error returned when a range cannot be mapped.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct TableError(String);

/// Stage-1 tables under construction, contiguous from [`Tables::base`] on, the root first.
#[derive(Debug, Clone)]
pub struct Tables {
    base: GuestAddress,
    format: Arc<dyn Format>,
    map: GuestMap,
    words: Vec<u64>,
}

impl Tables {
    /// Returns empty tables at guest-physical `base`, which must be aligned to the granule.
    pub fn new(base: GuestAddress, format: Arc<dyn Format>) -> Self {
        Self { base, map: GuestMap::Blocks, words: vec![0; 1 << (format.page_shift() - 3)], format }
    }

    /// Selects blocks or pages for subsequent mappings.
    pub const fn map_by(&mut self, map: GuestMap) {
        self.map = map;
    }

    /// Returns the address of the root.
    pub const fn base(&self) -> GuestAddress {
        self.base
    }

    /// Returns the words of all tables, to be copied to [`Tables::base`].
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Returns the size of all tables, a multiple of the granule.
    pub fn size(&self) -> Bytes {
        Bytes(self.words.len() as u64 * 8)
    }

    fn index_bits(&self) -> u8 {
        self.format.page_shift() - 3
    }

    /// Returns the level at which a walk begins.
    fn start_level(&self) -> u8 {
        let resolved = self.format.address_bits() - self.format.page_shift();
        4 - resolved.div_ceil(self.index_bits())
    }

    /// Returns the base-2 logarithm of the memory that an entry of a level maps.
    fn level_shift(&self, level: u8) -> u8 {
        self.format.page_shift() + (3 - level) * self.index_bits()
    }

    /// Returns whether the selected mapping allows a leaf at a level.
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
    /// The range is not aligned to the granule, exceeds the virtual addresses or is mapped.
    pub fn map(
        &mut self,
        address: u64,
        physical: GuestAddress,
        size: Bytes,
        kind: MemoryType,
    ) -> Result<(), TableError> {
        let granule = Bytes(1 << self.format.page_shift());
        if (address | physical.0 | size.0) & (granule.0 - 1) != 0 {
            return Err(TableError(format!(
                "{size} at {address:#x} are not aligned to the guest's granule of {granule}"
            )));
        }
        let bits = self.format.address_bits();
        let end = address.checked_add(size.0);
        if end.is_none_or(|end| end > 1 << bits) {
            return Err(TableError(format!(
                "{size} at {address:#x} exceed the guest's {bits} bits of virtual address"
            )));
        }
        let mut done = 0;
        while done < size.0 {
            done += self.map_largest(address + done, physical.0 + done, size.0 - done, kind)?;
        }
        Ok(())
    }

    /// Maps the largest block that starts at `address` and fits in `left`, and returns its size.
    fn map_largest(
        &mut self,
        address: u64,
        physical: u64,
        left: u64,
        kind: MemoryType,
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
                Entry::Empty | Entry::Leaf => {
                    return Err(TableError(format!("{address:#x} is already mapped")));
                }
            };
            level += 1;
        }
    }

    /// Appends an empty table, links it at word `at` and returns the index of its first word.
    fn new_table(&mut self, at: usize) -> usize {
        let table = self.words.len();
        self.words.resize(table + (1 << self.index_bits()), 0);
        let address = self.base.0 + table as u64 * 8;
        self.words[at] = self.format.table(address);
        table
    }

    /// Returns the index of the first word of the table at a physical address.
    fn table_at(&self, physical: u64) -> usize {
        usize::try_from((physical - self.base.0) / 8).unwrap_or(usize::MAX)
    }
}
