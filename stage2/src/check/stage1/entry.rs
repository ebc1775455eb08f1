// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stage-1 descriptors (Arm ARM D8.3.1 and D8.3.2, VMSAv8-64 stage 1, output addresses of 48 bits).
//!
//! ```text
//!  63  55 54  53  52   51  50 49 48 47            16 12 11 10 9  8  7     6    5  4     2 1 0
//!  ├ sw ─┤UXN│PXN│Cont│DBM│GP│     │ output address │nT│nG│AF│ SH │AP[2:1]│  │NS│AttrIndx│T│V│
//! ```

use core::fmt;

use crate::{
    address::{PhysAddr, TableAddress, VirtAddr},
    check::entry::{InputAddress, TableEntry},
    descriptor::EntryKind,
    geometry::Level,
};

const VALID: u64 = 1;
const TABLE_OR_PAGE: u64 = 1 << 1;
const MEMORY: u64 = 7 << 2;
const USER: u64 = 1 << 6;
const READ_ONLY: u64 = 1 << 7;
const SHAREABILITY: u64 = 3 << 8;
const ACCESSED: u64 = 1 << 10;
const NON_GLOBAL: u64 = 1 << 11;
const NO_TRANSLATION: u64 = 1 << 16;
const GUARDED: u64 = 1 << 50;
const DIRTY_MANAGED: u64 = 1 << 51;
const CONTIGUOUS: u64 = 1 << 52;
const EXECUTE_NEVER: u64 = 1 << 53;
const SOFTWARE: u64 = 0x1ff << 55;
const ADDRESS: u64 = 0x0000_ffff_ffff_f000;

/// Normal write-back memory with allocation tags (FEAT_MTE2), which differs from memory without tags
/// by a permission alone.
const TAGGED: u8 = 0xf0;
const UNTAGGED: u8 = 0xff;

/// An entry of the kernel's tables as stored in memory.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::check) struct Stage1Entry(pub(in crate::check) u64);

/// MAIR of the kernel's regime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::check) struct MemoryTypes(pub(in crate::check) u64);

impl MemoryTypes {
    /// Returns the memory type of an entry.
    fn of(self, entry: Stage1Entry) -> Option<u8> {
        let index = usize::try_from((entry.0 & MEMORY) >> 2).ok()?;
        let memory = self.0.to_le_bytes().get(index).copied();
        if memory == Some(TAGGED) { Some(UNTAGGED) } else { memory }
    }
}

/// The property of a valid leaf that a store changes although it requires break-before-make (Arm ARM
/// R_WHZWS).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Conflict {
    OutputAddress,
    MemoryType,
    Shareability,
    Contiguous,
    /// A global entry replaces a non-global one.
    Global,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OutputAddress => "output address",
            Self::MemoryType => "memory type",
            Self::Shareability => "shareability",
            Self::Contiguous => "Contiguous bit",
            Self::Global => "nG bit",
        })
    }
}

impl Stage1Entry {
    pub(super) const EMPTY: Self = Self(0);

    /// Returns whether the kernel can write by the leaf, or hardware makes it writable (FEAT_HAFDBS).
    const fn may_write(self) -> bool {
        self.0 & READ_ONLY == 0 || self.0 & DIRTY_MANAGED != 0
    }

    /// Returns whether the leaf permits the kernel an access that `new` does not.
    pub(super) const fn permits_more_than(self, new: Self) -> bool {
        let writes = self.0 & READ_ONLY == 0 && !new.may_write();
        let executes = self.0 & EXECUTE_NEVER == 0 && new.0 & EXECUTE_NEVER != 0;
        writes || executes
    }

    /// Returns whether the entry is a block with nT (FEAT_BBM level 1).
    pub(super) const fn has_nt(self) -> bool {
        self.0 & (NO_TRANSLATION | TABLE_OR_PAGE) == NO_TRANSLATION
    }

    /// Returns the conflict of two leaves of one level. A change of the address of memory that no leaf
    /// of both can write conflicts only if the contents differ, which is unknown.
    pub(super) fn conflict(self, new: Self, types: MemoryTypes) -> Option<Conflict> {
        let differs = self.0 ^ new.0;
        let is_writable = self.may_write() || new.may_write();
        if TableEntry::address(self) != TableEntry::address(new) && is_writable {
            Some(Conflict::OutputAddress)
        } else if types.of(self) != types.of(new) {
            Some(Conflict::MemoryType)
        } else if differs & SHAREABILITY != 0 {
            Some(Conflict::Shareability)
        } else if differs & CONTIGUOUS != 0 {
            Some(Conflict::Contiguous)
        } else if self.0 & NON_GLOBAL != 0 && new.0 & NON_GLOBAL == 0 {
            Some(Conflict::Global)
        } else {
            None
        }
    }

    /// Returns the entry at `level` that maps the part of the block at `offset` bytes.
    pub(super) fn block_part(self, level: Level, offset: u64) -> Self {
        let kind = if level == Level::PAGE { TABLE_OR_PAGE } else { 0 };
        let kept = self.0 & !(TABLE_OR_PAGE | CONTIGUOUS | ADDRESS);
        Self(kept | kind | ((TableEntry::address(self).0 + offset) & ADDRESS))
    }

    /// Returns the entry without the Contiguous bit.
    pub(super) const fn without_contiguous(self) -> Self {
        Self(self.0 & !CONTIGUOUS)
    }
}

impl TableEntry for Stage1Entry {
    type Input = VirtAddr;
    const EMPTY: Self = Self::EMPTY;

    fn kind(self, level: Level) -> EntryKind {
        if self.0 & VALID == 0 {
            EntryKind::Invalid
        } else if level < Level::PAGE && self.0 & TABLE_OR_PAGE != 0 {
            EntryKind::Table(TableAddress(self.0 & ADDRESS))
        } else {
            EntryKind::Leaf(TableEntry::address(self))
        }
    }

    fn address(self) -> PhysAddr {
        let is_block = self.0 & TABLE_OR_PAGE == 0;
        PhysAddr(self.0 & ADDRESS & if is_block { !NO_TRANSLATION } else { !0 })
    }

    fn is_contiguous(self) -> bool {
        self.0 & (VALID | CONTIGUOUS) == VALID | CONTIGUOUS
    }

    fn may_share_run(self, other: Self) -> bool {
        (self.0 ^ other.0) & !(ADDRESS | ACCESSED | SOFTWARE | GUARDED | USER) == 0
    }

    /// Stage 1 selects the attribute by MAIR; without a decoded XS, the qualifier nXS leaves out no
    /// entry, so that no invalidation is refused that may suffice.
    fn has_xs(self) -> bool {
        false
    }
}

impl fmt::Debug for Stage1Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl InputAddress for VirtAddr {
    const LOWEST: Self = Self(0);

    fn align_down(self, size: u64) -> Self {
        Self::align_down(self, size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// MAIR of Linux 5.10: normal, tagged, non-cacheable, Device-nGnRnE.
    const TYPES: MemoryTypes = MemoryTypes(0x0044_f0ff);
    /// A writable page of normal memory.
    const PAGE: u64 = 0x0068_0000_4000_0703;

    #[test]
    fn only_some_changes_of_a_leaf_conflict() {
        let conflict = |old: u64, new: u64| Stage1Entry(old).conflict(Stage1Entry(new), TYPES);
        for (old, new, expected) in [
            (PAGE, PAGE | READ_ONLY, None),
            (PAGE, PAGE & !EXECUTE_NEVER, None),
            (PAGE, PAGE | NON_GLOBAL, None),
            (PAGE, PAGE | 1 << 2, None),
            (PAGE, PAGE + 0x1000, Some(Conflict::OutputAddress)),
            (PAGE | READ_ONLY, (PAGE | READ_ONLY) + 0x1000, Some(Conflict::OutputAddress)),
            (PAGE, PAGE | 2 << 2, Some(Conflict::MemoryType)),
            (PAGE, PAGE & !SHAREABILITY, Some(Conflict::Shareability)),
            (PAGE, PAGE | CONTIGUOUS, Some(Conflict::Contiguous)),
            (PAGE | NON_GLOBAL, PAGE, Some(Conflict::Global)),
        ] {
            assert_eq!(conflict(old, new), expected, "{old:#x} → {new:#x}");
        }
        let read_only = (PAGE | READ_ONLY) & !DIRTY_MANAGED;
        assert_eq!(conflict(read_only, read_only + 0x1000), None);
    }

    #[test]
    fn a_leaf_permits_more_if_the_kernel_loses_an_access() {
        let permits_more =
            |old: u64, new: u64| Stage1Entry(old).permits_more_than(Stage1Entry(new));
        let read_only = (PAGE | READ_ONLY) & !DIRTY_MANAGED;

        assert!(permits_more(PAGE, read_only));
        assert!(!permits_more(PAGE, PAGE | READ_ONLY), "hardware makes it writable");
        assert!(permits_more(PAGE & !EXECUTE_NEVER, PAGE));
        assert!(!permits_more(read_only, PAGE));
        assert!(!permits_more(PAGE, PAGE & !ACCESSED));
    }

    #[test]
    fn a_part_of_a_block_has_its_attributes() {
        let block = Stage1Entry(0x0078_0000_4020_0701);

        assert_eq!(block.block_part(Level::PAGE, 0x7000), Stage1Entry(0x0068_0000_4020_7703));
        assert_eq!(block.without_contiguous(), Stage1Entry(0x0068_0000_4020_0701));
    }
}
