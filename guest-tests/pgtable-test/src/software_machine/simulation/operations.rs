// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Operations of one simulated CPU: each changes the tables and takes its time.

use std::{cell::Cell, rc::Rc};

use granule_stage2::{
    EntryAddress, Operations, PhysAddr, TableAddress,
    descriptor::Descriptor,
    operations::{Dsb, Note, Order, Scope, Tlbi, Unlinked, Vmid},
};

use super::{state::SimState, virtual_time};
use crate::software_machine::Count;

/// Size of a cache line.
const LINE: u64 = 64;

/// Initiator of operations, which determines their cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Initiator {
    /// The guest's walks, whose time is part of that of the access.
    Guest,
    /// The fault path.
    FaultPath,
    /// The host's memory management.
    Host,
}

/// Operations of one vCPU, or of the host's thread.
#[derive(Debug)]
pub(super) struct CpuOperations {
    state: Rc<SimState>,
    cpu: usize,
    initiator: Initiator,
    vmid: Cell<Vmid>,
}

impl CpuOperations {
    pub(super) fn new(state: &Rc<SimState>, cpu: usize, initiator: Initiator) -> Self {
        Self { state: Rc::clone(state), cpu, initiator, vmid: Cell::default() }
    }

    /// Frees unlinked tables that no walk can reach any more.
    pub(super) fn drain(&self) {
        self.state.reclaim.drain(&self.state.mmu, self);
    }
}

impl Operations for CpuOperations {
    fn load(&self, entry: EntryAddress) -> Descriptor {
        if self.initiator != Initiator::Guest {
            virtual_time::charge(self.state.prices.entry_load);
        }
        self.state.tables.load(entry)
    }

    fn store(&self, entry: EntryAddress, new: Descriptor, _: Order) {
        virtual_time::spend(self.state.prices.entry_store);
        self.state.change(entry, new);
    }

    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        virtual_time::spend(self.state.prices.entry_exchange);
        let now = self.state.tables.load(entry);
        if now != old {
            return Err(now);
        }
        self.state.change(entry, new);
        Ok(())
    }

    fn allocate(&self) -> Option<TableAddress> {
        self.state.count(Count::Tables, 1);
        virtual_time::charge(self.state.prices.table_allocate);
        self.state.tables.allocate()
    }

    fn free(&self, table: TableAddress) {
        virtual_time::charge(self.state.prices.table_free);
        self.state.tables.free(table);
    }

    fn defer(&self, unlinked: Unlinked) {
        self.state.reclaim.defer(unlinked);
    }

    fn begin_walk(&self) {
        self.state.reclaim.begin(self.cpu);
    }

    fn end_walk(&self) {
        self.state.reclaim.end(self.cpu);
    }

    fn take_references(&self, table: TableAddress, count: u32) {
        virtual_time::charge(self.state.prices.table_reference * u64::from(count));
        let references = self.state.tables.references(table);
        references.set(references.get() + count);
    }

    fn drop_references(&self, table: TableAddress, count: u32) -> u32 {
        virtual_time::charge(self.state.prices.table_reference * u64::from(count));
        let references = self.state.tables.references(table);
        references.set(references.get().saturating_sub(count));
        references.get()
    }

    fn references(&self, table: TableAddress) -> u32 {
        self.state.tables.references(table).get()
    }

    /// Takes no time: the cost of an operation contains the wait for its completion.
    fn dsb(&self, _: Dsb) {}

    fn isb(&self) {}

    fn tlbi(&self, kind: Tlbi) {
        let state = &self.state;
        let (what, scope) = match kind {
            Tlbi::Ipa { scope, .. } | Tlbi::Range { scope, .. } => (Count::TlbiAddress, scope),
            Tlbi::Stage1 { scope } | Tlbi::All { scope } => (Count::TlbiAll, scope),
        };
        state.count(what, 1);
        virtual_time::spend(match scope {
            Scope::Local => state.prices.tlbi_local,
            Scope::Broadcast => state.prices.tlbi_broadcast,
        });
    }

    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        self.vmid.replace(vmid)
    }

    fn clean_invalidate(&self, _: PhysAddr, size: u64) {
        self.state.count(Count::CleanedLines, size / LINE);
        self.state.clean(size / LINE);
    }

    fn invalidate_instructions(&self, range: Option<(PhysAddr, u64)>) {
        let prices = &self.state.prices;
        match range {
            Some((_, size)) => {
                self.state.count(Count::InvalidatedLines, size / LINE);
                virtual_time::spend(prices.icache_line * (size / LINE));
            }
            None => {
                self.state.count(Count::InvalidatedAll, 1);
                virtual_time::spend(prices.icache_all);
            }
        }
    }

    fn pause(&self) {
        virtual_time::spend(self.state.prices.locked_wait);
    }

    fn note(&self, note: Note) {
        match note {
            Note::TopUp => self.state.count(Count::TopUps, 1),
            Note::Lock { .. } => virtual_time::charge(match self.initiator {
                Initiator::Guest => 0,
                Initiator::FaultPath => self.state.prices.fault_locked,
                Initiator::Host => self.state.prices.host_locked,
            }),
            _ => {}
        }
    }
}
