// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Outcome of a job: ending, output, results and counts of its test; and detection of kernel splats
//! on the console.
//!
//! An oops or a panic always fails the job. With `--debug-kernel`, any splat of a debug checker
//! does too: lockdep (`=====` above a title), sleep in atomic context, list corruption, poison and
//! red-zone reports, RCU stalls, `WARNING:`.

use std::path::PathBuf;

use granule_report::{
    input::page_table_records,
    results::{FileError, read_records},
};
use granule_types::{
    phase::Phase,
    record::Record,
    units::{Bytes, Nanoseconds},
};
use thiserror::Error;

use crate::{
    command::{CommandError, indented, last_lines},
    host::job::{Ending, JobReport, ReportError},
    jobs::{
        counts::{self, CountError, CountSegment},
        matrix::PlannedJob,
    },
};

#[derive(Debug, Error)]
pub enum JobError {
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The host kernel crashed, or a checker of the debug kernel printed a splat.
    #[error("the host kernel {event}; console: {console}\n{splat}")]
    Splat { event: &'static str, console: PathBuf, splat: String },
    #[error("the host ended without a report of PID 1; console: {console}\n{tail}")]
    NoEnding { console: PathBuf, tail: String },
    #[error("console: {console}")]
    Report {
        console: PathBuf,
        #[source]
        source: ReportError,
    },
    /// The test failed: the reason, and the end of its output.
    #[error("the test {0}\n{1}")]
    Test(String, String),
    #[error("the statistics of `granule run` are invalid")]
    Statistics(#[source] serde_json::Error),
    #[error("the results of the test are invalid")]
    Results(#[source] FileError),
    #[error("the log of the kernel's test is invalid")]
    Log(#[source] FileError),
    #[error(transparent)]
    Counts(#[from] CountError),
}

/// Outcome of a job whose boot completed.
#[derive(Debug)]
pub struct JobOutcome {
    pub report: JobReport,
    pub segments: Vec<CountSegment>,
}

impl JobOutcome {
    /// Returns the records of the test, with the counts of each phase.
    pub fn records(&self, job: &PlannedJob) -> Result<Vec<Record>, JobError> {
        let ns = self.success()?;
        if !job.job.foreign {
            let mut records = read_records(&self.report.results).map_err(JobError::Results)?;
            counts::merge(&self.segments, &mut records)?;
            return Ok(records);
        }
        // The kernel's test does not describe its host, so the description is that of PID 1.
        let host = self.report.host.clone().unwrap_or_default();
        let mut records = page_table_records(&self.report.stdout).map_err(JobError::Log)?;
        for record in &mut records {
            record.host = host.clone();
            record.config.seed = job.job.seed;
        }
        if let Some(first) = records.first() {
            let mut whole = [Record { phase: Phase::Whole, ns, ..first.clone() }];
            counts::merge(&self.segments, &mut whole)?;
            records.extend(whole);
        }
        Ok(records)
    }

    /// Returns the duration of the test if it succeeded.
    pub fn success(&self) -> Result<Nanoseconds, JobError> {
        match &self.report.ending {
            Ending::Exited { code: 0, ns } => Ok(*ns),
            other => Err(self.failure(describe(other))),
        }
    }

    /// Returns the error for a test that failed for this reason.
    pub fn failure(&self, reason: String) -> JobError {
        let JobReport { stdout, stderr, .. } = &self.report;
        let lines: Vec<&str> = stdout.lines().chain(stderr.lines()).collect();
        JobError::Test(reason, last_lines(&lines))
    }
}

/// Formats an ending as the predicate of "the test".
pub fn describe(ending: &Ending) -> String {
    match ending {
        Ending::Exited { code, .. } => format!("exited with code {code}"),
        Ending::Killed { signal } => format!("was killed by signal {signal}"),
        Ending::Deadline { seconds } => {
            format!("exceeded its deadline of {seconds} s virtual time")
        }
        Ending::ShortPool { page, required, available } => format!(
            "requires {required} huge pages of {}, the emulated host has {available}: increase --memory",
            Bytes(*page)
        ),
        Ending::Init { error } => format!("could not be started: {error}"),
    }
}

const OOPSES: [&str; 4] = [
    "Kernel panic - not syncing",
    "Internal error: Oops",
    "Unable to handle kernel ",
    "kernel BUG at ",
];

/// Messages of debug checkers.
const SPLATS: [&str; 14] = [
    "BUG: ",
    "WARNING: ",
    "INFO: possible ",
    "INFO: task ",
    "INFO: rcu",
    "rcu: INFO: ",
    "detected stalls on CPUs",
    "detected stall on CPU",
    "suspicious RCU usage",
    "Call trace:",
    "corruption",
    "Poison overwritten",
    "Redzone overwritten",
    "inconsistent lock state",
];

/// Returns the first oops or panic with the lines after it.
pub fn oops(console: &str) -> Option<String> {
    find(console, |line| OOPSES.iter().any(|word| line.contains(word)))
}

/// Returns the first splat of any kind with the lines after it.
pub fn any_splat(console: &str) -> Option<String> {
    find(console, |line| {
        OOPSES.iter().chain(&SPLATS).any(|word| line.contains(word)) || is_separator(line)
    })
}

/// Reports whether a line is the row of `=` that begins a lockdep report.
fn is_separator(line: &str) -> bool {
    let text = line.rsplit(']').next().unwrap_or(line).trim();
    text.len() >= 20 && text.bytes().all(|byte| byte == b'=')
}

fn find(console: &str, matches: impl Fn(&str) -> bool) -> Option<String> {
    let mut lines = console.lines().map(|line| line.trim_end_matches('\r'));
    let first = lines.find(|line| matches(line))?;
    let shown: Vec<&str> = std::iter::once(first).chain(lines.take(19)).collect();
    Some(indented(&shown))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_normal_boot_has_no_splat() {
        let console = "[    0.000000] Booting Linux on physical CPU 0x0\r\n\
                       [    0.000000] Spectre-v4 mitigation disabled by command-line option\r\n\
                       [    0.063046] kvm [1]: Hyp mode initialized successfully\r\n";

        assert_eq!(any_splat(console), None);
    }

    #[test]
    fn a_splat_is_found_with_the_lines_after_it() {
        for line in [
            "[ 1.0] BUG: sleeping function called from invalid context at mm/slab.h:1",
            "[ 1.0] WARNING: CPU: 0 PID: 1 at arch/arm64/kvm/mmu.c:1",
            "[ 1.0] WARNING: possible circular locking dependency detected",
            "[ 1.0] list_add corruption. next->prev should be prev",
            "[ 1.0] rcu: INFO: rcu_sched self-detected stall on CPU",
            "[ 1.0] ======================================================",
            "[ 1.0] INFO: task granule:5 blocked for more than 120 seconds.",
        ] {
            let console = format!("[ 0.5] fine\n{line}\nmore\n");

            let found = any_splat(&console).unwrap();

            assert!(found.contains(line) && found.contains("more"), "{line}");
            assert!(!found.contains("fine"));
        }
    }

    #[test]
    fn a_warning_is_not_an_oops() {
        assert_eq!(oops("WARNING: x"), None);
        assert!(oops("[ 1.0] Kernel panic - not syncing: Attempted to kill init!").is_some());
    }
}
