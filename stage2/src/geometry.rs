// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Granules, levels, and the geometry of an IPA space.
//!
//! A table fills one granule and holds 8-byte entries, so each level resolves 9, 11 or 13 bits of
//! the intermediate physical address (IPA). The walk starts at the lowest level that needs at most
//! 16 contiguous root tables (Arm ARM D8.2.3, concatenated translation tables).

use core::fmt;

use thiserror::Error;

use crate::address::{EntryAddress, Ipa, TableAddress};

/// Address width in bits (Arm ARM D8.1.8, without FEAT_LPA and FEAT_LPA2).
pub(crate) const ADDRESS_BITS: u32 = 48;

/// Size of a page and of a translation table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Granule {
    /// 4 KiB
    K4 = 12,
    /// 16 KiB
    K16 = 14,
    /// 64 KiB
    K64 = 16,
}

impl Granule {
    /// Returns the number of bits of an offset in a page.
    pub const fn shift(self) -> u32 {
        self as u32
    }

    /// Returns the size of a page in bytes.
    pub const fn size(self) -> u64 {
        1 << self.shift()
    }

    /// Returns the number of address bits that one level resolves.
    pub const fn level_bits(self) -> u32 {
        self.shift() - 3
    }

    /// Returns the number of entries of a table.
    pub const fn entries(self) -> u64 {
        1 << self.level_bits()
    }

    /// Returns the size of the largest leaf in bytes: a level 1 block with 4K, a level 2 block with
    /// 16K and 64K.
    pub const fn largest_leaf_size(self) -> u64 {
        let levels = match self {
            Self::K4 => 2,
            Self::K16 | Self::K64 => 1,
        };
        1 << (self.shift() + levels * self.level_bits())
    }

    /// Returns the table that contains an entry. Concatenated root tables count as separate ones.
    pub const fn table_containing(self, entry: EntryAddress) -> TableAddress {
        TableAddress(entry.0 & !(self.size() - 1))
    }

    /// Returns the granule with this page size in bytes.
    pub const fn from_size(bytes: u64) -> Option<Self> {
        match bytes {
            0x1000 => Some(Self::K4),
            0x4000 => Some(Self::K16),
            0x1_0000 => Some(Self::K64),
            _ => None,
        }
    }
}

/// Lookup level, 0 to 3; pages are at level 3.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Level(u8);

impl Level {
    /// Level of page entries.
    pub const PAGE: Self = Self(3);

    /// Returns the level with this number, or `None` above 3.
    pub const fn new(number: u8) -> Option<Self> {
        if number <= 3 { Some(Self(number)) } else { None }
    }

    /// Returns the number of the level.
    pub const fn number(self) -> u8 {
        self.0
    }

    /// Returns the next lower level, or `None` for pages.
    pub const fn child(self) -> Option<Self> {
        Self::new(self.0 + 1)
    }

    /// Returns the next higher level, or `None` for level 0.
    pub const fn parent(self) -> Option<Self> {
        match self.0 {
            0 => None,
            n => Some(Self(n - 1)),
        }
    }

    /// Returns the number of bits of an offset in the span of one entry.
    pub const fn shift(self, granule: Granule) -> u32 {
        granule.shift() + (3 - self.0 as u32) * granule.level_bits()
    }

    /// Returns the span of one entry in bytes.
    pub const fn span(self, granule: Granule) -> u64 {
        1 << self.shift(granule)
    }

    /// Returns whether an entry may be a leaf (Arm ARM D8.3.1, 48-bit addresses): a page at level
    /// 3, a block at level 2 and, with 4K, at level 1.
    pub const fn can_be_leaf(self, granule: Granule) -> bool {
        match granule {
            Granule::K4 => self.0 >= 1,
            Granule::K16 | Granule::K64 => self.0 >= 2,
        }
    }

    /// Returns the number of entries of a contiguous run (Arm ARM D8.7.1); 1 if the level has no
    /// runs.
    pub const fn contiguous_entries(self, granule: Granule) -> u64 {
        match (granule, self.0) {
            (Granule::K4, 1..=3) => 16,
            (Granule::K16, 3) => 128,
            (Granule::K16, 2) | (Granule::K64, 2 | 3) => 32,
            _ => 1,
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The geometry of an IPA space: granule, width, and table levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    granule: Granule,
    ipa_bits: u32,
    start: Level,
    size: u64,
    /// `size` if granule and start level are [`Self::COMMON_GRANULE_AND_START`], otherwise 0.
    common_size: u64,
    root_tables: u64,
}

/// Error returned for an unsupported IPA width.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("IPA width {bits}: expected 32 to 48 bits")]
pub struct GeometryError {
    /// The requested width.
    pub bits: u32,
}

/// Error returned for a root that VTTBR_EL2 cannot select.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[allow(
    missing_docs,
    reason = "fields are the first table of the root and the bytes of all its tables"
)]
pub enum RootError {
    /// Error returned when the root is not aligned to the size of all its tables.
    #[error("root {root}: not a multiple of {size:#x}, the size of its tables")]
    Misaligned { root: TableAddress, size: u64 },
    /// Error returned when the root extends beyond the output address size of descriptors.
    #[error("root {root}, {size:#x} bytes: beyond 48 address bits")]
    OutOfRange { root: TableAddress, size: u64 },
}

impl Geometry {
    /// The most frequent granule and start level. Walks are specialised for them, with constant
    /// shifts.
    pub(crate) const COMMON_GRANULE_AND_START: (Granule, Level) = (Granule::K4, Level(1));

    /// Returns, by one comparison, whether the geometry is the common one and contains the address.
    #[inline(always)]
    pub(crate) const fn is_common_and_contains(&self, ipa: Ipa) -> bool {
        ipa.0 < self.common_size
    }

    /// Returns the granule and the start level, which determine all table indices.
    pub(crate) const fn granule_and_start(&self) -> (Granule, Level) {
        (self.granule, self.start)
    }

    /// Creates a geometry with as few levels as concatenated root tables allow.
    ///
    /// # Errors
    /// [`GeometryError`] for a width below 32 or above 48.
    pub const fn new(granule: Granule, ipa_bits: u32) -> Result<Self, GeometryError> {
        if ipa_bits < 32 || ipa_bits > ADDRESS_BITS {
            return Err(GeometryError { bits: ipa_bits });
        }
        // 16 concatenated root tables resolve 4 bits (Linux: `stage2_pgtable_levels()`).
        let resolved = ipa_bits - 4 - granule.shift();
        let levels = resolved.div_ceil(granule.level_bits());
        let start = match levels {
            0..=1 => Level(3),
            2 => Level(2),
            3 => Level(1),
            _ => Level(0),
        };
        let table_bits = start.shift(granule) + granule.level_bits();
        let root_tables = 1 << ipa_bits.saturating_sub(table_bits);
        Ok(Self {
            granule,
            ipa_bits,
            start,
            size: 1 << ipa_bits,
            common_size: match (granule, start) {
                Self::COMMON_GRANULE_AND_START => 1 << ipa_bits,
                _ => 0,
            },
            root_tables,
        })
    }

    /// Creates the geometry of the input addresses of stage 1, which has one root table.
    ///
    /// # Errors
    /// [`GeometryError`] for a width below 25 or above 48.
    #[cfg(feature = "check")]
    pub(crate) const fn of_stage1(granule: Granule, bits: u32) -> Result<Self, GeometryError> {
        if bits < 25 || bits > ADDRESS_BITS {
            return Err(GeometryError { bits });
        }
        let start = match (bits - granule.shift()).div_ceil(granule.level_bits()) {
            0..=1 => Level(3),
            2 => Level(2),
            3 => Level(1),
            _ => Level(0),
        };
        let (size, common_size) = (1 << bits, 0);
        Ok(Self { granule, ipa_bits: bits, start, size, common_size, root_tables: 1 })
    }

    /// Returns the granule.
    pub const fn granule(&self) -> Granule {
        self.granule
    }

    /// Returns the IPA width in bits.
    pub const fn ipa_bits(&self) -> u32 {
        self.ipa_bits
    }

    /// Returns the size of the IPA space in bytes.
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Returns the level at which walks start.
    pub const fn start_level(&self) -> Level {
        self.start
    }

    /// Returns the fields TG0, SL0 and T0SZ of VTCR_EL2, in their places (Arm ARM D19.2). The CPU walks
    /// the tables only as this geometry describes them.
    pub const fn vtcr_fields(&self) -> u64 {
        let (tg0, lowest_sl0) = match self.granule {
            Granule::K4 => (0, 2),
            Granule::K64 => (1, 3),
            Granule::K16 => (2, 3),
        };
        // With pages of 4K, 3 selects level 3.
        let sl0 = match (self.granule, self.start.number()) {
            (Granule::K4, 3) => 3,
            (_, level) => lowest_sl0 - level as u64,
        };
        tg0 << 14 | sl0 << 6 | (64 - self.ipa_bits as u64)
    }

    /// Returns the number of root tables, which are contiguous in memory.
    pub const fn root_tables(&self) -> u64 {
        self.root_tables
    }

    /// Returns the number of bytes to which the root is aligned: the size of all root tables (Arm ARM
    /// I_YXFPJ).
    pub const fn root_alignment(&self) -> u64 {
        self.root_tables * self.granule.size()
    }

    /// Checks the address of the first root table.
    pub(crate) const fn check_root(&self, root: TableAddress) -> Result<(), RootError> {
        let size = self.root_alignment();
        if root.0 & (size - 1) != 0 {
            return Err(RootError::Misaligned { root, size });
        }
        if root.0 > (1 << ADDRESS_BITS) - size {
            return Err(RootError::OutOfRange { root, size });
        }
        Ok(())
    }

    /// Returns the number of tables below the root on a walk to a page. The map of one leaf needs
    /// at most that many tables (Linux: `kvm_mmu_cache_min_pages()`).
    pub const fn tables_below_root(&self) -> usize {
        (3 - self.start.0) as usize
    }

    /// Returns the index of the entry for `ipa` in its table, or in the concatenated root tables. Beyond
    /// the IPA space, an index in the root tables is larger than their number of entries.
    pub const fn index(&self, ipa: Ipa, level: Level) -> u64 {
        let index = ipa.0 >> level.shift(self.granule);
        if level.0 == self.start.0 { index } else { index & (self.granule.entries() - 1) }
    }

    /// Returns the span of an entry at this level in bytes.
    pub const fn span(&self, level: Level) -> u64 {
        level.span(self.granule)
    }

    /// Returns the level of the largest leaf that fits in `size` bytes; `None` if no page fits.
    pub fn largest_leaf_within(&self, size: u64) -> Option<Level> {
        (self.start.0..=3)
            .map(Level)
            .filter(|level| level.can_be_leaf(self.granule))
            .find(|level| self.span(*level) <= size)
    }

    /// Returns the number of entries of a table at this level, or of the concatenated root tables.
    pub const fn entries(&self, level: Level) -> u64 {
        if level.0 == self.start.0 {
            self.granule.entries() * self.root_tables
        } else {
            self.granule.entries()
        }
    }
}

/// Converts a count or an index. Only 64-bit hosts are supported.
pub(crate) const fn to_usize(n: u64) -> usize {
    const { assert!(usize::BITS == 64) }
    #[expect(clippy::cast_possible_truncation, reason = "asserted above")]
    let index = n as usize;
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_levels_match_linux() {
        let levels =
            |granule, bits| 4 - Geometry::new(granule, bits).unwrap().start_level().number();
        let of_4k = [32, 34, 35, 40, 43, 44, 48].map(|bits| levels(Granule::K4, bits));

        assert_eq!(of_4k, [2, 2, 3, 3, 3, 4, 4]);
        assert_eq!([32, 40, 42, 48].map(|bits| levels(Granule::K64, bits)), [1, 2, 2, 3]);
        assert_eq!(levels(Granule::K16, 40), 2);
    }

    #[test]
    fn fields_of_vtcr_are_those_of_the_manual() {
        let fields = |granule, bits| Geometry::new(granule, bits).unwrap().vtcr_fields();

        // T0SZ, SL0 << 6, TG0 << 14: level 1 of 4K, level 0 of 4K, level 2 of 4K, 64K and 16K.
        assert_eq!(fields(Granule::K4, 39), 25 | 1 << 6);
        assert_eq!(fields(Granule::K4, 48), 16 | 2 << 6);
        assert_eq!(fields(Granule::K4, 32), 32);
        assert_eq!(fields(Granule::K64, 40), 24 | 1 << 6 | 1 << 14);
        assert_eq!(fields(Granule::K16, 40), 24 | 1 << 6 | 2 << 14);
    }

    #[test]
    fn spans_of_entries_and_contiguous_runs_match_the_manual() {
        for (granule, level, span, run) in [
            (Granule::K4, 3, 4 << 10, 64 << 10),
            (Granule::K4, 2, 2 << 20, 32 << 20),
            (Granule::K4, 1, 1 << 30, 16 << 30),
            (Granule::K4, 0, 512 << 30, 512 << 30),
            (Granule::K16, 3, 16 << 10, 2 << 20),
            (Granule::K16, 2, 32 << 20, 1 << 30),
            (Granule::K16, 1, 64 << 30, 64 << 30),
            (Granule::K16, 0, 128 << 40, 128 << 40),
            (Granule::K64, 3, 64 << 10, 2 << 20),
            (Granule::K64, 2, 512 << 20, 16 << 30),
            (Granule::K64, 1, 4 << 40, 4 << 40),
            (Granule::K64, 0, 32 << 50, 32 << 50),
        ] {
            let level = Level(level);
            let run_span = level.contiguous_entries(granule) * level.span(granule);
            assert_eq!((level.span(granule), run_span), (span, run), "{granule:?} {level}");
        }
    }

    #[test]
    fn a_root_is_aligned_to_all_its_tables_and_below_48_bits() {
        let geometry = Geometry::new(Granule::K4, 42).unwrap();
        let check = |root| geometry.check_root(root);
        assert_eq!((geometry.root_tables(), geometry.root_alignment()), (8, 0x8000));

        let size = 0x8000;
        for root in [0x8000_1000, 0x8000_4000, 0x8000_0008, (1 << 48) + 0x1000].map(TableAddress) {
            assert_eq!(check(root), Err(RootError::Misaligned { root, size }));
        }
        for root in [1 << 48, 1 << 63].map(TableAddress) {
            assert_eq!(check(root), Err(RootError::OutOfRange { root, size }));
        }
        assert_eq!([0x8000_0000, (1 << 48) - size].map(TableAddress).map(check), [Ok(()); 2]);
    }

    #[test]
    fn root_tables_cover_every_ipa_width() {
        for granule in [Granule::K4, Granule::K16, Granule::K64] {
            for bits in 32..=48 {
                let g = Geometry::new(granule, bits).unwrap();
                assert!((1..=16).contains(&g.root_tables()), "{g:?}");
                assert!(g.entries(g.start_level()) * g.span(g.start_level()) >= g.size());
                assert!(g.index(Ipa(g.size() - 1), g.start_level()) < g.entries(g.start_level()));
            }
        }
        assert!([31, 49].iter().all(|bits| Geometry::new(Granule::K4, *bits).is_err()));
    }
}
