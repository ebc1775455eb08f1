// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Operations that pass every call to a hook.
//!
//! [`Hooked`] turns each call of an [`Operations`] method into a [`Call`] and passes it to its
//! [`Hook`]. The hook runs the call on the inner operations, replaces it or omits it, and returns
//! the [`Reply`]. A [`Recorder`] reports every call to a [`Sink`]. One mutex covers an operation
//! and its report, so the order of events is the order in memory. Tests implement other hooks for
//! fault injection, pauses and schedules.

use alloc::vec::Vec;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{
    checker::Checker,
    event::{Action, Event, StoreKind},
};
use crate::{
    address::{EntryAddress, PhysAddr, TableAddress},
    descriptor::Descriptor,
    operations::{Dsb, Note, Operations, Order, Tlbi, Unlinked, Vmid},
};

/// One call of a method of [`Operations`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each variant is the method of its name")]
pub enum Call {
    Load(EntryAddress),
    Store { entry: EntryAddress, new: Descriptor, order: Order },
    CompareExchange { entry: EntryAddress, old: Descriptor, new: Descriptor },
    Allocate,
    Free(TableAddress),
    Defer(Unlinked),
    BeginWalk,
    EndWalk,
    TakeReferences(TableAddress, u32),
    DropReferences(TableAddress, u32),
    References(TableAddress),
    Dsb(Dsb),
    Isb,
    Tlbi(Tlbi),
    SwitchVmid(Vmid),
    CleanInvalidate { phys: PhysAddr, size: u64 },
    InvalidateInstructions(Option<(PhysAddr, u64)>),
    Pause,
    Note(Note),
}

/// The result of a [`Call`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// Result of a call without a return value.
    Done,
    /// Result of [`Call::Load`].
    Entry(Descriptor),
    /// Result of [`Call::CompareExchange`].
    Exchanged(Result<(), Descriptor>),
    /// Result of [`Call::Allocate`].
    Table(Option<TableAddress>),
    /// Result of [`Call::DropReferences`] and [`Call::References`].
    Count(u32),
    /// Result of [`Call::SwitchVmid`].
    Vmid(Vmid),
}

impl Call {
    /// Performs the call on `ops`.
    pub fn run(self, ops: &impl Operations) -> Reply {
        match self {
            Self::Load(entry) => return Reply::Entry(ops.load(entry)),
            Self::Store { entry, new, order } => ops.store(entry, new, order),
            Self::CompareExchange { entry, old, new } => {
                return Reply::Exchanged(ops.compare_exchange(entry, old, new));
            }
            Self::Allocate => return Reply::Table(ops.allocate()),
            Self::Free(table) => ops.free(table),
            Self::Defer(unlinked) => ops.defer(unlinked),
            Self::BeginWalk => ops.begin_walk(),
            Self::EndWalk => ops.end_walk(),
            Self::TakeReferences(table, count) => ops.take_references(table, count),
            Self::DropReferences(table, count) => {
                return Reply::Count(ops.drop_references(table, count));
            }
            Self::References(table) => return Reply::Count(ops.references(table)),
            Self::Dsb(kind) => ops.dsb(kind),
            Self::Isb => ops.isb(),
            Self::Tlbi(kind) => ops.tlbi(kind),
            Self::SwitchVmid(vmid) => return Reply::Vmid(ops.switch_vmid(vmid)),
            Self::CleanInvalidate { phys, size } => ops.clean_invalidate(phys, size),
            Self::InvalidateInstructions(range) => ops.invalidate_instructions(range),
            Self::Pause => ops.pause(),
            Self::Note(note) => ops.note(note),
        }
        Reply::Done
    }
}

/// Handler that runs in place of every call.
pub trait Hook<O: Operations> {
    /// Handles a call. [`Call::run`] on `inner` performs it. The reply's variant must be the
    /// call's.
    fn call(&self, inner: &O, call: Call) -> Reply;
}

/// Operations that pass every call to a hook.
#[derive(Debug)]
pub struct Hooked<O, H> {
    /// The operations on which the hook runs calls.
    pub inner: O,
    /// The hook.
    pub hook: H,
}

impl<O: Operations, H: Hook<O>> Hooked<O, H> {
    fn call(&self, call: Call) -> Reply {
        self.hook.call(&self.inner, call)
    }
}

/// Extracts the value from the reply variant that corresponds to a call.
macro_rules! reply {
    ($self:ident, $variant:ident, $call:expr) => {
        match $self.call($call) {
            Reply::$variant(value) => value,
            other => unreachable!("the hook replies {other:?} to {:?}", $call),
        }
    };
}

impl<O: Operations, H: Hook<O>> Operations for Hooked<O, H> {
    fn load(&self, entry: EntryAddress) -> Descriptor {
        reply!(self, Entry, Call::Load(entry))
    }

    fn store(&self, entry: EntryAddress, new: Descriptor, order: Order) {
        self.call(Call::Store { entry, new, order });
    }

    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        reply!(self, Exchanged, Call::CompareExchange { entry, old, new })
    }

    fn allocate(&self) -> Option<TableAddress> {
        reply!(self, Table, Call::Allocate)
    }

    fn free(&self, table: TableAddress) {
        self.call(Call::Free(table));
    }

    fn defer(&self, unlinked: Unlinked) {
        self.call(Call::Defer(unlinked));
    }

    fn begin_walk(&self) {
        self.call(Call::BeginWalk);
    }

    fn end_walk(&self) {
        self.call(Call::EndWalk);
    }

    fn take_references(&self, table: TableAddress, count: u32) {
        self.call(Call::TakeReferences(table, count));
    }

    fn drop_references(&self, table: TableAddress, count: u32) -> u32 {
        reply!(self, Count, Call::DropReferences(table, count))
    }

    fn references(&self, table: TableAddress) -> u32 {
        reply!(self, Count, Call::References(table))
    }

    fn dsb(&self, kind: Dsb) {
        self.call(Call::Dsb(kind));
    }

    fn isb(&self) {
        self.call(Call::Isb);
    }

    fn tlbi(&self, kind: Tlbi) {
        self.call(Call::Tlbi(kind));
    }

    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        reply!(self, Vmid, Call::SwitchVmid(vmid))
    }

    fn clean_invalidate(&self, phys: PhysAddr, size: u64) {
        self.call(Call::CleanInvalidate { phys, size });
    }

    fn invalidate_instructions(&self, range: Option<(PhysAddr, u64)>) {
        self.call(Call::InvalidateInstructions(range));
    }

    fn pause(&self) {
        self.call(Call::Pause);
    }

    fn note(&self, note: Note) {
        self.call(Call::Note(note));
    }
}

/// Receiver of events.
pub trait Sink {
    /// Receives the next event.
    fn event(&mut self, event: Event);
}

impl Sink for Vec<Event> {
    fn event(&mut self, event: Event) {
        self.push(event);
    }
}

impl Sink for Checker {
    fn event(&mut self, event: Event) {
        self.check(&event);
    }
}

/// Hook of a [`Recorder`].
#[derive(Debug)]
pub struct RecordHook<'a, S> {
    cpu: u8,
    sink: &'a Mutex<S>,
}

/// Operations of one CPU, reported to a sink.
pub type Recorder<'a, O, S> = Hooked<O, RecordHook<'a, S>>;

impl<'a, O, S: Sink> Recorder<'a, O, S> {
    /// Reports the operations of CPU `cpu` to `sink`.
    pub const fn new(inner: O, cpu: u8, sink: &'a Mutex<S>) -> Self {
        Self { inner, hook: RecordHook { cpu, sink } }
    }

    /// Reports an event that is not an operation of the engine.
    pub fn record(&self, action: Action) {
        let cpu = self.hook.cpu;
        self.sink().event(Event { cpu, action });
    }

    /// Locks the sink. No CPU can report an event until the guard is dropped.
    pub fn sink(&self) -> MutexGuard<'_, S> {
        self.hook.lock()
    }
}

impl<S> RecordHook<'_, S> {
    fn lock(&self) -> MutexGuard<'_, S> {
        self.sink.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<O: Operations, S: Sink> Hook<O> for RecordHook<'_, S> {
    fn call(&self, inner: &O, call: Call) -> Reply {
        let unrecorded =
            matches!(call, Call::Load(_) | Call::References(_) | Call::Defer(_) | Call::Pause);
        if unrecorded {
            return call.run(inner);
        }
        let mut sink = self.lock();
        let before = match call {
            Call::Store { entry, .. } => inner.load(entry),
            _ => Default::default(),
        };
        let reply = call.run(inner);
        let action = match call {
            Call::Store { entry, new, order } => Action::Store {
                entry,
                old: before,
                new,
                kind: match order {
                    Order::Plain => StoreKind::Plain,
                    Order::Release => StoreKind::Release,
                },
            },
            Call::CompareExchange { entry, old, new } if reply == Reply::Exchanged(Ok(())) => {
                let kind = StoreKind::Swap;
                Action::Store { entry, old, new, kind }
            }
            Call::Allocate if let Reply::Table(Some(table)) = reply => Action::Allocate(table),
            Call::Free(table) => Action::Free(table),
            Call::BeginWalk => Action::Walk { begins: true },
            Call::EndWalk => Action::Walk { begins: false },
            Call::TakeReferences(table, count) => Action::References(table, count.into()),
            Call::DropReferences(table, count) => Action::References(table, -i64::from(count)),
            Call::Dsb(kind) => Action::Dsb(kind),
            Call::Isb => Action::Isb,
            Call::Tlbi(kind) => Action::Tlbi(kind),
            Call::SwitchVmid(vmid) => Action::Vmid(vmid),
            Call::CleanInvalidate { phys, size } => Action::Clean { phys, size },
            Call::InvalidateInstructions(range) => Action::Instructions(range),
            Call::Note(note) => Action::Note(note),
            _ => return reply,
        };
        let cpu = self.cpu;
        sink.event(Event { cpu, action });
        reply
    }
}
