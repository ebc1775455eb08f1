// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Names and operands of TLB invalidations of both stages (Arm ARM C5.5).

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

/// Decodes the TTL hint of an operation by address: granule and level (FEAT_TTL). A hint of another
/// granule is no hint.
pub(super) fn address_ttl(ttl: u64, granule: Granule) -> Option<Level> {
    let of_granule = match granule {
        Granule::K4 => 1,
        Granule::K16 => 2,
        Granule::K64 => 3,
    };
    let level = u8::try_from(ttl & 3).ok()?;
    // Level 0 of these granules has no leaf, so the hint is reserved.
    (ttl >> 2 == of_granule && level > 0).then(|| Level::new(level)).flatten()
}

/// Decodes a range: BaseADDR, TTL, NUM, SCALE and TG. Returns its first address, bytes, and level hint.
pub(super) fn range_of_operand(operand: u64, encoding: Encoding) -> (u64, u64, Option<Level>) {
    let (base, ttl) = (operand & 0x1f_ffff_ffff, operand >> 37 & 3);
    let (number, scale) = (operand >> 39 & 0x1f, operand >> 44 & 3);
    let pages = (number + 1) << (5 * scale + 1);
    let ttl = u8::try_from(ttl).ok().filter(|ttl| *ttl > 0).and_then(Level::new);
    (base << encoding.base_shift(), pages << encoding.granule.shift(), ttl)
}
