// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The page-table test's machine on KVM.
//!
//! `build` makes memory, VM, memslots, vCPUs and guest program from a [`KvmConfig`];
//! [`KvmMachine`] is the resulting [`Machine`](crate::machine::Machine).

mod arch;
mod build;
mod config;
mod emulation_check;
mod error;
mod machine;
mod migration_ops;
mod vcpu;

pub use config::KvmConfig;
pub use machine::KvmMachine;
