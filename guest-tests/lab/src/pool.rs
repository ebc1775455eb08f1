// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs jobs, several emulators at a time: each is one thread and knows nothing of the others, so
//! their number changes no result.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
    time::Instant,
};

use super::{
    execute::{Bench, JobError, Outcome},
    kernel::Kernel,
    matrix::PlannedJob,
    progress::Progress,
    rundir::RunDir,
    step::Shell,
};
use granule_types::units::counted;

/// What runs jobs and what they share.
#[derive(Debug)]
pub struct Work<'a> {
    pub bench: &'a Bench,
    pub shell: Shell,
    pub progress: &'a Progress,
    pub rundir: &'a RunDir,
    pub parallel: usize,
}

/// What came of each job on each kernel: `[kernel][job]`; `None` in a dry run, and where it was not
/// run because its kernel does not boot.
pub type Outcomes = Vec<Vec<Option<Result<Outcome, JobError>>>>;

impl Work<'_> {
    /// Runs every job on every kernel; a job that fails stops no other, except that a kernel that
    /// gave no sign of life twice is given up.
    pub fn run(&self, kernels: &[Kernel], jobs: &[PlannedJob]) -> Outcomes {
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
        let silent = Mutex::new(vec![0; kernels.len()]);
        let outcomes: Outcomes = kernels
            .iter()
            .map(|_| jobs.iter().map(|_| None).collect())
            .collect();
        let outcomes = Mutex::new(outcomes);
        let workers = if self.shell.is_dry() {
            1
        } else {
            self.parallel
        };
        std::thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| {
                    while let Some((kernel, job)) = lock(&queue).pop_front() {
                        if lock(&silent)[kernel] >= 2 {
                            continue;
                        }
                        let outcome = self.one(&kernels[kernel], &jobs[job]);
                        if let Some(Err(JobError::Silent { .. })) = &outcome {
                            lock(&silent)[kernel] += 1;
                        }
                        lock(&outcomes)[kernel][job] = outcome;
                    }
                });
            }
        });
        outcomes
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn one(&self, kernel: &Kernel, job: &PlannedJob) -> Option<Result<Outcome, JobError>> {
        let start = Instant::now();
        let folder = self.rundir.job(kernel, job);
        let outcome = self.bench.run(self.shell, kernel, job, &folder).transpose();
        if !self.shell.is_dry() {
            let name = format!("{} {}", kernel.name, job.name);
            self.progress.job_done(&name, start.elapsed().as_secs_f64());
        }
        outcome
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
