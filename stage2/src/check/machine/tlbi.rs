// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Decodes TLB invalidations of stage 2 and of entries combined with it.

use crate::{
    address::Ipa,
    check::{
        entry::{InvalidatedRange, Invalidation},
        held_entries::Removed,
        tlbi_operand::{Encoding, address_ttl, range_of_operand, scope_of, without_nxs},
    },
};

/// The VMIDs whose entries an invalidation removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InvalidatedVmids {
    Current,
    /// `ALLE1`.
    All,
}

/// Decodes an invalidation by its name in lower case and its operand; `None` if it does not affect
/// stage 2 or entries combined with it.
pub(super) fn decode(
    name: &str,
    operand: u64,
    encoding: Encoding,
) -> Option<(InvalidatedVmids, Invalidation<Ipa>)> {
    let (name, is_nxs) = without_nxs(name);
    let (name, scope) = scope_of(name);
    let leaf_only = name.ends_with("le1");
    let (range, removed) = match name {
        "ipas2e1" | "ipas2le1" => {
            let first = Ipa(operand << 12 & 0x00ff_ffff_ffff_f000);
            let ttl = address_ttl(operand >> 44 & 0xf, encoding);
            (Some(InvalidatedRange { first, size: 1, ttl, leaf_only }), Removed::Stage2)
        }
        "ripas2e1" | "ripas2le1" => {
            let (base, size, ttl) = range_of_operand(operand, encoding);
            (Some(InvalidatedRange { first: Ipa(base), size, ttl, leaf_only }), Removed::Stage2)
        }
        "vmalle1" => (None, Removed::Combined),
        "vmalls12e1" | "alle1" => (None, Removed::Everything),
        _ => return None,
    };
    let vmids = if name == "alle1" { InvalidatedVmids::All } else { InvalidatedVmids::Current };
    Some((vmids, Invalidation { range, removed, scope, is_nxs }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        check::entry::TtlHint,
        geometry::{Granule, Level},
        operations::Scope,
    };

    const ENCODING: Encoding = Encoding { granule: Granule::K4, has_52_bits: false };

    fn range(name: &str, operand: u64, encoding: Encoding) -> InvalidatedRange<Ipa> {
        let (vmids, kind) = decode(name, operand, encoding).unwrap();
        assert_eq!((vmids, kind.scope), (InvalidatedVmids::Current, Scope::Broadcast));
        assert_eq!((kind.removed, kind.is_nxs), (Removed::Stage2, false));
        kind.range.unwrap()
    }

    #[test]
    fn an_address_has_a_level_hint_of_its_granule() {
        let (first, size, leaf_only) = (Ipa(0x4_1a00_0000), 1, false);
        for (hint, ttl) in [
            (0x0, TtlHint::Unknown),
            (0x6, TtlHint::Level(Level::new(2).unwrap())),
            (0xa, TtlHint::Wrong),
        ] {
            let found = range("ipas2e1is", hint << 44 | 0x0041_a000, ENCODING);

            assert_eq!(found, InvalidatedRange { first, size, ttl, leaf_only });
        }
    }

    #[test]
    fn a_range_consists_of_number_and_scale() {
        let operand = 0x100 | 3 << 37 | 7 << 39 | 1 << 44 | 1 << 46;

        let (first, size, ttl) = (Ipa(0x10_0000), 8 * 64 * 0x1000, TtlHint::Level(Level::PAGE));
        for (name, leaf_only) in [("ripas2e1is", false), ("ripas2le1is", true)] {
            let expected = InvalidatedRange { first, size, ttl, leaf_only };
            assert_eq!(range(name, operand, ENCODING), expected);
        }
    }

    #[test]
    fn with_52_address_bits_the_base_of_a_range_is_in_units_of_64k() {
        let encoding = Encoding { granule: Granule::K4, has_52_bits: true };

        let found = range("ripas2e1is", 0x6000_ffff_ff00, encoding);

        let (first, size, ttl) = (Ipa(0xffff_ff00_0000), 2048 * 0x1000, TtlHint::Unknown);
        assert_eq!(found, InvalidatedRange { first, size, ttl, leaf_only: false });
    }

    #[test]
    fn invalidations_of_the_host_are_ignored() {
        assert_eq!(decode("vae2is", 0, ENCODING), None);
        assert_eq!(decode("alle2", 0, ENCODING), None);
        let (vmids, kind) = decode("alle1isnxs", 0, ENCODING).unwrap();
        assert_eq!((vmids, kind.scope), (InvalidatedVmids::All, Scope::Broadcast));
        assert_eq!((kind.removed, kind.is_nxs), (Removed::Everything, true));
    }
}
