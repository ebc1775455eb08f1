// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Report of `granule lab zap`: what the removal of memory costs on each kernel.

use std::collections::BTreeMap;

use granule_report::render::{group_digits, page};
use granule_types::{mark, record::HostInfo, units::pluralize};
use serde::Serialize;

use crate::{
    error::LabError,
    host::zap::Zap,
    jobs::{
        JobResults,
        counts::{CountError, SegmentLine},
        matrix::PlannedJob,
        outcome::{JobError, JobOutcome},
        run_directory::RunDirectory,
        work::Work,
    },
    report::{
        RunInfo, RunStatus,
        count_table::{
            CountColumn, Records, TLBI_BROADCAST, TLBI_LOCAL, column_sums, failure_text, failures,
            html, markdown, rows, tlbi, write_records,
        },
        publish,
    },
};

/// Identifier of the format of a record.
const SCHEMA: &str = "granule.zap/1";
const REMARK: &str = "Counts of the calls, user and kernel. TLBI broadcast includes VAE1IS, VALE1IS \
                      and ranges.";
const NAMES: [&str; 2] = ["call", "kernel"];

const COLUMNS: [CountColumn; 9] = [
    ("instructions", |name| name == "instructions"),
    ("stores", |name| name == "stores"),
    TLBI_LOCAL,
    TLBI_BROADCAST,
    ("VAE1IS", |name| name == "TLBI VAE1IS"),
    ("VALE1IS", |name| name == "TLBI VALE1IS"),
    ("ranges", |name| tlbi(name).is_some_and(|operation| operation.starts_with('R'))),
    ("DSB ISH", |name| name == "DSB ISH"),
    ("DSB ISHST", |name| name == "DSB ISHST"),
];

/// Record of one removal, a line of `results.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct ZapRecord {
    schema: &'static str,
    host: HostInfo,
    #[serde(flatten)]
    zap: Zap,
    /// Counts between the marks.
    counters: BTreeMap<String, u64>,
}

impl ZapRecord {
    fn from_outcome(job: &PlannedJob, outcome: &JobOutcome) -> Result<Self, JobError> {
        outcome.passed_duration()?;
        let Work::Zap(zap) = job.work else {
            return Err(outcome.test_error("removes no memory".to_owned()));
        };
        Ok(Self {
            schema: SCHEMA,
            host: outcome.report.host.clone().unwrap_or_default(),
            zap,
            counters: step_counts(&outcome.segments)?,
        })
    }

    fn cells(&self) -> Vec<String> {
        let sums = column_sums(&COLUMNS, &self.counters);
        sums.map(|sum| group_digits(&sum.to_string())).into()
    }
}

/// Returns the counts of the only step.
fn step_counts(segments: &[SegmentLine]) -> Result<BTreeMap<String, u64>, CountError> {
    let steps = segments.iter().filter(|segment| mark::step_number(segment.mark).is_some());
    match steps.collect::<Vec<_>>().as_slice() {
        [step] => Ok(step.counts.clone()),
        steps => Err(CountError::NoStep(steps.len())),
    }
}

/// Publishes the report, and writes the records of each kernel. A failed job fails the run.
pub fn report(
    run_directory: &RunDirectory,
    run: RunInfo<'_>,
    results: JobResults,
) -> Result<RunStatus, LabError> {
    let zaps = write_records(run_directory, run, results, ZapRecord::from_outcome)?;
    let (text, html, status) = render(run, &zaps);
    publish(run_directory, &text, &html)?;
    Ok(status)
}

/// Returns the report in both formats, and the status of the run.
fn render(run: RunInfo<'_>, zaps: &Records<ZapRecord>) -> (String, String, RunStatus) {
    let (rows, failures) = (rows(run, zaps, ZapRecord::cells), failures(run, zaps));
    let status = if failures.is_empty() { RunStatus::Passed } else { RunStatus::Failed };
    let headings = NAMES.into_iter().chain(COLUMNS.map(|(heading, _)| heading));
    let head: Vec<_> = headings.map(str::to_owned).collect();
    let mut text = String::new();
    let class = if status == RunStatus::Passed { "" } else { "regression" };
    let all = pluralize(run.jobs.len() * run.kernels.len(), "job");
    let mut body = page::verdict(class, &format!("{all}, {} failed.", failures.len()));
    if !rows.is_empty() {
        text += &format!("{}\n{REMARK}\n", markdown(&head, &rows));
        body += &format!("<p>{REMARK}</p>\n{}", html(&head, &rows));
    }
    text += &failure_text(&failures);
    (text, run.page("Removal of memory", body, &failures), status)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        jobs::matrix::{self, tests::options},
        kernel::Kernel,
        values::PageSize,
    };

    #[test]
    fn the_report_has_a_row_for_each_call_and_kernel() {
        let jobs = &matrix::jobs(&options("zap --order 9 --call dontneed"), PageSize::Kib4, &[]);
        let kernels = ["base", "series"].map(|name| Kernel::placeholder(name.into(), "I".into()));
        let run = RunInfo { kernels: &kernels, jobs, emulator: "QEMU 7.2" };
        let Work::Zap(zap) = jobs[0].work else { panic!("{:?}", jobs[0]) };
        let counters = [("instructions", 12_345), ("TLBI VALE1IS", 6), ("TLBI RVAE1IS", 4)];
        let record = ZapRecord {
            schema: SCHEMA,
            host: HostInfo::default(),
            zap,
            counters: counters.map(|(name, count)| (name.to_owned(), count)).into(),
        };

        let (text, html, status) = render(run, &vec![vec![Ok(record), Err("no boot".to_owned())]]);

        let row = "| dontneed-1G-order-9 | base | 12,345 | 0 | 0 | 10 | 0 | 6 | 4 | 0 | 0 |";
        assert!(text.contains(row), "{text}");
        assert!(text.contains("dontneed-1G-order-9 on series: no boot"), "{text}");
        assert!(html.contains("2 jobs, 1 failed."));
        assert_eq!(status, RunStatus::Failed);
    }

    #[test]
    fn the_counts_are_those_of_the_only_step() {
        let segment = |mark, count| SegmentLine {
            mark,
            counts: [("stores".to_owned(), count)].into(),
            ..SegmentLine::default()
        };
        let segments = [segment(0x60, 1), segment(0x78, 2), segment(0x60, 4)];

        assert_eq!(step_counts(&segments).unwrap()["stores"], 2);
        assert!(matches!(step_counts(&segments[..1]), Err(CountError::NoStep(_))));
    }
}
