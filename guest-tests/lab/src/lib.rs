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
mod running_program;
mod shell;
mod slurm;
mod steps;
mod values;

mod host {
    //! The emulated host: the emulator's command line outside; initramfs, PID 1 and its job inside.

    pub mod costs;
    pub mod emulator;
    pub mod expect;
    pub mod guest_init;
    pub mod hold;
    pub mod init;
    pub mod initramfs;
    pub mod job;
    pub mod kernel_tables;
    pub mod page_cache_load;
    pub mod program;
    pub mod tlb;
    pub mod vmm;
    pub mod zap;
}

use std::{
    error::Error,
    io,
    path::{Path, PathBuf},
};

use granule_report::{CompareError, results::FileError};

pub use self::{
    bisect::{BisectOptions, bisect},
    cache::{CacheCommand, PruneOptions, execute as execute_cache_command},
    check::replay::ReplayOptions,
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
    steps::{Step, step},
    values::{BuildSetting, LinuxVersion, MakeVariable, PageSize, Revisions},
};
use self::{
    command::CommandError,
    jobs::{JobQueue, execute::Executor, matrix, run_directory::RunDirectory},
    kernel::{Preparation, planned, revisions::pinned as pinned_revisions},
    options::{ExecutorKind, Paths, RunPath},
    plan::Plan,
    progress::Progress,
    report::{RunInfo, comparison},
    shell::{Shell, absolute},
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
pub fn run(given: &Options) -> Result<RunStatus, LabError> {
    given.common.kernels.check()?;
    let resumed = match (&given.common.output.out, given.common.execution.resume) {
        (Some(out), true) => Some(resume(&absolute(out)?, given)?),
        _ => None,
    };
    let options = resumed.as_ref().map_or(given, |plan| &plan.options);
    let CommonOptions { output, execution, .. } = &options.common;
    let shell = match &execution.plan {
        Some(_) => Shell::silent(),
        None => Shell::new(output.dry_run),
    };
    let paths = Paths::new(&options.common)?;
    let executor_kind = execution.executor.or(resumed.as_ref().map(|plan| plan.executor));
    let executor_kind = executor_kind.unwrap_or_default();
    check_execution(shell, executor_kind, execution)?;
    let kernels = &options.common.kernels;
    if kernels.images.is_empty() {
        options.workload.check(kernels.build.page_size()?)?;
    }
    if let (RunPath::Given(path), None) = (&paths.out, &resumed) {
        RunDirectory::check_unused(shell, path)?;
    }
    if let Some(check) = &options.check {
        // An error after hours would lose the report.
        check.report.suppressions()?;
    }
    let progress = Progress::new(shell.is_dry_run());
    let executor = Executor::new(shell, (&options.common, options.check.as_ref()), &paths)?;
    let preparation = Preparation::new(shell, options, &paths, &progress)?;
    if shell.is_dry_run() && execution.plan.is_none() {
        return print_commands(options, &paths, &preparation, &executor, &progress);
    }
    let planned = preparation.planned()?;
    options.workload.check(planned::common_page_size(&planned)?)?;
    if let Some(plan) = &resumed {
        plan.check_kernels(&planned)?;
    }
    let mut pinned = options.clone().with_paths(&paths);
    pinned.common.kernels.revisions = pinned_revisions(&options.common.kernels)?;
    let new_plan = |directory: &Path, file: &Path| {
        let kernels = (planned.clone(), preparation.tests.clone());
        Plan::new(pinned.clone(), executor_kind, (directory, file), &executor, kernels)
    };
    if let Some(target) = &execution.plan {
        let directory = RunDirectory::next_path(&paths.out);
        let file = match target.as_os_str() == "-" {
            true => Plan::path_in(&directory),
            false => absolute(target)?,
        };
        new_plan(&directory, &file)?.write_to(target)?;
        return Ok(RunStatus::Passed);
    }
    let run_directory = match &resumed {
        Some(plan) => RunDirectory::of_path(&plan.directory),
        None => RunDirectory::create(shell, &paths.out)?,
    };
    if executor_kind == ExecutorKind::Local {
        slurm::check_not_submitted(run_directory.path())?;
    }
    let plan = new_plan(run_directory.path(), &Plan::path_in(run_directory.path()))?;
    let _lock = plan.claim(&run_directory)?;
    let remark = match executor_kind {
        ExecutorKind::Local => "",
        ExecutorKind::Slurm => ", the submitted jobs continue",
    };
    interrupt::set_run_directory("lab", run_directory.path(), remark);
    let status = match executor_kind {
        ExecutorKind::Local => {
            run_locally(&plan, &run_directory, &executor, preparation, &progress)?
        }
        ExecutorKind::Slurm => {
            drop(preparation);
            slurm::run(&plan, &run_directory, &executor, &progress)?
        }
    };
    eprintln!("lab: run directory: {}", run_directory.path().display());
    Ok(status)
}

/// Reads the plan of the run to resume.
fn resume(directory: &Path, given: &Options) -> Result<Plan, LabError> {
    let resolve = |options: Options| {
        let paths = Paths::new(&options.common)?;
        let mut resolved = options.with_paths(&paths);
        resolved.common.kernels.revisions = pinned_revisions(&resolved.common.kernels)?;
        Ok::<_, LabError>(resolved)
    };
    Plan::resume(directory, &resolve(given.clone())?, &resolve(Options::defaults())?)
}

/// Checks that the executor can be used, before kernels are built.
fn check_execution(
    shell: Shell,
    kind: ExecutorKind,
    execution: &ExecutionOptions,
) -> Result<(), LabError> {
    match kind {
        ExecutorKind::Slurm if !shell.is_dry_run() => slurm::check(),
        ExecutorKind::Local if !execution.slurm_args.is_empty() => {
            Err(LabError::Unusable("--slurm-arg requires --executor slurm".to_owned()))
        }
        _ => Ok(()),
    }
}

fn run_locally(
    plan: &Plan,
    run_directory: &RunDirectory,
    executor: &Executor,
    preparation: Preparation<'_>,
    progress: &Progress,
) -> Result<RunStatus, LabError> {
    let shell = Shell::new(false);
    let kernels = preparation.build_all(progress)?;
    let _in_use = planned::mark_in_use(&kernels, preparation.cache())?;
    drop(preparation);
    run_directory.add_kernels(shell, &kernels)?;
    let jobs = plan.jobs();
    let queue = JobQueue {
        executor,
        shell,
        progress,
        run_directory,
        emulator_count: plan.options.common.host.emulator_count(),
    };
    let results = queue.run(&kernels, &jobs);
    let run = RunInfo { kernels: &kernels, jobs: &jobs, emulator: &executor.emulator_version };
    report::publish_results(&plan.options, run_directory, run, results, progress)
}

/// Prints the commands of a run.
fn print_commands(
    options: &Options,
    paths: &Paths,
    preparation: &Preparation<'_>,
    executor: &Executor,
    progress: &Progress,
) -> Result<RunStatus, LabError> {
    let shell = Shell::new(true);
    let page_size = planned::common_page_size(&preparation.planned()?)?;
    options.workload.check(page_size)?;
    let kernels = preparation.build_all(progress)?;
    let run_directory = RunDirectory::create(shell, &paths.out)?;
    run_directory.add_kernels(shell, &kernels)?;
    let (run_directory, emulator_count) = (&run_directory, 1);
    let queue = JobQueue { executor, shell, progress, run_directory, emulator_count };
    queue.run(&kernels, &matrix::jobs(options, page_size, &preparation.tests));
    if options.has_records() {
        comparison::print_commands(run_directory, &kernels)?;
    }
    Ok(RunStatus::Passed)
}
