// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Decodes the operands of TLB invalidations of stage 1 (Arm ARM C5.5).

use crate::{
    address::VirtAddr,
    check::{
        entry::{InvalidatedRange, Invalidation},
        held_entries::Removed,
        tlbi_operand::{Encoding, address_ttl, range_of_operand, scope_of, without_nxs},
    },
};

/// Bits of a virtual address.
const ADDRESS: u64 = (1 << 56) - 1;

/// Decodes an invalidation of upper addresses by its name in lower case; `None` if it removes no global
/// entry. Those of EL2 apply to the EL2&0 regime.
pub(in crate::check) fn decode(
    name: &str,
    operand: u64,
    encoding: Encoding,
) -> Option<Invalidation<VirtAddr>> {
    let (name, is_nxs) = without_nxs(name);
    let (name, scope) = scope_of(name);
    let leaf_only = name.contains("ale");
    let range = match name {
        "vmalle1" | "alle2" => None,
        "vae1" | "vaae1" | "vale1" | "vaale1" | "vae2" | "vale2" => Some(InvalidatedRange {
            first: VirtAddr(operand << 12 & ADDRESS),
            size: 1,
            ttl: address_ttl(operand >> 44 & 0xf, encoding),
            leaf_only,
        }),
        "rvae1" | "rvaae1" | "rvale1" | "rvaale1" | "rvae2" | "rvale2" => {
            let (base, size, ttl) = range_of_operand(operand, encoding);
            // The base has 37 bits, and its highest one is that of all higher ones.
            let width = 37 + encoding.base_shift();
            let first = VirtAddr((base | !0 << width) & ADDRESS);
            Some(InvalidatedRange { first, size, ttl, leaf_only })
        }
        _ => return None,
    };
    Some(Invalidation { range, removed: Removed::Everything, scope, is_nxs })
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

    fn range(name: &str, operand: u64) -> InvalidatedRange<VirtAddr> {
        decode(name, operand, ENCODING).unwrap().range.unwrap()
    }

    #[test]
    fn an_address_applies_to_tables_too_unless_the_operation_is_for_the_last_level() {
        let first = VirtAddr(0xff_8000_1001_0000);
        for (name, operand, ttl, leaf_only) in [
            ("vaae1is", 0x0ff8_0001_0010, TtlHint::Unknown, false),
            ("vaale1is", 0x0ff8_0001_0010, TtlHint::Unknown, true),
            ("vale1", 7 << 44 | 0x0ff8_0001_0010, TtlHint::Level(Level::PAGE), true),
            ("vale1", 0xf << 44 | 0x0ff8_0001_0010, TtlHint::Wrong, true),
            ("vae2is", 0x0ff8_0001_0010, TtlHint::Unknown, false),
        ] {
            let expected = InvalidatedRange { first, size: 1, ttl, leaf_only };
            assert_eq!(range(name, operand), expected, "{name}");
        }
    }

    #[test]
    fn a_range_of_upper_addresses_is_extended_by_its_sign() {
        let base = 0xffff_8000_1001_0000_u64 >> 12 & ((1 << 37) - 1);

        let first = VirtAddr(0xff_8000_1001_0000);
        for (granule, ttl) in [(1, TtlHint::Unknown), (2, TtlHint::Wrong), (0, TtlHint::Wrong)] {
            let found = range("rvaale1is", base | 3 << 39 | granule << 46);

            assert_eq!(found, InvalidatedRange { first, size: 8 << 12, ttl, leaf_only: true });
        }
    }

    #[test]
    fn all_entries_are_removed_by_vmalle1_and_none_by_an_asid() {
        let all = decode("vmalle1is", 0, ENCODING).unwrap();

        assert_eq!((all.range, all.scope), (None, Scope::Broadcast));
        assert_eq!(decode("vmalle1", 0, ENCODING).unwrap().scope, Scope::Local);
        assert_eq!(decode("aside1is", 0, ENCODING), None);
    }
}
