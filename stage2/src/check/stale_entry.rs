// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A changed entry and the CPUs that may still hold its old value.
//!
//! A CPU may fetch any valid entry at any time, used or not (Arm ARM D8.13.1). After a store
//! changes a valid entry, every CPU is assumed to hold the old value in its stage-2 TLB and walk
//! cache, and combined with stage 1, until these steps have removed it:
//!
//! ```text
//!             DSB (all CPUs observe the store)   TLBI IPAS2…  DSB           TLBI VMALLE1…  DSB
//!  Both ──────── a TLBI before this does not count ─ issued(i) ─ Combined ─ issued(i) ─ Nothing
//!     └────────────────────────────── TLBI VMALLS12E1… ─ issued(i) ────────────────── DSB ──┘
//! ```
//!
//! `i` is the CPU that issued the TLBI: only its own DSB completes it. Several CPUs may invalidate
//! at the same time, so the model tracks each CPU's TLBIs separately.

use alloc::{vec, vec::Vec};

use super::table_model::EntryPosition;
use crate::{
    address::{Ipa, PhysAddr, TableAddress},
    descriptor::Descriptor,
    geometry::Level,
    operations::{Dsb, Scope, Tlbi},
};

/// The old values that one CPU may cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeldEntries {
    /// The stage-2 entry, and entries that combine it with stage 1.
    Both,
    /// Entries that combine stage 2 with stage 1.
    Combined,
    Nothing,
}

/// The CPUs that have issued an invalidation and not yet completed it.
#[derive(Debug, Clone, Copy, Default)]
struct IssuedInvalidations {
    local: u64,
    broadcast: u64,
}

impl IssuedInvalidations {
    /// Records an invalidation. Returns whether this CPU had none pending.
    fn issue(&mut self, cpu: usize, is_broadcast: bool) -> bool {
        let by = if is_broadcast { &mut self.broadcast } else { &mut self.local };
        let first = *by >> cpu & 1 == 0;
        *by |= 1 << cpu;
        first
    }

    /// Returns whether a CPU's DSB completes a pending invalidation: any, or local ones only.
    const fn completes(self, cpu: usize, is_broadcast: bool) -> bool {
        let by = self.local | if is_broadcast { self.broadcast } else { 0 };
        by >> cpu & 1 != 0
    }

    const fn is_any(self) -> bool {
        self.local | self.broadcast != 0
    }
}

/// The progress of the invalidations for one CPU.
#[derive(Debug, Clone, Copy)]
struct InvalidationProgress {
    held: HeldEntries,
    /// Pending stage-2 invalidations.
    stage2: IssuedInvalidations,
    /// Pending invalidations of everything that the CPU still holds.
    last: IssuedInvalidations,
}

impl InvalidationProgress {
    /// Records an invalidation that covers the entry. Returns whether it has an effect.
    fn issue(&mut self, cpu: usize, kind: Tlbi, is_broadcast: bool) -> bool {
        match (kind, self.held) {
            (Tlbi::Ipa { .. } | Tlbi::Range { .. }, HeldEntries::Both) => {
                self.stage2.issue(cpu, is_broadcast)
            }
            // While a CPU holds the stage-2 entry, it can create combined entries again.
            (Tlbi::Stage1 { .. }, HeldEntries::Combined)
            | (Tlbi::All { .. }, HeldEntries::Both | HeldEntries::Combined) => {
                self.last.issue(cpu, is_broadcast)
            }
            _ => false,
        }
    }

    /// Completes invalidations at a DSB. Returns whether that has an effect.
    fn complete(&mut self, cpu: usize, is_broadcast: bool) -> bool {
        let next = if self.last.completes(cpu, is_broadcast) {
            HeldEntries::Nothing
        } else if self.held == HeldEntries::Both && self.stage2.completes(cpu, is_broadcast) {
            HeldEntries::Combined
        } else {
            return false;
        };
        let changed = self.held != next;
        self.held = next;
        changed
    }
}

/// The type of change from an entry's old value to its new value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EntryChange {
    Removed,
    Restricted,
    /// Permissions are added: a CPU with the old value takes a permission fault.
    Relaxed,
}

/// A valid entry and its change by a store.
#[derive(Debug, Clone)]
pub(super) struct ChangedEntry {
    pub(super) position: EntryPosition,
    pub(super) was: Descriptor,
    /// The number of bytes that the entry maps.
    pub(super) size: u64,
    pub(super) change: EntryChange,
    pub(super) table: Option<TableAddress>,
    /// Set if the leaf became unreachable because a table above it was unlinked.
    pub(super) below_table: bool,
}

/// A changed entry whose old value CPUs may still hold.
#[derive(Debug, Clone)]
pub(super) struct StaleEntry {
    pub(super) entry: ChangedEntry,
    pub(super) since: u64,
    pub(super) by: usize,
    /// Set while other entries of its contiguous run remain, so that CPUs may fetch it again.
    pub(super) run_remains: bool,
    /// The CPUs that have since written the entry. A CPU that observes one of these stores observes
    /// the change.
    writers: u64,
    /// The CPUs that have since executed a DSB. If such a CPU has loaded the new value, its table
    /// walker observes the change.
    observed_by: u64,
    observed_by_all: bool,
    progress: Vec<InvalidationProgress>,
}

/// The effect of an event on the values that CPUs may hold or observe.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Effect {
    /// The event changes the values that CPUs may hold or observe.
    pub any: bool,
    /// A weaker event (local instead of broadcast, stores instead of all accesses) changes less.
    pub strong: bool,
}

impl Effect {
    pub(super) fn add(&mut self, other: Self) {
        self.any |= other.any;
        self.strong |= other.strong;
    }
}

/// The relation between a TLB invalidation and an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coverage {
    Outside,
    Covered,
    /// The address is covered, but the TTL hint or the leaf-only form excludes the entry.
    Excluded,
}

impl StaleEntry {
    pub(super) fn new(entry: ChangedEntry, since: u64, by: usize, cpus: usize) -> Self {
        let held = InvalidationProgress {
            held: HeldEntries::Both,
            stage2: IssuedInvalidations::default(),
            last: IssuedInvalidations::default(),
        };
        Self {
            entry,
            since,
            by,
            run_remains: false,
            writers: 1 << by,
            observed_by: 0,
            observed_by_all: false,
            progress: vec![held; cpus],
        }
    }

    pub(super) fn overlaps(&self, ipa: Ipa, size: u64) -> bool {
        let first = self.entry.position.ipa;
        first < ipa + size && ipa < first + self.entry.size
    }

    /// Returns whether this is a removed leaf whose memory overlaps the range.
    pub(super) fn maps_memory(&self, phys: PhysAddr, size: u64) -> bool {
        let at = self.entry.was.address();
        self.entry.table.is_none()
            && self.entry.change == EntryChange::Removed
            && at < phys + size
            && phys < at + self.entry.size
    }

    pub(super) fn is_held_by(&self, cpu: usize) -> bool {
        self.progress[cpu].held != HeldEntries::Nothing
    }

    pub(super) fn is_held(&self) -> bool {
        self.progress.iter().any(|p| p.held != HeldEntries::Nothing)
    }

    /// Returns whether no CPU can hold more than entries combined with stage 1.
    pub(super) fn only_combined(&self) -> bool {
        let mut progress = self.progress.iter();
        progress.all(|p| p.held != HeldEntries::Both || p.last.is_any())
    }

    pub(super) fn note_writer(&mut self, cpu: usize) {
        self.writers |= 1 << cpu;
    }

    pub(super) fn coverage(&self, kind: Tlbi) -> Coverage {
        let (ipa, size, ttl, leaf_only) = match kind {
            Tlbi::Stage1 { .. } | Tlbi::All { .. } => return Coverage::Covered,
            Tlbi::Ipa { ipa, ttl, leaf_only, .. } => (ipa, 1, ttl, leaf_only),
            Tlbi::Range { ipa, size, ttl, .. } => (ipa, size, ttl, false),
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

    /// Records an invalidation that covers the entry.
    pub(super) fn invalidate(&mut self, cpu: usize, kind: Tlbi) -> Effect {
        let is_broadcast = kind.scope() == Scope::Broadcast;
        let is_relaxed = self.entry.change == EntryChange::Relaxed;
        // A CPU that has observed the change may invalidate locally. For a relaxed entry it may
        // also broadcast, as other CPUs may keep the old value.
        let observed = self.observed_by_all
            || ((!is_broadcast || is_relaxed) && self.observed_by >> cpu & 1 != 0);
        let mut effect = Effect::default();
        if !observed || self.run_remains {
            return effect;
        }
        let reaches_others = is_broadcast && self.observed_by_all;
        for (at, progress) in self.progress.iter_mut().enumerate() {
            if (at == cpu || reaches_others) && progress.issue(cpu, kind, is_broadcast) {
                effect.any |= !is_relaxed || at == cpu;
                effect.strong |= !is_relaxed && at != cpu;
            }
        }
        effect
    }

    /// Records a DSB of a CPU.
    pub(super) fn barrier(&mut self, cpu: usize, kind: Dsb) -> Effect {
        let orders_all = matches!(kind, Dsb::Ish | Dsb::IshSt);
        let wrote = self.writers >> cpu & 1 != 0;
        let mut effect = Effect {
            any: wrote && self.observed_by >> cpu & 1 == 0,
            strong: orders_all && wrote && !self.observed_by_all,
        };
        self.observed_by |= 1 << cpu;
        self.observed_by_all |= orders_all && wrote;
        if matches!(kind, Dsb::IshSt | Dsb::NshSt) {
            return effect;
        }
        for (at, progress) in self.progress.iter_mut().enumerate() {
            if progress.complete(cpu, kind == Dsb::Ish) {
                let needed = self.entry.change != EntryChange::Relaxed || at == cpu;
                effect.add(Effect { any: needed, strong: needed });
            }
        }
        effect
    }
}
