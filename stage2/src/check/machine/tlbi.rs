// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Decodes TLB invalidations of stage 2 and of entries combined with it.

use crate::{
    address::Ipa,
    check::tlbi_operand::{Encoding, address_ttl, range_of_operand, scope_of},
    operations::{Scope, Tlbi},
};

/// The effect of an invalidation on guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Invalidation {
    /// Entries of the current VMID.
    CurrentVmid(Tlbi),
    /// Entries of all VMIDs (`ALLE1`).
    AllVmids(Scope),
}

/// Decodes an invalidation by its name in lower case without qualifier and its operand; `None` if it
/// does not affect stage 2 or entries combined with it.
pub(super) fn decode(name: &str, operand: u64, encoding: Encoding) -> Option<Invalidation> {
    let (name, scope) = scope_of(name);
    let leaf_only = name.ends_with("le1");
    let kind = match name {
        "ipas2e1" | "ipas2le1" => Tlbi::Ipa {
            ipa: Ipa(operand << 12 & 0x00ff_ffff_ffff_f000),
            ttl: address_ttl(operand >> 44 & 0xf, encoding.granule),
            leaf_only,
            scope,
        },
        "ripas2e1" | "ripas2le1" => range(operand, encoding, (leaf_only, scope)),
        "vmalle1" => Tlbi::Stage1 { scope },
        "vmalls12e1" => Tlbi::All { scope },
        "alle1" => return Some(Invalidation::AllVmids(scope)),
        _ => return None,
    };
    Some(Invalidation::CurrentVmid(kind))
}

/// Decodes an invalidation of a range.
fn range(operand: u64, encoding: Encoding, (leaf_only, scope): (bool, Scope)) -> Tlbi {
    let (base, size, ttl) = range_of_operand(operand, encoding);
    Tlbi::Range { ipa: Ipa(base), size, ttl, leaf_only, scope }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{Granule, Level};

    const ENCODING: Encoding = Encoding { granule: Granule::K4, has_52_bits: false };

    #[test]
    fn an_address_has_a_level_hint_of_its_granule() {
        let ipa = |operand| decode("ipas2e1is", operand, ENCODING);
        let expected = |ttl| {
            let (ipa, scope) = (Ipa(0x4_1a00_0000), Scope::Broadcast);
            Some(Invalidation::CurrentVmid(Tlbi::Ipa { ipa, ttl, leaf_only: false, scope }))
        };

        assert_eq!(ipa(0x0041_a000), expected(None));
        assert_eq!(ipa(0x6 << 44 | 0x0041_a000), expected(Level::new(2)));
        assert_eq!(ipa(0xa << 44 | 0x0041_a000), expected(None));
    }

    #[test]
    fn a_range_consists_of_number_and_scale() {
        let operand = 0x100 | 3 << 37 | 7 << 39 | 1 << 44 | 1 << 46;

        let (ipa, size, ttl) = (Ipa(0x10_0000), 8 * 64 * 0x1000, Level::new(3));
        for (name, leaf_only) in [("ripas2e1is", false), ("ripas2le1is", true)] {
            let decoded = decode(name, operand, ENCODING);

            let scope = Scope::Broadcast;
            let expected = Tlbi::Range { ipa, size, ttl, leaf_only, scope };
            assert_eq!(decoded, Some(Invalidation::CurrentVmid(expected)));
        }
    }

    #[test]
    fn with_52_address_bits_the_base_of_a_range_is_in_units_of_64k() {
        let encoding = Encoding { granule: Granule::K4, has_52_bits: true };

        let decoded = decode("ripas2e1is", 0x6000_ffff_ff00, encoding);

        let (ipa, size, scope) = (Ipa(0xffff_ff00_0000), 2048 * 0x1000, Scope::Broadcast);
        let range = Tlbi::Range { ipa, size, ttl: None, leaf_only: false, scope };
        let expected = Invalidation::CurrentVmid(range);
        assert_eq!(decoded, Some(expected));
    }

    #[test]
    fn invalidations_of_the_host_are_ignored() {
        assert_eq!(decode("vae2is", 0, ENCODING), None);
        assert_eq!(decode("alle2", 0, ENCODING), None);
        assert_eq!(decode("alle1is", 0, ENCODING), Some(Invalidation::AllVmids(Scope::Broadcast)));
    }
}
