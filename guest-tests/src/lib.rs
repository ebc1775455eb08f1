// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The page-table test: what is measured, how, and what became of it.
//!
//! Data flows one way: a configuration ([`config`]) and a [`machine::Machine`] go into the
//! [`harness`], which drives the [`guest`]'s program ([`arch`]) through the [`phase`]s with a [`crew`]
//! of vCPU threads and yields [`results`]; [`compare`] puts two sets of results side by side; the
//! [`lab`] makes both sets on an emulated arm64 host, before and after a Linux series.
//!
//! The harness, its logs and the comparison know a machine only by its trait. The `granule` crate
//! implements it on KVM.

pub mod arch;
pub mod compare;
pub mod config;
pub mod crew;
pub mod events;
pub mod guest;
pub mod guest_mode;
pub mod harness;
pub mod lab;
pub mod log_lines;
pub mod machine;
pub mod mark;
pub mod model;
pub mod phase;
pub mod results;
#[cfg(test)]
mod toy;
pub mod units;
