// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The run directory: inputs and results of a run.
//!
//! ```text
//! lab-runs/NAME/
//!   comparison.txt          the printed report
//!   report.html             the HTML report; a patch has one in the directory of its kernel
//!   KERNEL/                 `base`, the name of a series …: an input of `granule compare`
//!     kernel.json           series, SHA-256 of the image
//!     config                configuration of the kernel
//!     results.jsonl         all records with counts, in the order of the matrix
//!     JOB/                  one boot: see `execute`
//! ```
//!
//! Except for paths in command lines, the contents do not depend on time or machine.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use granule_report::results::record_lines;

use crate::{
    LabError,
    command::CommandError,
    jobs::{JobResults, KERNEL_DOES_NOT_BOOT, matrix::PlannedJob},
    kernel::Kernel,
    progress::Progress,
    shell::{Shell, absolute},
    with_causes,
};

#[derive(Debug)]
pub struct RunDirectory {
    path: PathBuf,
}

impl RunDirectory {
    /// Creates the directory, which must be empty if it exists, and writes each `kernel.json`.
    pub fn create(shell: Shell, path: &Path, kernels: &[Kernel]) -> Result<Self, CommandError> {
        let path = absolute(path)?;
        let in_use = fs::read_dir(&path).is_ok_and(|mut entries| entries.next().is_some());
        if in_use && !shell.is_dry_run() {
            let in_use = io::Error::new(
                io::ErrorKind::AlreadyExists,
                "it is not empty; remove it or set another one with --out",
            );
            return Err(CommandError::file("use the run directory", path, in_use));
        }
        let run_directory = Self { path };
        kernels.iter().try_for_each(|kernel| run_directory.add_kernel(shell, kernel))?;
        Ok(run_directory)
    }

    /// Opens an existing directory.
    pub fn open(path: &Path) -> Result<Self, CommandError> {
        Ok(Self { path: absolute(path)? })
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

    pub fn job_path(&self, kernel: &Kernel, job: &PlannedJob) -> PathBuf {
        self.kernel_path(kernel).join(&job.name)
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
            let mut all = Vec::new();
            for (job, result) in jobs.iter().zip(results) {
                let error = match result.map(|result| result.and_then(|o| o.records(job))) {
                    Some(Ok(records)) => {
                        all.extend(records);
                        continue;
                    }
                    Some(Err(error)) => with_causes(&error),
                    None => KERNEL_DOES_NOT_BOOT.to_owned(),
                };
                failed = true;
                progress.print_note(&format!("{} {}: {error}", kernel.name, job.name));
            }
            if !all.is_empty() {
                any = true;
                write(&self.results_path(kernel), &record_lines(&all)?)?;
            }
        }
        if any {
            return Ok(failed);
        }
        Err(LabError::Unusable(format!(
            "no job returned a result; see the errors above and the logs in {}",
            self.path.display()
        )))
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

fn write(path: &Path, text: &str) -> Result<(), CommandError> {
    Shell::new(false).write(path, text)
}
