// SPDX-License-Identifier: GPL-2.0-or-later
//! The shape of tables.

use granule_stage2::geometry::{Granule, Level};

/// Shape of the tables that a value of VTCR_EL2 defines (Arm ARM, D8.2), without FEAT_LPA2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Size of a table.
    pub granule: Granule,
    /// Level of the root tables.
    pub start: Level,
    /// Number of concatenated root tables.
    pub roots: u64,
}

impl Shape {
    /// Returns the shape; `None` for reserved values.
    pub fn of_vtcr(vtcr: u64) -> Option<Self> {
        let field = |low: u32, bits: u32| (vtcr >> low) & ((1 << bits) - 1);
        let (granule, last_start): (_, u8) = match field(14, 2) {
            0 => (Granule::K4, 2),
            1 => (Granule::K64, 3),
            2 => (Granule::K16, 3),
            _ => return None,
        };
        let start = last_start.checked_sub(u8::try_from(field(6, 2)).ok()?)?;
        let address_bits = 64 - u32::try_from(field(0, 6)).ok()?;
        let level_shift = granule.shift() + granule.level_bits() * u32::from(3 - start);
        let root_bits = address_bits.checked_sub(level_shift)?;
        let excess = root_bits.saturating_sub(granule.level_bits());
        // A root has at most 16 tables.
        let roots = (excess <= 4).then_some(1 << excess)?;
        Some(Self { granule, start: Level::new(start)?, roots })
    }

    /// Returns the shape of the upper addresses that a value of TCR_EL1 defines (Arm ARM, D8.2),
    /// without FEAT_LPA2; `None` for reserved values.
    pub fn of_tcr1(tcr: u64) -> Option<Self> {
        let granule = match tcr >> 30 & 3 {
            1 => Granule::K16,
            2 => Granule::K4,
            3 => Granule::K64,
            _ => return None,
        };
        let address_bits = 64 - u32::try_from(tcr >> 16 & 0x3f).ok()?;
        let resolved = address_bits.checked_sub(granule.shift())?;
        let levels = u8::try_from(resolved.div_ceil(granule.level_bits())).ok()?;
        Some(Self { granule, start: Level::new(4_u8.checked_sub(levels)?)?, roots: 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(number: u8) -> Level {
        Level::new(number).unwrap()
    }

    #[test]
    fn the_shape_of_the_upper_addresses_follows_from_tcr() {
        let shape = |granule: u64, bits: u64| Shape::of_tcr1(granule << 30 | (64 - bits) << 16);
        for (value, expected) in [
            (shape(2, 48), Some((Granule::K4, level(0)))),
            (shape(2, 39), Some((Granule::K4, level(1)))),
            (shape(1, 47), Some((Granule::K16, level(1)))),
            (shape(1, 48), Some((Granule::K16, level(0)))),
            (shape(3, 42), Some((Granule::K64, level(2)))),
            (shape(0, 48), None),
            (shape(2, 52), None),
        ] {
            assert_eq!(value.map(|shape| (shape.granule, shape.start)), expected);
        }
    }

    #[test]
    fn the_shape_follows_from_vtcr() {
        let shape =
            |vtcr| Shape::of_vtcr(vtcr).map(|shape| (shape.granule, shape.start, shape.roots));
        let (t0sz, sl0, tg0) =
            (|bits: u64| 64 - bits, |field: u64| field << 6, |field: u64| field << 14);
        for (vtcr, expected) in [
            (0x8002_3558, Some((Granule::K4, level(1), 2))),
            (t0sz(44) | sl0(2), Some((Granule::K4, level(0), 1))),
            (t0sz(43) | sl0(1), Some((Granule::K4, level(1), 16))),
            (t0sz(32) | sl0(1), Some((Granule::K4, level(1), 1))),
            (t0sz(40) | sl0(1) | tg0(2), Some((Granule::K16, level(2), 16))),
            (t0sz(48) | sl0(2) | tg0(1), Some((Granule::K64, level(1), 1))),
            (0, None),
            (t0sz(40) | sl0(1) | tg0(3), None),
        ] {
            assert_eq!(shape(vtcr), expected, "{vtcr:#x}");
        }
    }
}
