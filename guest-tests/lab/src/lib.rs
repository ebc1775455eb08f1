// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The lab boots a host kernel before and after a Linux series under emulated EL2, runs the
//! page-table test in each and compares the results.
//!
//! ```text
//! options ─┬─ kernel: sources, series, builds ─┬─ jobs: matrix, queue, boots ─ report
//!          └─ host: emulator, initramfs, PID 1 ┘
//! ```
//!
//! `kernel` unpacks sources and builds kernels once. Each job is one boot (`jobs`). PID 1 of the
//! emulated host (`host`) runs the test and sends results over the serial console; `jobs` combines
//! them with the counts of the plugin. Under `-icount`, equal inputs produce equal bytes. All files
//! of a run are in its run directory, with its `plan`, whose `steps` `slurm` distributes.
//! `shell::Shell` executes all external commands and file operations, so that a dry run prints
//! exactly the steps of a run.

mod bisect;
mod cache;
mod check;
mod command;
mod error;
mod file_lock;
mod host;
mod image;
mod in_use;
pub mod interrupt;
mod jobs;
mod kernel;
mod ledger;
mod measure;
mod observing_emulator;
mod options;
mod plan;
mod progress;
mod report;
mod run;
mod running_program;
mod shell;
mod slurm;
mod steps;
mod values;

use std::path::{Path, PathBuf};

use self::shell::Shell;
pub use self::{
    bisect::{BisectOptions, bisect},
    cache::{CacheCommand, PruneOptions, execute as execute_cache_command},
    check::replay::ReplayOptions,
    error::LabError,
    host::{expect, init::run_as_pid_1},
    image::check_image,
    kernel::{host_packages::HostPackages, series_check::SeriesCheckOptions},
    ledger::{LedgerOptions, ledger},
    options::{
        BootMatrix, BuildOptions, CheckArgs, CommonOptions, ExecutionOptions, FindingsOptions,
        GuestMatrix, HostOptions, ImageOptions, KernelOptions, Locations, Matrix, Options,
        OutputOptions, ProgramMatrix, ProgramOptions, ReportOptions, SelftestOptions,
        SourceOptions, TestProgram, Workload, ZapMatrix,
    },
    report::{RunStatus, check_report::check_trace},
    run::run,
    steps::{Step, step},
    values::{BuildSetting, LinuxVersion, MakeVariable, PageSize, Revisions},
};

/// Returns the paths of the patches of the required series and of this one, in order.
///
/// # Errors
/// A series is unknown.
pub fn patches(linux: &Path, base: LinuxVersion, series: &str) -> Result<Vec<PathBuf>, LabError> {
    let patches = kernel::series::all_patches(linux, base, series)?;
    Ok(patches.into_iter().map(|patch| patch.path).collect())
}

/// Fetches and unpacks the source of the base, and returns its tree.
///
/// # Errors
/// The source is not available.
pub fn fetch(origin: &SourceOptions) -> Result<PathBuf, LabError> {
    kernel::fetch(Shell::new(false), &origin.locations.cache()?, origin)
}
