// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reports of a run as text and HTML: comparison, selftest verdicts, guest boots, findings.

mod boot_columns;
mod boot_figures;
mod boot_statistics;
pub mod check_report;
pub mod comparison;
mod count_table;
mod function_table;
pub mod guest_boot_report;
pub mod kernel_table_report;
mod linear_maps;
pub mod selftest_report;
mod table_figures;
mod tlb_figures;
pub mod zap_report;

use std::io::{self, Write};

use granule_report::{command_line, render::page, series_line};
use granule_types::units::pluralize;

use crate::{
    error::LabError,
    jobs::{JobResult, JobResults, matrix::PlannedJob, run_directory::RunDirectory},
    kernel::Kernel,
    options::{Options, Workload},
    progress::Progress,
};

/// Status of a completed run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunStatus {
    /// No failure.
    Passed,
    /// Failed job, regression of a phase, selftest whose results differ, or finding of the checker.
    Failed,
}

pub fn print(text: &str) -> Result<(), LabError> {
    match io::stdout().write_all(text.as_bytes()) {
        // A reader may close the pipe early (`| head`).
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.map_err(LabError::Output),
    }
}

/// Prints a report, and writes it as text and HTML.
fn publish(run_directory: &RunDirectory, report: &str, html: &str) -> Result<(), LabError> {
    run_directory.write_report(report)?;
    print(report)?;
    publish_html(run_directory, html)
}

fn publish_html(run_directory: &RunDirectory, html: &str) -> Result<(), LabError> {
    let path = run_directory.write_html(None, html)?;
    eprintln!("lab: HTML report: {}", path.display());
    Ok(())
}

/// Writes the results of a run, and publishes its report.
pub fn publish_results(
    options: &Options,
    run_directory: &RunDirectory,
    run: RunInfo<'_>,
    results: JobResults,
    progress: &Progress,
) -> Result<RunStatus, LabError> {
    let RunInfo { kernels, jobs, .. } = run;
    if let Some(check) = &options.check {
        progress.finish();
        return check_report::publish(
            &check.report,
            &options.workload,
            run_directory,
            run,
            results,
        );
    }
    match &options.workload {
        Workload::Selftests(_) => {
            progress.finish();
            selftest_report::report(run_directory, run, results)
        }
        Workload::Guest(_) => {
            progress.finish();
            guest_boot_report::report(run_directory, run, results)
        }
        Workload::Boot(matrix) => {
            progress.finish();
            let costs = options.common.host.costs.as_ref();
            kernel_table_report::report(run_directory, run, results, (matrix, costs))
        }
        Workload::Zap(_) => {
            progress.finish();
            zap_report::report(run_directory, run, results)
        }
        Workload::PageTableTest(_) | Workload::Program(_) => {
            let functions = match options.report.functions {
                true => function_table::publish(run_directory, run, &results, |phase| {
                    options.report.shows(phase)
                })?,
                false => String::new(),
            };
            let failed = run_directory.write_records(kernels, jobs, results, progress)?;
            progress.finish();
            match comparison::compare(options, run_directory, kernels, &functions)? {
                RunStatus::Passed if !failed => Ok(RunStatus::Passed),
                _ => Ok(RunStatus::Failed),
            }
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct RunInfo<'a> {
    pub kernels: &'a [Kernel],
    pub jobs: &'a [PlannedJob],
    pub emulator: &'a str,
}

/// Names of the failed job and its kernel, and the message.
type FailedJob = (String, String);

impl RunInfo<'_> {
    /// Returns a value for each kernel of each job: `[job][kernel]`.
    fn group_by_job<T>(
        self,
        results: JobResults,
        value: impl Fn(&PlannedJob, JobResult) -> T,
    ) -> Vec<Vec<T>> {
        let mut columns: Vec<_> = results.into_iter().map(Vec::into_iter).collect();
        let row = |job| columns.iter_mut().map(|of| value(job, of.next().flatten())).collect();
        self.jobs.iter().map(row).collect()
    }

    fn kernel_names(&self) -> Vec<&str> {
        self.kernels.iter().map(|kernel| kernel.name.as_str()).collect()
    }

    /// Returns a page with failures and provenance below `body`.
    fn page(self, kind: &str, mut body: String, failures: &[FailedJob]) -> String {
        if !failures.is_empty() {
            body.push_str("<h2>Failures</h2>\n");
        }
        for (place, message) in failures {
            let (first, rest) = message.split_once('\n').unwrap_or((message, ""));
            let summary = format!("{place}: {first}");
            body.push_str(&match rest.trim() {
                "" => format!("<p>{}</p>\n", page::escape_html(&summary)),
                rest => page::details(&summary, rest),
            });
        }
        let columns = self.kernel_names();
        let of = |fact: &dyn Fn(&Kernel) -> Option<String>| self.kernels.iter().map(fact).collect();
        let emulator = format!("{} {}", self.emulator, self.machine());
        let rows = [
            ("series", of(&|kernel| series_line(kernel.series.as_deref()))),
            ("image, SHA-256", of(&|kernel| Some(kernel.image_sha256.clone()))),
            ("emulator", of(&|_| Some(emulator.clone()))),
        ];
        body.push_str("<h2>Provenance</h2>\n");
        body.push_str(&page::properties(&columns, &rows));
        body.push_str(&page::command_section(&command_line()));
        let names = match columns.as_slice() {
            [first, rest @ ..] if !rest.is_empty() => {
                format!("{} against {first}", rest.join(", "))
            }
            names => names.join(", "),
        };
        page::page(&format!("{kind}: {names}"), &body)
    }

    /// Formats the emulated hardware, which may differ between jobs.
    fn machine(self) -> String {
        let mut kinds: Vec<String> = Vec::new();
        for job in self.jobs {
            let kind = job.machine.describe();
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        match kinds.as_slice() {
            [first, rest @ ..] if !rest.is_empty() => {
                format!("{first} (and {} of other sizes)", pluralize(rest.len(), "host"))
            }
            kinds => kinds.concat(),
        }
    }
}
