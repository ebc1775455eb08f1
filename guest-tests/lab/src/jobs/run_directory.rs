// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The run directory: inputs and results of a run.
//!
//! ```text
//! lab-runs/NAME/
//!   comparison.txt          the printed report
//!   report.html             the HTML report; that of one patch is in the directory of its kernel
//!   KERNEL/                 `base`, the name of a series …: an input of `granule compare`
//!     kernel.json           series, SHA-256 of the image
//!     config                configuration of the kernel
//!     results.jsonl         all records with counts, in the order of the matrix
//!     JOB/                  one boot: see `execute`
//! ```
//!
//! Except for paths in command lines, the contents do not depend on time and place of the run.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    command::CommandError,
    jobs::planned_job::PlannedJob,
    kernel::Kernel,
    shell::{Shell, absolute},
};

/// A run directory.
#[derive(Debug)]
pub struct RunDirectory {
    path: PathBuf,
}

/// Returns the next unused name below `lab-runs` in the current directory.
pub fn next_name(base: &str) -> PathBuf {
    (1..)
        .map(|number| PathBuf::from(format!("lab-runs/{base}-{number:03}")))
        .find(|path| !path.exists())
        .unwrap_or_else(|| PathBuf::from("lab-runs"))
}

impl RunDirectory {
    /// Creates the directory, which must be empty, and describes each kernel in it.
    pub fn create(shell: Shell, path: &Path, kernels: &[Kernel]) -> Result<Self, CommandError> {
        let path = absolute(path)?;
        let in_use = fs::read_dir(&path).is_ok_and(|mut entries| entries.next().is_some());
        if in_use && !shell.is_dry() {
            let in_use = io::Error::new(
                io::ErrorKind::AlreadyExists,
                "it is not empty; remove it or set another one with --out",
            );
            return Err(CommandError::file("use the run directory", path, in_use));
        }
        let run_directory = Self { path };
        for kernel in kernels {
            let directory = run_directory.kernel(kernel);
            shell.create_dir(&directory)?;
            let description = serde_json::json!({
                "name": kernel.name,
                "series": kernel.series,
                "image_sha256": kernel.image_sha256,
            });
            shell.write(&directory.join("kernel.json"), format!("{description:#}\n"))?;
            if let Some(config) = &kernel.config {
                shell.copy(config, &directory.join("config"))?;
            }
        }
        Ok(run_directory)
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn kernel(&self, kernel: &Kernel) -> PathBuf {
        self.path.join(&kernel.name)
    }

    /// Returns the directory of a job.
    pub fn job(&self, kernel: &Kernel, job: &PlannedJob) -> PathBuf {
        self.kernel(kernel).join(&job.name)
    }

    /// Returns the path of a kernel's results.
    pub fn results(&self, kernel: &Kernel) -> PathBuf {
        self.kernel(kernel).join("results.jsonl")
    }

    /// Writes the printed report.
    pub fn write_report(&self, report: &str) -> Result<(), CommandError> {
        let path = self.path.join("comparison.txt");
        fs::write(&path, report).map_err(|e| CommandError::file("write", path, e))
    }

    /// Writes the HTML report of the run, or of one patch into the directory of its kernel. Returns
    /// its path.
    pub fn write_html(&self, patch: Option<&Kernel>, html: &str) -> Result<PathBuf, CommandError> {
        let directory = patch.map_or_else(|| self.path.clone(), |kernel| self.kernel(kernel));
        let path = directory.join("report.html");
        match fs::write(&path, html) {
            Ok(()) => Ok(path),
            Err(error) => Err(CommandError::file("write", path, error)),
        }
    }
}
