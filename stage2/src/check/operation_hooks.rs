// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Operations that pass every call to a hook.
//!
//! [`HookedOperations`] turns each call of an [`Operations`] method into a [`Call`] and passes it to
//! its [`Hook`]. The hook runs the call on the inner operations, replaces it or omits it, and
//! returns the [`Reply`]. A [`Recorder`](super::Recorder) reports every call. Tests implement other
//! hooks to inject faults and pauses.

use crate::{
    address::{EntryAddress, PhysAddr, TableAddress},
    descriptor::Descriptor,
    operations::{Dsb, Note, Operations, Order, Tlbi, UnlinkedTable, Vmid},
};

/// One call of a method of [`Operations`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each variant is a call of the method with its name")]
pub enum Call {
    Load(EntryAddress),
    Store { entry: EntryAddress, new: Descriptor, order: Order },
    CompareExchange { entry: EntryAddress, old: Descriptor, new: Descriptor },
    Allocate,
    Free(TableAddress),
    DeferFree(UnlinkedTable),
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
    InvalidateICache(Option<(PhysAddr, u64)>),
    Pause,
    Note(Note),
}

/// The result of a [`Call`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// Result of a call without a return value.
    NoValue,
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
            Self::DeferFree(unlinked) => ops.defer_free(unlinked),
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
            Self::InvalidateICache(range) => ops.invalidate_icache(range),
            Self::Pause => ops.pause(),
            Self::Note(note) => ops.note(note),
        }
        Reply::NoValue
    }
}

/// Handler that runs in place of every call.
pub trait Hook<O: Operations> {
    /// Handles a call, which [`Call::run`] on `inner` performs. The variant of the reply must
    /// correspond to the call.
    fn call(&self, inner: &O, call: Call) -> Reply;
}

/// Operations that pass every call to a hook.
#[derive(Debug)]
pub struct HookedOperations<O, H> {
    /// The operations on which the hook runs calls.
    pub inner: O,
    /// The hook.
    pub hook: H,
}

/// Defines methods of [`Operations`] that pass their call to the hook. A method with a result names
/// the variant of [`Reply`] that contains it.
macro_rules! pass_to_hook {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $reply:ident: $result:ty)?, $call:expr;)*) => {
        $(fn $name(&self, $($arg: $type),*) $(-> $result)? {
            pass_to_hook!(@reply self.hook.call(&self.inner, $call) $(, $reply)?)
        })*
    };
    (@reply $called:expr) => {{
        $called;
    }};
    (@reply $called:expr, $reply:ident) => {
        match $called {
            Reply::$reply(value) => value,
            other => unreachable!("the hook replies {other:?} in place of {}", stringify!($reply)),
        }
    };
}

impl<O: Operations, H: Hook<O>> Operations for HookedOperations<O, H> {
    pass_to_hook! {
        fn load(entry: EntryAddress) -> Entry: Descriptor, Call::Load(entry);
        fn store(entry: EntryAddress, new: Descriptor, order: Order),
            Call::Store { entry, new, order };
        fn compare_exchange(entry: EntryAddress, old: Descriptor, new: Descriptor)
            -> Exchanged: Result<(), Descriptor>, Call::CompareExchange { entry, old, new };
        fn allocate() -> Table: Option<TableAddress>, Call::Allocate;
        fn free(table: TableAddress), Call::Free(table);
        fn defer_free(unlinked: UnlinkedTable), Call::DeferFree(unlinked);
        fn begin_walk(), Call::BeginWalk;
        fn end_walk(), Call::EndWalk;
        fn take_references(table: TableAddress, count: u32), Call::TakeReferences(table, count);
        fn drop_references(table: TableAddress, count: u32) -> Count: u32,
            Call::DropReferences(table, count);
        fn references(table: TableAddress) -> Count: u32, Call::References(table);
        fn dsb(kind: Dsb), Call::Dsb(kind);
        fn isb(), Call::Isb;
        fn tlbi(kind: Tlbi), Call::Tlbi(kind);
        fn switch_vmid(vmid: Vmid) -> Vmid: Vmid, Call::SwitchVmid(vmid);
        fn clean_invalidate(phys: PhysAddr, size: u64), Call::CleanInvalidate { phys, size };
        fn invalidate_icache(range: Option<(PhysAddr, u64)>), Call::InvalidateICache(range);
        fn pause(), Call::Pause;
        fn note(note: Note), Call::Note(note);
    }
}
