// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Snapshots: the state of a VM in a directory, from which another process continues the guest.
//!
//! ```text
//! save:     pause vCPUs ── suspend devices ── state of machine ── memory ── commit ── resume
//! restore:  VM ── vCPUs ── memory ── devices, suspended ── GIC ── stage 2 ── counter ── resume
//! ```
//!
//! The order makes the snapshot one of a single moment: neither a vCPU nor a device changes memory
//! when it is read (a live one reads again what was written meanwhile), and the interrupt controller's
//! tables, which KVM writes to guest memory, are in it. What a device has raised without the guest's
//! acknowledgement is raised again.
//!
//! With `incremental=on`, only the first snapshot has all memory. Later ones have the pages that changed
//! since the one before, from the change log (`vm::change_log`), and name the files of all of them.
//!
//! `directory.rs` defines the files, `open.rs` opens them for a restore, `state.rs` defines what the state
//! contains, and `order.rs` the file of a guest's first accesses.

mod directory;
mod open;
pub mod order;
mod state;

pub(super) use directory::Committed;
pub use directory::SnapshotDirectory;
pub use open::{MAX_CHANGES_FILES, OpenSnapshot};
pub use order::OrderFile;
#[cfg(test)]
pub(super) use state::testing;
pub use state::{ChangesState, VmState, ZoneState};
