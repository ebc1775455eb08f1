// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! TLB invalidation.
//!
//! Every invalidation has the same frame: DSB ISHST (table walkers see the store) → the guest's
//! VMID, ISB → stage 2 by address → DSB ISH → stage 1 and combined → DSB ISH → the previous VMID,
//! ISB. `VMALLS12E1IS` does both stages at once (Arm ARM D8.14.4; Linux: `hyp/*/tlb.c`).

use super::walk::{Walk, WalkMode};
use crate::{
    address::Ipa,
    geometry::Level,
    operations::{Dsb, Operations, Scope, Tlbi},
    range,
};

impl<O: Operations, M: WalkMode> Walk<'_, O, M> {
    /// Invalidates the cached copies of one leaf on all CPUs.
    pub(super) fn invalidate_leaf(&self, ipa: Ipa, level: Level) {
        self.invalidate_ipas(core::iter::once((ipa, Some(level))));
    }

    /// Invalidates the cached copies of single entries on all CPUs; a level is a TTL hint.
    pub(super) fn invalidate_ipas(&self, entries: impl Iterator<Item = (Ipa, Option<Level>)>) {
        let scope = Scope::Broadcast;
        self.ops.dsb(Dsb::IshSt);
        self.in_vmid(|| {
            for (ipa, ttl) in entries {
                self.tlbi_ipa(ipa, ttl, scope);
            }
            self.ops.dsb(Dsb::Ish);
            self.ops.tlbi(Tlbi::Stage1 { scope });
            self.ops.dsb(Dsb::Ish);
        });
    }

    /// Invalidates the cached leaves and the walk caches of a range on all CPUs.
    #[inline]
    pub(super) fn invalidate_range(&self, ipa: Ipa, size: u64) {
        let scope = Scope::Broadcast;
        self.ops.dsb(Dsb::IshSt);
        self.in_vmid(|| {
            if self.stage2.uses_range_tlbi() {
                if range::is_one(self.stage2.geometry.granule(), size) {
                    self.tlbi_range(ipa, size);
                } else {
                    self.tlbi_pieces(ipa, size);
                }
                self.ops.dsb(Dsb::Ish);
                self.ops.tlbi(Tlbi::Stage1 { scope });
            } else {
                self.ops.tlbi(Tlbi::All { scope });
            }
            self.ops.dsb(Dsb::Ish);
        });
    }

    /// Invalidates the cached copies of a leaf whose permissions are relaxed, on this CPU.
    pub(super) fn invalidate_leaf_local(&self, ipa: Ipa, level: Level) {
        let scope = Scope::Local;
        self.ops.dsb(Dsb::NshSt);
        self.in_vmid(|| {
            self.tlbi_ipa(ipa, Some(level), scope);
            self.ops.dsb(Dsb::Nsh);
            self.ops.tlbi(Tlbi::Stage1 { scope });
            self.ops.dsb(Dsb::Nsh);
        });
    }

    fn tlbi_ipa(&self, ipa: Ipa, ttl: Option<Level>, scope: Scope) {
        self.ops.tlbi(Tlbi::Ipa { ipa, ttl, leaf_only: false, scope });
    }

    /// Issues one range TLBI; the instruction must be able to encode the size.
    #[inline]
    fn tlbi_range(&self, ipa: Ipa, size: u64) {
        self.ops.tlbi(Tlbi::Range { ipa, size, ttl: None, scope: Scope::Broadcast });
    }

    /// Issues as many TLBIs as the encoding of ranges takes.
    #[inline(never)]
    fn tlbi_pieces(&self, ipa: Ipa, size: u64) {
        let granule = self.stage2.geometry.granule();
        range::pieces(granule, ipa, size).for_each(|piece| match piece.pages {
            1 => self.tlbi_ipa(piece.ipa, None, Scope::Broadcast),
            pages => self.tlbi_range(piece.ipa, pages * granule.size()),
        });
    }

    /// Runs `invalidate` with the guest's VMID current.
    fn in_vmid(&self, invalidate: impl FnOnce()) {
        let before = self.ops.switch_vmid(self.stage2.vmid);
        self.ops.isb();
        invalidate();
        self.ops.switch_vmid(before);
        self.ops.isb();
    }
}
