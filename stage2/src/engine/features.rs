// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! CPU features on which the protocol depends.

/// CPU features that the engine uses; all CPUs of the machine must have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features {
    /// FEAT_S2FWB: stage 2 forces write-back, so guests cannot bypass the caches.
    pub fwb: bool,
    /// CTR_EL0.DIC: instruction fetches need no I-cache invalidation.
    pub dic: bool,
    /// FEAT_TLBIRANGE: one TLBI covers a range.
    pub tlb_range: bool,
    /// FEAT_BBM.
    pub bbm: BbmLevel,
}

/// Level of FEAT_BBM: what a change of a mapping's size requires (Arm ARM R_KFLJB, R_FCPSG).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum BbmLevel {
    /// Level 0: break-before-make.
    #[default]
    L0,
    /// Level 1: a block that has nT while its size changes.
    L1,
    /// Level 2: nothing, but CPUs may take TLB conflict aborts.
    L2,
    /// Level 3: nothing, as CPUs take no TLB conflict aborts (Linux: `has_bbml3()`).
    L3,
}

impl BbmLevel {
    /// Returns the level with this number, or `None` above 3.
    pub const fn new(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::L0,
            1 => Self::L1,
            2 => Self::L2,
            3 => Self::L3,
            _ => return None,
        })
    }

    /// Returns the level that the field BBM of ID_AA64MMFR2_EL1 shows. Earlier CPUs may take no TLB
    /// conflict aborts although the register shows level 2: then level 3 applies.
    pub const fn of_id_register(id_aa64mmfr2_el1: u64) -> Self {
        match id_aa64mmfr2_el1 >> 52 & 0xf {
            0 => Self::L0,
            1 => Self::L1,
            2 => Self::L2,
            _ => Self::L3,
        }
    }

    /// Returns the number of the level.
    pub const fn number(self) -> u8 {
        self as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_have_numbers_and_a_field_of_the_register() {
        for number in 0..=3 {
            assert_eq!(BbmLevel::new(number).map(BbmLevel::number), Some(number));
        }
        assert_eq!(BbmLevel::new(4), None);
        let levels = [0, 1, 2, 3].map(|field| BbmLevel::of_id_register(field << 52 | 0xf << 48));
        assert_eq!(levels, [BbmLevel::L0, BbmLevel::L1, BbmLevel::L2, BbmLevel::L3]);
    }
}
