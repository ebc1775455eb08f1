// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The checker, which tests a stream of events for violations of the architecture and the protocol.
//!
//! Emulation has neither caches nor weak memory ordering, so a missing CMO or barrier never fails
//! there. The checker assumes the worst case that the architecture allows: every CPU caches every
//! entry that it may cache (`tlb_model`), and every byte written by the host stays in a cache until
//! a CMO cleans it (`cache_model`). It keeps its own copy of the tables (`table_model`) and reports
//! each violation of a [`Rule`] at the event that reveals it (`rules`).
//!
//! Events come from a `Recorder` (feature `std`) around the engine's operations, or from a [trace](mod@trace) of
//! any program. A trace can be replayed and [shrunk](Trace::shrink), as `examples/trace.rs` does.
//!
//! Not modelled: stage 1 of guests, hardware updates of the access flag and the dirty state,
//! reordering of plain stores beyond the rules, tables with more than one VMID.

mod cache_model;
mod checker;
mod entry;
mod event;
mod held_entries;
mod leaf_count;
pub mod machine;
mod operation_hooks;
#[cfg(feature = "std")]
mod recorder;
mod rule;
mod shrink;
mod stage1;
mod stale_entry;
mod table_model;
mod tlb_model;
mod tlbi_operand;
pub mod trace;

mod rules {
    //! The checks of the rules, grouped by the event that reveals a violation.
    //!
    //! Each file adds methods to [`Checker`](super::Checker), one for each type of event. They
    //! update the models and call `Checker::report`:
    //!
    //! | file | events |
    //! |---|---|
    //! | `store` | an entry changes from one value to another |
    //! | `make` | an entry becomes valid: a leaf or a table becomes reachable |
    //! | `operation` | the lock, notes of the engine, the end of an operation or walk; tables are allocated and freed; TLB invalidations, CMOs, switches of the VMID |
    //! | `host` | memory, dirty logging, the resumption of a vCPU |

    mod host;
    mod make;
    mod operation;
    mod store;
}

pub use checker::{Checker, Violation};
pub use event::{Action, Cause, Event, MAX_CPUS, Setup, StoreKind};
pub use leaf_count::LeafCount;
pub use operation_hooks::{Call, Hook, HookedOperations, Reply};
#[cfg(feature = "std")]
pub use recorder::{RecordHook, Recorder, Sink};
pub use rule::Rule;
pub use stale_entry::Effect;
pub use trace::{ParseTraceError, Trace};
