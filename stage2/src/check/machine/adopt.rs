// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Additions to the checker for tables that a hypervisor builds before the checker sees them, and for
//! several guests on one machine.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec::Vec,
};

use crate::{
    address::{EntryAddress, Ipa, PhysAddr, TableAddress},
    check::{
        Checker, StoreKind, entry::Invalidation, stale_entry::EntryChange,
        table_model::EntryPosition,
    },
    descriptor::Descriptor,
    geometry::Granule,
    operations::Vmid,
};

impl Checker {
    pub(super) fn current_vmid(&self, cpu: usize) -> Vmid {
        self.cpus[cpu].vmid
    }

    /// Applies the rules of FEAT_S2FWB.
    pub(super) const fn set_fwb(&mut self) {
        self.setup.features.fwb = true;
    }

    /// Lets operations end before their restrictions have reached all TLBs, until
    /// [`Checker::end_call`].
    pub(super) const fn defer_restrictions(&mut self) {
        self.defers_restrictions = true;
    }

    /// Lets shared walkers relax permissions by plain stores.
    pub(super) const fn share_plain_relaxations(&mut self) {
        self.shares_plain_relaxations = true;
    }

    /// Reports restrictions that have not reached all TLBs.
    pub(super) fn end_call(&mut self) {
        self.report_incomplete(|stale| stale.entry.change == EntryChange::Restricted);
    }

    /// Invalidates the entries of all VMIDs.
    pub(super) fn invalidate_all_vmids(&mut self, cpu: usize, kind: Invalidation<Ipa>) {
        self.invalidate_entries(cpu, kind);
    }

    /// Orders the stores of a CPU to tables before its later stores, without completing them.
    pub(super) fn order_stores(&mut self, cpu: usize) {
        self.tables.publish_stores(cpu);
    }

    /// Adds a table with these entries. A table of the same address has been freed since.
    pub(super) fn adopt_table(
        &mut self,
        table: TableAddress,
        entries: BTreeMap<u64, Descriptor>,
        writer: Option<usize>,
    ) {
        if self.tables.table_states.contains_key(&table) {
            self.free(table);
        }
        self.tables.adopt(table, entries, writer);
    }

    /// Adds an entry of the root that was made before the first event.
    pub(super) fn adopt_entry(&mut self, cpu: usize, entry: EntryAddress, value: Descriptor) {
        let root = self.setup.root;
        let index = (entry.0 - root.0) / 8;
        let level = self.setup.geometry.start_level();
        let Some(table) = self.tables.table_states.get_mut(&root) else { return };
        table.entries.insert(index, value);
        if value.is_valid() {
            let ipa = table.ipa + index * self.setup.geometry.span(level);
            self.make_valid(cpu, &EntryPosition { entry, level, ipa }, value, StoreKind::Release);
        }
    }

    /// Removes the state of unlinked tables that no CPU can reach.
    pub(super) fn forget_unlinked_tables(&mut self) {
        let granule = self.granule();
        let reachable: BTreeSet<TableAddress> = self
            .tlbs
            .all()
            .flat_map(|stale| {
                let holder = granule.table_containing(stale.entry.position.entry);
                stale.entry.table.into_iter().chain([holder])
            })
            .collect();
        let cpus = &self.cpus;
        self.tables.table_states.retain(|at, table| {
            table.is_linked
                || reachable.contains(at)
                || table
                    .unlinked_at
                    .is_none_or(|event| cpus.iter().any(|cpu| cpu.walks_since(event)))
        });
    }

    pub(super) const fn granule(&self) -> Granule {
        self.setup.geometry.granule()
    }

    /// Returns the first address and the bytes that an entry of a linked table translates.
    pub(super) fn range_of(&mut self, entry: EntryAddress) -> Option<(Ipa, u64)> {
        let geometry = self.setup.geometry;
        let (at, table) = self.tables.table_containing(entry)?;
        let span = geometry.span(table.level.filter(|_| table.is_linked)?);
        Some((table.ipa + (entry.0 - at.0) / 8 * span, span))
    }

    /// Returns the leaf that was broken at an entry, while the lock is held.
    pub(super) fn broken_leaf(&self, entry: EntryAddress) -> Option<Descriptor> {
        self.tables.broken_leaves.get(&entry).copied()
    }

    /// Returns the leaves of a linked table and those below it.
    pub(super) fn leaves_of(&self, table: TableAddress) -> Vec<(EntryPosition, Descriptor)> {
        self.tables.subtree(table).leaves
    }

    /// Frees a table, unless it was never linked.
    pub(super) fn free_known_table(&mut self, table: TableAddress) {
        if self.tables.table_states.contains_key(&table) {
            self.free(table);
        }
    }

    /// Cleans memory to the PoC without an invalidation.
    pub(super) fn clean(&mut self, phys: PhysAddr, size: u64) {
        self.caches.clean(self.current(), phys, size);
    }
}
