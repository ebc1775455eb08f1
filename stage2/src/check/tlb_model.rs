// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The model of the TLBs: all [stale entries](StaleEntry) of a run, and how invalidations and
//! barriers affect them.

use alloc::vec::Vec;

use super::stale_entry::{ChangedEntry, Coverage, Effect, EntryChange, StaleEntry};
use crate::{
    address::EntryAddress,
    operations::{Dsb, Tlbi},
};

#[derive(Debug)]
pub(super) struct TlbModel {
    pub(super) stale_entries: Vec<StaleEntry>,
    cpus: usize,
}

impl TlbModel {
    pub(super) fn new(cpus: usize) -> Self {
        Self { stale_entries: Vec::new(), cpus }
    }

    /// Returns whether a relaxed entry has been removed since: its CPU invalidates it on all CPUs.
    pub(super) fn is_removed_later(&self, relaxed: &StaleEntry) -> bool {
        self.stale_entries.iter().any(|stale| {
            stale.entry.position.entry == relaxed.entry.position.entry
                && stale.entry.change == EntryChange::Removed
                && stale.changed_at > relaxed.changed_at
        })
    }

    pub(super) fn record_store(&mut self, cpu: usize, entry: EntryAddress) {
        let of_entry = |stale: &&mut StaleEntry| stale.entry.position.entry == entry;
        let stale = self.stale_entries.iter_mut().filter(of_entry);
        stale.for_each(|stale| stale.record_writer(cpu));
    }

    /// Adds an entry that a CPU changed in event `now`.
    pub(super) fn add(&mut self, cpu: usize, now: u64, entry: ChangedEntry) {
        self.record_store(cpu, entry.position.entry);
        let stale = StaleEntry::new(entry, now, cpu, self.cpus);
        self.stale_entries.push(stale);
    }

    /// Records an invalidation. Returns its effect, and whether its TTL hint is wrong for every
    /// leaf that it covers.
    pub(super) fn invalidate(&mut self, cpu: usize, kind: Tlbi, is_nxs: bool) -> (Effect, bool) {
        let mut effect = Effect::default();
        let (mut covers_leaf, mut excludes_leaf) = (false, false);
        let is_by_address = matches!(kind, Tlbi::Ipa { .. } | Tlbi::Range { .. });
        for stale in &mut self.stale_entries {
            let coverage = stale.coverage(kind);
            if stale.entry.table.is_none() && is_by_address {
                covers_leaf |= coverage == Coverage::Covered;
                excludes_leaf |= coverage == Coverage::Excluded;
            }
            if coverage == Coverage::Covered {
                effect.add(stale.invalidate(cpu, kind, is_nxs));
            }
        }
        (effect, excludes_leaf && !covers_leaf)
    }

    pub(super) fn barrier(&mut self, cpu: usize, kind: Dsb, is_nxs: bool) -> Effect {
        let mut effect = Effect::default();
        for stale in &mut self.stale_entries {
            effect.add(stale.barrier(cpu, kind, is_nxs));
        }
        self.stale_entries.retain(StaleEntry::is_held);
        effect
    }
}
