// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One simulated CPU's operations: each does what it does to the table and takes its time.

use std::{cell::Cell, rc::Rc};

use granule_stage2::{
    EntryAddress, Operations, PhysAddr, TableAddress,
    descriptor::Descriptor,
    operations::{Dsb, Note, Order, Scope, Tlbi, Unlinked, Vmid},
};

use super::{clock, world::World};
use crate::software_machine::shared::Count;

/// Bytes of a line.
const LINE: u64 = 64;

/// On whose behalf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// The guest's own walks: their time is in that of the access.
    Guest,
    /// The fault path.
    Fault,
    /// The host's memory management.
    Host,
}

/// The operations of one vCPU, or of the host's thread.
#[derive(Debug)]
pub(super) struct CpuOperations {
    world: Rc<World>,
    cpu: usize,
    side: Side,
    vmid: Cell<Vmid>,
}

impl CpuOperations {
    pub(super) fn new(world: &Rc<World>, cpu: usize, side: Side) -> Self {
        Self {
            world: Rc::clone(world),
            cpu,
            side,
            vmid: Cell::default(),
        }
    }

    /// Frees tables whose grace period is over.
    pub(super) fn drain(&self) {
        self.world.reclaim.drain(&self.world.mmu, self);
    }
}

impl Operations for CpuOperations {
    fn load(&self, entry: EntryAddress) -> Descriptor {
        if self.side != Side::Guest {
            clock::charge(self.world.prices.entry_load);
        }
        self.world.tables.load(entry)
    }

    fn store(&self, entry: EntryAddress, new: Descriptor, _: Order) {
        clock::spend(self.world.prices.entry_store);
        self.world.change(entry, new);
    }

    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        clock::spend(self.world.prices.entry_exchange);
        let now = self.world.tables.load(entry);
        if now != old {
            return Err(now);
        }
        self.world.change(entry, new);
        Ok(())
    }

    fn allocate(&self) -> Option<TableAddress> {
        self.world.count(Count::Tables, 1);
        clock::charge(self.world.prices.table_allocate);
        self.world.tables.allocate()
    }

    fn free(&self, table: TableAddress) {
        clock::charge(self.world.prices.table_free);
        self.world.tables.free(table);
    }

    fn defer(&self, unlinked: Unlinked) {
        self.world.reclaim.defer(unlinked);
    }

    fn begin_walk(&self) {
        self.world.reclaim.begin(self.cpu);
    }

    fn end_walk(&self) {
        self.world.reclaim.end(self.cpu);
    }

    fn take_references(&self, table: TableAddress, count: u32) {
        clock::charge(self.world.prices.table_reference * u64::from(count));
        let references = self.world.tables.references(table);
        references.set(references.get() + count);
    }

    fn drop_references(&self, table: TableAddress, count: u32) -> u32 {
        clock::charge(self.world.prices.table_reference * u64::from(count));
        let references = self.world.tables.references(table);
        references.set(references.get().saturating_sub(count));
        references.get()
    }

    fn references(&self, table: TableAddress) -> u32 {
        self.world.tables.references(table).get()
    }

    /// Waiting for what went before is in the price of what went before.
    fn dsb(&self, _: Dsb) {}

    fn isb(&self) {}

    fn tlbi(&self, kind: Tlbi) {
        let world = &self.world;
        let (what, scope) = match kind {
            Tlbi::Ipa { scope, .. } | Tlbi::Range { scope, .. } => (Count::TlbiAddress, scope),
            Tlbi::Stage1 { scope } | Tlbi::All { scope } => (Count::TlbiAll, scope),
        };
        world.count(what, 1);
        clock::spend(match scope {
            Scope::Local => world.prices.tlbi_local,
            Scope::Broadcast => world.prices.tlbi_broadcast,
        });
    }

    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        self.vmid.replace(vmid)
    }

    fn clean_invalidate(&self, _: PhysAddr, size: u64) {
        self.world.count(Count::CleanedLines, size / LINE);
        self.world.clean(size / LINE);
    }

    fn invalidate_instructions(&self, range: Option<(PhysAddr, u64)>) {
        let prices = &self.world.prices;
        match range {
            Some((_, size)) => {
                self.world.count(Count::InvalidatedLines, size / LINE);
                clock::spend(prices.icache_line * (size / LINE));
            }
            None => {
                self.world.count(Count::InvalidatedAll, 1);
                clock::spend(prices.icache_all);
            }
        }
    }

    fn pause(&self) {
        clock::spend(self.world.prices.locked_wait);
    }

    fn note(&self, note: Note) {
        match note {
            Note::TopUp => self.world.count(Count::TopUps, 1),
            Note::Lock { .. } => clock::charge(match self.side {
                Side::Guest => 0,
                Side::Fault => self.world.prices.fault_locked,
                Side::Host => self.world.prices.host_locked,
            }),
            _ => {}
        }
    }
}
