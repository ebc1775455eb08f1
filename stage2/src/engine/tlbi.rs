// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! TLB invalidation.
//!
//! All invalidations follow one sequence: DSB ISHST (table walkers observe the store) → the guest's
//! VMID, ISB → stage 2 by address → DSB ISH → stage 1 and combined → DSB ISH → the previous VMID,
//! ISB. `VMALLS12E1IS` invalidates both stages at once (Arm ARM R_VZZVZ; Linux: `hyp/*/tlb.c`).
//!
//! One `RIPAS2E1IS` covers `(NUM + 1) << (5 × SCALE + 1)` pages, NUM 0 to 31 and SCALE 0 to 3 (Arm
//! ARM C5.5, TLBI RIPAS2E1IS). The engine divides a range into a single page if its page count is
//! odd, and one range TLBI for each SCALE that the rest of the count needs.

use super::walk::{Walk, WalkMode};
use crate::{
    address::Ipa,
    geometry::{Granule, Level},
    operations::{Dsb, Operations, Scope, Tlbi},
};

/// Maximum number of pages that one range TLBI covers.
const MAX_TLBI_PAGES: u64 = 32 << 16;

/// Returns whether one range TLBI covers this many bytes, a power of two (the span of a table).
#[inline]
const fn is_single_tlbi(granule: Granule, size: u64) -> bool {
    size.is_power_of_two() && size > granule.size() && size >> granule.shift() <= MAX_TLBI_PAGES
}

/// Divides a range into operands of `TLBI` instructions, each an address and a number of pages:
/// ranges, and a single page for the by-address form if the count is odd. `ipa` and `size` (in
/// bytes) are multiples of the granule.
fn tlbi_operands(granule: Granule, ipa: Ipa, size: u64) -> impl Iterator<Item = (Ipa, u64)> {
    let mut at = ipa;
    let mut left = size >> granule.shift();
    core::iter::from_fn(move || {
        let pages = match left {
            0 => return None,
            odd if !odd.is_multiple_of(2) => 1,
            MAX_TLBI_PAGES.. => MAX_TLBI_PAGES,
            _ => {
                // The lowest non-zero digit of the count: five bits for each SCALE, from bit 1.
                let scale = (left.trailing_zeros() - 1) / 5;
                let shift = 5 * scale + 1;
                ((left >> shift) & 31) << shift
            }
        };
        let piece = (at, pages);
        at += pages << granule.shift();
        left -= pages;
        Some(piece)
    })
}

impl<O: Operations, M: WalkMode> Walk<'_, O, M> {
    /// Invalidates one leaf on all CPUs.
    pub(super) fn invalidate_leaf(&self, ipa: Ipa, level: Level) {
        self.invalidate_ipas(core::iter::once((ipa, Some(level))), Scope::Broadcast);
    }

    /// Invalidates a leaf with relaxed permissions in this CPU's TLB.
    pub(super) fn invalidate_leaf_local(&self, ipa: Ipa, level: Level) {
        self.invalidate_ipas(core::iter::once((ipa, Some(level))), Scope::Local);
    }

    /// Invalidates single entries, each by address with an optional level as TTL hint.
    pub(super) fn invalidate_ipas(
        &self,
        entries: impl Iterator<Item = (Ipa, Option<Level>)>,
        scope: Scope,
    ) {
        let (before, after) = match scope {
            Scope::Local => (Dsb::NshSt, Dsb::Nsh),
            Scope::Broadcast => (Dsb::IshSt, Dsb::Ish),
        };
        self.ops.dsb(before);
        self.with_guest_vmid(|| {
            for (ipa, ttl) in entries {
                self.tlbi_ipa(ipa, ttl, scope);
            }
            self.ops.dsb(after);
            self.ops.tlbi(Tlbi::Stage1 { scope });
            self.ops.dsb(after);
        });
    }

    /// Invalidates the leaves and table entries of a range on all CPUs.
    #[inline]
    pub(super) fn invalidate_range(&self, ipa: Ipa, size: u64) {
        let scope = Scope::Broadcast;
        self.ops.dsb(Dsb::IshSt);
        self.with_guest_vmid(|| {
            if self.stage2.uses_range_tlbi() {
                if is_single_tlbi(self.stage2.geometry.granule(), size) {
                    self.tlbi_range(ipa, size);
                } else {
                    self.issue_tlbis(ipa, size);
                }
                self.ops.dsb(Dsb::Ish);
                self.ops.tlbi(Tlbi::Stage1 { scope });
            } else {
                self.ops.tlbi(Tlbi::All { scope });
            }
            self.ops.dsb(Dsb::Ish);
        });
    }

    fn tlbi_ipa(&self, ipa: Ipa, ttl: Option<Level>, scope: Scope) {
        self.ops.tlbi(Tlbi::Ipa { ipa, ttl, leaf_only: false, scope });
    }

    /// Issues one range TLBI. The instruction must be able to encode the size.
    #[inline]
    fn tlbi_range(&self, ipa: Ipa, size: u64) {
        let scope = Scope::Broadcast;
        self.ops.tlbi(Tlbi::Range { ipa, size, ttl: None, leaf_only: false, scope });
    }

    /// Issues the TLBIs that together cover the range.
    #[inline(never)]
    fn issue_tlbis(&self, ipa: Ipa, size: u64) {
        let granule = self.stage2.geometry.granule();
        tlbi_operands(granule, ipa, size).for_each(|(ipa, pages)| match pages {
            1 => self.tlbi_ipa(ipa, None, Scope::Broadcast),
            _ => self.tlbi_range(ipa, pages * granule.size()),
        });
    }

    /// Runs `invalidate` with the guest's VMID current.
    fn with_guest_vmid(&self, invalidate: impl FnOnce()) {
        let before = self.ops.switch_vmid(self.stage2.vmid);
        self.ops.isb();
        invalidate();
        self.ops.switch_vmid(before);
        self.ops.isb();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tlbi_operands_cover_every_range_without_a_gap() {
        let interesting = (1..5000).chain([1 << 18, (1 << 21) - 1, 1 << 21, 5 * (1 << 21) + 77]);
        for pages in interesting {
            for granule in [Granule::K4, Granule::K16, Granule::K64] {
                let mut at = 7 * granule.size();
                let first = tlbi_operands(granule, Ipa(at), pages * granule.size()).next();
                if is_single_tlbi(granule, pages * granule.size()) {
                    assert_eq!(first, Some((Ipa(at), pages)));
                    assert!(Tlbi::is_encodable(granule, pages * granule.size()));
                }
                for (ipa, part) in tlbi_operands(granule, Ipa(at), pages * granule.size()) {
                    assert_eq!(ipa, Ipa(at), "{pages} pages");
                    let size = part * granule.size();
                    let fits = part == 1 || Tlbi::is_encodable(granule, size);
                    assert!(fits, "{part} of {pages} pages");
                    at += size;
                }
                assert_eq!(at, (7 + pages) * granule.size());
            }
        }
    }

    #[test]
    fn encodable_ranges_have_a_scale_and_a_factor() {
        for granule in [Granule::K4, Granule::K16, Granule::K64] {
            let is_encodable = |pages| Tlbi::is_encodable(granule, pages * granule.size());
            assert!([2, 64, 512, MAX_TLBI_PAGES].into_iter().all(is_encodable));
            assert!(![0, 1, 66, MAX_TLBI_PAGES * 2].into_iter().any(is_encodable));
            assert!(!Tlbi::is_encodable(granule, 2 * granule.size() + 1));
        }
    }
}
