// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The lab: boots a host kernel before and after a Linux series under emulated EL2 and compares
//! what the page-table test measures.
//!
//! ```text
//! options ─┬─ kernel: sources, series, builds ─┬─ jobs: matrix, queue, boots ─ report
//!          └─ host: emulator, initramfs, PID 1 ┘
//! ```
//!
//! Sources are unpacked once and kernels built once (`kernel`). Each job is one boot (`jobs`); PID 1
//! of the emulated host (`host`) runs the test and sends results over the serial console, where they
//! are combined with the counts of the plugin. Under `-icount`, equal inputs produce equal bytes. All
//! files of a run are in its run directory. All external commands and file operations go through
//! `shell::Shell`, so that a dry run prints exactly what a run executes.

mod command;
mod digest;
mod error;
mod host;
mod jobs;
mod kernel;
mod options;
mod process;
mod progress;
mod report;
mod shell;

use std::path::{Path, PathBuf};

pub use self::{
    error::LabError,
    host::{expect, guest_init, init},
    jobs::run_directory::next_name,
    kernel::{
        KernelError,
        host_packages::{PackageError, PackageOptions, build as build_packages},
        series::names as series_names,
        series_check::check_all as check_series,
    },
    options::{Kernels, Matrix, Options, Paths, Test},
    report::RunStatus,
};
use self::{
    host::emulator,
    jobs::{
        execute::Executor,
        guest_matrix,
        job_queue::{JobQueue, JobResults},
        matrix,
        planned_job::PlannedJob,
        records,
        run_directory::RunDirectory,
    },
    kernel::{prepare, stacks},
    progress::Progress,
    report::{RunInfo, comparison, guest_boot_report, output, selftest_report},
    shell::Shell,
};

/// Fetches and unpacks the source and prints the path of its tree.
///
/// # Errors
/// The source is not available.
pub fn fetch(options: &Options) -> Result<(), LabError> {
    let shell = Shell::new(options.dry_run);
    let tree = prepare::fetch(shell, &options.paths.cache, &options.kernels)?;
    output::print(&format!("{}\n", tree.display()))
}

/// Returns the paths of the patches of a series, after those of the series that it requires.
///
/// # Errors
/// A series is unknown.
pub fn patches(linux: &Path, base: &str, series: &str) -> Result<Vec<PathBuf>, LabError> {
    let patches = stacks::all_patches(linux, base, series).map_err(KernelError::from)?;
    Ok(patches.into_iter().map(|patch| patch.path).collect())
}

/// Executes a run and publishes its report.
///
/// # Errors
/// A requirement is missing, a kernel cannot be built, or no results can be compared.
pub fn run(options: &Options) -> Result<RunStatus, LabError> {
    let shell = Shell::new(options.dry_run);
    let progress = Progress::new(options.dry_run);
    check_programs(options)?;
    let emulator = match emulator::version() {
        Err(_) if options.dry_run => "QEMU".to_owned(),
        version => version?,
    };
    let (kernels, tests) = prepare::prepare(shell, options, &progress)?;
    let run_directory = RunDirectory::create(shell, &options.paths.out, &kernels)?;
    let jobs: Vec<PlannedJob> = match options.matrix.test {
        Test::Selftests => tests
            .iter()
            .map(|(path, arguments)| matrix::selftest(&options.matrix, path, arguments))
            .collect(),
        Test::Guest => guest_matrix::jobs(&options.matrix),
        Test::Bench | Test::KernelPageTableTest => {
            matrix::jobs(&options.matrix, tests.first().map(|(path, _)| path))
        }
    };
    let executor = Executor {
        init: options.paths.init.clone(),
        plugin: options.paths.plugin.clone(),
        emulator,
        deadline: options.deadline,
        strict: options.kernels.debug,
    };
    let queue = JobQueue {
        executor: &executor,
        shell,
        progress: &progress,
        run_directory: &run_directory,
        parallel: options.parallel,
    };
    let results: JobResults = queue.run(&kernels, &jobs);
    let run = RunInfo { kernels: &kernels, jobs: &jobs, emulator: &executor.emulator };
    let status = match options.matrix.test {
        Test::Selftests => {
            progress.finish();
            selftest_report::report(shell, &run_directory, run, results)?
        }
        Test::Guest => {
            progress.finish();
            guest_boot_report::report(shell, &run_directory, run, results)?
        }
        Test::Bench | Test::KernelPageTableTest => {
            let jobs = (&kernels[..], &jobs[..]);
            let failed = records::write(shell, &run_directory, jobs, results, &progress)?;
            progress.finish();
            match comparison::compare(options, &run_directory, &kernels)? {
                RunStatus::Passed if !failed => RunStatus::Passed,
                _ => RunStatus::Failed,
            }
        }
    };
    if !options.dry_run {
        eprintln!("lab: run directory: {}", run_directory.path().display());
    }
    Ok(status)
}

/// Checks for the programs of this workspace before anything takes long.
fn check_programs(options: &Options) -> Result<(), LabError> {
    let paths = &options.paths;
    for (program, path, option) in [
        ("the static arm64 `granule`", &paths.init, "--init"),
        ("the counting plugin", &paths.plugin, "--plugin"),
    ] {
        if !path.is_file() && !options.dry_run {
            return Err(LabError::NotBuilt { program, path: path.clone(), option });
        }
    }
    Ok(())
}
