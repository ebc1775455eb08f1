// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The page-table test: guest programs, phases, and the machines they run on.
//!
//! Data flows one way: a configuration ([`config`]) and a [`machine::Machine`] go into the
//! [`harness`], which drives the [`guest`]'s program ([`arch`]) through the phases with a thread for
//! each vCPU ([`vcpu_threads`]) and yields records. The harness knows a machine only by its trait:
//! [`pgtable_vm`] implements it on KVM, [`software_machine`] on the table engine.

pub mod arch;
pub mod config;
#[cfg(test)]
mod fake_machine;
pub mod guest;
pub mod harness;
pub mod log_lines;
pub mod machine;
pub mod pgtable_vm;
pub mod software_machine;
pub mod vcpu_threads;
