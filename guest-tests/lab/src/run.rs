// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A run: options → kernels → plan → jobs → report.
//!
//! A run either is new or resumes the plan in its directory, and only prints its commands, writes its
//! plan, executes it here or submits it to Slurm.

use std::path::Path;

use crate::{
    error::LabError,
    interrupt,
    jobs::{
        JobQueue, execute::Executor, matrix, run_directory::RunDirectory, used_entries::mark_in_use,
    },
    kernel::{Preparation, planned, revisions::pinned as pinned_revisions},
    options::{CommonOptions, ExecutionOptions, ExecutorKind, Options, Paths, RunPath},
    plan::Plan,
    progress::Progress,
    report::{self, RunInfo, RunStatus, comparison},
    shell::{Shell, absolute},
    slurm,
};

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
    let mut executor = Executor::new(shell, (&options.common, options.check.as_ref()), &paths)?;
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
    pinned.common.kernels.revisions = preparation.revisions();
    let new_plan = |executor: &Executor, directory: &Path, file: &Path| {
        let kernels = (planned.clone(), preparation.tests.clone());
        Plan::new(pinned.clone(), executor_kind, (directory, file), executor, kernels)
    };
    if let Some(target) = &execution.plan {
        let directory = RunDirectory::next_path(&paths.out);
        let file = match target.as_os_str() == "-" {
            true => Plan::path_in(&directory),
            false => absolute(target)?,
        };
        new_plan(&executor, &directory, &file)?.write_to(target)?;
        return Ok(RunStatus::Passed);
    }
    let run_directory = match &resumed {
        Some(plan) => RunDirectory::of_path(&plan.directory),
        None => RunDirectory::create(shell, &paths.out)?,
    };
    if executor_kind == ExecutorKind::Local {
        slurm::check_not_submitted(run_directory.path())?;
    }
    let _lock = run_directory.lock()?;
    select_programs(shell, executor_kind, &mut executor, &run_directory)?;
    let file = Plan::path_in(run_directory.path());
    let plan = new_plan(&executor, run_directory.path(), &file)?;
    plan.write_in(&run_directory)?;
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
            // The jobs mark their kernels themselves.
            let _in_use = mark_in_use(shell, &[], &plan.jobs(), preparation.cache())?;
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

/// Copies the programs of the jobs. Submitted jobs keep those that they have, because jobs of one run must
/// have the same programs.
fn select_programs(
    shell: Shell,
    kind: ExecutorKind,
    executor: &mut Executor,
    run_directory: &RunDirectory,
) -> Result<(), LabError> {
    match kind == ExecutorKind::Slurm && slurm::is_submitted(run_directory.path())? {
        true => executor.use_copied_programs(run_directory),
        false => executor.copy_programs(shell, run_directory)?,
    }
    Ok(())
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
    let jobs = plan.jobs();
    let _in_use = mark_in_use(shell, &kernels, &jobs, preparation.cache())?;
    drop(preparation);
    run_directory.add_kernels(shell, &kernels)?;
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
