// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A changed entry and the CPUs that may still hold its old value.
//!
//! A CPU may fetch any valid entry at any time, used or not (Arm ARM D8.13.1). From the store that
//! changes a valid entry on, every CPU is therefore taken to hold the old value in its stage-2 TLB
//! and walk cache, and combined with stage 1, until these steps have removed it:
//!
//! ```text
//!             DSB (all CPUs observe the store)   TLBI IPAS2…  DSB           TLBI VMALLE1…  DSB
//!  Both ──────── a TLBI before this does not count ─ issued(i) ─ Combined ─ issued(i) ─ Nothing
//!     └────────────────────────────── TLBI VMALLS12E1… ─ issued(i) ────────────────── DSB ──┘
//! ```
//!
//! `i` is the CPU that issued the TLBI: its own DSB completes it. Several CPUs may invalidate at
//! the same time, each by its own instructions, so the model keeps what each CPU has under way.

use alloc::{vec, vec::Vec};

use super::table_model::EntryPosition;
use crate::{
    address::{Ipa, PhysAddr, TableAddress},
    descriptor::Descriptor,
    geometry::Level,
    operations::{Dsb, Scope, Tlbi},
};

/// The old values that one CPU may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeldEntries {
    /// The stage-2 entry and the entries combined from it.
    Both,
    /// Entries combined with stage 1.
    Combined,
    Nothing,
}

/// The CPUs that have issued an invalidation and not completed it.
#[derive(Debug, Clone, Copy, Default)]
struct IssuedInvalidations {
    local: u64,
    broadcast: u64,
}

impl IssuedInvalidations {
    /// Notes an invalidation; returns whether none was under way.
    fn issue(&mut self, cpu: usize, is_broadcast: bool) -> bool {
        let by = if is_broadcast { &mut self.broadcast } else { &mut self.local };
        let first = *by >> cpu & 1 == 0;
        *by |= 1 << cpu;
        first
    }

    /// Returns whether a DSB of a CPU completes one: of all, or of local ones only.
    const fn completes(self, cpu: usize, is_broadcast: bool) -> bool {
        let by = self.local | if is_broadcast { self.broadcast } else { 0 };
        by >> cpu & 1 != 0
    }

    const fn is_any(self) -> bool {
        self.local | self.broadcast != 0
    }
}

/// The progress of the invalidation on one CPU.
#[derive(Debug, Clone, Copy)]
struct InvalidationProgress {
    held: HeldEntries,
    /// Invalidations of stage 2 under way.
    stage2: IssuedInvalidations,
    /// Invalidations of everything that is still held under way.
    last: IssuedInvalidations,
}

impl InvalidationProgress {
    /// Notes that an invalidation covers the entry; returns whether it has an effect.
    fn issue(&mut self, cpu: usize, kind: Tlbi, is_broadcast: bool) -> bool {
        match (kind, self.held) {
            (Tlbi::Ipa { .. } | Tlbi::Range { .. }, HeldEntries::Both) => {
                self.stage2.issue(cpu, is_broadcast)
            }
            // A CPU can combine again while it holds the stage-2 entry.
            (Tlbi::Stage1 { .. }, HeldEntries::Combined)
            | (Tlbi::All { .. }, HeldEntries::Both | HeldEntries::Combined) => {
                self.last.issue(cpu, is_broadcast)
            }
            _ => false,
        }
    }

    /// Completes invalidations at a DSB; returns whether it has an effect.
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

/// The difference between an entry's old value and its new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EntryChange {
    Removed,
    Restricted,
    /// Permissions are added: a CPU with the old value takes a fault.
    Relaxed,
}

/// A valid entry before a store that changes it.
#[derive(Debug, Clone)]
pub(super) struct ChangedEntry {
    pub(super) position: EntryPosition,
    pub(super) was: Descriptor,
    /// The bytes that the entry maps.
    pub(super) size: u64,
    pub(super) change: EntryChange,
    pub(super) table: Option<TableAddress>,
    /// Set if a table above the leaf was unlinked, not the leaf itself.
    pub(super) below_table: bool,
}

/// A changed entry whose old value CPUs may still hold.
#[derive(Debug, Clone)]
pub(super) struct StaleEntry {
    pub(super) entry: ChangedEntry,
    pub(super) since: u64,
    pub(super) by: usize,
    /// Set while the rest of its contiguous run is in the table, so that CPUs may fetch it again.
    pub(super) run_remains: bool,
    /// The CPUs that have written the entry since. A CPU that observes one of these stores observes
    /// the change.
    writers: u64,
    /// The CPUs that have executed a DSB since. The walker of a CPU that has loaded the new value
    /// observes the change then.
    observed_by: u64,
    observed_by_all: bool,
    progress: Vec<InvalidationProgress>,
}

/// The effect of an event on what CPUs may hold or observe.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Effect {
    /// The event changes what CPUs may hold or observe.
    pub any: bool,
    /// A weaker event of its kind (local instead of broadcast, stores instead of all) changes less.
    pub strong: bool,
}

impl Effect {
    pub(super) fn add(&mut self, other: Self) {
        self.any |= other.any;
        self.strong |= other.strong;
    }
}

/// The relation of a TLB invalidation to an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coverage {
    Outside,
    Covered,
    /// The address is covered, the TTL hint or the leaf-only form excludes the entry.
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

    /// Returns whether this is a removed leaf whose memory overlaps a range.
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

    /// Returns whether only entries combined with stage 1 can be left.
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

    /// Notes an invalidation that covers the entry.
    pub(super) fn invalidate(&mut self, cpu: usize, kind: Tlbi) -> Effect {
        let is_broadcast = kind.scope() == Scope::Broadcast;
        let is_relaxed = self.entry.change == EntryChange::Relaxed;
        // A CPU may invalidate locally what it has observed itself, and by a broadcast what was
        // relaxed: others lose nothing.
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

    /// Notes a DSB of a CPU.
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
