// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Outcome of a job: output, results and counts of its test, and kernel splats on its console.
//!
//! An oops or a panic always fails the job. With `--debug-kernel`, any splat fails it: lockdep
//! (`=====` above a title), sleep in atomic context, list corruption, poison and red-zone reports,
//! RCU stalls, `WARNING:`.

use std::{collections::BTreeMap, path::PathBuf};

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
    command::{CommandError, indent, last_lines},
    host::{
        guest_init::ended_with_success,
        hold::HoldError,
        job::{JobReport, REPORT_PREFIX, ReportError, TestEnding},
    },
    jobs::{
        counts::{self, CountError, SegmentLine},
        matrix::PlannedJob,
        program_run::ProgramRun,
        work::Work,
    },
    options::Rodata,
};

#[derive(Debug, Error)]
pub enum JobError {
    #[error(transparent)]
    Command(#[from] CommandError),
    /// Crash of the host kernel, or splat of a checker of the debug kernel, in host or guest.
    #[error("the {machine} kernel {event}; console: {console}\n{splat}")]
    Splat { machine: &'static str, event: &'static str, console: PathBuf, splat: String },
    #[error("the kernel has no rodata={0}: set another --rodata")]
    UnknownRodata(Rodata),
    #[error(
        "the kernel does not know its parameter {0}: its configuration lacks the feature, or --append is wrong"
    )]
    UnknownParameter(String),
    #[error("the host ended without a report of PID 1; console: {console}\n{tail}")]
    NoReport { console: PathBuf, tail: String },
    #[error("cannot read the report of PID 1; console: {console}")]
    Report {
        console: PathBuf,
        #[source]
        source: ReportError,
    },
    /// Failure of the test: the reason, and the end of the test's output.
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
    #[error(transparent)]
    Hold(#[from] HoldError),
    /// Failure of a job that another process ran.
    #[error("{0}")]
    Recorded(String),
    #[error("the job did not run to its end: continue the run with --resume")]
    NotEnded,
}

impl JobError {
    /// Reports whether the kernel did not boot.
    pub const fn is_failed_boot(&self) -> bool {
        matches!(self, Self::NoReport { .. })
    }
}

/// Outcome of a job whose boot completed.
#[derive(Debug)]
pub struct JobOutcome {
    pub report: JobReport,
    pub segments: Vec<SegmentLine>,
    /// SHA-256 of the programs that made the results, by their names in records. The lab adds them,
    /// because the emulated host would spend time on them and does not see the plugin.
    pub programs: BTreeMap<String, String>,
}

impl JobOutcome {
    /// Returns the records of the test, with the counts of each phase and the digests of the
    /// programs.
    pub fn records(&self, job: &PlannedJob) -> Result<Vec<Record>, JobError> {
        let mut records = self.records_with_counts(job)?;
        for record in &mut records {
            record.programs.clone_from(&self.programs);
        }
        Ok(records)
    }

    fn records_with_counts(&self, job: &PlannedJob) -> Result<Vec<Record>, JobError> {
        if let Some(run) = job.work.program() {
            return self.program_records(run);
        }
        let ns = self.passed_duration()?;
        if !matches!(job.work, Work::KernelTest(_)) {
            let mut records = read_records(&self.report.results).map_err(JobError::Results)?;
            counts::merge_counts(&self.segments, &mut records)?;
            return Ok(records);
        }
        // PID 1 describes the host, because the kernel's test does not.
        let host = self.report.host.clone().unwrap_or_default();
        let mut records = page_table_records(&self.report.stdout).map_err(JobError::Log)?;
        for record in &mut records {
            record.host = host.clone();
            record.config.seed = job.job.seed;
        }
        if let Some(first) = records.first() {
            let mut whole = [Record { phase: Phase::WholeRun, ns, ..first.clone() }];
            counts::merge_counts(&self.segments, &mut whole)?;
            records.extend(whole);
        }
        Ok(records)
    }

    /// Returns the records of a user's program: its steps, and the whole run.
    fn program_records(&self, run: &ProgramRun) -> Result<Vec<Record>, JobError> {
        self.passed_duration()?;
        if run.is_in_guest() && !ended_with_success(&self.report.stdout) {
            return Err(self.test_error("did not end in the guest with exit code 0".to_owned()));
        }
        let head = run.record_head(self.report.host.clone().unwrap_or_default());
        Ok(counts::program_records(&self.segments, &head)?)
    }

    /// Returns the duration of the test if it succeeded.
    pub fn passed_duration(&self) -> Result<Nanoseconds, JobError> {
        match &self.report.ending {
            TestEnding::Exited { code: 0, ns } => Ok(*ns),
            other => Err(self.test_error(describe_ending(other))),
        }
    }

    /// Returns the error of a failed test, with the end of its output.
    pub fn test_error(&self, reason: String) -> JobError {
        let JobReport { stdout, stderr, .. } = &self.report;
        let lines: Vec<&str> = stdout.lines().chain(stderr.lines()).collect();
        JobError::Test(reason, last_lines(&lines))
    }
}

/// Formats an ending as the predicate of "the test".
pub fn describe_ending(ending: &TestEnding) -> String {
    match ending {
        TestEnding::Exited { code, .. } => format!("exited with code {code}"),
        TestEnding::Killed { signal } => format!("was killed by signal {signal}"),
        TestEnding::Deadline { seconds } => {
            format!("exceeded its deadline of {seconds} s virtual time")
        }
        TestEnding::PoolTooSmall { page_size, required_pages, available_pages } => format!(
            "requires {required_pages} huge pages of {}, the emulated host has {available_pages}: \
             increase --host-memory",
            Bytes(*page_size)
        ),
        TestEnding::InitFailed { error } => format!("could not be started: {error}"),
    }
}

const OOPS_MESSAGES: [&str; 4] = [
    "Kernel panic - not syncing",
    "Internal error: Oops",
    "Unable to handle kernel ",
    "kernel BUG at ",
];

/// Messages of debug checkers.
const SPLAT_MESSAGES: [&str; 14] = [
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

/// Returns the first of these kernel parameters that the kernel does not know, as Linux reports since 5.14.
pub fn find_unknown_parameter(console: &str, parameters: &str) -> Option<String> {
    let (unknown, _) = console.lines().find_map(|line| {
        line.split_once("Unknown kernel command line parameters \"")?.1.split_once('"')
    })?;
    let is_unknown = |parameter: &&str| unknown.split_whitespace().any(|word| word == *parameter);
    parameters.split_whitespace().find(is_unknown).map(str::to_owned)
}

/// Returns the first oops or panic with the lines after it.
pub fn find_oops(console: &str) -> Option<String> {
    find_with_context(console, |line| OOPS_MESSAGES.iter().any(|word| line.contains(word)))
}

/// Returns the first splat of any kind with the lines after it.
pub fn find_splat(console: &str) -> Option<String> {
    find_with_context(console, |line| {
        OOPS_MESSAGES.iter().chain(&SPLAT_MESSAGES).any(|word| line.contains(word))
            || is_separator(line)
    })
}

/// Reports whether a line is the row of `=` that begins a lockdep report.
fn is_separator(line: &str) -> bool {
    let text = line.rsplit(']').next().unwrap_or(line).trim();
    text.len() >= 20 && text.bytes().all(|byte| byte == b'=')
}

fn find_with_context(console: &str, matches: impl Fn(&str) -> bool) -> Option<String> {
    // The report of PID 1 contains the output of the test, such as a guest's console.
    let lines = console.lines().filter(|line| !line.starts_with(REPORT_PREFIX));
    let mut lines = lines.map(|line| line.trim_end_matches('\r'));
    let first = lines.find(|line| matches(line))?;
    let shown: Vec<&str> = std::iter::once(first).chain(lines.take(19)).collect();
    Some(indent(&shown))
}

#[cfg(test)]
mod tests {
    use granule_report::results::record_lines;
    use granule_types::{mark, record::SCHEMA};

    use super::*;
    use crate::{
        host::job::send_report,
        jobs::matrix::{self, tests::options},
        values::PageSize,
    };

    #[test]
    fn records_have_the_digests_of_the_programs() {
        let job = matrix::jobs(&options("lab -s 4k"), PageSize::Kib4, &[]).remove(0);
        let record = Record { schema: SCHEMA.to_owned(), ..Record::default() };
        let outcome = JobOutcome {
            report: JobReport {
                ending: TestEnding::Exited { code: 0, ns: Nanoseconds(1) },
                host: None,
                stdout: String::new(),
                stderr: String::new(),
                results: record_lines(&[record]).unwrap(),
            },
            segments: vec![SegmentLine {
                mark: mark::immediate(Phase::Create),
                ..Default::default()
            }],
            programs: [("granule".to_owned(), "00".repeat(32))].into(),
        };

        let records = outcome.records(&job).unwrap();

        assert_eq!(records[0].programs, outcome.programs);
    }

    #[test]
    fn a_parameter_that_the_kernel_does_not_know_is_found() {
        let console = "[    0.000000] Unknown kernel command line parameters \"skew_tick=1 \
                       direct_map_pool=2M\", will be passed to user space.\n";

        let find = |parameters| find_unknown_parameter(console, parameters);

        assert_eq!(find("rodata=on direct_map_pool=2M").as_deref(), Some("direct_map_pool=2M"));
        assert_eq!(find("rodata=on direct_map_pool=4M"), None);
        assert_eq!(find_unknown_parameter("[    0.0] Booting\n", "a=1"), None);
    }

    #[test]
    fn a_normal_boot_has_no_splat() {
        let console = "[    0.000000] Booting Linux on physical CPU 0x0\r\n\
                       [    0.000000] Spectre-v4 mitigation disabled by command-line option\r\n\
                       [    0.063046] kvm [1]: Hyp mode initialized successfully\r\n";

        assert_eq!(find_splat(console), None);
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

            let found = find_splat(&console).unwrap();

            assert!(found.contains(line) && found.contains("more"), "{line}");
            assert!(!found.contains("fine"));
        }
    }

    #[test]
    fn a_crash_of_a_guest_in_the_report_is_not_one_of_the_host() {
        let mut console = b"[ 0.5] fine".to_vec();
        let report = JobReport {
            ending: TestEnding::Killed { signal: 9 },
            host: None,
            stdout: "[ 1.0] Kernel panic - not syncing: x\n".to_owned(),
            stderr: String::new(),
            results: String::new(),
        };
        send_report(&mut console, &report).unwrap();
        let mut console = String::from_utf8(console).unwrap();

        assert_eq!((find_oops(&console), find_splat(&console)), (None, None));
        console += "[ 2.0] Kernel panic - not syncing: y\n";
        assert!(find_oops(&console).unwrap().contains("syncing: y"));
    }

    #[test]
    fn a_warning_is_not_an_oops() {
        assert_eq!(find_oops("WARNING: x"), None);
        assert!(find_oops("[ 1.0] Kernel panic - not syncing: Attempted to kill init!").is_some());
    }
}
