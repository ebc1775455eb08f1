// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule lab step`: executes one step of a plan. Executors run these commands, on any machine that
//! sees the same files.

use std::{path::PathBuf, slice};

use crate::{
    error::{LabError, with_causes},
    jobs::{
        JobResults, MAX_FAILED_BOOTS,
        outcome::JobError,
        outcome_file::{Failure, OutcomeFile},
        run_directory::RunDirectory,
        used_entries::mark_in_use,
    },
    kernel::Preparation,
    options::Paths,
    plan::{JobIndex, Plan},
    progress::Progress,
    report::{self, RunInfo, RunStatus},
    shell::Shell,
};

/// Step of a plan.
#[derive(Debug, clap::Subcommand)]
pub enum Step {
    /// Build the kernel of this index, or all kernels
    Build {
        /// Plan of the run
        #[command(flatten)]
        plan: PlanFile,
        /// Index of the kernel [default: all]
        #[arg(value_name = "INDEX")]
        index: Option<usize>,
    },
    /// Boot a kernel and run one job
    Job {
        /// Plan of the run
        #[command(flatten)]
        plan: PlanFile,
        /// Index of the job
        #[arg(value_name = "INDEX")]
        index: usize,
    },
    /// Write the results and the report of all jobs that ended, and print the report
    Collect {
        /// Plan of the run
        #[command(flatten)]
        plan: PlanFile,
    },
}

/// File with the plan.
#[derive(Debug, clap::Args)]
pub struct PlanFile {
    /// Plan of the run
    #[arg(long = "plan", value_name = "FILE")]
    file: PathBuf,
}

/// Executes a step. A job that ended with an error is a completed step: `collect` reports the error.
///
/// # Errors
/// The plan is unusable, a kernel cannot be built, or this machine cannot run the job.
pub fn step(step: &Step) -> Result<RunStatus, LabError> {
    match step {
        Step::Build { plan, index } => build(&plan.open()?, *index).map(|()| RunStatus::Passed),
        Step::Job { plan, index } => job(&plan.open()?, *index).map(|()| RunStatus::Passed),
        Step::Collect { plan } => collect(&plan.open()?),
    }
}

impl PlanFile {
    fn open(&self) -> Result<Plan, LabError> {
        Plan::enter(&self.file)
    }
}

fn build(plan: &Plan, index: Option<usize>) -> Result<(), LabError> {
    let shell = Shell::new(false);
    let paths = Paths::new(&plan.options.common)?;
    let progress = Progress::new(false);
    let preparation = Preparation::new(shell, &plan.options, &paths, &progress)?;
    plan.check_kernels(&preparation.planned()?)?;
    let indices = match index {
        Some(index) => index..index + 1,
        None => 0..plan.kernels.len(),
    };
    for index in indices {
        check_index(index, plan.kernels.len())?;
        preparation.build(index, &progress)?;
    }
    Ok(())
}

fn check_index(index: usize, count: usize) -> Result<(), LabError> {
    if index < count {
        return Ok(());
    }
    Err(LabError::Unusable(format!("the plan has no step of index {index}, only {count}")))
}

fn job(plan: &Plan, index: usize) -> Result<(), LabError> {
    let jobs = plan.jobs();
    let indices: Vec<JobIndex> = plan.job_indices(jobs.len()).collect();
    check_index(index, indices.len())?;
    let at = indices[index];
    let (kernel, job) = (plan.kernels[at.kernel].open()?, &jobs[at.job]);
    let shell = Shell::new(false);
    let _in_use = mark_in_use(
        shell,
        slice::from_ref(&kernel),
        slice::from_ref(job),
        &Paths::new(&plan.options.common)?.cache,
    )?;
    let executor = plan.job_executor()?;
    let run_directory = RunDirectory::of_path(&plan.directory);
    let directory = run_directory.job_path(&kernel.name, &job.name);
    let inputs = executor.inputs(&kernel, job)?;
    if OutcomeFile::read(&directory).is_some_and(|outcome| outcome.inputs == inputs) {
        eprintln!("lab: {} {} is done", kernel.name, job.name);
        return Ok(());
    }
    run_directory.add_kernel(shell, &kernel)?;
    // The same job may run a second time, after its machine was lost. Each attempt has a directory,
    // and the first that ends is published.
    let attempt = run_directory.attempt(&kernel.name)?;
    let failed_boots = jobs.iter().filter(|other| {
        let other = OutcomeFile::read(&run_directory.job_path(&kernel.name, &other.name));
        matches!(other, Some(OutcomeFile { failure: Some(Failure::NoReport(_)), .. }))
    });
    if failed_boots.count() >= MAX_FAILED_BOOTS {
        OutcomeFile { inputs, failure: Some(Failure::Skipped) }.write(&attempt)?;
    } else if let Err(error) = executor.run(shell, &kernel, job, &attempt) {
        eprintln!("lab: {} {}: {}", kernel.name, job.name, with_causes(&error));
    }
    if OutcomeFile::exists(&attempt) {
        OutcomeFile::publish(&attempt, &directory)?;
    }
    Ok(())
}

/// Collects the results of all jobs.
pub fn collect(plan: &Plan) -> Result<RunStatus, LabError> {
    let shell = Shell::new(false);
    let executor = plan.job_executor()?;
    let run_directory = RunDirectory::of_path(&plan.directory);
    let kernels = plan.kernels.iter().map(|kernel| kernel.open()).collect::<Result<Vec<_>, _>>()?;
    run_directory.add_kernels(shell, &kernels)?;
    let jobs = plan.jobs();
    let mut results: JobResults = Vec::new();
    for kernel in &kernels {
        let mut of_kernel = Vec::new();
        for job in &jobs {
            let directory = run_directory.job_path(&kernel.name, &job.name);
            let recorded = executor.recorded(kernel, job, &directory)?;
            of_kernel.push(recorded.unwrap_or(Some(Err(JobError::NotEnded))));
        }
        run_directory.remove_attempts(&kernel.name)?;
        results.push(of_kernel);
    }
    let progress = Progress::new(false);
    let run = RunInfo { kernels: &kernels, jobs: &jobs, emulator: &executor.emulator_version };
    report::publish_results(&plan.options, &run_directory, run, results, &progress)
}
