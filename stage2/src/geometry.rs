// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Granules, levels, and the geometry of an IPA space.
//!
//! A table fills one granule and holds 8-byte entries, so each level resolves 9, 11 or 13 bits of
//! the intermediate physical address (IPA). The walk starts at the lowest level that needs at most
//! 16 contiguous root tables (Arm ARM D8.2.3, concatenated translation tables).

use core::fmt;

use thiserror::Error;

use crate::address::Ipa;

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
    /// Returns the number of offset bits of an address within a page.
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
    pub const fn largest_leaf(self) -> u64 {
        let levels = match self {
            Self::K4 => 2,
            Self::K16 | Self::K64 => 1,
        };
        1 << (self.shift() + levels * self.level_bits())
    }

    /// Returns the granule whose pages have this size in bytes.
    pub const fn of_size(bytes: u64) -> Option<Self> {
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

    /// Returns the level with this number, or `None` if it is above 3.
    pub const fn new(number: u8) -> Option<Self> {
        if number <= 3 { Some(Self(number)) } else { None }
    }

    /// Returns the number of the level.
    pub const fn number(self) -> u8 {
        self.0
    }

    /// Returns the next lower level, or `None` for pages.
    pub const fn down(self) -> Option<Self> {
        Self::new(self.0 + 1)
    }

    /// Returns the next higher level, or `None` for level 0.
    pub const fn up(self) -> Option<Self> {
        match self.0 {
            0 => None,
            n => Some(Self(n - 1)),
        }
    }

    /// Returns the number of offset bits of an address within one entry's span.
    pub const fn shift(self, granule: Granule) -> u32 {
        granule.shift() + (3 - self.0 as u32) * granule.level_bits()
    }

    /// Returns the number of bytes that one entry spans.
    pub const fn span(self, granule: Granule) -> u64 {
        1 << self.shift(granule)
    }

    /// Returns whether an entry may be a leaf, with 48-bit addresses (Arm ARM D8.3.1): pages at
    /// level 3; blocks at levels 1 and 2 with 4K, at level 2 with 16K and 64K.
    pub const fn can_map(self, granule: Granule) -> bool {
        match granule {
            Granule::K4 => self.0 >= 1,
            Granule::K16 | Granule::K64 => self.0 >= 2,
        }
    }

    /// Returns the number of entries of a contiguous run (Arm ARM D8.7.1); 1 if the level has no
    /// runs.
    pub const fn contiguous(self, granule: Granule) -> u64 {
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
    /// `size` if granule and start level are [`Self::COMMON`], otherwise 0.
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

impl Geometry {
    /// The most frequent granule and start level. Walks are specialised for them, so that shifts
    /// and levels are constants.
    pub(crate) const COMMON: (Granule, Level) = (Granule::K4, Level(1));

    /// Returns, by one comparison, whether the shape is the common one and the address lies in it.
    #[inline(always)]
    pub(crate) const fn is_common(&self, ipa: Ipa) -> bool {
        ipa.0 < self.common_size
    }

    /// Returns granule and start level, which determine all table indices.
    pub(crate) const fn shape(&self) -> (Granule, Level) {
        (self.granule, self.start)
    }

    /// Linux 6.12 with only the first patch of `stage2-fault-count`: it waits for locked entries.
    ///
    /// # Errors
    /// [`GeometryError`] for a width below 32 or above 48.
    pub const fn new(granule: Granule, ipa_bits: u32) -> Result<Self, GeometryError> {
        if ipa_bits < 32 || ipa_bits > ADDRESS_BITS {
            return Err(GeometryError { bits: ipa_bits });
        }
        // 16 concatenated tables resolve 4 bits (Linux: `stage2_pgtable_levels()`).
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
                Self::COMMON => 1 << ipa_bits,
                _ => 0,
            },
            root_tables,
        })
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
    pub const fn start(&self) -> Level {
        self.start
    }

    /// Returns the number of root tables, which are contiguous in memory.
    pub const fn root_tables(&self) -> u64 {
        self.root_tables
    }

    /// Returns the number of tables below the root on a walk to a page: the maximum that one
    /// mapping needs, and the memcache minimum (Linux: `kvm_mmu_cache_min_pages()`).
    pub const fn depth(&self) -> usize {
        (3 - self.start.0) as usize
    }

    /// Returns the index of an address's entry in its table; at the start level, in all root tables
    /// together.
    pub const fn index(&self, ipa: Ipa, level: Level) -> u64 {
        let index = ipa.0 >> level.shift(self.granule);
        if level.0 == self.start.0 { index } else { index & (self.granule.entries() - 1) }
    }

    /// Returns the number of bytes that an entry of this level spans.
    pub const fn span(&self, level: Level) -> u64 {
        level.span(self.granule)
    }

    /// Returns the number of entries of a table at this level; at the start level, of all root
    /// tables together.
    pub const fn entries(&self, level: Level) -> u64 {
        if level.0 == self.start.0 {
            self.granule.entries() * self.root_tables
        } else {
            self.granule.entries()
        }
    }
}

/// Converts a 64-bit count or offset to an index. Only 64-bit hosts are supported.
pub(crate) const fn index(n: u64) -> usize {
    const { assert!(usize::BITS == 64) }
    #[expect(clippy::cast_possible_truncation, reason = "asserted above")]
    let index = n as usize;
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_those_of_linux() {
        let levels = |granule, bits| 4 - Geometry::new(granule, bits).unwrap().start().number();
        let of_4k = [32, 34, 35, 40, 43, 44, 48].map(|bits| levels(Granule::K4, bits));

        assert_eq!(of_4k, [2, 2, 3, 3, 3, 4, 4]);
        assert_eq!([32, 40, 42, 48].map(|bits| levels(Granule::K64, bits)), [1, 2, 2, 3]);
        assert_eq!(levels(Granule::K16, 40), 2);
    }

    #[test]
    fn entries_and_contiguous_runs_span_the_sizes_in_the_manual() {
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
            let run_of = level.contiguous(granule) * level.span(granule);
            assert_eq!((level.span(granule), run_of), (span, run), "{granule:?} {level}");
        }
    }

    #[test]
    fn every_width_is_covered_by_its_tables_to_the_byte() {
        for granule in [Granule::K4, Granule::K16, Granule::K64] {
            for bits in 32..=48 {
                let g = Geometry::new(granule, bits).unwrap();
                assert!((1..=16).contains(&g.root_tables()), "{g:?}");
                assert!(g.entries(g.start()) * g.span(g.start()) >= g.size());
                assert!(g.index(Ipa(g.size() - 1), g.start()) < g.entries(g.start()));
            }
        }
        assert!([31, 49].iter().all(|bits| Geometry::new(Granule::K4, *bits).is_err()));
    }
}
