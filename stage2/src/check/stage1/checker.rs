// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state of the checker of a kernel's tables, and the events that change no entry.

use alloc::{collections::BTreeMap, format, string::String, vec::Vec};

use super::entry::{MemoryTypes, Stage1Entry};
use crate::{
    address::{TableAddress, VirtAddr},
    check::{
        entry::Invalidation,
        event::Cause,
        rule::Rule,
        stale_entry::{ChangedEntry, EntryChange, StaleEntry},
        table_model::TableModel,
        tlb_model::TlbModel,
    },
    engine::BbmLevel,
    geometry::Geometry,
    operations::Dsb,
};

/// A table whose contents are known before an entry or TTBR1 links it.
#[derive(Debug, Clone)]
pub(in crate::check) struct NewTable {
    pub(in crate::check) entries: BTreeMap<u64, Stage1Entry>,
    /// The CPU whose stores to it no barrier has ordered.
    pub(in crate::check) unordered_writer: Option<usize>,
}

/// A violation, and the earlier event that caused it.
#[derive(Debug)]
pub(in crate::check) struct KernelViolation {
    pub(in crate::check) rule: Rule,
    pub(in crate::check) detail: String,
    pub(in crate::check) cause: Option<Cause>,
}

/// Checks the tables of one kernel.
#[derive(Debug)]
pub(in crate::check) struct Stage1Checker {
    pub(super) geometry: Geometry,
    pub(super) types: MemoryTypes,
    /// The level of FEAT_BBM of all CPUs.
    pub(super) bbm: BbmLevel,
    pub(super) tables: TableModel<Stage1Entry>,
    pub(super) tlbs: TlbModel<Stage1Entry>,
    /// Tables that are not linked yet.
    pub(super) new_tables: BTreeMap<TableAddress, NewTable>,
    pub(super) event: u64,
    pub(super) current: Cause,
    violations: Vec<KernelViolation>,
    /// The number of linked tables whose contents are unknown.
    pub(super) unknown_tables: u64,
}

impl Stage1Checker {
    /// Creates a checker of a kernel without tables.
    pub(in crate::check) fn new(geometry: Geometry, cpus: u8, bbm: BbmLevel) -> Self {
        let cpus = usize::from(cpus);
        let mut tlbs = TlbModel::new(cpus);
        (0..cpus).for_each(|cpu| tlbs.set_user(cpu, false));
        Self {
            geometry,
            types: MemoryTypes::default(),
            bbm,
            tables: TableModel::new(geometry),
            tlbs,
            new_tables: BTreeMap::new(),
            event: 0,
            current: Cause { cpu: 0, stack: None },
            violations: Vec::new(),
            unknown_tables: 0,
        }
    }

    /// Sets MAIR.
    pub(in crate::check) const fn set_types(&mut self, types: MemoryTypes) {
        self.types = types;
    }

    /// Sets the event that is about to be checked.
    pub(in crate::check) const fn begin_event(&mut self, event: u64, cause: Cause) {
        (self.event, self.current) = (event, cause);
    }

    pub(in crate::check) const fn geometry(&self) -> Geometry {
        self.geometry
    }

    pub(in crate::check) const fn unknown_tables(&self) -> u64 {
        self.unknown_tables
    }

    /// Removes and returns the violations.
    pub(in crate::check) fn take_violations(&mut self) -> Vec<KernelViolation> {
        core::mem::take(&mut self.violations)
    }

    pub(super) fn report(&mut self, rule: Rule, detail: String, cause: Option<Cause>) {
        self.violations.push(KernelViolation { rule, detail, cause });
    }

    /// Adds a table that is about to be linked.
    pub(in crate::check) fn add_table(&mut self, table: TableAddress, contents: NewTable) {
        self.new_tables.insert(table, contents);
    }

    /// Processes an invalidation by a CPU. As in stage 2, a CPU may fetch a contiguous run again while
    /// one of its entries remains.
    pub(in crate::check) fn invalidate(&mut self, cpu: usize, kind: Invalidation<VirtAddr>) {
        let tables = &mut self.tables;
        let run_remains = |entry: &ChangedEntry<Stage1Entry>| {
            entry.change == EntryChange::Removed
                && entry.table.is_none()
                && crate::check::entry::TableEntry::is_contiguous(entry.old)
                && tables.run_remains(entry.position.entry, entry.position.level)
        };
        self.tlbs.invalidate(cpu, kind, run_remains);
    }

    /// Processes a DSB.
    pub(in crate::check) fn barrier(&mut self, cpu: usize, kind: Dsb, is_nxs: bool) {
        self.tlbs.barrier(cpu, kind, is_nxs);
    }

    /// Returns whether no other CPU uses the tables: a barrier of a CPU for itself is enough.
    pub(in crate::check) const fn is_alone(&self, cpu: usize) -> bool {
        self.tlbs.is_only_user(cpu)
    }

    /// Orders the stores of a CPU to tables before its later stores.
    pub(in crate::check) fn order_stores(&mut self, cpu: usize) {
        self.tables.publish_stores(cpu);
    }

    /// Checks that a page is no table that a walker may read: it is freed, or written after it has been
    /// unlinked. The page is no table any more.
    pub(in crate::check) fn reuse_page(&mut self, page: TableAddress) {
        let Some(table) = self.tables.table_states.get(&page) else { return };
        let is_linked = table.is_linked;
        let walked = self.find_walked(page);
        if is_linked || walked.is_some() {
            let state = if is_linked { "is linked" } else { "may be in a walk cache" };
            let detail = format!("table {:#x} {state}", page.0);
            self.report(Rule::FreedWhileWalked, detail, None);
        }
        if !is_linked {
            self.tables.free(page);
        }
    }

    /// Returns an entry by which a CPU may still walk an unlinked table.
    pub(super) fn find_walked(&self, page: TableAddress) -> Option<&StaleEntry<Stage1Entry>> {
        self.tlbs.removed_or_restricted().find(|stale| stale.entry.table == Some(page))
    }

    /// Reports the removed and restricted entries among those selected that a CPU may still hold: the
    /// call that changed them ends.
    pub(in crate::check) fn end_call(
        &mut self,
        selects: impl Fn(&StaleEntry<Stage1Entry>) -> bool,
    ) {
        for stale in self.tlbs.take(selects) {
            let entry = &stale.entry;
            let rule = if entry.table.is_some() || entry.is_below_unlinked_table {
                Rule::TableRemovalSpan
            } else {
                Rule::ReductionNotComplete
            };
            let (at, size, was) = (kernel_address(entry.position.ipa), entry.size, entry.old);
            let detail = format!("{at}, {size:#x} bytes: {was:?} may be held");
            self.report(rule, detail, Some(entry.cause));
        }
    }
}

/// Returns the text of a kernel's address in the details of a violation.
pub(super) fn kernel_address(address: VirtAddr) -> String {
    format!("kernel address {:#x}", address.0 | 0xff << 56)
}
