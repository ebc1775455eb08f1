// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The run directory: everything that a run was made from and gave.
//!
//! ```text
//! lab-runs/NAME/
//!   comparison.txt          what was printed
//!   report.html             the same as a page; a step's in the folder of the kernel it led to
//!   KERNEL/                 `base`, the series' name …: a side for `granule compare`
//!     kernel.json           series, SHA-256 of the image
//!     config                the kernel's configuration
//!     results.jsonl         all records, counts merged in, in the matrix's order
//!     JOB/                  one boot: see `execute`
//! ```
//!
//! Nothing in it depends on the time or the place of the run, but for paths in command lines.

use std::{
    error::Error,
    fs, io,
    path::{Path, PathBuf},
};

use super::{
    LabError,
    kernel::Kernel,
    matrix::PlannedJob,
    pool::Outcomes,
    progress::Progress,
    step::{Shell, StepError},
};
use granule_report::results::record_lines;

/// A run directory.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
}

/// The next free name below `lab-runs` in the current folder.
pub fn next_name(base: &str) -> PathBuf {
    (1..)
        .map(|number| PathBuf::from(format!("lab-runs/{base}-{number:03}")))
        .find(|path| !path.exists())
        .unwrap_or_else(|| PathBuf::from("lab-runs"))
}

impl RunDir {
    /// Makes the directory and writes down what each kernel is.
    ///
    /// # Errors
    /// It holds something already, or cannot be written.
    pub fn create(shell: Shell, path: &Path, kernels: &[Kernel]) -> Result<Self, LabError> {
        let path = std::path::absolute(path).map_err(|e| StepError::file("find", path, e))?;
        let taken = fs::read_dir(&path).is_ok_and(|mut entries| entries.next().is_some());
        if taken && !shell.is_dry() {
            let taken = io::Error::new(
                io::ErrorKind::AlreadyExists,
                "it holds an earlier run; remove it or choose another with --out",
            );
            return Err(StepError::file("use the run directory", path, taken).into());
        }
        let rundir = Self { path };
        for kernel in kernels {
            let folder = rundir.kernel(kernel);
            shell.make_dir(&folder)?;
            let about = serde_json::json!({
                "name": kernel.name,
                "series": kernel.series,
                "image_sha256": kernel.image_sha256,
            });
            shell.write(&folder.join("kernel.json"), format!("{about:#}\n"))?;
            if let Some(config) = &kernel.config {
                shell.copy(config, &folder.join("config"))?;
            }
        }
        Ok(rundir)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A kernel's folder.
    pub fn kernel(&self, kernel: &Kernel) -> PathBuf {
        self.path.join(&kernel.name)
    }

    /// A job's folder.
    pub fn job(&self, kernel: &Kernel, job: &PlannedJob) -> PathBuf {
        self.kernel(kernel).join(&job.name)
    }

    /// A kernel's results.
    pub fn results(&self, kernel: &Kernel) -> PathBuf {
        self.kernel(kernel).join("results.jsonl")
    }

    /// Writes what is printed at the end.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write_report(&self, report: &str) -> Result<(), StepError> {
        let path = self.path.join("comparison.txt");
        fs::write(&path, report).map_err(|e| StepError::file("write", path, e))
    }

    /// Writes a page and gives its path: that of the whole run, or of one step to a
    /// kernel into the kernel's folder.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write_page(&self, step: Option<&Kernel>, page: &str) -> Result<PathBuf, StepError> {
        let folder = step.map_or_else(|| self.path.clone(), |kernel| self.kernel(kernel));
        let path = folder.join("report.html");
        match fs::write(&path, page) {
            Ok(()) => Ok(path),
            Err(error) => Err(StepError::file("write", path, error)),
        }
    }

    /// The same, and says where it is.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn tell_page(&self, step: Option<&Kernel>, page: &str) -> Result<(), StepError> {
        let path = self.write_page(step, page)?;
        eprintln!("lab: as a page: {}", path.display());
        Ok(())
    }

    /// Writes all records that there are and tells of each job that failed; true if one did.
    ///
    /// # Errors
    /// Records cannot be written, or there is none.
    pub fn keep(
        &self,
        shell: Shell,
        kernels: &[Kernel],
        jobs: &[PlannedJob],
        outcomes: Outcomes,
        progress: &Progress,
    ) -> Result<bool, LabError> {
        if shell.is_dry() {
            return Ok(false);
        }
        let mut failed = false;
        let mut any = false;
        for (kernel, outcomes) in kernels.iter().zip(outcomes) {
            let mut all = Vec::new();
            for (job, outcome) in jobs.iter().zip(outcomes) {
                let name = format!("{} {}", kernel.name, job.name);
                let records = match outcome {
                    Some(outcome) => outcome.and_then(|outcome| outcome.records(job)),
                    None => {
                        failed = true;
                        progress.note(&format!("{name}: not run, this kernel does not boot"));
                        continue;
                    }
                };
                match records {
                    Ok(records) => all.extend(records),
                    Err(error) => {
                        failed = true;
                        progress.note(&format!("{name}: {}", chain(&error)));
                    }
                }
            }
            if !all.is_empty() {
                any = true;
                shell.write(&self.results(kernel), record_lines(&all)?)?;
            }
        }
        if any {
            Ok(failed)
        } else {
            Err(LabError::Nothing(self.path.clone()))
        }
    }
}

/// An error and everything behind it.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!("\n  because: {error}"));
        cause = error.source();
    }
    text
}
