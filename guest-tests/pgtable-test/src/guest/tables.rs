// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stage-1 tables of the guest, which the host builds before the guest runs.
//!
//! A table occupies one granule. Each level translates `granule bits - 3` bits of the address; the
//! last level is 3. The architecture defines the entries ([`GuestArch`]). By default all memory is
//! mapped by the largest blocks that fit, so the guest's walks touch few pages and nearly all
//! stage-2 faults are in the region under test.

use std::collections::BTreeMap;

use crate::config::GuestMap;
use granule_types::{
    guest_mode::GuestMode,
    units::{Bytes, GuestAddress},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestVirtAddr(pub u64);

/// Architecture-specific properties of a guest. A stage-1 entry consists of a physical address and
/// attributes.
#[derive(Debug, Clone, Copy)]
pub struct GuestArch {
    pub mode: GuestMode,
    /// Address of the first doorbell; `None` if doorbells are ports.
    pub first_doorbell: Option<GuestAddress>,
    /// Width of virtual addresses, in bits.
    pub address_bits: u8,
    /// First level at which an entry can be a block.
    pub first_block_level: u8,
    /// Attributes of an entry that links a table.
    pub table_attributes: u64,
    /// Attributes of a block, without its memory type.
    pub block_attributes: u64,
    /// Attributes of a page, without its memory type.
    pub page_attributes: u64,
    /// Memory type of normal memory.
    pub normal_memory: u64,
    /// Memory type of device memory.
    pub device_memory: u64,
}

impl GuestArch {
    /// Returns an output address as bits of an entry: address bits 51:12, or with 64K granules bits
    /// 47:16, and bits 51:48 as 15:12 (Arm manual, D8.3).
    const fn entry_address(&self, physical: u64) -> u64 {
        let aligned = physical & 0x000f_ffff_ffff_f000 & !((1 << self.mode.page_shift) - 1);
        if self.mode.page_shift == 16 {
            return aligned & 0x0000_ffff_ffff_ffff | (physical >> 48 & 0xf) << 12;
        }
        aligned
    }

    /// Returns an entry that maps a block, or at level 3 a page.
    const fn leaf_entry(&self, physical: u64, level: u8, memory: u64) -> u64 {
        self.entry_address(physical)
            | if level == 3 { self.page_attributes } else { self.block_attributes }
            | memory
    }
}

/// Contiguous stage-1 tables, the root first.
#[derive(Debug, Clone)]
pub struct Stage1Tables {
    root: GuestAddress,
    arch: GuestArch,
    entries: Vec<u64>,
    /// Index of each table's first entry, by the index of the entry that links the table.
    child_tables: BTreeMap<usize, usize>,
}

impl Stage1Tables {
    /// Returns empty tables at guest-physical `root`, which must be aligned to the granule.
    pub fn new(root: GuestAddress, arch: GuestArch) -> Self {
        let entries = vec![0; 1 << (arch.mode.page_shift - 3)];
        Self { root, arch, entries, child_tables: BTreeMap::new() }
    }

    /// Returns the guest-physical address of the root.
    pub const fn root(&self) -> GuestAddress {
        self.root
    }

    /// Returns the entries of all tables, to be copied to [`Stage1Tables::root`].
    pub fn entries(&self) -> &[u64] {
        &self.entries
    }

    /// Returns the size of all tables, a multiple of the granule.
    pub fn size(&self) -> Bytes {
        Bytes(self.entries.len() as u64 * 8)
    }

    const fn index_bits(&self) -> u8 {
        self.arch.mode.page_shift - 3
    }

    /// Maps `size` bytes at guest-virtual `address` to guest-physical `physical`, with the type
    /// [`GuestArch::normal_memory`] or [`GuestArch::device_memory`].
    ///
    /// # Panics
    /// The range is not aligned to the granule, exceeds the virtual addresses, or is mapped.
    pub fn map(
        &mut self,
        GuestVirtAddr(address): GuestVirtAddr,
        physical: GuestAddress,
        size: Bytes,
        memory: u64,
        map: GuestMap,
    ) {
        let unaligned = (address | physical.0 | size.0) & ((1 << self.arch.mode.page_shift) - 1);
        assert_eq!(unaligned, 0, "the range is aligned to the granule");
        assert!(address + size.0 <= 1 << self.arch.address_bits, "the range is addressable");
        let first_leaf = match map {
            GuestMap::Blocks => self.arch.first_block_level,
            GuestMap::Pages => 3,
        };
        let mut done = 0;
        while done < size.0 {
            let left = size.0 - done;
            done +=
                self.map_largest_leaf(address + done, physical.0 + done, left, memory, first_leaf);
        }
    }

    /// Maps the largest block or page that starts at `address`, fits in `left` and is at level
    /// `first_leaf` or below. Returns its size.
    fn map_largest_leaf(
        &mut self,
        address: u64,
        physical: u64,
        left: u64,
        memory: u64,
        first_leaf: u8,
    ) -> u64 {
        let resolved = self.arch.address_bits - self.arch.mode.page_shift;
        let mut level = 4 - resolved.div_ceil(self.index_bits());
        let mut table = 0;
        loop {
            let shift = self.arch.mode.page_shift + (3 - level) * self.index_bits();
            let span = 1 << shift;
            let fits = (address | physical) & (span - 1) == 0 && left >= span;
            let index = (address >> shift) & ((1 << self.index_bits()) - 1);
            let entry = table + usize::try_from(index).unwrap_or(usize::MAX);
            let is_empty = self.entries[entry] == 0;
            if fits && is_empty && level >= first_leaf {
                self.entries[entry] = self.arch.leaf_entry(physical, level, memory);
                return span;
            }
            table = match self.child_tables.get(&entry) {
                Some(&linked) => linked,
                None => {
                    assert!(is_empty && level < 3, "{address:#x} is already mapped");
                    self.new_table(entry)
                }
            };
            level += 1;
        }
    }

    /// Appends an empty table, links it in entry `parent` and returns the index of its first entry.
    fn new_table(&mut self, parent: usize) -> usize {
        let table = self.entries.len();
        self.entries.resize(table + (1 << self.index_bits()), 0);
        let address = self.root.0 + table as u64 * 8;
        self.entries[parent] = self.arch.entry_address(address) | self.arch.table_attributes;
        self.child_tables.insert(parent, table);
        table
    }
}
