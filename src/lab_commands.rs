// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The subcommands that need the lab. A program without the feature `lab` lacks them, and has a
//! third of the size.

use clap::Subcommand;

use super::{CommandResult, cache, check, doctor, lab, ledger};

/// Subcommands of the lab.
#[derive(Debug, Subcommand)]
pub enum LabCommand {
    /// List and prune the lab's cache of sources and kernels
    Cache(cache::Args),
    /// Check a trace of `granule lab check --keep-trace` again
    Check(check::Args),
    /// Check this machine for KVM and for the lab
    Doctor(doctor::Args),
    /// Boot a host kernel before and after a change under emulation, and compare
    Lab(Box<lab::Args>),
    /// Measure a fixed matrix on a list of kernels, and keep a line and a page of trends
    Ledger(Box<ledger::Args>),
}

impl LabCommand {
    /// Runs the subcommand.
    pub fn run(self) -> CommandResult {
        match self {
            Self::Cache(args) => cache::run(&args),
            Self::Check(args) => check::run(&args),
            Self::Doctor(args) => doctor::run(args),
            Self::Lab(args) => lab::run(*args),
            Self::Ledger(args) => ledger::run(&args),
        }
    }
}
