// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The Slurm executor: submits the steps of a plan, waits for them and prints the report.
//!
//! ```text
//! sbatch build ── afterok ─▶ sbatch --array jobs, for each size of memory ── afterany ─▶ sbatch collect
//! ```
//!
//! Slurm runs a job again after its node failed (`--requeue`). When all jobs have left the queue, jobs
//! without an outcome are submitted again. The state is in the run directory, so that `--resume`
//! waits for the submitted jobs. Neither accounting nor `slurmdbd` is required.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use granule_types::units::{Bytes, pluralize};
use serde::{Deserialize, Serialize};

use crate::{
    command::{Command, CommandError, log_tail, quote},
    error::LabError,
    jobs::{
        execute::Executor, matrix::PlannedJob, outcome_file::OutcomeFile,
        run_directory::RunDirectory,
    },
    kernel::recipe::SLURM_DIRECTORY,
    plan::Plan,
    progress::Progress,
    report::{RunStatus, print},
    shell::Shell,
};

/// Submissions of a job that leaves the queue without an outcome.
const MAX_ATTEMPTS: usize = 3;
/// Maximum number of elements of an array; Slurm's default of `MaxArraySize` is 1001.
const MAX_ARRAY: usize = 1000;
const SUBMITTED_FILE: &str = "submitted.json";
const POLL: Duration = Duration::from_secs(3);
/// Time for which a missing controller is no error.
const CONTROLLER_TIMEOUT: Duration = Duration::from_secs(600);

/// Checks that jobs can be submitted from this machine.
pub fn check() -> Result<(), LabError> {
    let version = Command::new("querying Slurm", "sbatch").arg("--version").query();
    let queue = version.and_then(|_| squeue().query());
    queue.map(drop).map_err(|error| match error {
        CommandError::Missing(program) => LabError::Unusable(format!(
            "--executor slurm: '{program}' is not installed: run this on a machine from which jobs \
             are submitted (package slurm-client), or omit --executor"
        )),
        error => {
            LabError::Unusable(format!("--executor slurm: the cluster does not answer: {error}"))
        }
    })
}

/// Returns the submission of a run, if its jobs are in the queue.
fn active_submission(run_directory: &Path) -> Result<Option<Submission>, LabError> {
    let Ok(text) = fs::read(run_directory.join(SLURM_DIRECTORY).join(SUBMITTED_FILE)) else {
        return Ok(None);
    };
    let submission: Submission = serde_json::from_slice(&text)?;
    Ok((!submission.active()?.is_empty()).then_some(submission))
}

/// Reports whether submitted jobs of a run are in the queue.
pub fn is_submitted(run_directory: &Path) -> Result<bool, LabError> {
    Ok(active_submission(run_directory)?.is_some())
}

/// Refuses a run whose submitted jobs are still in the queue.
pub fn check_not_submitted(run_directory: &Path) -> Result<(), LabError> {
    let Some(submission) = active_submission(run_directory)? else { return Ok(()) };
    let ids = submission.ids.join(" ");
    Err(LabError::Unusable(format!(
        "jobs of this run are in the queue of Slurm: wait for them with --executor slurm, or cancel \
         them with: scancel {ids}"
    )))
}

fn squeue() -> Command {
    Command::new("querying the queue", "squeue").args(["--me", "--noheader", "--format=%F %T %r"])
}

/// Executes a plan. The submitted jobs continue if this process ends.
pub fn run(
    plan: &Plan,
    run_directory: &RunDirectory,
    executor: &Executor,
    progress: &Progress,
) -> Result<RunStatus, LabError> {
    let jobs = plan.jobs();
    let directory = run_directory.path().join(SLURM_DIRECTORY);
    Shell::new(false).create_dir(&directory)?;
    let mut cluster = Cluster {
        plan,
        run_directory,
        executor,
        slurm_args: &plan.options.common.execution.slurm_args,
        array_limit: plan.options.common.host.jobs,
        progress,
        directory,
        jobs,
        submission: Submission::default(),
    };
    let status = cluster.run()?;
    progress.finish();
    Ok(status)
}

/// IDs of submitted jobs.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Submission {
    ids: Vec<String>,
}

impl Submission {
    /// Returns the states of the jobs in the queue, with the reasons of waiting.
    fn active(&self) -> Result<Vec<String>, CommandError> {
        let queue = squeue().query()?;
        let is_of_this_run = |line: &&str| {
            let id = line.split_once(' ').map_or("", |(id, _)| id);
            self.ids.iter().any(|submitted| submitted == id)
        };
        Ok(queue.lines().filter(is_of_this_run).map(str::to_owned).collect())
    }
}

struct Cluster<'a> {
    plan: &'a Plan,
    run_directory: &'a RunDirectory,
    executor: &'a Executor,
    slurm_args: &'a [String],
    array_limit: Option<u32>,
    progress: &'a Progress,
    /// Directory of scripts and logs.
    directory: PathBuf,
    jobs: Vec<PlannedJob>,
    submission: Submission,
}

impl Cluster<'_> {
    fn run(&mut self) -> Result<RunStatus, LabError> {
        self.remove_stale_outcomes()?;
        if let Ok(text) = fs::read(self.submission_path()) {
            self.submission = serde_json::from_slice(&text)?;
        }
        let mut attempts = 0;
        if self.submission.active()?.is_empty() {
            self.submit()?;
            attempts = 1;
        } else {
            self.progress.print_note("waiting for the submitted jobs of this run");
        }
        loop {
            self.wait()?;
            let missing = self.missing();
            if missing.is_empty() && self.collect_status().is_some() {
                break;
            }
            if let Some(kernel) = self.plan.kernels.iter().find(|kernel| !kernel.is_built()) {
                let log = self.directory.join("build.log");
                return Err(LabError::Unusable(format!(
                    "the kernel '{}' was not built; log: {}\n{}",
                    kernel.name,
                    log.display(),
                    log_tail(&log)
                )));
            }
            if attempts == MAX_ATTEMPTS {
                break;
            }
            self.progress.print_note(&format!(
                "{} left the queue without an outcome: submitting again",
                pluralize(missing.len(), "job")
            ));
            self.submit()?;
            attempts += 1;
        }
        let _ = fs::remove_file(self.submission_path());
        self.print_report()
    }

    fn submission_path(&self) -> PathBuf {
        self.directory.join(SUBMITTED_FILE)
    }

    fn job_directory(&self, index: usize) -> PathBuf {
        let kernels = self.plan.kernels.len();
        let kernel = &self.plan.kernels[index % kernels];
        self.run_directory.job_path(&kernel.name, &self.jobs[index / kernels].name)
    }

    /// Removes the outcomes of jobs that failed or had other inputs: they are run again.
    fn remove_stale_outcomes(&self) -> Result<(), LabError> {
        for (index, at) in self.plan.job_indices(self.jobs.len()).enumerate() {
            let directory = self.job_directory(index);
            let Some(outcome) = OutcomeFile::read(&directory) else { continue };
            let kernel = &self.plan.kernels[at.kernel];
            // The inputs of a kernel that is not built are unknown.
            let is_other = || match kernel.is_built() {
                true => {
                    let inputs = self.executor.inputs(&kernel.open()?, &self.jobs[at.job])?;
                    Ok::<_, LabError>(outcome.inputs != inputs)
                }
                false => Ok(false),
            };
            if outcome.failure.is_some() || is_other()? {
                Shell::new(false).remove_dir(&directory)?;
            }
        }
        Ok(())
    }

    /// Returns the indices of jobs without an outcome.
    fn missing(&self) -> Vec<usize> {
        let all = 0..self.jobs.len() * self.plan.kernels.len();
        all.filter(|index| !OutcomeFile::exists(&self.job_directory(*index))).collect()
    }

    /// Submits the builds, the jobs without an outcome, and the job that collects the results.
    fn submit(&mut self) -> Result<(), LabError> {
        self.submission = Submission::default();
        let mut dependency = Vec::new();
        if self.plan.kernels.iter().any(|kernel| !kernel.is_built()) {
            // Kernels of one source share objects and a lock, so one job builds all.
            let script = format!("exec {}\n", self.step("build"));
            let log = self.log("build.log");
            let id = self.sbatch("build", &script, &["--exclusive", "--mem=0", &log])?;
            dependency =
                vec![format!("--dependency=afterok:{id}"), "--kill-on-invalid-dep=yes".into()];
            self.add_submitted(id)?;
        }
        for (memory, indices) in self.arrays() {
            let list: Vec<String> = indices.iter().map(usize::to_string).collect();
            let script = format!(
                "set -- {}\nshift \"$SLURM_ARRAY_TASK_ID\"\nexec {} \"$1\"\n",
                list.join(" "),
                self.step("job")
            );
            let limit = self.array_limit.map_or_else(String::new, |limit| format!("%{limit}"));
            let minutes = self.plan.options.common.host.deadline.div_ceil(60) + 5;
            let mut options = vec![
                format!("--array=0-{}{limit}", indices.len() - 1),
                "--cpus-per-task=1".to_owned(),
                format!("--mem={}M", memory.0 >> 20),
                format!("--time={minutes}"),
                self.log("job-%A-%a.log"),
            ];
            options.extend(dependency.iter().cloned());
            self.add_submitted(self.sbatch("jobs", &script, &options)?)?;
        }
        let status = quote(self.directory.join("collect.status"));
        let script = format!(
            "{}\nstatus=$?\necho $status >{status}.partial && mv {status}.partial {status}\n\
             exit $status\n",
            self.step("collect")
        );
        let _ = fs::remove_file(self.directory.join("collect.status"));
        let mut options = vec![
            format!("--output={}", self.directory.join("report.txt").display()),
            format!("--error={}", self.directory.join("collect.log").display()),
            "--open-mode=truncate".to_owned(),
        ];
        let ids = &self.submission.ids;
        if !ids.is_empty() {
            options.push(format!("--dependency=afterany:{}", ids.join(":")));
        }
        self.add_submitted(self.sbatch("collect", &script, &options)?)?;
        self.progress.print_note(&format!("submitted to Slurm: {}", self.submission.ids.join(" ")));
        Ok(())
    }

    /// Records a job of the queue, so that a run that is interrupted now does not submit it again.
    fn add_submitted(&mut self, id: String) -> Result<(), LabError> {
        self.submission.ids.push(id);
        let text = serde_json::to_string(&self.submission)?;
        Ok(Shell::new(false).replace(&self.submission_path(), text)?)
    }

    /// Returns arrays of jobs without an outcome that require the same memory.
    fn arrays(&self) -> Vec<(Bytes, Vec<usize>)> {
        let mut by_memory: BTreeMap<Bytes, Vec<usize>> = BTreeMap::new();
        for index in self.missing() {
            let job = &self.jobs[index / self.plan.kernels.len()];
            by_memory.entry(job.machine.process_memory()).or_default().push(index);
        }
        let chunks = |(memory, indices): (Bytes, Vec<usize>)| {
            let of = |chunk: &[usize]| (memory, chunk.to_vec());
            indices.chunks(MAX_ARRAY).map(of).collect::<Vec<_>>()
        };
        by_memory.into_iter().flat_map(chunks).collect()
    }

    fn step(&self, name: &str) -> String {
        let program = std::env::current_exe().unwrap_or_else(|_| "granule".into());
        let plan = Plan::path_in(self.run_directory.path());
        format!("{} lab step {name} --plan {}", quote(program), quote(plan))
    }

    fn log(&self, name: &str) -> String {
        format!("--output={}", self.directory.join(name).display())
    }

    /// Submits a script and returns the ID of its job.
    fn sbatch<T: AsRef<str>>(
        &self,
        name: &str,
        script: &str,
        options: &[T],
    ) -> Result<String, LabError> {
        let path = self.directory.join(format!("{name}.sh"));
        Shell::new(false).write(&path, format!("#!/bin/sh\n{script}"))?;
        let run = self.run_directory.path().file_name().unwrap_or_default().to_string_lossy();
        let output = Command::new("submitting to Slurm", "sbatch")
            .args(["--parsable", "--requeue", "--nodes=1", "--ntasks=1"])
            .arg(format!("--job-name=granule-{run}-{name}"))
            .arg(format!("--chdir={}", self.run_directory.path().display()))
            .args(options.iter().map(AsRef::as_ref))
            .args(self.slurm_args)
            .arg(&path)
            .query()?;
        // The ID may be followed by the name of the cluster.
        Ok(output.trim().split(';').next().unwrap_or_default().to_owned())
    }

    /// Waits until all submitted jobs have left the queue.
    fn wait(&self) -> Result<(), LabError> {
        let all = self.jobs.len() * self.plan.kernels.len();
        let start = Instant::now();
        let mut last_answer = start;
        loop {
            let ended = all - self.missing().len();
            match self.submission.active() {
                Ok(active) if active.is_empty() => return Ok(()),
                Ok(active) => {
                    last_answer = Instant::now();
                    self.progress.set_jobs((ended, all), start, &describe(&active));
                }
                Err(error) if last_answer.elapsed() > CONTROLLER_TIMEOUT => {
                    return Err(error.into());
                }
                Err(_) => {
                    self.progress.set_jobs((ended, all), start, "the controller does not answer")
                }
            }
            sleep(POLL);
        }
    }

    fn collect_status(&self) -> Option<i32> {
        let text = fs::read_to_string(self.directory.join("collect.status")).ok()?;
        text.trim().parse().ok()
    }

    /// Prints the output of the job that collected the results.
    fn print_report(&self) -> Result<RunStatus, LabError> {
        let read = |name: &str| fs::read_to_string(self.directory.join(name)).unwrap_or_default();
        print(&read("report.txt"))?;
        let log = read("collect.log");
        eprint!("{log}");
        match self.collect_status() {
            Some(0) => Ok(RunStatus::Passed),
            Some(1) => Ok(RunStatus::Failed),
            _ => Err(LabError::Unusable(format!(
                "the results were not collected; logs: {}",
                self.directory.display()
            ))),
        }
    }
}

/// Describes jobs in the queue: `4 running, 20 pending (Resources)`.
fn describe(active: &[String]) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for line in active {
        let mut words = line.splitn(3, ' ').skip(1);
        let state = words.next().unwrap_or_default().to_lowercase();
        let reason = words.next().filter(|reason| !matches!(*reason, "None" | "Dependency" | ""));
        let reason = reason.map_or_else(String::new, |reason| format!(" ({reason})"));
        *counts.entry(state + &reason).or_default() += 1;
    }
    let parts: Vec<String> =
        counts.iter().map(|(state, count)| format!("{count} {state}")).collect();
    format!("Slurm: {}", parts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_is_described_by_state_and_reason() {
        let active = [
            "7 RUNNING None",
            "7 PENDING Resources",
            "7 PENDING Resources",
            "8 PENDING Dependency",
        ]
        .map(str::to_owned);

        assert_eq!(describe(&active), "Slurm: 1 pending, 2 pending (Resources), 1 running");
    }
}
