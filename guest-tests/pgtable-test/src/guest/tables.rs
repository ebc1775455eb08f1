// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's stage-1 tables, built by the host before the guest runs.
//!
//! A table fills one granule. Each level translates `granule bits - 3` bits of the address; the
//! last level is 3. The architecture defines the entries ([`Abi`]). By default all memory is mapped
//! by the largest blocks that fit, so the guest's walks touch few pages and nearly all stage-2
//! faults are in the region under test.

use std::collections::BTreeMap;

use crate::config::GuestMap;
use granule_types::{
    guest_mode::GuestMode,
    units::{Bytes, GuestAddress},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestVirtAddr(pub u64);

/// Architecture-specific properties of a guest, mostly its format of table entries. An entry is a
/// physical address and attribute bits.
#[derive(Debug, Clone, Copy)]
pub struct Abi {
    pub mode: GuestMode,
    /// Address of the doorbells; `None` where they are ports.
    pub doorbells: Option<GuestAddress>,
    /// Width of a virtual address, in bits.
    pub address_bits: u8,
    /// First level at which an entry can be a block.
    pub first_block_level: u8,
    /// Attributes of an entry that links a table.
    pub table: u64,
    /// Attributes of a block, without those of its memory type.
    pub block: u64,
    /// Attributes of a page, without those of its memory type.
    pub page: u64,
    pub normal: u64,
    pub device: u64,
}

impl Abi {
    /// Returns the address bits of an entry: bits 51:12, or with 64K granules bits 47:16 in place
    /// and bits 51:48 in 15:12 (Arm manual, D8.3).
    const fn address(&self, physical: u64) -> u64 {
        let aligned = physical & 0x000f_ffff_ffff_f000 & !((1 << self.mode.page_shift) - 1);
        if self.mode.page_shift == 16 {
            return aligned & 0x0000_ffff_ffff_ffff | (physical >> 48 & 0xf) << 12;
        }
        aligned
    }

    /// Returns an entry that maps a block, or a page at level 3, of this memory type.
    const fn leaf(&self, physical: u64, level: u8, memory: u64) -> u64 {
        self.address(physical) | if level == 3 { self.page } else { self.block } | memory
    }
}

/// Stage-1 tables under construction, contiguous at [`Tables::base`], root first.
#[derive(Debug, Clone)]
pub struct Tables {
    base: GuestAddress,
    abi: Abi,
    words: Vec<u64>,
    /// Index of the first word of each table, by the index of the entry that links the table.
    linked: BTreeMap<usize, usize>,
}

impl Tables {
    /// Returns empty tables at guest-physical `base`, which must be aligned to the granule.
    pub fn new(base: GuestAddress, abi: Abi) -> Self {
        let words = vec![0; 1 << (abi.mode.page_shift - 3)];
        Self { base, abi, words, linked: BTreeMap::new() }
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

    const fn index_bits(&self) -> u8 {
        self.abi.mode.page_shift - 3
    }

    /// Maps `size` bytes of guest-physical memory from `physical` at guest-virtual `address`, as
    /// memory of the type [`Abi::normal`] or [`Abi::device`].
    ///
    /// # Panics
    /// The range is not aligned to the granule, exceeds the virtual addresses or is already mapped.
    pub fn map(
        &mut self,
        GuestVirtAddr(address): GuestVirtAddr,
        physical: GuestAddress,
        size: Bytes,
        memory: u64,
        map: GuestMap,
    ) {
        let unaligned = (address | physical.0 | size.0) & ((1 << self.abi.mode.page_shift) - 1);
        assert_eq!(unaligned, 0, "the range is aligned to the granule");
        assert!(address + size.0 <= 1 << self.abi.address_bits, "the range is addressable");
        let first_leaf = match map {
            GuestMap::Blocks => self.abi.first_block_level,
            GuestMap::Pages => 3,
        };
        let mut done = 0;
        while done < size.0 {
            let left = size.0 - done;
            done += self.map_largest(address + done, physical.0 + done, left, memory, first_leaf);
        }
    }

    /// Maps the largest block that starts at `address`, fits in `left` and is at level `first_leaf`
    /// or below. Returns its size.
    fn map_largest(
        &mut self,
        address: u64,
        physical: u64,
        left: u64,
        memory: u64,
        first_leaf: u8,
    ) -> u64 {
        let resolved = self.abi.address_bits - self.abi.mode.page_shift;
        let mut level = 4 - resolved.div_ceil(self.index_bits());
        let mut table = 0;
        loop {
            let shift = self.abi.mode.page_shift + (3 - level) * self.index_bits();
            let span = 1 << shift;
            let fits = (address | physical) & (span - 1) == 0 && left >= span;
            let index = (address >> shift) & ((1 << self.index_bits()) - 1);
            let at = table + usize::try_from(index).unwrap_or(usize::MAX);
            let is_empty = self.words[at] == 0;
            if fits && is_empty && level >= first_leaf {
                self.words[at] = self.abi.leaf(physical, level, memory);
                return span;
            }
            table = match self.linked.get(&at) {
                Some(&linked) => linked,
                None => {
                    assert!(is_empty && level < 3, "{address:#x} is not mapped yet");
                    self.new_table(at)
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
        self.words[at] = self.abi.address(address) | self.abi.table;
        self.linked.insert(at, table);
        table
    }
}
