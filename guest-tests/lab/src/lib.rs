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
//! of a run are in its run directory. `shell::Shell` executes all external commands and file
//! operations, so that a dry run prints exactly the steps of a run.

mod bisect;
mod command;
mod jobs;
mod kernel;
mod ledger;
mod measure;
mod options;
mod progress;
mod report;
mod shell;
mod values;

mod host {
    //! The emulated host: the emulator's command line outside; initramfs, PID 1 and its job inside.

    pub mod costs;
    pub mod emulator;
    pub mod expect;
    pub mod guest_init;
    pub mod init;
    pub mod initramfs;
    pub mod job;
}

use std::{
    error::Error,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use granule_report::{CompareError, results::FileError};
use granule_types::units::Bytes;

pub use self::{
    bisect::{BisectOptions, bisect},
    host::{expect, init::run_as_pid_1},
    kernel::{host_packages::HostPackages, series_check::check_all as check_series},
    ledger::{LedgerOptions, ledger},
    options::{
        BuildOptions, CommonOptions, GuestMatrix, HostOptions, KernelOptions, Locations, Matrix,
        Options, OutputOptions, ReportOptions, SelftestOptions, SourceOptions, TestProgram,
        Workload,
    },
    report::RunStatus,
    values::{BuildSetting, LinuxVersion, MakeVariable, PageSize, Revisions},
};
use self::{
    command::CommandError,
    host::emulator,
    jobs::{JobQueue, execute::Executor, matrix, run_directory::RunDirectory},
    options::{Paths, RunPath},
    progress::Progress,
    report::{RunInfo, comparison, guest_boot_report, selftest_report},
    shell::Shell,
};

/// Error returned when a run of the lab or of one of its tools fails.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message describes its variant")]
#[non_exhaustive]
pub enum LabError {
    /// Error returned for a missing requirement or an unusable input. The message names the remedy.
    #[error("{0}")]
    Unusable(String),
    #[error("{message}")]
    Failed {
        message: String,
        #[source]
        source: CommandError,
    },
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error(transparent)]
    Input(#[from] FileError),
    #[error(transparent)]
    Compare(#[from] CompareError),
    #[error("cannot write a record")]
    Record(#[from] serde_json::Error),
    #[error("cannot write to standard output")]
    Output(#[source] io::Error),
    /// Error returned when the current directory or the path of this program is unknown.
    #[error(transparent)]
    Path(#[from] io::Error),
}

/// Formats an error and its causes, each on a line.
fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!("\n  because: {error}"));
        cause = error.source();
    }
    text
}

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

/// Executes a run and publishes its report.
///
/// # Errors
/// A requirement is missing, a kernel cannot be built, or no results can be compared.
pub fn run(options: &Options) -> Result<RunStatus, LabError> {
    let CommonOptions { host, output, .. } = &options.common;
    let dry = output.dry_run;
    let shell = Shell::new(dry);
    let paths = Paths::new(&options.common)?;
    let progress = Progress::new(dry);
    if let RunPath::Given(path) = &paths.out {
        RunDirectory::check_unused(shell, path)?;
    }
    let executor = executor(&options.common, &paths)?;
    let (built, tests) = kernel::prepare(shell, options, &paths, &progress)?;
    let run_directory = RunDirectory::create(shell, &paths.out)?;
    run_directory.add_kernels(shell, &built)?;
    let jobs = matrix::jobs(options, &tests);
    let queue = JobQueue {
        executor: &executor,
        shell,
        progress: &progress,
        run_directory: &run_directory,
        emulator_count: host.emulator_count(),
    };
    let results = queue.run(&built, &jobs);
    if dry {
        if options.workload.has_records() {
            comparison::print_commands(&run_directory, &built)?;
        }
        return Ok(RunStatus::Passed);
    }
    let run = RunInfo { kernels: &built, jobs: &jobs, emulator: &executor.emulator_version };
    let status = match &options.workload {
        Workload::Selftests(_) => {
            progress.finish();
            selftest_report::report(&run_directory, run, results)?
        }
        Workload::Guest(_) => {
            progress.finish();
            guest_boot_report::report(&run_directory, run, results)?
        }
        Workload::PageTableTest(_) => {
            let failed = run_directory.write_records(&built, &jobs, results, &progress)?;
            progress.finish();
            match comparison::compare(options, &run_directory, &built)? {
                RunStatus::Passed if !failed => RunStatus::Passed,
                _ => RunStatus::Failed,
            }
        }
    };
    eprintln!("lab: run directory: {}", run_directory.path().display());
    Ok(status)
}

/// Returns the executor of jobs, after a check of its programs.
fn executor(options: &CommonOptions, paths: &Paths) -> Result<Executor, LabError> {
    let CommonOptions { kernels, host, output } = options;
    let dry = output.dry_run;
    check_programs(paths, dry)?;
    let emulator_version = match emulator::version(&host.qemu) {
        Err(_) if dry => "QEMU".to_owned(),
        version => version?,
    };
    if !dry {
        let machine = matrix::machine(host, 1, Bytes::mib(64));
        emulator::probe(&host.qemu, &machine, &paths.plugin)?;
    }
    Ok(Executor {
        qemu: host.qemu.clone(),
        init: paths.init.clone(),
        plugin: paths.plugin.clone(),
        emulator_version,
        deadline: Duration::from_secs(host.deadline),
        fails_on_splat: kernels.build.debug_kernel,
    })
}

/// Checks that the required programs of this workspace exist, before the kernels are built.
fn check_programs(paths: &Paths, dry: bool) -> Result<(), LabError> {
    for (program, path, option) in [
        ("the static arm64 `granule`", &paths.init, "--init"),
        ("the counting plugin", &paths.plugin, "--plugin"),
    ] {
        if !path.is_file() && !dry {
            return Err(LabError::Unusable(format!(
                "{program} is missing at {}: run scripts/lab, which builds it, or set {option}",
                path.display()
            )));
        }
    }
    Ok(())
}
