// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A [`Recorder`] reports every call of the engine's operations to a [`Sink`]. It holds one mutex during
//! a call and its report, so the order of events is the order in memory.

use alloc::vec::Vec;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{
    checker::Checker,
    event::{Action, Event, StoreKind},
    operation_hooks::{Call, Hook, HookedOperations, Reply},
};
use crate::operations::{Operations, Order};

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
pub type Recorder<'a, O, S> = HookedOperations<O, RecordHook<'a, S>>;

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
            matches!(call, Call::Load(_) | Call::References(_) | Call::DeferFree(_) | Call::Pause);
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
            Call::TakeReferences(table, count) => Action::ChangeReferences(table, count.into()),
            Call::DropReferences(table, count) => {
                Action::ChangeReferences(table, -i64::from(count))
            }
            Call::Dsb(kind) => Action::Dsb(kind),
            Call::Isb => Action::Isb,
            Call::Tlbi(kind) => Action::Tlbi(kind),
            Call::SwitchVmid(vmid) => Action::SwitchVmid(vmid),
            Call::CleanInvalidate { phys, size } => Action::CleanInvalidate { phys, size },
            Call::InvalidateICache(range) => Action::InvalidateICache(range),
            Call::Note(note) => Action::Note(note),
            _ => return reply,
        };
        let cpu = self.cpu;
        sink.event(Event { cpu, action });
        reply
    }
}
