// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables of counts by job and kernel, and the records behind them.

use std::collections::BTreeMap;

use granule_report::render::page;
use serde::Serialize;

use crate::{
    error::{LabError, with_causes},
    host::costs::is_broadcast,
    jobs::{
        JobResults, KERNEL_DOES_NOT_BOOT,
        matrix::PlannedJob,
        outcome::{JobError, JobOutcome},
        run_directory::RunDirectory,
    },
    report::{FailedJob, RunInfo},
    shell::Shell,
};

/// Records or error messages: `[job][kernel]`.
pub type Records<T> = Vec<Vec<Result<T, String>>>;

/// Heading of a column and the counts that it sums.
pub type CountColumn = (&'static str, fn(&str) -> bool);

/// Number of columns of names, before the counts.
const NAMES: usize = 2;

pub const TLBI_LOCAL: CountColumn =
    ("TLBI local", |name| tlbi(name).is_some_and(|operation| !is_broadcast(operation)));
pub const TLBI_BROADCAST: CountColumn =
    ("TLBI broadcast", |name| tlbi(name).is_some_and(is_broadcast));

/// Returns the operation of a TLBI; `None` for other counts.
pub fn tlbi(name: &str) -> Option<&str> {
    name.strip_prefix("TLBI ")
}

/// Returns the count of each column; a count that did not occur is 0.
pub fn column_sums<const N: usize>(
    columns: &[CountColumn; N],
    counters: &BTreeMap<String, u64>,
) -> [u64; N] {
    columns.map(|(_, selects)| {
        let selected = counters.iter().filter(|(name, _)| selects(name));
        selected.map(|(_, count)| count).sum()
    })
}

/// Writes the records of each kernel, and returns them with the messages of failed jobs.
pub fn write_records<T: Serialize>(
    run_directory: &RunDirectory,
    run: RunInfo<'_>,
    results: JobResults,
    record: impl Fn(&PlannedJob, &JobOutcome) -> Result<T, JobError>,
) -> Result<Records<T>, LabError> {
    let records = run.group_by_job(results, |job, result| match result {
        Some(Ok(outcome)) => record(job, &outcome).map_err(|error| with_causes(&error)),
        Some(Err(error)) => Err(with_causes(&error)),
        None => Err(KERNEL_DOES_NOT_BOOT.to_owned()),
    });
    for (index, kernel) in run.kernels.iter().enumerate() {
        let mut lines = String::new();
        for record in records.iter().filter_map(|records| records[index].as_ref().ok()) {
            lines += &(serde_json::to_string(record)? + "\n");
        }
        Shell::new(false).write(&run_directory.results_path(kernel), lines)?;
    }
    Ok(records)
}

/// Returns job, kernel and record of each boot.
pub fn places<'a, T>(
    run: RunInfo<'a>,
    records: &'a Records<T>,
) -> impl Iterator<Item = (&'a str, &'a str, &'a Result<T, String>)> {
    run.jobs.iter().zip(records).flat_map(move |(job, records)| {
        let of_kernel = run.kernels.iter().zip(records);
        of_kernel.map(|(kernel, record)| (job.name.as_str(), kernel.name.as_str(), record))
    })
}

/// Returns a row for each record: job, kernel, and the cells.
pub fn rows<T>(
    run: RunInfo<'_>,
    records: &Records<T>,
    cells: impl Fn(&T) -> Vec<String>,
) -> Vec<Vec<String>> {
    let found = places(run, records).filter_map(|(job, kernel, record)| {
        let names = vec![job.to_owned(), kernel.to_owned()];
        Some([names, cells(record.as_ref().ok()?)].concat())
    });
    found.collect()
}

/// Returns the failures among the boots.
pub fn failures<T>(run: RunInfo<'_>, records: &Records<T>) -> Vec<FailedJob> {
    let failed = places(run, records).filter_map(|(job, kernel, record)| {
        Some((format!("{job} on {kernel}"), record.as_ref().err()?.clone()))
    });
    failed.collect()
}

/// Formats failures for a Markdown report.
pub fn failure_text(failures: &[FailedJob]) -> String {
    failures.iter().map(|(place, error)| format!("\n{place}: {error}\n")).collect()
}

/// Formats a Markdown table; all columns but those of names are aligned to the right.
pub fn markdown(head: &[String], rows: &[Vec<String>]) -> String {
    let rules = (0..head.len()).map(|at| if at < NAMES { "---|" } else { "--:|" });
    let mut text = format!("| {} |\n|{}\n", head.join(" | "), rules.collect::<String>());
    for row in rows {
        text += &format!("| {} |\n", row.join(" | "));
    }
    text
}

/// Formats an HTML table.
pub fn html(head: &[String], rows: &[Vec<String>]) -> String {
    let escape = |row: &Vec<String>| row.iter().map(|cell| page::escape_html(cell)).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(escape).collect();
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    page::table(&head, &rows)
}
