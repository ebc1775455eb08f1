// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The page-table test: guest programs, phases, and the machines that run them.
//!
//! Data flows one way. A run [`config`]uration and a [`machine::Machine`] go into the [`harness`],
//! which drives the [`guest`] program through the phases of [`granule_types::phase`], with one
//! thread for each vCPU ([`vcpu_threads`]), checks dirty log and contents, and passes a
//! [`granule_types::record::Record`] of each phase to its caller. The harness knows a machine by
//! its trait only: [`pgtable_vm`] implements it on KVM, [`software_machine`] on the stage-2 engine.

mod clock;
pub mod config;
#[cfg(test)]
mod fake_machine;
pub mod guest;
pub mod harness;
pub mod log_lines;
pub mod machine;
pub mod pgtable_vm;
pub mod software_machine;
pub mod task;
pub mod vcpu_threads;
