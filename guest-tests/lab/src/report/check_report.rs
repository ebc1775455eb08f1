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
            let checked = Checked::read(&directory.join(DEFECTS));
            let unread = || checked.as_ref().err().map(|error| with_causes(error));
            let error = match result {
                Some(Ok(outcome)) => failure(workload, &outcome).or_else(unread),
                Some(Err(error)) => Some(with_causes(&error)),
                None => Some(KERNEL_DOES_NOT_BOOT.to_owned()),
            };
            jobs.push(CheckedJob {
                kernel: kernel.name.clone(),
                job: job.name.clone(),
                needs_guest: !matches!(workload, Workload::Boot(_)),
                checked: checked.ok(),
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
        // The trace may be that of a boot.
        needs_guest: false,
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

#[cfg(test)]
mod tests {
    use granule_types::units::Nanoseconds;

    use super::*;
    use crate::{
        check::defect::tests::checked,
        host::job::JobReport,
        jobs::matrix::{self, tests::options},
        kernel::Kernel,
        values::PageSize,
    };

    #[test]
    fn unreadable_findings_of_a_job_are_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let run_directory = RunDirectory::of_path(directory.path());
        let options = options("lab -s 4k --seeds 2");
        let jobs = matrix::jobs(&options, PageSize::Kib4, &[]);
        let kernels = [Kernel::placeholder("base".to_owned(), "Image".into())];
        let paths = [0, 1].map(|job: usize| run_directory.job_path("base", &jobs[job].name));
        for path in &paths {
            std::fs::create_dir_all(path).unwrap();
            checked(Vec::new()).write(&path.join(DEFECTS)).unwrap();
        }
        let publish = || {
            let outcome = |_| {
                let report = JobReport {
                    ending: TestEnding::Exited { code: 0, ns: Nanoseconds(1) },
                    host: None,
                    stdout: String::new(),
                    stderr: String::new(),
                    results: String::new(),
                };
                Some(Ok(JobOutcome { report, segments: Vec::new(), programs: Default::default() }))
            };
            let findings = FindingsOptions { suppress: None, format: CheckFormat::Text };
            let run = RunInfo { kernels: &kernels, jobs: &jobs, emulator: "QEMU" };
            let results = vec![jobs.iter().map(outcome).collect()];
            publish(&findings, &options.workload, &run_directory, run, results)
        };

        let complete = publish().unwrap();
        std::fs::write(paths[1].join(DEFECTS), "").unwrap();
        let empty = publish().unwrap_err().to_string();

        assert_eq!(complete, RunStatus::Passed);
        assert!(empty.contains("findings may be missing"), "{empty}");
        let text = std::fs::read_to_string(directory.path().join("findings.txt")).unwrap();
        assert!(text.contains("error: cannot read"), "{text}");
    }
}
