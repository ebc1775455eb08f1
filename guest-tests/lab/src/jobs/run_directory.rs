// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The run directory: inputs and results of a run.
//!
//! ```text
//! lab-runs/NAME/
//!   plan.json               kernels, jobs and options of the run (see `plan`)
//!   comparison.txt          the printed report
//!   report.html             the HTML report; a patch has one in the directory of its kernel
//!   programs/               the arm64 `granule` and the plugin that the jobs use
//!   KERNEL/                 `base`, the name of a series …: an input of `granule compare`
//!     kernel.json           series, SHA-256 of the image
//!     config                configuration of the kernel
//!     functions.jsonl       functions of each phase, with `--functions`
//!     results.jsonl         all records with counts, in the order of the matrix
//!     JOB/                  one boot: see `execute`
//! ```
//!
//! Except for paths in command lines, the contents do not depend on time or machine.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use granule_report::results::record_lines;
use granule_types::record::Record;

use crate::{
    command::CommandError,
    error::{LabError, with_causes},
    file_lock::FileLock,
    jobs::{JobResult, JobResults, KERNEL_DOES_NOT_BOOT, matrix::PlannedJob},
    kernel::{Kernel, recipe::PROGRAMS_DIRECTORY},
    options::RunPath,
    progress::Progress,
    shell::{Shell, partial_path, sorted_entries},
};

/// A job without results, and its error with causes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedJob {
    pub job: String,
    pub error: String,
}

/// Start of the names of directories of attempts.
const ATTEMPT_PREFIX: &str = ".attempt-";

#[derive(Debug)]
pub struct RunDirectory {
    path: PathBuf,
}

impl RunDirectory {
    /// Creates the directory. An existing one must be empty, and is never used for a number.
    pub fn create(shell: Shell, path: &RunPath) -> Result<Self, CommandError> {
        let path = match path {
            RunPath::Given(path) => {
                Self::check_unused(shell, path)?;
                shell.create_dir(path)?;
                path.clone()
            }
            RunPath::Numbered(stem) => create_numbered(shell, stem)?,
        };
        Ok(Self { path })
    }

    /// Returns the path of the directory that would be created.
    pub fn next_path(path: &RunPath) -> PathBuf {
        match path {
            RunPath::Given(path) => path.clone(),
            RunPath::Numbered(stem) => next_unused(stem, 1).1,
        }
    }

    /// Refuses a path that is no empty directory.
    pub fn check_unused(shell: Shell, path: &Path) -> Result<(), CommandError> {
        let error = match fs::read_dir(path).map(|mut entries| entries.next().is_some()) {
            Ok(true) => io::Error::new(
                io::ErrorKind::AlreadyExists,
                "it is not empty; remove it, set another one with --out, or add --resume, with \
                 which granule lab and its bisect continue a run",
            ),
            Err(error) if error.kind() != io::ErrorKind::NotFound => error,
            _ => return Ok(()),
        };
        match shell.is_dry_run() {
            true => Ok(()),
            false => Err(CommandError::file("use the run directory", path, error)),
        }
    }

    /// Locks the directory until the value is dropped.
    ///
    /// # Errors
    /// Another process holds the lock.
    pub fn lock(&self) -> Result<FileLock, LabError> {
        let failed = |error| CommandError::file("lock the run directory", &self.path, error);
        let file = File::create(self.path.join(".lock")).map_err(failed)?;
        FileLock::try_exclusive(file).map_err(failed)?.map_err(|_| {
            LabError::Unusable(format!(
                "another process executes the run in {}: wait for its end, or end it",
                self.path.display()
            ))
        })
    }

    /// Writes `kernel.json` and the configuration of each kernel.
    pub fn add_kernels(&self, shell: Shell, kernels: &[Kernel]) -> Result<(), CommandError> {
        kernels.iter().try_for_each(|kernel| self.add_kernel(shell, kernel))
    }

    /// Returns a run directory that exists.
    pub fn of_path(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// Creates the directory of a kernel and writes its `kernel.json`.
    pub fn add_kernel(&self, shell: Shell, kernel: &Kernel) -> Result<(), CommandError> {
        let directory = self.kernel_path(kernel);
        shell.create_dir(&directory)?;
        let description = serde_json::json!({
            "name": kernel.name,
            "title": kernel.title,
            "series": kernel.series,
            "commit": kernel.commit,
            "tree": kernel.tree,
            "compiler": kernel.compiler,
            "image_sha256": kernel.image_sha256,
            "uncounted": kernel.uncounted,
        });
        shell.write(&directory.join("kernel.json"), format!("{description:#}\n"))?;
        match &kernel.config {
            Some(config) => shell.copy(config, &directory.join("config")),
            None => Ok(()),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn kernel_path(&self, kernel: &Kernel) -> PathBuf {
        self.path.join(&kernel.name)
    }

    /// Returns the path of a job by the names of its kernel and the job.
    pub fn job_path(&self, kernel: &str, job: &str) -> PathBuf {
        self.path.join(kernel).join(job)
    }

    /// Creates a directory for one attempt of a job on a kernel.
    pub fn attempt(&self, kernel: &str) -> Result<PathBuf, CommandError> {
        let parent = self.path.join(kernel);
        let attempt = tempfile::Builder::new().prefix(ATTEMPT_PREFIX).tempdir_in(&parent);
        Ok(attempt.map_err(|e| CommandError::file("create an attempt in", parent, e))?.keep())
    }

    /// Removes the attempts of a kernel's jobs that were lost with their machine.
    pub fn remove_attempts(&self, kernel: &str) -> Result<(), CommandError> {
        let parent = self.path.join(kernel);
        for name in sorted_entries(&parent) {
            if name.starts_with(ATTEMPT_PREFIX) {
                Shell::new(false).remove_dir(&parent.join(name))?;
            }
        }
        Ok(())
    }

    /// Returns the path of the counts of functions.
    pub fn functions_path(&self, kernel: &Kernel) -> PathBuf {
        self.kernel_path(kernel).join("functions.jsonl")
    }

    /// Returns the path of the copy of a program.
    pub fn program_path(&self, program: &Path) -> PathBuf {
        self.path.join(PROGRAMS_DIRECTORY).join(program.file_name().unwrap_or_default())
    }

    /// Replaces the paths of programs by those of their copies, if they exist.
    pub fn use_copies(&self, programs: [&mut PathBuf; 2]) {
        for program in programs {
            let copy = self.program_path(program);
            if copy.is_file() {
                *program = copy;
            }
        }
    }

    /// Copies a program, or replaces the copy of an interrupted run. Jobs execute the copy, so a
    /// program that is rebuilt meanwhile has no effect on their results. Returns its path.
    pub fn copy_program(&self, shell: Shell, program: &Path) -> Result<PathBuf, CommandError> {
        let copy = self.program_path(program);
        shell.create_dir(&self.path.join(PROGRAMS_DIRECTORY))?;
        let partial = partial_path(&copy);
        shell.copy(program, &partial)?;
        shell.rename(&partial, &copy)?;
        Ok(copy)
    }

    pub fn results_path(&self, kernel: &Kernel) -> PathBuf {
        self.kernel_path(kernel).join("results.jsonl")
    }

    /// Writes all records and prints the error of each failed job; returns whether a job failed.
    pub fn write_records(
        &self,
        kernels: &[Kernel],
        jobs: &[PlannedJob],
        results: JobResults,
        progress: &Progress,
    ) -> Result<bool, LabError> {
        let mut failed = false;
        let mut any = false;
        for (kernel, results) in kernels.iter().zip(results) {
            let (records, failures) = self.write_kernel_records(kernel, jobs, results, progress)?;
            failed |= !failures.is_empty();
            any |= !records.is_empty();
        }
        if any {
            return Ok(failed);
        }
        Err(LabError::Unusable(format!(
            "no job returned a result; see the errors above and the logs in {}",
            self.path.display()
        )))
    }

    /// Writes the records of a kernel, and prints the error of each failed job.
    pub fn write_kernel_records(
        &self,
        kernel: &Kernel,
        jobs: &[PlannedJob],
        results: Vec<JobResult>,
        progress: &Progress,
    ) -> Result<(Vec<Record>, Vec<FailedJob>), LabError> {
        let (mut all, mut failures) = (Vec::new(), Vec::new());
        for (job, result) in jobs.iter().zip(results) {
            let error = match result.map(|result| result.and_then(|o| o.records(job))) {
                Some(Ok(records)) => {
                    all.extend(records);
                    continue;
                }
                Some(Err(error)) => with_causes(&error),
                None => KERNEL_DOES_NOT_BOOT.to_owned(),
            };
            progress.print_note(&format!("{} {}: {error}", kernel.name, job.name));
            failures.push(FailedJob { job: job.name.clone(), error });
        }
        let results = self.results_path(kernel);
        match all.is_empty() {
            false => write(&results, &record_lines(&all)?)?,
            // Results of an earlier execution are not those of this one.
            true => drop(fs::remove_file(&results)),
        }
        Ok((all, failures))
    }

    pub fn write_report(&self, report: &str) -> Result<(), CommandError> {
        write(&self.path.join("comparison.txt"), report)
    }

    /// Writes the HTML report of the run, or of a patch in the directory of its kernel. Returns its
    /// path.
    pub fn write_html(&self, patch: Option<&Kernel>, html: &str) -> Result<PathBuf, CommandError> {
        let directory = patch.map_or_else(|| self.path.clone(), |kernel| self.kernel_path(kernel));
        let path = directory.join("report.html");
        write(&path, html)?;
        Ok(path)
    }
}

/// Creates the first unused directory of `STEM-001`, `STEM-002` … No other run gets the same one.
fn create_numbered(shell: Shell, stem: &Path) -> Result<PathBuf, CommandError> {
    let mut first = 1;
    loop {
        let (number, path) = next_unused(stem, first);
        if shell.is_dry_run() {
            shell.create_dir(&path)?;
            return Ok(path);
        }
        shell.create_dir(stem.parent().unwrap_or(Path::new(".")))?;
        match fs::create_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => first = number + 1,
            Err(error) => return Err(CommandError::file("create the directory", path, error)),
            Ok(()) => return Ok(path),
        }
    }
}

/// Returns the first unused number from `first` on, and its path.
fn next_unused(stem: &Path, first: u32) -> (u32, PathBuf) {
    let path = |number| PathBuf::from(format!("{}-{number:03}", stem.display()));
    let number = (first..u32::MAX).find(|number| !path(*number).exists()).unwrap_or(u32::MAX);
    (number, path(number))
}

fn write(path: &Path, text: &str) -> Result<(), CommandError> {
    Shell::new(false).write(path, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_that_start_at_the_same_time_get_different_directories() {
        let parent = tempfile::tempdir().unwrap();
        let path = RunPath::Numbered(parent.path().join("lab-runs/5.10"));
        let create = || RunDirectory::create(Shell::new(false), &path).unwrap().path;

        let mut created: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(create)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });

        created.sort();
        created.dedup();
        assert_eq!(created.len(), 8);
        assert!(created[7].ends_with("lab-runs/5.10-008"), "{created:?}");
    }

    #[test]
    fn a_copied_program_is_that_of_the_last_start() {
        let parent = tempfile::tempdir().unwrap();
        let program = parent.path().join("granule");
        let run = RunDirectory::of_path(&parent.path().join("run"));
        let copy = |text| {
            std::fs::write(&program, text).unwrap();
            run.copy_program(Shell::new(false), &program).unwrap()
        };

        let mut without = [program.clone(), program.clone()];
        run.use_copies(without.each_mut());
        let first = copy("first");
        std::fs::write(&program, "rebuilt").unwrap();
        let kept = std::fs::read_to_string(&first).unwrap();
        let mut with = [program.clone(), program.clone()];
        run.use_copies(with.each_mut());
        let second = std::fs::read_to_string(copy("second")).unwrap();

        assert_eq!((&without[0], &with), (&program, &[first.clone(), first]));
        assert_eq!((kept.as_str(), second.as_str()), ("first", "second"));
        assert_eq!(sorted_entries(&run.path().join("programs")), ["granule"]);
    }

    #[test]
    fn one_process_at_a_time_locks_a_directory() {
        let directory = tempfile::tempdir().unwrap();
        let run = RunDirectory::of_path(directory.path());

        let first = run.lock().unwrap();
        let second = run.lock().unwrap_err().to_string();
        drop(first);

        assert!(second.contains("another process executes the run"), "{second}");
        run.lock().unwrap();
    }

    #[test]
    fn a_given_directory_with_files_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = RunPath::Given(directory.path().to_owned());
        let create = || RunDirectory::create(Shell::new(false), &path);
        let empty = create().is_ok();
        std::fs::write(directory.path().join("x"), "").unwrap();

        let error = create().unwrap_err();

        assert!(empty);
        assert!(with_causes(&error).contains("not empty"), "{error}");
    }
}
