// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The software machine: threads as vCPUs, and the [`granule_stage2`] engine as the hypervisor.
//!
//! It shows the effect of a fault path's policy on the phases of the test, on any computer.
//!
//! *Real*: the engine's work on the tables, its locks and the waiting for them; the memory; cache
//! maintenance by the CPU's own instructions, which is most of the difference between policies; the
//! elapsed time.
//!
//! *Not real*: no guest runs. Each access walks the stage-2 tables in software. No TLB exists, so TLB
//! invalidations and their barriers are counted and cost nothing, and a fault costs a function call
//! instead of an exception. The host populates the memory in advance, in pages of its choice; the
//! backing only determines the page size that the fault path sees. Instructions are compared, not
//! executed. So the machine compares policies, not hosts, and its times are those of no CPU.
//!
//! [`simulation`] runs the same engine in virtual time.

mod access;
mod arch;
mod config;
mod counters;
mod host_memory;
mod machine;
mod operations;
pub mod simulation;
mod state;
#[cfg(test)]
mod tests;
mod vcpu;

pub use config::{DEFAULT_POLICY, SoftwareMachineConfig, SoftwareMachineError};
pub use machine::SoftwareMachine;
