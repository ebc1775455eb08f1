// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A changed entry and the CPUs that may still hold its old value.
//!
//! A CPU may fetch any valid entry at any time, used or not (Arm ARM R_SQBCS). After a store
//! changes a valid entry, every CPU is assumed to hold the old value in its stage-2 TLB and walk
//! cache, and combined with stage 1, until these steps have removed it:
//!
//! ```text
//!             DSB (all CPUs observe the store)   TLBI IPAS2…  DSB           TLBI VMALLE1…  DSB
//!  Stage2 ────── a TLBI before this does not count ─ issued(i) ─ Combined ─ issued(i) ─ Nothing
//!     └────────────────────────────── TLBI VMALLS12E1… ─ issued(i) ────────────────── DSB ──┘
//! ```
//!
//! `i` is the CPU that issued the TLBI: only its own DSB completes it. Several CPUs may invalidate
//! at the same time, so the model tracks each CPU's TLBIs separately.

use alloc::{vec, vec::Vec};

use super::table_model::EntryPosition;
use crate::{
    address::{Ipa, PhysAddr, TableAddress},
    descriptor::{Descriptor, MemoryType},
    geometry::Level,
    operations::{Dsb, Scope, Tlbi},
};

/// The old values that one CPU may cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeldEntries {
    /// The stage-2 entry, and therefore entries that combine it with stage 1.
    Stage2,
    /// Entries that combine stage 2 with stage 1.
    Combined,
    Nothing,
}

/// The extent of a TLB invalidation or of a DSB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) is_broadcast: bool,
    /// Indicates the qualifier nXS (FEAT_XS), which leaves out accesses with the XS attribute. Stage 2
    /// clears this attribute for write-back memory, whatever stage 1 has, so TLBI nXS is enough for
    /// all leaves but those of devices and non-cacheable memory. DSB nXS completes TLBI nXS alone.
    pub(super) is_nxs: bool,
}

impl Extent {
    const ALL: [Self; 4] = [
        Self { is_broadcast: false, is_nxs: false },
        Self { is_broadcast: true, is_nxs: false },
        Self { is_broadcast: false, is_nxs: true },
        Self { is_broadcast: true, is_nxs: true },
    ];

    const fn index(self) -> usize {
        self.is_broadcast as usize | (self.is_nxs as usize) << 1
    }

    /// Returns whether a DSB of this extent completes an invalidation of another one.
    const fn completes(self, invalidation: Self) -> bool {
        (self.is_broadcast || !invalidation.is_broadcast) && (!self.is_nxs || invalidation.is_nxs)
    }
}

/// The CPUs that have issued an invalidation and not yet completed it, for each extent.
#[derive(Debug, Clone, Copy, Default)]
struct PendingInvalidations([u64; 4]);

impl PendingInvalidations {
    /// Records an invalidation. Returns whether this CPU had none pending.
    const fn issue(&mut self, cpu: usize, extent: Extent) -> bool {
        let by = &mut self.0[extent.index()];
        let first = *by >> cpu & 1 == 0;
        *by |= 1 << cpu;
        first
    }

    /// Returns whether a CPU's DSB completes a pending invalidation.
    fn completes(self, cpu: usize, dsb: Extent) -> bool {
        let mut completed = Extent::ALL.into_iter().filter(|extent| dsb.completes(*extent));
        completed.any(|extent| self.0[extent.index()] >> cpu & 1 != 0)
    }

    fn is_pending(self) -> bool {
        self.0 != [0; 4]
    }
}

#[derive(Debug, Clone, Copy)]
struct InvalidationProgress {
    held_entries: HeldEntries,
    /// Pending stage-2 invalidations.
    stage2_invalidations: PendingInvalidations,
    /// Pending invalidations of all entries that the CPU still holds.
    all_invalidations: PendingInvalidations,
}

impl InvalidationProgress {
    /// Records an invalidation that covers the entry. Returns whether it has an effect.
    fn issue(&mut self, cpu: usize, kind: Tlbi, extent: Extent) -> bool {
        match (kind, self.held_entries) {
            (Tlbi::Ipa { .. } | Tlbi::Range { .. }, HeldEntries::Stage2) => {
                self.stage2_invalidations.issue(cpu, extent)
            }
            // While a CPU holds the stage-2 entry, it can create combined entries again.
            (Tlbi::Stage1 { .. }, HeldEntries::Combined)
            | (Tlbi::All { .. }, HeldEntries::Stage2 | HeldEntries::Combined) => {
                self.all_invalidations.issue(cpu, extent)
            }
            _ => false,
        }
    }

    /// Completes invalidations at a DSB. Returns whether that has an effect.
    fn complete(&mut self, cpu: usize, dsb: Extent) -> bool {
        let next = if self.all_invalidations.completes(cpu, dsb) {
            HeldEntries::Nothing
        } else if self.held_entries == HeldEntries::Stage2
            && self.stage2_invalidations.completes(cpu, dsb)
        {
            HeldEntries::Combined
        } else {
            return false;
        };
        let changed = self.held_entries != next;
        self.held_entries = next;
        changed
    }
}

/// The type of a change to a valid entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EntryChange {
    Removed,
    Restricted,
    /// Addition of permissions: a CPU with the old value takes a permission fault.
    Relaxed,
}

/// A valid entry and its change by a store.
#[derive(Debug, Clone)]
pub(super) struct ChangedEntry {
    pub(super) position: EntryPosition,
    pub(super) old: Descriptor,
    /// The number of bytes that the entry maps.
    pub(super) size: u64,
    pub(super) change: EntryChange,
    pub(super) table: Option<TableAddress>,
    /// Indicates that the leaf became unreachable because a table above it was unlinked.
    pub(super) is_below_unlinked_table: bool,
}

impl ChangedEntry {
    /// Returns whether accesses by the old entry may have the XS attribute.
    fn has_xs(&self) -> bool {
        self.table.is_none() && self.old.attributes().memory != MemoryType::Normal
    }
}

/// A changed entry whose old value CPUs may still hold.
#[derive(Debug, Clone)]
pub(super) struct StaleEntry {
    pub(super) entry: ChangedEntry,
    pub(super) changed_at: u64,
    pub(super) changed_by: usize,
    /// Flag set while other entries of its contiguous run remain, so that CPUs may fetch it again.
    pub(super) run_remains: bool,
    /// The CPUs that have since written the entry. A CPU that observes one of these stores observes
    /// the change.
    writers: u64,
    /// The CPUs that have since executed a DSB. If such a CPU has loaded the new value, its table
    /// walker observes the change.
    observers: u64,
    is_observed_by_all: bool,
    progress: Vec<InvalidationProgress>,
}

/// The effect of an event on the model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Effect {
    /// Indicates that the event changes the values that CPUs may hold or observe.
    pub exists: bool,
    /// Indicates that a weaker event (local, not broadcast; stores, not all accesses) changes less.
    pub is_strong: bool,
}

impl Effect {
    pub(super) fn add(&mut self, other: Self) {
        self.exists |= other.exists;
        self.is_strong |= other.is_strong;
    }
}

/// The relation between a TLB invalidation and an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coverage {
    Outside,
    Covered,
    /// Covered address whose entry the TTL hint or the leaf-only form excludes.
    Excluded,
}

impl StaleEntry {
    pub(super) fn new(entry: ChangedEntry, event: u64, cpu: usize, cpus: usize) -> Self {
        let held = InvalidationProgress {
            held_entries: HeldEntries::Stage2,
            stage2_invalidations: PendingInvalidations::default(),
            all_invalidations: PendingInvalidations::default(),
        };
        Self {
            entry,
            changed_at: event,
            changed_by: cpu,
            run_remains: false,
            writers: 1 << cpu,
            observers: 0,
            is_observed_by_all: false,
            progress: vec![held; cpus],
        }
    }

    pub(super) fn overlaps(&self, ipa: Ipa, size: u64) -> bool {
        let first = self.entry.position.ipa;
        first < ipa + size && ipa < first + self.entry.size
    }

    /// Returns whether this is a removed leaf whose memory overlaps the range.
    pub(super) fn maps_memory(&self, phys: PhysAddr, size: u64) -> bool {
        let at = self.entry.old.address();
        self.entry.table.is_none()
            && self.entry.change == EntryChange::Removed
            && at < phys + size
            && phys < at + self.entry.size
    }

    pub(super) fn is_held_by(&self, cpu: usize) -> bool {
        self.progress[cpu].held_entries != HeldEntries::Nothing
    }

    pub(super) fn is_held(&self) -> bool {
        self.progress.iter().any(|p| p.held_entries != HeldEntries::Nothing)
    }

    /// Returns whether no CPU can hold more than entries combined with stage 1.
    pub(super) fn holds_only_combined(&self) -> bool {
        let mut progress = self.progress.iter();
        progress.all(|p| p.held_entries != HeldEntries::Stage2 || p.all_invalidations.is_pending())
    }

    pub(super) fn record_writer(&mut self, cpu: usize) {
        self.writers |= 1 << cpu;
    }

    pub(super) fn coverage(&self, kind: Tlbi) -> Coverage {
        let (ipa, size, ttl, leaf_only) = match kind {
            Tlbi::Stage1 { .. } | Tlbi::All { .. } => return Coverage::Covered,
            Tlbi::Ipa { ipa, ttl, leaf_only, .. } => (ipa, 1, ttl, leaf_only),
            Tlbi::Range { ipa, size, ttl, leaf_only, .. } => (ipa, size, ttl, leaf_only),
        };
        if !self.overlaps(ipa, size) {
            return Coverage::Outside;
        }
        let fits = match self.entry.table {
            Some(_) => !leaf_only && ttl.is_none(),
            None => ttl.is_none_or(|level: Level| level == self.entry.position.level),
        };
        if fits { Coverage::Covered } else { Coverage::Excluded }
    }

    pub(super) fn invalidate(&mut self, cpu: usize, kind: Tlbi, is_nxs: bool) -> Effect {
        let is_broadcast = kind.scope() == Scope::Broadcast;
        let extent = Extent { is_broadcast, is_nxs };
        let is_relaxed = self.entry.change == EntryChange::Relaxed;
        // A CPU that has observed the change may invalidate locally. For a relaxed entry it may
        // also broadcast, as other CPUs may keep the old value.
        let observed = self.is_observed_by_all
            || ((!is_broadcast || is_relaxed) && self.observers >> cpu & 1 != 0);
        let mut effect = Effect::default();
        let leaves_out = is_nxs && self.entry.has_xs();
        if !observed || self.run_remains || leaves_out {
            return effect;
        }
        let reaches_others = is_broadcast && self.is_observed_by_all;
        for (at, progress) in self.progress.iter_mut().enumerate() {
            if (at == cpu || reaches_others) && progress.issue(cpu, kind, extent) {
                effect.exists |= !is_relaxed || at == cpu;
                effect.is_strong |= !is_relaxed && at != cpu;
            }
        }
        effect
    }

    pub(super) fn barrier(&mut self, cpu: usize, kind: Dsb, is_nxs: bool) -> Effect {
        let orders_all = matches!(kind, Dsb::Ish | Dsb::IshSt);
        let wrote = self.writers >> cpu & 1 != 0;
        let mut effect = Effect {
            exists: wrote && self.observers >> cpu & 1 == 0,
            is_strong: orders_all && wrote && !self.is_observed_by_all,
        };
        self.observers |= 1 << cpu;
        self.is_observed_by_all |= orders_all && wrote;
        if matches!(kind, Dsb::IshSt | Dsb::NshSt) {
            return effect;
        }
        for (at, progress) in self.progress.iter_mut().enumerate() {
            if progress.complete(cpu, Extent { is_broadcast: kind == Dsb::Ish, is_nxs }) {
                let needed = self.entry.change != EntryChange::Relaxed || at == cpu;
                effect.add(Effect { exists: needed, is_strong: needed });
            }
        }
        effect
    }
}
