// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! References to tables, as the hypervisor counts them.
//!
//! A table has one reference since its allocation, and one for each entry that is not zero (Linux:
//! `stage2_pte_is_counted()`). The entry and its reference change one after the other, so both are
//! compared when no CPU holds the lock of the guest. A table without references is free.

use alloc::{collections::BTreeMap, format};

use crate::{
    address::{PhysAddr, TableAddress},
    check::{
        Cause, Rule,
        machine::{guest::Guest, pages::Pages, step::Thread},
    },
    geometry::Granule,
};

#[derive(Debug, Default)]
pub(super) struct References {
    counts: BTreeMap<TableAddress, i64>,
    /// The bytes that each thread allocates.
    allocations: BTreeMap<Thread, u64>,
    /// Tables whose entries or references have changed since they were last compared, with the last
    /// change.
    changed: BTreeMap<TableAddress, Cause>,
}

impl References {
    /// Processes the start of an allocation.
    pub(super) fn begin_allocation(&mut self, thread: Thread, bytes: u64) {
        self.allocations.insert(thread, bytes);
    }

    /// Processes the end of an allocation: each table has one reference.
    pub(super) fn end_allocation(&mut self, thread: Thread, first: PhysAddr, granule: Granule) {
        let tables = self.allocations.remove(&thread).unwrap_or(0) / granule.size();
        let table = |index| TableAddress(first.0 + index * granule.size());
        self.counts.extend((0..tables).map(|index| (table(index), 1)));
    }

    /// Changes the references to a table. Returns whether the table is free afterwards.
    pub(super) fn change(&mut self, call: Cause, table: TableAddress, change: i64) -> bool {
        let Some(count) = self.counts.get_mut(&table) else { return false };
        *count += change;
        self.changed.insert(table, call);
        let is_free = *count == 0;
        if is_free {
            self.forget(&[table]);
        }
        is_free
    }

    /// Records that a store has changed an entry of a table, or linked the table.
    pub(super) fn record_store(&mut self, store: Cause, table: TableAddress) {
        if self.counts.contains_key(&table) {
            self.changed.insert(table, store);
        }
    }

    /// Compares the changed tables of a guest with their entries.
    pub(super) fn compare(&mut self, guest: &mut Guest, pages: &Pages) {
        let counts = &self.counts;
        self.changed.retain(|table, cause| {
            // Of a table that is not linked the entries are unknown.
            let Some(page) = pages.get(*table) else { return false };
            if page.guest != Some(guest.number) {
                return page.guest.is_some();
            }
            let entries = page.entries.len();
            let count = counts.get(table).copied().unwrap_or(0);
            if i64::try_from(entries + 1) != Ok(count) {
                let detail = format!("table {:#x}: count {count}, {entries} entries", table.0);
                guest.checker.report_caused(Rule::WrongReferences, detail, Some(*cause));
            }
            false
        });
    }

    /// Forgets tables that have been freed.
    pub(super) fn forget(&mut self, tables: &[TableAddress]) {
        for table in tables {
            self.counts.remove(table);
            self.changed.remove(table);
        }
    }
}
