// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ranges in the encoding of `TLBI RIPAS2E1IS`.
//!
//! One instruction covers `(NUM + 1) << (5 × SCALE + 1)` pages, NUM 0 to 31 and SCALE 0 to 3 (Arm
//! ARM C5.5, TLBI RIPAS2E1IS). A range is divided into one page if its count is odd, and one piece
//! for each SCALE, which together cover it exactly.

use crate::{address::Ipa, geometry::Granule};

/// A part of a range that one instruction covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// First address.
    pub ipa: Ipa,
    /// Number of pages; 1 needs the instruction for one address.
    pub pages: u64,
}

/// Largest number of pages that one instruction covers.
const MOST: u64 = 32 << 16;

/// Returns whether one range instruction covers this many pages.
pub const fn is_encodable(pages: u64) -> bool {
    let mut scale = 0;
    while scale <= 3 {
        let unit = 1 << (5 * scale + 1);
        if pages.is_multiple_of(unit) && pages / unit >= 1 && pages / unit <= 32 {
            return true;
        }
        scale += 1;
    }
    false
}

/// Returns whether one range instruction covers this many bytes, a power of two, as the span of a
/// table.
#[inline]
pub const fn is_one(granule: Granule, size: u64) -> bool {
    size.is_power_of_two() && size > granule.size() && size >> granule.shift() <= MOST
}

/// Divides `size` bytes from `ipa`, both multiples of the granule, into pieces.
pub fn pieces(granule: Granule, ipa: Ipa, size: u64) -> impl Iterator<Item = Piece> {
    let mut at = ipa;
    let mut left = size >> granule.shift();
    core::iter::from_fn(move || {
        let pages = match left {
            0 => return None,
            odd if !odd.is_multiple_of(2) => 1,
            MOST.. => MOST,
            _ => {
                // The lowest non-zero digit: five bits each, above bit 0.
                let scale = (left.trailing_zeros() - 1) / 5;
                let shift = 5 * scale + 1;
                ((left >> shift) & 31) << shift
            }
        };
        let piece = Piece { ipa: at, pages };
        at += pages << granule.shift();
        left -= pages;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_every_range_without_a_gap() {
        let interesting = (1..5000).chain([1 << 18, (1 << 21) - 1, 1 << 21, 5 * (1 << 21) + 77]);
        for pages in interesting {
            for granule in [Granule::K4, Granule::K16, Granule::K64] {
                let mut at = 7 * granule.size();
                let first = pieces(granule, Ipa(at), pages * granule.size()).next();
                if is_one(granule, pages * granule.size()) {
                    assert_eq!(first, Some(Piece { ipa: Ipa(at), pages }));
                    assert!(is_encodable(pages));
                }
                for piece in pieces(granule, Ipa(at), pages * granule.size()) {
                    assert_eq!(piece.ipa, Ipa(at), "{pages} pages");
                    assert!(piece.pages == 1 || is_encodable(piece.pages), "{piece:?}");
                    at += piece.pages * granule.size();
                }
                assert_eq!(at, (7 + pages) * granule.size());
            }
        }
    }

    #[test]
    fn encodable_ranges_have_a_scale_and_a_factor() {
        assert!(is_encodable(2) && is_encodable(64) && is_encodable(512) && is_encodable(MOST));
        assert!(
            !is_encodable(0) && !is_encodable(1) && !is_encodable(66) && !is_encodable(MOST * 2)
        );
    }
}
