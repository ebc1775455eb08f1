// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Writes the records of all jobs into the run directory.

use granule_report::results::record_lines;

use crate::{
    error::{LabError, with_causes},
    jobs::{job_queue::JobResults, planned_job::PlannedJob, run_directory::RunDirectory},
    kernel::Kernel,
    progress::Progress,
    shell::Shell,
};

/// Failure of a job that was skipped.
pub const NO_BOOT: &str = "not run: this kernel does not boot";

/// Writes all records and reports each failed job; returns whether a job failed.
pub fn write(
    shell: Shell,
    run_directory: &RunDirectory,
    (kernels, jobs): (&[Kernel], &[PlannedJob]),
    results: JobResults,
    progress: &Progress,
) -> Result<bool, LabError> {
    if shell.is_dry() {
        return Ok(false);
    }
    let mut failed = false;
    let mut any = false;
    for (kernel, results) in kernels.iter().zip(results) {
        let mut all = Vec::new();
        for (job, result) in jobs.iter().zip(results) {
            let records = match result {
                Some(result) => result.and_then(|outcome| outcome.records(job)),
                None => {
                    failed = true;
                    progress.note(&format!("{} {}: {NO_BOOT}", kernel.name, job.name));
                    continue;
                }
            };
            match records {
                Ok(records) => all.extend(records),
                Err(error) => {
                    failed = true;
                    let error = with_causes(&error);
                    progress.note(&format!("{} {}: {error}", kernel.name, job.name));
                }
            }
        }
        if !all.is_empty() {
            any = true;
            shell.write(&run_directory.results(kernel), record_lines(&all)?)?;
        }
    }
    if any { Ok(failed) } else { Err(LabError::NoResults(run_directory.path().to_owned())) }
}
