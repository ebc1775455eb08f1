// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VTCR_EL2, VTTBR_EL2 and HCR_EL2 (Arm ARM D24.2), as far as they determine the stage-2 table and
//! the translation regime to which a TLB invalidation applies; features by identification registers.

use crate::{
    address::TableAddress,
    check::tlbi_operand::Encoding,
    engine::{BbmLevel, Features},
    geometry::{Geometry, Granule},
    operations::Vmid,
};

const CTR_DIC: u64 = 1 << 29;
const HCR_VM: u64 = 1;
const HCR_TGE: u64 = 1 << 27;
const HCR_E2H: u64 = 1 << 34;
const HCR_FWB: u64 = 1 << 46;
const VTCR_DS: u64 = 1 << 32;

/// Identification registers with a field of [`Features`], in lower case.
pub const IDENTIFICATION: [&str; 3] = ["ctr_el0", "id_aa64isar0_el1", "id_aa64mmfr2_el1"];

/// Adds what an identification register shows to the features. FEAT_S2FWB is not added: it is in use
/// only if a hypervisor sets HCR_EL2.FWB.
pub(super) fn identify(features: &mut Features, name: &str, value: u64) {
    let field = |low: u32| (value >> low) & 0xf;
    match name {
        "ctr_el0" => features.dic = value & CTR_DIC != 0,
        "id_aa64isar0_el1" => features.tlb_range = field(56) >= 2,
        "id_aa64mmfr2_el1" => features.bbm = BbmLevel::of_id_register(value),
        _ => {}
    }
}

/// The registers of a CPU that select its stage-2 table.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Registers {
    pub(super) vtcr: u64,
    pub(super) vttbr: u64,
    pub(super) hcr: u64,
    /// Indicates that no ISB has followed the last write of VTTBR_EL2.
    pub(super) needs_isb: bool,
    /// The call stack of the last write of VTTBR_EL2.
    pub(super) vttbr_stack: Option<u32>,
}

impl Registers {
    /// Returns the address of the root table, or `None` if no table is selected.
    pub(super) const fn root(self) -> Option<TableAddress> {
        let root = self.vttbr & 0x0000_ffff_ffff_fffe;
        if root == 0 { None } else { Some(TableAddress(root)) }
    }

    pub(super) const fn vmid(self) -> Vmid {
        Vmid((self.vttbr >> 48) as u16)
    }

    /// Returns whether invalidations of stage 1 of the EL1&0 regime apply to the guest of VTTBR_EL2.
    /// With E2H and TGE they apply to the host, and those of stage 2 to the guest nevertheless (Arm
    /// ARM: TLBI VMALLE1, TLBI IPAS2E1, TLBI VMALLS12E1).
    pub(super) const fn selects_guest(self) -> bool {
        self.hcr & (HCR_E2H | HCR_TGE) != HCR_E2H | HCR_TGE
    }

    pub(super) const fn has_fwb(self) -> bool {
        self.hcr & HCR_FWB != 0
    }

    /// Returns whether the CPU executes a guest, or is about to.
    pub(super) const fn runs_guest(self) -> bool {
        self.enables_stage2() && self.hcr & HCR_TGE == 0
    }

    /// Returns whether stage 2 is enabled.
    pub(super) const fn enables_stage2(self) -> bool {
        self.hcr & HCR_VM != 0
    }

    const fn granule(self) -> Option<Granule> {
        Some(match self.vtcr >> 14 & 3 {
            0 => Granule::K4,
            1 => Granule::K64,
            2 => Granule::K16,
            _ => return None,
        })
    }

    /// Returns the encoding of TLB invalidations, or `None` for a reserved granule.
    pub(super) fn encoding(self) -> Option<Encoding> {
        let has_52_bits = self.vtcr & VTCR_DS != 0;
        self.granule().map(|granule| Encoding { granule, has_52_bits })
    }

    /// Returns the geometry of VTCR_EL2, or `None` if it is reserved or starts at another level than
    /// the lowest possible one.
    pub(super) fn geometry(self) -> Option<Geometry> {
        let granule = self.granule()?;
        let ipa_bits = 64 - (self.vtcr & 0x3f) as u32;
        let geometry = Geometry::new(granule, ipa_bits).ok()?;
        let level = match (granule, self.vtcr >> 6 & 3) {
            (Granule::K4, sl0 @ 0..=2) => 2 - sl0,
            (Granule::K16 | Granule::K64, sl0 @ 0..=2) => 3 - sl0,
            _ => return None,
        };
        (u64::from(geometry.start_level().number()) == level).then_some(geometry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_of_a_running_kernel_has_40_bits_in_4k_granules_from_level_1() {
        let registers = Registers { vtcr: 0x8002_3558, ..Registers::default() };

        let geometry = registers.geometry().unwrap();

        assert_eq!((geometry.granule(), geometry.ipa_bits()), (Granule::K4, 40));
        assert_eq!((geometry.start_level().number(), geometry.root_tables()), (1, 2));
    }

    #[test]
    fn a_root_with_another_start_level_is_refused() {
        let registers = Registers { vtcr: 0x8002_3598, ..Registers::default() };

        assert_eq!(registers.geometry(), None);
    }

    #[test]
    fn features_are_fields_of_identification_registers() {
        let mut features = Features::default();
        for (name, value) in
            IDENTIFICATION.into_iter().zip([1 << 29, 2 << 56, 0x0021_1000_0000_0000])
        {
            identify(&mut features, name, value);
        }

        let bbm = BbmLevel::L2;
        assert_eq!(features, Features { fwb: false, dic: true, tlb_range: true, bbm });
        identify(&mut features, "id_aa64isar0_el1", 1 << 56);
        assert!(!features.tlb_range);
    }

    #[test]
    fn with_e2h_and_tge_invalidations_apply_to_the_host() {
        let registers = |hcr| Registers { hcr, ..Registers::default() };

        assert!(!registers(HCR_E2H | HCR_TGE).selects_guest());
        assert!(registers(HCR_E2H | HCR_VM).selects_guest());
        assert!(registers(0).selects_guest());
    }
}
