// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs the jobs of a matrix: one boot for each job on each kernel. Several emulators run in
//! parallel; jobs share no state, so the number of emulators does not affect results.

pub mod boot;
pub mod counts;
pub mod execute;
pub mod functions;
pub mod guest;
pub mod matrix;
mod observed_kernel;
pub mod outcome;
pub mod outcome_file;
pub mod planned_job;
pub mod program_run;
pub mod run_directory;
pub mod used_entries;
pub mod work;
pub mod zap;

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Instant,
};

use granule_types::units::pluralize;

use self::{
    execute::Executor,
    matrix::PlannedJob,
    outcome::{JobError, JobOutcome},
    run_directory::RunDirectory,
};
use crate::{kernel::Kernel, progress::Progress, shell::Shell};

/// Error message of a skipped job.
pub const KERNEL_DOES_NOT_BOOT: &str = "not run: this kernel does not boot";

/// Number of jobs without a report of PID 1 after which the other jobs of a kernel are skipped.
pub const MAX_FAILED_BOOTS: usize = 2;

#[derive(Debug)]
pub struct JobQueue<'a> {
    pub executor: &'a Executor,
    pub shell: Shell,
    pub progress: &'a Progress,
    pub run_directory: &'a RunDirectory,
    pub emulator_count: usize,
}

/// Outcome of a job; `None` in a dry run, or if its kernel does not boot.
pub type JobResult = Option<Result<JobOutcome, JobError>>;
/// Results of all jobs: `[kernel][job]`.
pub type JobResults = Vec<Vec<JobResult>>;

impl JobQueue<'_> {
    /// Runs every job on every kernel. A failed job does not stop the others.
    pub fn run(&self, kernels: &[Kernel], jobs: &[PlannedJob]) -> JobResults {
        let boots = jobs.len() * kernels.len();
        self.progress.start_stage(format!(
            "{} on {}",
            pluralize(jobs.len(), "job"),
            pluralize(kernels.len(), "kernel")
        ));
        let classes = (0..boots).map(|index| jobs[index / kernels.len()].cost_class().to_owned());
        self.progress.start_jobs(classes, self.emulator_count);
        let next = AtomicUsize::new(0);
        let failed_boots: Vec<_> = kernels.iter().map(|_| AtomicUsize::new(0)).collect();
        let results: JobResults =
            kernels.iter().map(|_| jobs.iter().map(|_| None).collect()).collect();
        let results = Mutex::new(results);
        let worker = || {
            while let Some(index) = Some(next.fetch_add(1, Relaxed)).filter(|next| *next < boots) {
                let (job, kernel) = (index / kernels.len(), index % kernels.len());
                if failed_boots[kernel].load(Relaxed) >= MAX_FAILED_BOOTS {
                    continue;
                }
                let result = self.run_job(&kernels[kernel], &jobs[job]);
                if let Some(Err(error)) = &result
                    && error.is_failed_boot()
                {
                    failed_boots[kernel].fetch_add(1, Relaxed);
                }
                results.lock().unwrap_or_else(PoisonError::into_inner)[kernel][job] = result;
            }
        };
        let workers = if self.shell.is_dry_run() { 1 } else { self.emulator_count };
        std::thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(worker))));
        results.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_job(&self, kernel: &Kernel, job: &PlannedJob) -> JobResult {
        let start = Instant::now();
        let name = format!("{} {}", kernel.name, job.name);
        let directory = self.run_directory.job_path(&kernel.name, &job.name);
        let recorded = match self.shell.is_dry_run() {
            true => None,
            false => self.executor.recorded(kernel, job, &directory).ok().flatten(),
        };
        if let Some(Some(Ok(outcome))) = recorded {
            self.progress.job_done(&name, job.cost_class(), None);
            return Some(Ok(outcome));
        }
        let result = self.executor.run(self.shell, kernel, job, &directory).transpose();
        if !self.shell.is_dry_run() {
            let seconds = start.elapsed().as_secs_f64();
            self.progress.job_done(&name, job.cost_class(), Some(seconds));
        }
        result
    }
}
