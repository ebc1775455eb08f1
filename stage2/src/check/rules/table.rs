// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rules of the allocation and the freeing of tables.

use alloc::format;

use crate::{
    address::TableAddress,
    check::{
        checker::{Checker, CpuState},
        rule::Rule,
        stale_entry::StaleEntry,
    },
};

impl Checker {
    pub(in crate::check) fn allocate(&mut self, cpu: usize, table: TableAddress) {
        if self.cpus[cpu].lock.is_some() {
            self.report(Rule::SleepUnderLock, format!("table {:#x}", table.0));
        }
        self.tables.allocate(cpu, table);
    }

    pub(in crate::check) fn free(&mut self, table: TableAddress) {
        let detail = format!("table {:#x}", table.0);
        let entries = table.0..table.0 + self.setup.geometry.granule().size();
        let may_walk = |stale: &StaleEntry| {
            stale.entry.table == Some(table) || entries.contains(&stale.entry.place.entry.0)
        };
        if self.tlbs.stale.iter().any(may_walk) || self.tables.is_linked(table) {
            self.report(Rule::FreedWhileWalked, detail.as_str());
        }
        let unlinked_at = self.tables.unlinked_at(table);
        // The walk of the freeing CPU counts too: no grace period ends before the walk does.
        let may_be_inside = |cpu: &CpuState| {
            let walk = cpu.walk.zip(unlinked_at);
            walk.is_some_and(|(walk, at)| walk.since <= at)
        };
        if self.cpus.iter().any(may_be_inside) {
            self.report(Rule::FreedInGracePeriod, detail.as_str());
        }
        match self.tables.free(table) {
            None => self.report(Rule::TableNotOwned, format!("{detail} is freed")),
            Some(count) if count != 1 && unlinked_at.is_some() => {
                let detail = format!("{detail} is freed with count {count}");
                self.report(Rule::WrongReferences, detail);
            }
            Some(_) => {}
        }
    }
}
