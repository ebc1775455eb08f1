// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Steps of the hypervisor: the thread that a CPU executes, and the entries that it changes.

use crate::{address::EntryAddress, check::Cause, descriptor::Descriptor, geometry::Level};

/// A thread of the hypervisor, which may change the CPU between two events. In a trace without threads,
/// each CPU executes its own one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Thread {
    OfCpu(u8),
    Number(u64),
}

impl Thread {
    pub(super) const fn of_cpu(cpu: u8) -> Self {
        Self::OfCpu(cpu)
    }

    /// Returns the thread of an event, whose number 0 is no thread of the hypervisor.
    pub(super) const fn of_event(cpu: u8, number: u64) -> Self {
        if number == 0 { Self::OfCpu(cpu) } else { Self::Number(number) }
    }
}

/// A step of a CPU that executes a thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    /// The current event.
    pub(super) cause: Cause,
    pub(super) thread: Thread,
    /// The number of the event.
    pub(super) event: u64,
}

/// An entry that a CPU has changed.
#[derive(Debug, Clone, Copy)]
pub(super) struct MadeEntry {
    pub(super) entry: EntryAddress,
    pub(super) level: Level,
    pub(super) old: Descriptor,
    /// The leaf that was broken before, if any.
    pub(super) broken: Option<Descriptor>,
    pub(super) new: Descriptor,
    /// The store.
    pub(super) store: Cause,
}
