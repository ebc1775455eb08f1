// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options that select how the steps of a run are executed.

use std::path::PathBuf;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Execution of a run.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Execution")]
pub struct ExecutionOptions {
    /// Continue the interrupted run in --out: a job that ended with the same inputs is not run again
    #[arg(long, requires = "out", conflicts_with = "dry_run")]
    pub(crate) resume: bool,
    /// Write the run as JSON to standard output or FILE, and execute nothing
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true,
          default_missing_value = "-", conflicts_with_all = ["dry_run", "resume"])]
    pub(crate) plan: Option<PathBuf>,
    /// Executor of builds and jobs [default: local; with --resume, that of the run]
    #[arg(long, value_enum, value_name = "EXECUTOR")]
    pub(crate) executor: Option<ExecutorKind>,
    /// Additional argument of sbatch, such as --partition=NAME
    #[arg(long = "slurm-arg", value_name = "ARGUMENT", allow_hyphen_values = true)]
    pub(crate) slurm_args: Vec<String>,
}

/// Executor of the steps of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExecutorKind {
    /// This process
    #[default]
    Local,
    /// Jobs of Slurm, on machines that share this file system
    Slurm,
}
