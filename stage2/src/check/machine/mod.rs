// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks the stage-2 tables of any hypervisor, from the events of the machine that runs it.
//!
//! ```text
//! emulator's plugin → MachineEvent → Observer ┬→ Checker of guest 1 ┐
//!                     (text or memory)         └→ Checker of guest 2 ┴→ Finding
//! ```
//!
//! An [`Observer`] finds the guests by VTTBR_EL2, follows their tables from the root, and passes each
//! event to the checkers that it concerns: a store to the guest that owns the table, a TLB
//! invalidation to the guest of the current VMID, barriers and CMOs to all.

mod adopt;
mod calls;
pub mod event;
mod findings;
mod guest;
mod hypervisor;
mod kernel;
mod kernel_events;
mod lock;
mod maintenance;
mod observer;
mod pages;
mod registers;
mod roots;
mod step;
mod table_stores;
mod tlbi;
mod violations;
mod vmids;

pub use self::{
    event::{MachineAction, MachineEvent},
    findings::{CheckedTables, Finding, TableChange, TranslatedAddress},
    hypervisor::{Hypervisor, LockedEntry, Role},
    lock::LockType,
    observer::{Machine, Observer, Totals},
    registers::IDENTIFICATION,
};
