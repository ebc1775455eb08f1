// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Changing one entry: claim, break, make, and the invalidations between.
//!
//! *Exclusive*: a break is a store of zero. *Shared*: a break is a compare-and-swap to
//! [`Descriptor::LOCKED`]; from then on the entry is this walker's own until it makes a new one.
//! Where memory is made ready before the break, a valid entry is claimed first, so that no second
//! walker makes the same memory ready; the guest goes on using it.
//!
//! Every invalidation has the same frame: DSB ISHST (the store is seen by walkers) → the guest's
//! VMID, ISB → stage 2 by address → DSB ISH → stage 1 and combined → DSB ISH → the VMID from before,
//! ISB. Or both stages at once, `VMALLS12E1IS` (Arm ARM D8.14.4; Linux: `hyp/*/tlb.c`).

use super::{MapError, Slot, Walk};
use crate::{
    address::Ipa,
    descriptor::{Descriptor, EntryKind},
    geometry::Level,
    operations::{Dsb, Operations, Order, Scope, Tlbi},
    range,
};

/// How often a walker looks at a locked entry before it gives up.
const LOCK_SPINS: u32 = 64;

impl<O: Operations> Walk<'_, O> {
    /// Reads an entry. One that another walker has locked is waited for, if the policy says so.
    ///
    /// # Errors
    /// It stays locked.
    #[inline]
    pub(super) fn load_settled(&self, slot: &Slot) -> Result<Descriptor, MapError> {
        let entry = self.ops.load(slot.entry);
        if entry.is_locked() {
            self.wait_for(slot)
        } else {
            Ok(entry)
        }
    }

    /// Waits for an entry that another walker has locked, if the policy says so, and gives what it
    /// then is.
    ///
    /// # Errors
    /// It stays locked.
    #[inline(never)]
    pub(super) fn wait_for(&self, slot: &Slot) -> Result<Descriptor, MapError> {
        if self.stage2.policy.wait_for_locked {
            for _ in 0..LOCK_SPINS {
                self.ops.pause();
                let entry = self.ops.load(slot.entry);
                if !entry.is_locked() {
                    return Ok(entry);
                }
            }
        }
        Err(MapError::Again)
    }

    /// Stores over `old` what needs no break, or is a step of one.
    pub(super) fn put(
        &self,
        slot: &Slot,
        old: Descriptor,
        new: Descriptor,
        order: Order,
    ) -> Result<(), MapError> {
        if self.shared {
            self.ops
                .compare_exchange(slot.entry, old, new)
                .map_err(|_| MapError::Again)
        } else {
            self.ops.store(slot.entry, new, order);
            Ok(())
        }
    }

    /// Announces a break of a valid entry. Gives what the entry then is.
    pub(super) fn claim(&self, slot: &Slot, old: Descriptor) -> Result<Descriptor, MapError> {
        if !self.shared {
            return Ok(old);
        }
        if old.is_break_pending() {
            return Err(MapError::Again);
        }
        self.put(slot, old, old.with_break_pending(), Order::Plain)?;
        Ok(old.with_break_pending())
    }

    /// Makes an invalid entry this walker's own.
    pub(super) fn lock_empty(&self, slot: &Slot, old: Descriptor) -> Result<(), MapError> {
        if self.shared {
            self.put(slot, old, Descriptor::LOCKED, Order::Plain)
        } else {
            Ok(())
        }
    }

    /// Breaks a valid entry and waits until no CPU holds anything that came from it.
    pub(super) fn break_entry(&self, slot: &Slot, old: Descriptor) -> Result<(), MapError> {
        let broken = if self.shared {
            Descriptor::LOCKED
        } else {
            Descriptor::EMPTY
        };
        self.put(slot, old, broken, Order::Plain)?;
        self.invalidate_old(slot, old);
        Ok(())
    }

    /// Stores the new entry, behind all that came before it.
    pub(super) fn make(&self, slot: &Slot, new: Descriptor) {
        self.ops.store(slot.entry, new, Order::Release);
    }

    /// Breaks `old` and makes `new`, which maps the same memory in another shape; without a break
    /// where the CPUs need none.
    ///
    /// FEAT_BBM level 1 and 2: the block is made uncachable for TLBs first (nT), so that none holds
    /// two shapes at once; level 3: they may (Arm ARM D8.16.2).
    pub(super) fn reshape(
        &self,
        slot: &Slot,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), MapError> {
        let level = if self.stage2.policy.use_bbm {
            self.stage2.features.bbm
        } else {
            0
        };
        match (level, old.is_leaf(slot.level)) {
            (0, _) => {
                self.break_entry(slot, old)?;
                self.make(slot, new);
            }
            (1 | 2, true) => {
                let quiet = old.with_nt(true);
                self.put(slot, old, quiet, Order::Plain)?;
                self.invalidate_leaf(slot.ipa, slot.level);
                self.put(slot, quiet, new, Order::Release)?;
            }
            (1 | 2, false) => {
                self.put(slot, old, new.with_nt(true), Order::Release)?;
                self.invalidate_old(slot, old);
                self.put(slot, new.with_nt(true), new, Order::Plain)?;
            }
            _ => {
                self.put(slot, old, new, Order::Release)?;
                self.invalidate_old(slot, old);
            }
        }
        Ok(())
    }

    /// Invalidates what came from an entry that was there.
    fn invalidate_old(&self, slot: &Slot, old: Descriptor) {
        match old.kind(slot.level) {
            EntryKind::Leaf(_) => self.invalidate_leaf(slot.ipa, slot.level),
            EntryKind::Table(_) => {
                self.invalidate_range(slot.ipa, self.stage2.geometry.span(slot.level));
            }
            EntryKind::Invalid | EntryKind::Locked => {}
        }
    }

    /// Invalidates what came from the leaf at an address.
    pub(super) fn invalidate_leaf(&self, ipa: Ipa, level: Level) {
        self.invalidate_ipas(core::iter::once((ipa, Some(level))));
    }

    /// Invalidates what came from some addresses' entries, of unknown level if not told.
    pub(super) fn invalidate_ipas(&self, entries: impl Iterator<Item = (Ipa, Option<Level>)>) {
        let scope = Scope::Broadcast;
        self.ops.dsb(Dsb::IshSt);
        self.in_vmid(|| {
            for (ipa, ttl) in entries {
                self.ops.tlbi(Tlbi::Ipa {
                    ipa,
                    ttl,
                    leaf_only: false,
                    scope,
                });
            }
            self.ops.dsb(Dsb::Ish);
            self.ops.tlbi(Tlbi::Stage1 { scope });
            self.ops.dsb(Dsb::Ish);
        });
    }

    /// Invalidates everything that came from a range, tables too.
    #[inline]
    pub(super) fn invalidate_range(&self, ipa: Ipa, size: u64) {
        let scope = Scope::Broadcast;
        self.ops.dsb(Dsb::IshSt);
        self.in_vmid(|| {
            if self.stage2.uses_ranges() {
                if range::is_one(self.stage2.geometry.granule(), size) {
                    self.invalidate_piece(ipa, size);
                } else {
                    self.invalidate_pieces(ipa, size);
                }
                self.ops.dsb(Dsb::Ish);
                self.ops.tlbi(Tlbi::Stage1 { scope });
            } else {
                self.ops.tlbi(Tlbi::All { scope });
            }
            self.ops.dsb(Dsb::Ish);
        });
    }

    /// Stage 2 of as much as one instruction covers.
    #[inline]
    fn invalidate_piece(&self, ipa: Ipa, size: u64) {
        self.ops.tlbi(Tlbi::Range {
            ipa,
            size,
            ttl: None,
            scope: Scope::Broadcast,
        });
    }

    /// Stage 2 of any range.
    #[inline(never)]
    fn invalidate_pieces(&self, ipa: Ipa, size: u64) {
        let granule = self.stage2.geometry.granule();
        range::pieces(granule, ipa, size).for_each(|piece| match piece.pages {
            1 => self.ops.tlbi(Tlbi::Ipa {
                ipa: piece.ipa,
                ttl: None,
                leaf_only: false,
                scope: Scope::Broadcast,
            }),
            pages => self.invalidate_piece(piece.ipa, pages * granule.size()),
        });
    }

    /// Invalidates what this CPU holds of a leaf whose permissions have grown.
    pub(super) fn invalidate_own(&self, ipa: Ipa, level: Level) {
        let scope = Scope::Local;
        self.ops.dsb(Dsb::NshSt);
        self.in_vmid(|| {
            self.ops.tlbi(Tlbi::Ipa {
                ipa,
                ttl: Some(level),
                leaf_only: false,
                scope,
            });
            self.ops.dsb(Dsb::Nsh);
            self.ops.tlbi(Tlbi::Stage1 { scope });
            self.ops.dsb(Dsb::Nsh);
        });
    }

    /// Does something with the guest's VMID in place.
    fn in_vmid(&self, invalidate: impl FnOnce()) {
        let before = self.ops.switch_vmid(self.stage2.vmid);
        self.ops.isb();
        invalidate();
        self.ops.switch_vmid(before);
        self.ops.isb();
    }
}
