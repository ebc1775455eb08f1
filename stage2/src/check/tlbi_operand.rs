// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Names and operands of TLB invalidations of both stages (Arm ARM C5.5).

use super::entry::TtlHint;
use crate::{
    geometry::{Granule, Level},
    operations::Scope,
};

/// The encoding of operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Encoding {
    pub(super) granule: Granule,
    /// VTCR_EL2.DS (FEAT_LPA2): the base of a range is a number of 64K.
    pub(super) has_52_bits: bool,
}

impl Encoding {
    /// Returns the number of address bits below the base of a range.
    pub(super) const fn base_shift(self) -> u32 {
        if self.has_52_bits { Granule::K64.shift() } else { self.granule.shift() }
    }
}

/// Returns the name of an invalidation without the qualifier nXS, and whether it has the qualifier.
pub(super) fn without_nxs(name: &str) -> (&str, bool) {
    name.strip_suffix("nxs").map_or((name, false), |name| (name, true))
}

/// Returns the name of an invalidation without `is` or `os`, and the CPUs that it affects.
pub(super) fn scope_of(name: &str) -> (&str, Scope) {
    match name.strip_suffix("is").or_else(|| name.strip_suffix("os")) {
        Some(name) => (name, Scope::Broadcast),
        None => (name, Scope::Local),
    }
}

/// Returns the encoding of a granule in the upper half of TTL, and in TG.
const fn granule_field(granule: Granule) -> u64 {
    match granule {
        Granule::K4 => 1,
        Granule::K16 => 2,
        Granule::K64 => 3,
    }
}

/// Decodes the TTL hint of an operation by address: granule and level (FEAT_TTL). A hint of another
/// granule is wrong. Reserved values are no hint; level 0 of 4K and level 1 of 16K are reserved without
/// FEAT_LPA2.
pub(super) fn address_ttl(ttl: u64, encoding: Encoding) -> TtlHint {
    let (granule, level) = (ttl >> 2 & 3, ttl & 3);
    let is_level = match granule {
        1 => level > 0 || encoding.has_52_bits,
        2 => level > 1 || (level > 0 && encoding.has_52_bits),
        3 => level > 0,
        _ => false,
    };
    match u8::try_from(level).ok().and_then(Level::new) {
        Some(level) if is_level && granule == granule_field(encoding.granule) => {
            TtlHint::Level(level)
        }
        _ if is_level => TtlHint::Wrong,
        _ => TtlHint::Unknown,
    }
}

/// Decodes a range: BaseADDR, TTL, NUM, SCALE and TG. Returns its first address, bytes, and level hint,
/// which is wrong with the TG of another granule (Arm ARM R_XKMMX).
pub(super) fn range_of_operand(operand: u64, encoding: Encoding) -> (u64, u64, TtlHint) {
    let (base, ttl, granule) = (operand & 0x1f_ffff_ffff, operand >> 37 & 3, operand >> 46 & 3);
    let (number, scale) = (operand >> 39 & 0x1f, operand >> 44 & 3);
    let pages = (number + 1) << (5 * scale + 1);
    let hint = if granule != granule_field(encoding.granule) {
        TtlHint::Wrong
    } else if ttl == 0 {
        TtlHint::Unknown
    } else {
        address_ttl(granule << 2 | ttl, encoding)
    };
    (base << encoding.base_shift(), pages << encoding.granule.shift(), hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(number: u8) -> TtlHint {
        TtlHint::Level(Level::new(number).unwrap())
    }

    #[test]
    fn a_hint_names_its_granule_and_reserved_values_are_none() {
        use Granule::{K4, K16, K64};
        for (ttl, granule, has_52_bits, expected) in [
            (0b0000, K4, false, TtlHint::Unknown),
            (0b0011, K4, false, TtlHint::Unknown),
            (0b0100, K4, false, TtlHint::Unknown),
            (0b0100, K4, true, level(0)),
            (0b0101, K4, false, level(1)),
            (0b0111, K4, false, level(3)),
            (0b1001, K16, false, TtlHint::Unknown),
            (0b1001, K16, true, level(1)),
            (0b1010, K16, false, level(2)),
            (0b1101, K64, false, level(1)),
            (0b1100, K64, true, TtlHint::Unknown),
            (0b0111, K64, false, TtlHint::Wrong),
            (0b1010, K4, false, TtlHint::Wrong),
            (0b1000, K4, false, TtlHint::Unknown),
            (0b1111, K16, false, TtlHint::Wrong),
        ] {
            let encoding = Encoding { granule, has_52_bits };

            assert_eq!(address_ttl(ttl, encoding), expected, "{ttl:#06b} {encoding:?}");
        }
    }

    #[test]
    fn a_range_has_a_hint_only_with_the_granule_of_the_tables() {
        use Granule::{K4, K16, K64};
        for (granule_field, ttl, granule, has_52_bits, expected) in [
            (1, 0, K4, false, TtlHint::Unknown),
            (1, 0, K4, true, TtlHint::Unknown),
            (1, 3, K4, false, level(3)),
            (2, 1, K16, false, TtlHint::Unknown),
            (2, 1, K16, true, level(1)),
            (3, 2, K64, false, level(2)),
            (0, 0, K4, false, TtlHint::Wrong),
            (1, 0, K64, false, TtlHint::Wrong),
            (2, 3, K4, false, TtlHint::Wrong),
        ] {
            let encoding = Encoding { granule, has_52_bits };

            let (_, _, hint) = range_of_operand(granule_field << 46 | ttl << 37, encoding);

            assert_eq!(hint, expected, "TG {granule_field}, TTL {ttl}, {encoding:?}");
        }
    }
}
