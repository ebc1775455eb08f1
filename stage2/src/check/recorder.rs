// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Operations that tell somebody of every event.
//!
//! Each event is done and told under one mutex, so the order told is the order in memory.

use std::sync::{Mutex, MutexGuard, PoisonError};

use alloc::vec::Vec;

use super::event::{Action, Event, How};
use crate::{
    address::{EntryAddress, PhysAddr, TableAddress},
    descriptor::Descriptor,
    operations::{Dsb, Note, Operations, Order, Tlbi, Unlinked, Vmid},
};

/// Who is told.
pub trait Sink {
    /// An event happened.
    fn event(&mut self, event: Event);
}

impl Sink for Vec<Event> {
    fn event(&mut self, event: Event) {
        self.push(event);
    }
}

/// One CPU's operations, each of them told.
#[derive(Debug)]
pub struct Recorder<'a, O, S> {
    inner: O,
    cpu: u8,
    sink: &'a Mutex<S>,
}

impl<'a, O: Operations, S: Sink> Recorder<'a, O, S> {
    /// Tells `sink` of what `inner` does, as CPU `cpu`.
    pub const fn new(inner: O, cpu: u8, sink: &'a Mutex<S>) -> Self {
        Self { inner, cpu, sink }
    }

    /// The operations within.
    pub const fn inner(&self) -> &O {
        &self.inner
    }

    /// Tells of something that needs no doing.
    pub fn tell(&self, action: Action) {
        self.act(action, || ());
    }

    /// Who is told. Nothing can be told as long as this is held.
    pub fn sink(&self) -> MutexGuard<'_, S> {
        self.sink.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn act<T>(&self, action: Action, act: impl FnOnce() -> T) -> T {
        let mut sink = self.sink();
        let result = act();
        sink.event(Event {
            cpu: self.cpu,
            action,
        });
        result
    }
}

impl<O: Operations, S: Sink> Operations for Recorder<'_, O, S> {
    fn load(&self, entry: EntryAddress) -> Descriptor {
        self.inner.load(entry)
    }

    fn store(&self, entry: EntryAddress, new: Descriptor, order: Order) {
        let mut sink = self.sink();
        let old = self.inner.load(entry);
        self.inner.store(entry, new, order);
        let how = match order {
            Order::Plain => How::Plain,
            Order::Release => How::Release,
        };
        let action = Action::Store {
            entry,
            old,
            new,
            how,
        };
        sink.event(Event {
            cpu: self.cpu,
            action,
        });
    }

    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        let mut sink = self.sink();
        self.inner.compare_exchange(entry, old, new)?;
        let action = Action::Store {
            entry,
            old,
            new,
            how: How::Swap,
        };
        sink.event(Event {
            cpu: self.cpu,
            action,
        });
        Ok(())
    }

    fn allocate(&self) -> Option<TableAddress> {
        let mut sink = self.sink();
        let table = self.inner.allocate()?;
        sink.event(Event {
            cpu: self.cpu,
            action: Action::Allocate(table),
        });
        Some(table)
    }

    fn free(&self, table: TableAddress) {
        self.act(Action::Free(table), || self.inner.free(table));
    }

    fn defer(&self, unlinked: Unlinked) {
        self.inner.defer(unlinked);
    }

    fn begin_walk(&self) {
        self.act(Action::BeginWalk, || self.inner.begin_walk());
    }

    fn end_walk(&self) {
        self.act(Action::EndWalk, || self.inner.end_walk());
    }

    fn take_references(&self, table: TableAddress, count: u32) {
        self.act(Action::References(table, count.into()), || {
            self.inner.take_references(table, count);
        });
    }

    fn drop_references(&self, table: TableAddress, count: u32) -> u32 {
        self.act(Action::References(table, -i64::from(count)), || {
            self.inner.drop_references(table, count)
        })
    }

    fn references(&self, table: TableAddress) -> u32 {
        self.inner.references(table)
    }

    fn dsb(&self, kind: Dsb) {
        self.act(Action::Dsb(kind), || self.inner.dsb(kind));
    }

    fn isb(&self) {
        self.act(Action::Isb, || self.inner.isb());
    }

    fn tlbi(&self, kind: Tlbi) {
        self.act(Action::Tlbi(kind), || self.inner.tlbi(kind));
    }

    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        self.act(Action::Vmid(vmid), || self.inner.switch_vmid(vmid))
    }

    fn clean_invalidate(&self, phys: PhysAddr, size: u64) {
        self.act(Action::Clean { phys, size }, || {
            self.inner.clean_invalidate(phys, size);
        });
    }

    fn invalidate_instructions(&self, range: Option<(PhysAddr, u64)>) {
        self.act(Action::Instructions(range), || {
            self.inner.invalidate_instructions(range);
        });
    }

    fn pause(&self) {
        self.inner.pause();
    }

    fn note(&self, note: Note) {
        self.act(Action::Note(note), || self.inner.note(note));
    }
}
