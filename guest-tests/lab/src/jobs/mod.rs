// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! From a matrix to outcomes: one boot for each job on each kernel. Several emulators run at a
//! time; jobs share nothing, so their number changes no result.

pub mod counts;
pub mod execute;
pub mod guest;
pub mod matrix;
pub mod outcome;
pub mod run_directory;

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use granule_types::units::counted;

use self::{
    execute::Executor,
    matrix::PlannedJob,
    outcome::{JobError, JobOutcome},
    run_directory::RunDirectory,
};
use crate::{kernel::Kernel, progress::Progress, shell::Shell};

/// Failure of a job that was skipped.
pub const KERNEL_DOES_NOT_BOOT: &str = "not run: this kernel does not boot";

/// Number of jobs without an ending after which a kernel counts as unbootable and its other jobs
/// are skipped.
const MAX_FAILED_BOOTS: usize = 2;

/// Runs all jobs of a run.
#[derive(Debug)]
pub struct JobQueue<'a> {
    pub executor: &'a Executor,
    pub shell: Shell,
    pub progress: &'a Progress,
    pub run_directory: &'a RunDirectory,
    /// Number of emulators at a time.
    pub parallel: usize,
}

/// Outcome of a job; `None` in a dry run, and if its kernel does not boot.
pub type JobResult = Option<Result<JobOutcome, JobError>>;
/// Results of all jobs: `[kernel][job]`.
pub type JobResults = Vec<Vec<JobResult>>;

impl JobQueue<'_> {
    /// Runs every job on every kernel. A failed job does not stop the others.
    pub fn run(&self, kernels: &[Kernel], jobs: &[PlannedJob]) -> JobResults {
        let queue: VecDeque<(usize, usize)> = (0..jobs.len())
            .flat_map(|job| (0..kernels.len()).map(move |kernel| (kernel, job)))
            .collect();
        self.progress.stage(format!(
            "{} on {}",
            counted(jobs.len(), "job"),
            counted(kernels.len(), "kernel")
        ));
        self.progress.jobs(queue.len());
        let queue = Mutex::new(queue);
        let failed_boots = Mutex::new(vec![0; kernels.len()]);
        let results: JobResults =
            kernels.iter().map(|_| jobs.iter().map(|_| None).collect()).collect();
        let results = Mutex::new(results);
        let workers = if self.shell.is_dry() { 1 } else { self.parallel };
        std::thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| {
                    loop {
                        // In the condition of a `while let`, the lock would be held for the job.
                        let next = lock(&queue).pop_front();
                        let Some((kernel, job)) = next else { break };
                        if lock(&failed_boots)[kernel] >= MAX_FAILED_BOOTS {
                            continue;
                        }
                        let result = self.run_one(&kernels[kernel], &jobs[job]);
                        if let Some(Err(JobError::NoEnding { .. })) = &result {
                            lock(&failed_boots)[kernel] += 1;
                        }
                        lock(&results)[kernel][job] = result;
                    }
                });
            }
        });
        results.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_one(&self, kernel: &Kernel, job: &PlannedJob) -> JobResult {
        let start = Instant::now();
        let directory = self.run_directory.job(kernel, job);
        let result = self.executor.run(self.shell, kernel, job, &directory).transpose();
        if !self.shell.is_dry() {
            let name = format!("{} {}", kernel.name, job.name);
            self.progress.job_done(&name, start.elapsed().as_secs_f64());
        }
        result
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
