// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Report of a run whose jobs are checked.

use std::path::Path;

use crate::{
    check::{
        defect::Checked,
        observation::DEFECTS,
        replay::{ReplayOptions, replay},
        report::{CheckedJob, Report},
    },
    error::{LabError, with_causes},
    host::job::TestEnding,
    jobs::{JobResults, KERNEL_DOES_NOT_BOOT, outcome::JobOutcome, run_directory::RunDirectory},
    options::{CheckFormat, FindingsOptions, Workload},
    report::{RunInfo, RunStatus, print},
    shell::Shell,
};

/// Files of the report in the run directory.
const FILES: [(&str, CheckFormat); 3] = [
    ("findings.txt", CheckFormat::Text),
    ("findings.jsonl", CheckFormat::Json),
    ("findings.sarif", CheckFormat::Sarif),
];

/// Publishes the report of all jobs. A finding fails the run.
///
/// # Errors
/// A job failed, so that findings may be missing.
pub fn publish(
    options: &FindingsOptions,
    workload: &Workload,
    run_directory: &RunDirectory,
    run: RunInfo<'_>,
    results: JobResults,
) -> Result<RunStatus, LabError> {
    let mut jobs = Vec::new();
    for (kernel, results) in run.kernels.iter().zip(results) {
        for (job, result) in run.jobs.iter().zip(results) {
            let directory = run_directory.job_path(&kernel.name, &job.name);
            let error = match result {
                Some(Ok(outcome)) => failure(workload, &outcome),
                Some(Err(error)) => Some(with_causes(&error)),
                None => Some(KERNEL_DOES_NOT_BOOT.to_owned()),
            };
            jobs.push(CheckedJob {
                kernel: kernel.name.clone(),
                job: job.name.clone(),
                checked: Checked::read(&directory.join(DEFECTS)).ok(),
                error,
            });
        }
    }
    publish_jobs(options, run_directory.path(), jobs, "choose another --test")
}

/// Writes the report of these jobs to a directory, and prints it. A finding fails the run; `remedy`
/// is the step that lets a kernel without a guest start one.
///
/// # Errors
/// A job failed, so that findings may be missing.
pub fn publish_jobs(
    options: &FindingsOptions,
    directory: &Path,
    jobs: Vec<CheckedJob>,
    remedy: &'static str,
) -> Result<RunStatus, LabError> {
    let report = Report::new(jobs, &options.suppressions()?, remedy);
    for (file, format) in FILES {
        Shell::new(false).write(&directory.join(file), text(&report, format))?;
    }
    finish(&report, options.format)
}

/// Checks a kept trace again, and prints its report. A finding is a failure.
///
/// # Errors
/// The trace cannot be checked.
pub fn check_trace(
    options: &ReplayOptions,
    findings: &FindingsOptions,
) -> Result<RunStatus, LabError> {
    let suppressions = findings.suppressions()?;
    let (setup, checked) = replay(options)?;
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let job = CheckedJob {
        kernel: setup.linux.map_or("image".to_owned(), |version| format!("Linux {version}")),
        job: name(&options.trace),
        checked: Some(checked),
        error: None,
    };
    let remedy = "keep the trace of a run that starts a guest";
    finish(&Report::new(vec![job], &suppressions, remedy), findings.format)
}

/// Returns the reason for which a test failed, if any. The result of a selftest is no concern of the
/// check.
fn failure(workload: &Workload, outcome: &JobOutcome) -> Option<String> {
    match workload {
        Workload::Selftests(_) if matches!(outcome.report.ending, TestEnding::Exited { .. }) => {
            None
        }
        _ => outcome.passed_duration().err().map(|error| with_causes(&error)),
    }
}

fn text(report: &Report, format: CheckFormat) -> String {
    match format {
        CheckFormat::Text => report.text(),
        CheckFormat::Json => report.json_lines(),
        CheckFormat::Sarif => report.sarif(),
    }
}

/// Prints a report and returns the status of the run.
fn finish(report: &Report, format: CheckFormat) -> Result<RunStatus, LabError> {
    print(&text(report, format))?;
    if report.has_error() {
        return Err(LabError::Unusable(
            "a job failed or ran no guest, so findings may be missing: see the errors in the report".to_owned(),
        ));
    }
    Ok(if report.defects().next().is_some() { RunStatus::Failed } else { RunStatus::Passed })
}
