// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks the stage-2 tables of an emulated host while it runs.
//!
//! ```text
//! System.map, version ─ hypervisor ─ setup ─┐
//! plugin ─ FIFO ─ observation ─ trace ──────┴─ Observer ─ defect ─┬─ defects.jsonl
//!                      └─ trace.gz ─ replay                       └─ report, suppressions, sarif
//! ```
//!
//! `hypervisor` lists the facts about KVM that the checker requires. A `setup`
//! describes one observed machine and is also in a kept trace, so that `replay` needs nothing else.

pub mod code;
pub mod defect;
mod history;
pub mod hypervisor;
pub mod observation;
mod places;
pub mod replay;
pub mod report;
mod sarif;
mod setup;
pub mod suppressions;
mod symbols;
mod trace;

pub use self::{
    places::Places,
    setup::{Hardware, ObservedSymbol, Setup},
    symbols::SymbolTable,
};
