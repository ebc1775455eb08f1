// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stores to the tables of guests, and to the words of the locks that protect them.
//!
//! 1. The known contents of the page change. A page of no guest remembers its writer.
//! 2. The guest gets the tables that the entry links, before its checker processes the store.
//! 3. The checker processes the store, then the call in which it happened.
//! 4. The contents of tables that the entry no longer links are forgotten.

use alloc::collections::BTreeMap;

use super::{
    findings::{TableChange, TranslatedAddress},
    guest::Guest,
    lock::Lock,
    observer::Observer,
    pages::child,
    step::MadeEntry,
};
use crate::{
    address::{EntryAddress, PhysAddr, TableAddress},
    check::{Action, Cause, StoreKind},
    descriptor::Descriptor,
    geometry::Level,
};

impl Observer {
    /// Processes a store to an entry of a table.
    pub(super) fn store(
        &mut self,
        store: Cause,
        entry: EntryAddress,
        (old, new): (Descriptor, Descriptor),
        kind: StoreKind,
    ) {
        let cpu = store.cpu;
        let Some((level, number)) = self.update_page(cpu, entry, old, new) else { return };
        self.totals.stores += 1;
        self.associate_lock(cpu, number);
        let Some(guest) = self.guests.get_mut(&number) else { return };
        let broken = guest.checker.broken_leaf(entry);
        let made = MadeEntry { entry, level, old, broken, new, store };
        record_change(guest, &made);
        let (before, after) = (child(old, level), child(new, level));
        if let Some(table) = after.filter(|_| before != after) {
            self.link(store, number, table);
        }
        let Some(guest) = self.guests.get_mut(&number) else { return };
        guest.check(cpu, Action::Store { entry, old, new, kind });
        self.calls.make_entry(self.threads[usize::from(cpu)], guest, &made);
        if let (Some(pages), Some(table)) = (&mut self.pages, before.filter(|_| before != after)) {
            pages.forget(table);
        }
    }

    /// Changes the known contents of a page. Returns its level and its guest, if it has one.
    fn update_page(
        &mut self,
        cpu: u8,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Option<(Level, usize)> {
        let pages = self.pages.as_mut()?;
        let (page, index) = pages.of_entry(entry)?;
        let known = match new {
            Descriptor::EMPTY => page.entries.remove(&index),
            Descriptor(value) => page.entries.insert(index, value),
        };
        self.totals.unexpected_values += u64::from(Descriptor(known.unwrap_or(0)) != old);
        let (level, guest) = (page.level, page.guest);
        if guest.is_none() {
            pages.set_writer(entry, cpu);
        }
        guest.map(|number| (level, number))
    }

    /// Links a table, with all tables below it, into the tables of a guest.
    fn link(&mut self, store: Cause, number: usize, table: TableAddress) {
        let (Some(guest), Some(pages)) = (self.guests.get_mut(&number), &mut self.pages) else {
            return;
        };
        let tables = pages.assign(table, number);
        if tables.is_empty() {
            self.totals.unknown_tables += 1;
            guest.checker.adopt_table(table, BTreeMap::new(), None);
        }
        for (table, page) in tables {
            self.calls.link_table(store, table);
            guest.checker.adopt_table(table, page.descriptors(), page.writer());
        }
    }

    /// Processes a store to the word of a lock.
    pub(super) fn change_lock(&mut self, cpu: u8, word: PhysAddr, old: u64, new: u64) {
        let cpus = usize::from(self.machine.cpus);
        let kind = self.machine.hypervisor.lock;
        let lock = self.locks.entry(word).or_insert_with(|| Lock::new(kind, cpus));
        lock.change(usize::from(cpu), old, new, self.totals.events);
        for guest in self.guests.values_mut().filter(|guest| guest.lock == Some(word)) {
            guest.update_lock(lock);
            if let Some(pages) = self.pages.as_ref().filter(|_| guest.is_unlocked()) {
                self.calls.compare_references(guest, pages);
            }
        }
    }

    /// Finds the lock of a guest: the last one that the CPU has taken and holds while it writes the
    /// table.
    fn associate_lock(&mut self, cpu: u8, number: usize) {
        if self.guests.get(&number).is_none_or(|guest| guest.lock.is_some()) {
            return;
        }
        let held = self.locks.iter().filter(|(_, lock)| lock.hold(usize::from(cpu)).is_some());
        let Some((word, lock)) = held.max_by_key(|(_, lock)| lock.changed_at()) else { return };
        let (word, is_shadow) = (*word, self.has_lock(*word));
        self.totals.shadows += u64::from(is_shadow);
        if let Some(guest) = self.guests.get_mut(&number) {
            guest.lock = Some(word);
            guest.is_shadow = is_shadow;
            guest.update_lock(lock);
        }
    }
}

/// Records a change of a guest's table for the findings.
fn record_change(guest: &mut Guest, made: &MadeEntry) {
    let MadeEntry { entry, level, old, new, store, .. } = *made;
    let Some((ipa, _)) = guest.checker.range_of(entry) else { return };
    let address = TranslatedAddress::Guest(ipa);
    let change = TableChange { address, level, old: old.0, new: new.0 };
    guest.last_changes[usize::from(store.cpu)] = Some(change);
    if old.is_leaf(level) && !new.is_leaf(level) {
        guest.last_unmap = Some((store.cpu, store.stack, change));
    }
}
