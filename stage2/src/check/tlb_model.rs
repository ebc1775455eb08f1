// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The model of the TLBs: all [stale entries](StaleEntry) of a run, and how invalidations and
//! barriers affect them.
//!
//! Most stale entries are relaxed leaves that their CPU has invalidated for itself: the other CPUs may
//! hold them until an invalidation of their address. A run has one for each leaf, so each event visits
//! only the entries of its addresses, and those that have *work*: a barrier can change them. Those
//! without work are invalidated later, as after an unmapping that Linux flushes lazily.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec,
    vec::Vec,
};

use super::{
    entry::{InputAddress, Invalidation, TableEntry},
    held_entries::Removed,
    stale_entry::{ChangedEntry, Coverage, Effect, EntryChange, StaleEntry},
    table_model::EntryPosition,
};
use crate::{address::EntryAddress, descriptor::Descriptor, operations::Dsb};

/// Number of a stale entry, in the order of the changes.
type Number = u64;

#[derive(Debug)]
pub(super) struct TlbModel<E: TableEntry = Descriptor> {
    stale_entries: BTreeMap<Number, StaleEntry<E>>,
    by_address: BTreeSet<(EntryAddress, Number)>,
    /// Entries by the bytes that they map, and their first input address.
    by_range: BTreeSet<(u64, E::Input, Number)>,
    /// Removed and restricted entries.
    reductions: BTreeSet<Number>,
    /// Entries that barriers, and invalidations of stage 1, can change.
    with_work: BTreeSet<Number>,
    /// The number of changes and barriers.
    steps: Number,
    /// The step of each CPU's last barrier.
    last_barriers: Vec<Number>,
    /// The CPUs that translate by the tables, as bits: others hold no entry.
    users: u64,
    /// The number of entries that events have visited.
    #[cfg(test)]
    visits: u64,
}

impl<E: TableEntry> TlbModel<E> {
    /// Returns the model of up to 64 CPUs that all translate by the tables.
    pub(super) fn new(cpus: usize) -> Self {
        Self {
            stale_entries: BTreeMap::new(),
            by_address: BTreeSet::new(),
            by_range: BTreeSet::new(),
            reductions: BTreeSet::new(),
            with_work: BTreeSet::new(),
            steps: 0,
            last_barriers: vec![0; cpus],
            users: (0..cpus).fold(0, |users, cpu| users | 1 << cpu),
            #[cfg(test)]
            visits: 0,
        }
    }

    /// Adds or removes a CPU that translates by the tables.
    pub(super) const fn set_user(&mut self, cpu: usize, is_user: bool) {
        self.users = self.users & !(1 << cpu) | (is_user as u64) << cpu;
    }

    /// Returns whether no other CPU translates by the tables.
    pub(super) const fn is_only_user(&self, cpu: usize) -> bool {
        self.users & !(1 << cpu) == 0
    }

    /// Removes what a CPU holds: its TLB has been reset.
    pub(super) fn forget(&mut self, cpu: usize) {
        self.stale_entries.values_mut().for_each(|stale| stale.forget(cpu));
        let free = self.stale_entries.iter().filter(|(_, stale)| !stale.is_held());
        let free: Vec<_> = free.map(|(number, _)| *number).collect();
        free.into_iter().for_each(|number| drop(self.remove(number)));
    }

    /// Returns all stale entries in the order of the changes.
    pub(super) fn all(&self) -> impl Iterator<Item = &StaleEntry<E>> {
        self.stale_entries.values()
    }

    /// Returns the removed and restricted entries in the order of the changes.
    pub(super) fn removed_or_restricted(&self) -> impl Iterator<Item = &StaleEntry<E>> {
        self.reductions.iter().filter_map(|number| self.stale_entries.get(number))
    }

    /// Returns the old values of an entry of a table in the order of the changes.
    pub(super) fn of_entry(&self, entry: EntryAddress) -> impl Iterator<Item = &StaleEntry<E>> {
        let numbers = self.numbers_of(entry).into_iter();
        numbers.filter_map(|number| self.stale_entries.get(&number))
    }

    /// Returns the stale entries that overlap a range in the order of the changes.
    pub(super) fn overlapping(
        &self,
        ipa: E::Input,
        size: u64,
    ) -> impl Iterator<Item = &StaleEntry<E>> {
        let numbers = self.numbers_overlapping(ipa, size).into_iter();
        numbers.filter_map(|number| self.stale_entries.get(&number))
    }

    fn numbers_of(&self, entry: EntryAddress) -> Vec<Number> {
        let found = self.by_address.range((entry, 0)..=(entry, Number::MAX));
        found.map(|(_, number)| *number).collect()
    }

    fn numbers_overlapping(&self, ipa: E::Input, size: u64) -> Vec<Number> {
        let mut found = Vec::new();
        let mut next = self.by_range.first().map(|(span, ..)| *span);
        while let Some(span) = next {
            // Entries are aligned to their span.
            let first = (span, ipa.align_down(span), 0);
            let overlaps = self.by_range.range(first..(span, ipa + size, 0));
            found.extend(overlaps.map(|(.., number)| *number));
            let larger = self.by_range.range((span + 1, E::Input::LOWEST, 0)..).next();
            next = larger.map(|(span, ..)| *span);
        }
        found.sort_unstable();
        found
    }

    /// Returns whether a relaxed entry has been removed since: its CPU invalidates it on all CPUs.
    pub(super) fn is_removed_later(&self, relaxed: &StaleEntry<E>) -> bool {
        self.of_entry(relaxed.entry.position.entry).any(|stale| {
            stale.entry.change == EntryChange::Removed && stale.changed_at > relaxed.changed_at
        })
    }

    pub(super) fn record_store(&mut self, cpu: usize, entry: EntryAddress) {
        for number in self.numbers_of(entry) {
            if let Some(stale) = self.stale_entries.get_mut(&number) {
                stale.record_writer(cpu);
                self.with_work.insert(number);
            }
        }
    }

    /// Adds an entry that was changed in event `now`.
    pub(super) fn add(&mut self, now: u64, entry: ChangedEntry<E>) {
        self.record_store(usize::from(entry.cause.cpu), entry.position.entry);
        self.steps += 1;
        let number = self.steps;
        self.by_address.insert((entry.position.entry, number));
        self.by_range.insert((entry.size, entry.position.ipa, number));
        self.with_work.insert(number);
        if entry.change != EntryChange::Relaxed {
            self.reductions.insert(number);
        }
        let stale = StaleEntry::new(number, entry, now, self.users);
        self.stale_entries.insert(number, stale);
    }

    /// Forgets the removal of a leaf that is made again as it was: what CPUs may hold is right again.
    pub(super) fn restore(&mut self, position: &EntryPosition<E::Input>, leaf: E) {
        let is_same = |stale: &StaleEntry<E>| {
            stale.entry.position.ipa == position.ipa && stale.is_removal_of(position.level, leaf)
        };
        for number in self.numbers_of(position.entry) {
            if self.stale_entries.get(&number).is_some_and(is_same) {
                self.remove(number);
            }
        }
    }

    /// Removes and returns the removed or restricted entries that a function selects.
    pub(super) fn take(&mut self, selects: impl Fn(&StaleEntry<E>) -> bool) -> Vec<StaleEntry<E>> {
        let found = self.reductions.iter();
        let found = found.filter(|number| self.stale_entries.get(number).is_some_and(&selects));
        let found: Vec<_> = found.copied().collect();
        found.into_iter().filter_map(|number| self.remove(number)).collect()
    }

    fn remove(&mut self, number: Number) -> Option<StaleEntry<E>> {
        let stale = self.stale_entries.remove(&number)?;
        let entry = &stale.entry;
        self.by_address.remove(&(entry.position.entry, number));
        self.by_range.remove(&(entry.size, entry.position.ipa, number));
        self.with_work.remove(&number);
        self.reductions.remove(&number);
        Some(stale)
    }

    /// Records an invalidation; `run_remains` returns whether CPUs may fetch an entry again. Returns
    /// its effect, and whether its TTL hint is wrong for every leaf that it covers.
    pub(super) fn invalidate(
        &mut self,
        cpu: usize,
        kind: Invalidation<E::Input>,
        mut run_remains: impl FnMut(&ChangedEntry<E>) -> bool,
    ) -> (Effect, bool) {
        let mut effect = Effect::default();
        let (mut covers_leaf, mut excludes_leaf) = (false, false);
        let (numbers, is_by_address): (Vec<_>, _) = match (kind.range, kind.removed) {
            (Some(range), _) => (self.numbers_overlapping(range.first, range.size), true),
            // Combined entries are work.
            (None, Removed::Combined) => (self.with_work.iter().copied().collect(), false),
            (None, _) => (self.stale_entries.keys().copied().collect(), false),
        };
        for number in numbers {
            let Some(stale) = self.stale_entries.get_mut(&number) else { continue };
            #[cfg(test)]
            {
                self.visits += 1;
            }
            let coverage = stale.coverage(kind);
            if stale.entry.table.is_none() && is_by_address {
                covers_leaf |= coverage == Coverage::Covered;
                excludes_leaf |= coverage == Coverage::Excluded;
            }
            if coverage == Coverage::Covered {
                stale.run_remains = run_remains(&stale.entry);
                effect.add(stale.invalidate(cpu, kind, &self.last_barriers));
                if stale.has_work(&self.last_barriers) {
                    self.with_work.insert(number);
                }
            }
        }
        (effect, excludes_leaf && !covers_leaf)
    }

    /// Executes a barrier of a CPU.
    pub(super) fn barrier(&mut self, cpu: usize, kind: Dsb, is_nxs: bool) -> Effect {
        let mut effect = Effect::default();
        let numbers: Vec<_> = self.with_work.iter().copied().collect();
        for number in &numbers {
            if let Some(stale) = self.stale_entries.get_mut(number) {
                effect.add(stale.barrier(cpu, (kind, is_nxs), &self.last_barriers));
            }
        }
        self.steps += 1;
        self.last_barriers[cpu] = self.steps;
        for number in numbers {
            let Some(stale) = self.stale_entries.get(&number) else { continue };
            #[cfg(test)]
            {
                self.visits += 1;
            }
            if !stale.is_held() {
                self.remove(number);
            } else if !stale.has_work(&self.last_barriers) {
                self.with_work.remove(&number);
            }
        }
        effect
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        address::Ipa,
        check::{event::Cause, table_model::EntryPosition},
        geometry::Level,
        operations::{Scope, Tlbi},
    };

    const CPUS: usize = 4;

    /// Returns a leaf of 4K that a CPU relaxes.
    fn relaxed(page: u64, cpu: u8) -> ChangedEntry {
        let position = EntryPosition {
            entry: EntryAddress(0x8000_0000 + page * 8),
            level: Level::PAGE,
            ipa: Ipa(page << 12),
        };
        let (old, size) = (Descriptor(0x4100_077f), 0x1000);
        let change = EntryChange::Relaxed;
        let cause = Cause { cpu, stack: None };
        let is_below_unlinked_table = false;
        ChangedEntry { position, old, size, change, table: None, is_below_unlinked_table, cause }
    }

    /// Relaxes leaves and invalidates each one on its own CPU.
    fn relax(pages: u64) -> TlbModel {
        let mut tlbs = TlbModel::new(CPUS);
        for page in 0..pages {
            let cpu = usize::try_from(page).unwrap() % CPUS;
            tlbs.add(page, relaxed(page, u8::try_from(cpu).unwrap()));
            tlbs.barrier(cpu, Dsb::IshSt, false);
            let ipa = Ipa(page << 12);
            let scope = Scope::Local;
            let leaf = Tlbi::Ipa { ipa, ttl: None, leaf_only: false, scope };
            for kind in [leaf, Tlbi::Stage1 { scope }] {
                tlbs.invalidate(cpu, Invalidation::of_stage2(kind), |_| false);
                tlbs.barrier(cpu, Dsb::Nsh, false);
            }
        }
        tlbs
    }

    #[test]
    fn the_work_of_a_relaxed_leaf_does_not_depend_on_their_number() {
        let visits = [100, 200, 400].map(|pages| relax(pages).visits);

        assert!(visits[0] > 0);
        assert_eq!((visits[1], visits[2]), (2 * visits[0], 4 * visits[0]));
    }

    #[test]
    fn other_cpus_hold_a_leaf_that_is_invalidated_locally() {
        let mut tlbs = relax(3);
        let broadcast = Tlbi::All { scope: Scope::Broadcast };

        let held = |tlbs: &TlbModel| -> Vec<_> {
            let page = tlbs.overlapping(Ipa(0x1000), 1).next().unwrap();
            (0..CPUS).map(|cpu| page.is_held_by(cpu)).collect()
        };
        assert_eq!(held(&tlbs), [true, false, true, true]);
        assert!(tlbs.with_work.is_empty());
        tlbs.invalidate(2, Invalidation::of_stage2(broadcast), |_| false);
        tlbs.barrier(2, Dsb::Ish, false);

        assert_eq!((tlbs.all().count(), tlbs.by_range.len(), tlbs.by_address.len()), (0, 0, 0));
    }

    #[test]
    fn entries_of_all_sizes_that_overlap_a_range_are_found() {
        let mut tlbs = TlbModel::new(CPUS);
        for (page, size) in [(0, 1 << 12), (1, 1 << 12), (3, 1 << 12), (0, 1 << 21), (0, 1 << 30)] {
            tlbs.add(0, ChangedEntry { size, ..relaxed(page, 0) });
        }
        let found = |ipa, size| -> Vec<_> {
            tlbs.overlapping(Ipa(ipa), size).map(|stale| stale.entry.size).collect()
        };

        assert_eq!(found(0x1fff, 1), [1 << 12, 1 << 21, 1 << 30]);
        assert_eq!(found(0x1000, 0x2001), [1 << 12, 1 << 12, 1 << 21, 1 << 30]);
        assert_eq!(found(1 << 21, 1), [1 << 30]);
        assert_eq!(found(1 << 30, 1), []);
    }
}
