// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stage-2 descriptors (Arm ARM D8.3.1 and D8.3.2, VMSAv8-64 stage 2, output addresses of 48 bits).
//!
//! ```text
//!  63 62  59 58 55 54 53  52   51  50 48 47           16 12  11   10 9  8 7  6 5     2 1 0
//!  │  │ PBHA │ sw  │ XN  │Cont│DBM│     │ output address │FnXS│AF│ SH  │S2AP│MemAttr│T│V│
//! ```
//!
//! Bit 16 of a block is nT (FEAT_BBM level 1). The engine leaves PBHA, DBM and FnXS clear.
//!
//! An entry with V = 0 is invalid. T is 1 for a table (levels 0 to 2) and for a page (level 3), 0
//! for a block. An entry equal to [`LOCKED`](Descriptor::LOCKED) is invalid, and only the walker
//! that locked it changes it. A valid entry with software bit 55 is
//! [break-pending](Descriptor::is_break_pending): CPUs use it until a walker breaks it.

mod attributes;

use core::fmt;

use crate::{
    address::{PhysAddr, TableAddress},
    geometry::{Granule, Level},
};

pub use self::attributes::{Attributes, MemoryType};

const VALID: u64 = 1;
const TABLE_OR_PAGE: u64 = 1 << 1;
const MEMATTR: u64 = 0xf << 2;
const READ: u64 = 1 << 6;
const WRITE: u64 = 1 << 7;
const SHAREABILITY: u64 = 3 << 8;
const INNER_SHAREABLE: u64 = 3 << 8;
const ACCESSED: u64 = 1 << 10;
const NO_TRANSLATION: u64 = 1 << 16;
const CONTIGUOUS: u64 = 1 << 52;
const NOT_EXECUTABLE: u64 = 1 << 54;
const BREAK_PENDING: u64 = 1 << 55;
const SOFTWARE_SHIFT: u32 = 56;
const SOFTWARE_BITS: u64 = 0x7 << SOFTWARE_SHIFT;
const ADDRESS_MASK: u64 = 0x0000_ffff_ffff_f000;
/// Bits whose change needs break-before-make (Arm ARM R_WHZWS): memory type, shareability, and output
/// address, with bits 49:48 of FEAT_LPA2. The size of a block or run is the type and the
/// Contiguous bit; nT is bit 16 of a block.
const NEEDS_BREAK: u64 =
    TABLE_OR_PAGE | MEMATTR | SHAREABILITY | 0x0003_ffff_ffff_f000 | CONTIGUOUS;

/// A table entry as stored in memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Descriptor(pub u64);

/// Type of an entry, which depends on its level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// An invalid entry that is not locked.
    Invalid,
    /// An invalid entry that one walker has locked.
    Locked,
    /// A table at this address.
    Table(TableAddress),
    /// A leaf that maps memory at this address.
    Leaf(PhysAddr),
}

impl Descriptor {
    /// The empty entry: all bits are 0.
    pub const EMPTY: Self = Self(0);
    /// The locked entry: invalid, and owned by one walker until that walker replaces it (Linux:
    /// `KVM_INVALID_PTE_LOCKED`, the same bit).
    pub const LOCKED: Self = Self(1 << 10);

    /// Returns a table entry.
    pub const fn table(table: TableAddress) -> Self {
        Self((table.0 & ADDRESS_MASK) | TABLE_OR_PAGE | VALID)
    }

    /// Returns a leaf at `level`. With `fwb` (FEAT_S2FWB) the memory type is encoded as HCR_EL2.FWB
    /// requires (Arm ARM D8.6.6).
    pub const fn leaf(phys: PhysAddr, level: Level, a: Attributes, fwb: bool) -> Self {
        let kind = if level.number() == 3 { TABLE_OR_PAGE } else { 0 };
        let memory = match (a.memory, fwb) {
            (MemoryType::Normal, false) => 0b1111,
            (MemoryType::Normal, true) => 0b0110,
            (MemoryType::NonCacheable, _) => 0b0101,
            (MemoryType::Device, _) => 0b0001,
        };
        let mut bits = (phys.0 & ADDRESS_MASK) | kind | VALID | memory << 2;
        if !matches!(a.memory, MemoryType::Device) {
            bits |= INNER_SHAREABLE;
        }
        bits |=
            bits_if(a.read, READ) | bits_if(a.write, WRITE) | bits_if(!a.execute, NOT_EXECUTABLE);
        bits |= bits_if(a.is_accessed, ACCESSED) | bits_if(a.is_contiguous, CONTIGUOUS);
        Self(bits | ((a.software as u64) << SOFTWARE_SHIFT) & SOFTWARE_BITS)
    }

    /// Returns the entry's type at `level`.
    pub const fn kind(self, level: Level) -> EntryKind {
        if self.0 & VALID == 0 {
            return if self.0 == Self::LOCKED.0 { EntryKind::Locked } else { EntryKind::Invalid };
        }
        if level.number() < 3 && self.0 & TABLE_OR_PAGE != 0 {
            EntryKind::Table(TableAddress(self.0 & ADDRESS_MASK))
        } else {
            EntryKind::Leaf(self.address())
        }
    }

    /// Returns whether the entry is valid.
    pub const fn is_valid(self) -> bool {
        self.0 & VALID != 0
    }

    /// Returns whether the entry is a valid leaf at `level`.
    #[inline]
    pub const fn is_leaf(self, level: Level) -> bool {
        matches!(self.kind(level), EntryKind::Leaf(_))
    }

    /// Returns whether the entry is locked.
    pub const fn is_locked(self) -> bool {
        self.0 == Self::LOCKED.0
    }

    /// Returns whether a walker has marked the entry break-pending.
    pub const fn is_break_pending(self) -> bool {
        self.is_valid() && self.0 & BREAK_PENDING != 0
    }

    /// Returns the entry marked break-pending. Software bits change without break-before-make.
    pub const fn with_break_pending(self) -> Self {
        Self(self.0 | BREAK_PENDING)
    }

    /// Returns the output address or the next-level table address.
    pub const fn address(self) -> PhysAddr {
        // Bit 16 of a block is nT: the smallest block is 2M, so its address has no bit 16.
        let block = self.0 & TABLE_OR_PAGE == 0;
        PhysAddr(self.0 & ADDRESS_MASK & !bits_if(block, NO_TRANSLATION))
    }

    /// Returns the output address of an entry that must be a page.
    pub const fn page_address(self) -> PhysAddr {
        PhysAddr(self.0 & ADDRESS_MASK)
    }

    /// Returns the attributes of a leaf.
    pub const fn attributes(self) -> Attributes {
        Attributes {
            memory: match (self.0 & MEMATTR) >> 2 {
                0b1111 | 0b0110 => MemoryType::Normal,
                0b0101 => MemoryType::NonCacheable,
                _ => MemoryType::Device,
            },
            read: self.0 & READ != 0,
            write: self.0 & WRITE != 0,
            execute: self.0 & NOT_EXECUTABLE == 0,
            is_accessed: self.0 & ACCESSED != 0,
            is_contiguous: self.0 & CONTIGUOUS != 0,
            software: ((self.0 & SOFTWARE_BITS) >> SOFTWARE_SHIFT) as u8,
        }
    }

    /// Returns the leaf with the permissions and access flag of `a`.
    pub const fn with_permissions(self, a: Attributes) -> Self {
        let kept = self.0 & !(READ | WRITE | NOT_EXECUTABLE | ACCESSED);
        Self(
            kept | bits_if(a.read, READ)
                | bits_if(a.write, WRITE)
                | bits_if(!a.execute, NOT_EXECUTABLE)
                | bits_if(a.is_accessed, ACCESSED),
        )
    }

    /// Returns the leaf without write permission.
    pub const fn write_protected(self) -> Self {
        Self(self.0 & !WRITE)
    }

    /// Returns the leaf without the access flag.
    pub const fn without_access_flag(self) -> Self {
        Self(self.0 & !ACCESSED)
    }

    /// Returns the entry at `level` that maps the part of the block at `offset` bytes.
    pub const fn block_part(self, level: Level, offset: u64) -> Self {
        let kind = if level.number() == 3 { TABLE_OR_PAGE } else { 0 };
        let kept = self.0 & !(TABLE_OR_PAGE | BREAK_PENDING | CONTIGUOUS | ADDRESS_MASK);
        Self(kept | kind | ((self.address().0 + offset) & ADDRESS_MASK))
    }

    /// Returns the leaf with output address `phys`, as a page or a block.
    pub const fn with_address(self, phys: PhysAddr, is_page: bool) -> Self {
        let kept = self.0 & !(TABLE_OR_PAGE | ADDRESS_MASK);
        Self(kept | bits_if(is_page, TABLE_OR_PAGE) | (phys.0 & ADDRESS_MASK))
    }

    /// Returns the leaf, whose address must be 0, with output address `phys`.
    pub const fn with_address_bits(self, phys: PhysAddr) -> Self {
        Self(self.0 | (phys.0 & ADDRESS_MASK))
    }

    /// Returns the next-level table address of a table entry. The entry must be above level 3.
    #[inline(always)]
    pub const fn next_table(self) -> Option<TableAddress> {
        let rest = self.0.wrapping_sub(VALID | TABLE_OR_PAGE);
        // Fast path for table entries that the engine wrote: one test and no mask.
        if rest & !ADDRESS_MASK == 0 {
            return Some(TableAddress(rest));
        }
        if self.0 & (VALID | TABLE_OR_PAGE) == VALID | TABLE_OR_PAGE {
            return Some(TableAddress(self.0 & ADDRESS_MASK));
        }
        None
    }

    /// Returns the leaf that maps the memory `bytes` bytes after this leaf's.
    pub const fn offset_by(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }

    /// Returns the leaf with or without the contiguous hint.
    pub const fn with_contiguous(self, on: bool) -> Self {
        Self(if on { self.0 | CONTIGUOUS } else { self.0 & !CONTIGUOUS })
    }

    /// Returns whether the entry is valid and has the contiguous hint.
    pub const fn is_contiguous(self) -> bool {
        self.is_valid() && self.0 & CONTIGUOUS != 0
    }

    /// Returns whether two entries may belong to one contiguous run: all but address, access flag
    /// and software bits are equal (Arm ARM R_NGLXZ).
    pub const fn may_share_run(self, other: Self) -> bool {
        // Whether PBHA may differ is IMPLEMENTATION DEFINED. Where hardware manages the dirty state,
        // which is not modelled, S2AP bit 1 may differ between entries with DBM.
        (self.0 ^ other.0) & !(ADDRESS_MASK | ACCESSED | BREAK_PENDING | SOFTWARE_BITS) == 0
    }

    /// Returns the block with nT set or clear. While CPUs use the block with nT, its size can change
    /// (FEAT_BBM level 1). A page or a table, whose bit 16 is a bit of the address, is
    /// returned unchanged.
    pub const fn with_nt(self, on: bool) -> Self {
        let nt = bits_if(self.0 & TABLE_OR_PAGE == 0, NO_TRANSLATION);
        Self(if on { self.0 | nt } else { self.0 & !nt })
    }

    /// Returns whether the entry is a block with nT.
    pub const fn has_nt(self) -> bool {
        self.0 & (NO_TRANSLATION | TABLE_OR_PAGE) == NO_TRANSLATION
    }

    /// Returns whether two leaves of one level differ in memory type, shareability, output address or
    /// size, so that replacing one by the other needs break-before-make (Arm ARM R_WHZWS). All other
    /// bits change without a break: permissions with DBM, access flag, FnXS, PBHA, software bits.
    pub const fn needs_break(self, new: Self) -> bool {
        (self.0 ^ new.0) & NEEDS_BREAK != 0
    }

    /// Returns whether the leaf's address is a multiple of its size.
    pub const fn is_aligned(self, level: Level, granule: Granule) -> bool {
        self.address().is_aligned(level.span(granule))
    }
}

const fn bits_if(condition: bool, bits: u64) -> u64 {
    if condition { bits } else { 0 }
}

impl fmt::Debug for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    /// Returns every combination of attributes that a leaf can have.
    fn all_attributes() -> impl Iterator<Item = Attributes> {
        let types = [MemoryType::Normal, MemoryType::NonCacheable, MemoryType::Device];
        (0..=u8::MAX).flat_map(move |bits| {
            types.map(|memory| Attributes {
                memory,
                read: bits & 1 != 0,
                write: bits & 2 != 0,
                execute: bits & 4 != 0,
                is_accessed: bits & 8 != 0,
                is_contiguous: bits & 16 != 0,
                software: bits >> 5,
            })
        })
    }

    #[test]
    fn leaves_decode_to_their_attributes() {
        for (number, fwb) in [(1, false), (2, true), (3, false), (3, true)] {
            let level = Level::new(number).unwrap();
            for attributes in all_attributes() {
                let leaf = Descriptor::leaf(PhysAddr(0x4000_0000), level, attributes, fwb);
                assert_eq!(leaf.attributes(), attributes);
                assert_eq!(leaf.kind(level), EntryKind::Leaf(PhysAddr(0x4000_0000)));
                assert!(!leaf.is_break_pending());
            }
        }
    }

    #[test]
    fn the_kind_of_an_entry_depends_on_its_level() {
        let level = Level::new(2).unwrap();
        let page = Descriptor::leaf(PhysAddr(0x9000), Level::PAGE, Attributes::READ, false);
        let table = EntryKind::Table(TableAddress(0x9000));
        for (entry, kind) in [
            (page, table),
            (Descriptor::table(TableAddress(0x9000)).with_break_pending(), table),
            (Descriptor::LOCKED, EntryKind::Locked),
            (Descriptor::EMPTY, EntryKind::Invalid),
        ] {
            assert_eq!(entry.kind(level), kind, "{entry:?}");
        }
    }

    #[test]
    fn only_permissions_access_flag_and_software_bits_change_without_a_break() {
        let level = Level::new(2).unwrap();
        for a in all_attributes() {
            for b in all_attributes().step_by(7) {
                let leaf = |a| Descriptor::leaf(PhysAddr(0x20_0000), level, a, false);
                let needed = a.memory != b.memory || a.is_contiguous != b.is_contiguous;
                assert_eq!(leaf(a).needs_break(leaf(b)), needed, "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn a_change_of_pbha_dbm_fnxs_or_a_permission_needs_no_break() {
        let page = Descriptor::leaf(PhysAddr(0x20_0000), Level::PAGE, Attributes::READ, false);
        let is_needed = |bit: &u32| page.needs_break(Descriptor(page.0 ^ 1 << bit));

        let needed: Vec<_> = (2..64).filter(is_needed).collect();

        // MemAttr, SH, output address, Contiguous.
        assert_eq!(needed, (2..6).chain(8..10).chain(12..50).chain([52]).collect::<Vec<_>>());
    }

    #[test]
    fn a_block_part_has_the_attributes_of_the_block() {
        let leaf = |phys, level| Descriptor::leaf(phys, level, Attributes::READ_WRITE, true);
        let block = leaf(PhysAddr(0x4000_0000), Level::new(2).unwrap()).with_break_pending();

        let page = block.block_part(Level::PAGE, 0x7000);

        assert_eq!(page, leaf(PhysAddr(0x4000_7000), Level::PAGE));
    }

    #[test]
    fn nt_is_a_bit_of_a_block_and_of_no_page_or_table() {
        let leaf = |phys, level| Descriptor::leaf(PhysAddr(phys), level, Attributes::READ, false);
        let block = leaf(0x4000_0000, Level::new(2).unwrap());
        assert!(block.with_nt(true).has_nt());
        assert_eq!(block.with_nt(true).with_nt(false), block);

        let table = Descriptor::table(TableAddress(0x4001_0000));
        for entry in [leaf(0x4001_0000, Level::PAGE), leaf(0x4000_0000, Level::PAGE), table] {
            let changed = [true, false].map(|on| entry.with_nt(on));

            assert_eq!(changed, [entry; 2]);
            assert!(!entry.has_nt());
        }
    }

    #[test]
    fn next_table_ignores_other_bits() {
        let level = Level::new(1).unwrap();
        for (bit, kind) in (2..64).flat_map(|bit| (0..4).map(move |kind| (bit, kind))) {
            let entry = Descriptor(0x9000 | kind | 1 << bit);

            let table = match entry.kind(level) {
                EntryKind::Table(table) => Some(table),
                _ => None,
            };

            assert_eq!(entry.next_table(), table, "{entry:?}");
        }
    }
}
