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

use super::{
    entry::{Invalidation, TableEntry},
    event::Cause,
    held_entries::{Extent, HeldEntries},
    table_model::EntryPosition,
};
use crate::{
    address::{PhysAddr, TableAddress},
    descriptor::Descriptor,
    geometry::Level,
    operations::{Dsb, Scope},
};

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
pub(super) struct ChangedEntry<E: TableEntry = Descriptor> {
    pub(super) position: EntryPosition<E::Input>,
    pub(super) old: E,
    /// The number of bytes that the entry maps.
    pub(super) size: u64,
    pub(super) change: EntryChange,
    pub(super) table: Option<TableAddress>,
    /// Indicates that the leaf became unreachable because a table above it was unlinked.
    pub(super) is_below_unlinked_table: bool,
    /// The store.
    pub(super) cause: Cause,
}

impl<E: TableEntry> ChangedEntry<E> {
    /// Returns whether accesses by the old entry may have the XS attribute.
    fn has_xs(&self) -> bool {
        self.table.is_none() && self.old.has_xs()
    }
}

/// A changed entry whose old value CPUs may still hold.
#[derive(Debug, Clone)]
pub(super) struct StaleEntry<E: TableEntry = Descriptor> {
    /// The number among changes and barriers, in their order.
    number: u64,
    pub(super) entry: ChangedEntry<E>,
    pub(super) changed_at: u64,
    /// Flag set while other entries of its contiguous run remain, so that CPUs may fetch it again.
    pub(super) run_remains: bool,
    /// The CPUs that have since written the entry. A CPU that observes one of these stores observes
    /// the change.
    writers: u64,
    is_observed_by_all: bool,
    held: HeldEntries,
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

impl<E: TableEntry> StaleEntry<E> {
    /// Returns the entry with this number, which was changed in an event. The CPUs, as bits, may hold
    /// its old value.
    pub(super) fn new(number: u64, entry: ChangedEntry<E>, changed_at: u64, cpus: u64) -> Self {
        Self {
            number,
            changed_at,
            run_remains: false,
            writers: 1 << entry.cause.cpu,
            entry,
            is_observed_by_all: false,
            held: HeldEntries::of(cpus),
        }
    }

    /// Returns whether a CPU has made the change.
    pub(super) fn is_changed_by(&self, cpu: usize) -> bool {
        usize::from(self.entry.cause.cpu) == cpu
    }

    pub(super) fn overlaps(&self, ipa: E::Input, size: u64) -> bool {
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

    /// Returns whether this is the removal of a leaf that is equal to a new one.
    pub(super) fn is_removal_of(&self, level: Level, leaf: E) -> bool {
        let entry = &self.entry;
        entry.change == EntryChange::Removed
            && entry.table.is_none()
            && entry.position.level == level
            && entry.old == leaf
    }

    /// Removes what a CPU holds.
    pub(super) fn forget(&mut self, cpu: usize) {
        self.held.forget(cpu);
    }

    pub(super) const fn is_held_by(&self, cpu: usize) -> bool {
        self.held.is_held_by(cpu)
    }

    pub(super) const fn is_held(&self) -> bool {
        self.held.is_held()
    }

    /// Returns whether no CPU can hold more than entries combined with stage 1.
    pub(super) fn holds_only_combined(&self) -> bool {
        self.held.holds_only_combined()
    }

    /// Returns whether a barrier, or an invalidation of combined entries, may change the state.
    pub(super) fn has_work(&self, last_barriers: &[u64]) -> bool {
        !self.is_observed_by_all
            || self.held.has_work()
            || (0..last_barriers.len())
                .any(|cpu| self.writers >> cpu & 1 != 0 && !self.is_observed_by(cpu, last_barriers))
    }

    /// Returns whether a CPU has executed a DSB since the change. If it has loaded the new value, its
    /// table walker observes the change.
    fn is_observed_by(&self, cpu: usize, last_barriers: &[u64]) -> bool {
        last_barriers[cpu] > self.number
    }

    pub(super) fn record_writer(&mut self, cpu: usize) {
        self.writers |= 1 << cpu;
    }

    pub(super) fn coverage(&self, kind: Invalidation<E::Input>) -> Coverage {
        let Some(range) = kind.range else { return Coverage::Covered };
        if !self.overlaps(range.first, range.size) {
            return Coverage::Outside;
        }
        let fits = match self.entry.table {
            Some(_) => range.removes_table(self.entry.position.level),
            None => range.removes_leaf(self.entry.position.level),
        };
        if fits { Coverage::Covered } else { Coverage::Excluded }
    }

    /// Issues an invalidation by a CPU; `last_barriers` are those before it.
    pub(super) fn invalidate(
        &mut self,
        cpu: usize,
        kind: Invalidation<E::Input>,
        last_barriers: &[u64],
    ) -> Effect {
        let (is_broadcast, is_nxs) = (kind.scope == Scope::Broadcast, kind.is_nxs);
        let is_relaxed = self.entry.change == EntryChange::Relaxed;
        // A CPU that has observed the change may invalidate locally. For a relaxed entry it may
        // also broadcast, as other CPUs may keep the old value.
        let observed = self.is_observed_by_all
            || ((!is_broadcast || is_relaxed) && self.is_observed_by(cpu, last_barriers));
        let leaves_out = is_nxs && self.entry.has_xs();
        if !observed || self.run_remains || leaves_out {
            return Effect::default();
        }
        let own = 1 << cpu;
        let reached = if is_broadcast && self.is_observed_by_all { u64::MAX } else { own };
        let first = self.held.issue(cpu, kind.removed, Extent { is_broadcast, is_nxs }, reached);
        Effect {
            exists: first & own != 0 || (!is_relaxed && first != 0),
            is_strong: !is_relaxed && first & !own != 0,
        }
    }

    /// Executes a DSB of a CPU; `last_barriers` are those before it.
    pub(super) fn barrier(
        &mut self,
        cpu: usize,
        (kind, is_nxs): (Dsb, bool),
        last_barriers: &[u64],
    ) -> Effect {
        let orders_all = matches!(kind, Dsb::Ish | Dsb::IshSt);
        let wrote = self.writers >> cpu & 1 != 0;
        let mut effect = Effect {
            exists: wrote && !self.is_observed_by(cpu, last_barriers),
            is_strong: orders_all && wrote && !self.is_observed_by_all,
        };
        self.is_observed_by_all |= orders_all && wrote;
        if matches!(kind, Dsb::IshSt | Dsb::NshSt) {
            return effect;
        }
        let removed = self.held.complete(cpu, Extent { is_broadcast: kind == Dsb::Ish, is_nxs });
        let is_relaxed = self.entry.change == EntryChange::Relaxed;
        let is_needed = if is_relaxed { removed >> cpu & 1 != 0 } else { removed != 0 };
        effect.add(Effect { exists: is_needed, is_strong: is_needed });
        effect
    }
}
