// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Protocol between the lab and PID 1: a file with the job of one boot, and a console line with the
//! report of PID 1.
//!
//! The serial console is the only channel that every kernel and emulator supports, and kernel
//! messages appear on it too. PID 1 sends its report at the end, as one line with a checksum that
//! detects lost and inserted bytes:
//!
//! ```text
//! @@granule report <SHA-256 of the JSON in hexadecimal> <the report as JSON>
//! ```
//!
//! PID 1 lowers the console log level while it sends the line. If a kernel message appears
//! nevertheless, the checksum does not match.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use granule_types::{record::HostInfo, units::Nanoseconds};
use rand_xoshiro::{
    SplitMix64,
    rand_core::{Rng as _, SeedableRng as _},
};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{
    host::{expect::Exchange, zap::Zap},
    shell::sha256,
};

/// Path of the job in the initramfs.
pub const JOB_PATH: &str = "/job.json";
/// Path in the initramfs of the facts about the host that PID 1 cannot detect.
pub const FACTS_PATH: &str = "/facts.json";
/// Path of the results file in the emulated host.
pub const RESULTS_PATH: &str = "/tmp/results.jsonl";
/// Path of a test from the kernel tree in the initramfs.
pub const KERNEL_TEST_PATH: &str = "/test";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    pub argv: Vec<String>,
    /// Number of huge pages to reserve, by page size in bytes.
    pub pools: BTreeMap<u64, u64>,
    /// Files below `/sys` and the values to write to them.
    pub settings: BTreeMap<String, String>,
    /// Seed of the schedule (see [`CpuSchedule`]); 0 skips it.
    pub seed: u64,
    /// Indicates that PID 1 executes marks before and after the program.
    #[serde(rename = "foreign")]
    pub has_unmarked_program: bool,
    /// Work of PID 1 that replaces the program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_work: Option<OwnWork>,
    /// Script for standard input and output of the test; if empty, the test has no standard input.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expect: Vec<Exchange>,
    /// Virtual seconds after which the test is killed.
    pub deadline_seconds: u64,
}

/// Work that PID 1 does itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OwnWork {
    /// Reports the kernel's page tables.
    ReportTables {
        /// Indicates that the load on the page cache runs before.
        loads_page_cache: bool,
    },
    /// Removes memory from its page tables, between marks.
    Zap(Zap),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobReport {
    pub ending: TestEnding,
    /// Properties of the emulated host; `None` if PID 1 could not detect them.
    pub host: Option<HostInfo>,
    pub stdout: String,
    pub stderr: String,
    /// Content of the file at [`RESULTS_PATH`].
    pub results: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TestEnding {
    Exited {
        code: i32,
        /// Duration of the test.
        ns: Nanoseconds,
    },
    Killed {
        signal: i32,
    },
    Deadline {
        seconds: u64,
    },
    /// Ending of a job that requires more huge pages than the host has.
    PoolTooSmall {
        /// Page size in bytes.
        page_size: u64,
        required_pages: u64,
        available_pages: u64,
    },
    /// Failure of PID 1.
    InitFailed {
        error: String,
    },
}

/// Order in which PID 1 runs on the CPUs before the test, which determines the schedule of a seed.
///
/// PID 1 runs on every CPU once; order and spin counts depend on the seed. For a new thread, the
/// scheduler prefers the CPU that became idle last (`find_idlest_group_cpu()`). Another seed thus
/// places the vCPUs on other CPUs, and ticks occur at other times.
#[derive(Debug, Clone)]
pub struct CpuSchedule {
    generator: SplitMix64,
    remaining_cpus: Vec<usize>,
}

impl CpuSchedule {
    pub fn new(seed: u64, cpus: &[usize]) -> Self {
        Self { generator: SplitMix64::seed_from_u64(seed), remaining_cpus: cpus.to_vec() }
    }
}

/// Yields a CPU and the number of loop iterations to spin there, below 2^18.
impl Iterator for CpuSchedule {
    type Item = (usize, u64);

    fn next(&mut self) -> Option<Self::Item> {
        let choices = self.remaining_cpus.len() as u64;
        if choices == 0 {
            return None;
        }
        let chosen = usize::try_from(self.generator.next_u64() % choices).unwrap_or(0);
        let spins = self.generator.next_u64() >> (64 - 18);
        Some((self.remaining_cpus.swap_remove(chosen), spins))
    }
}

/// Start of the line with the report of PID 1.
pub const REPORT_PREFIX: &str = "@@granule report ";

#[derive(Debug, Error)]
pub enum ReportError {
    #[error("the console log ends in the report of PID 1: the host crashed")]
    Truncated,
    #[error("the report of PID 1 is damaged: a kernel message interrupted it")]
    Damaged,
    #[error("the emulated host's `granule` has another version: run scripts/lab to build it")]
    Version(#[source] serde_json::Error),
}

pub fn send_report(to: &mut impl Write, report: &JobReport) -> io::Result<()> {
    let json = serde_json::to_string(report)?;
    writeln!(to, "\n{REPORT_PREFIX}{} {json}", sha256(json.as_bytes()))?;
    to.flush()
}

pub fn receive_report(console: &str) -> Result<Option<JobReport>, ReportError> {
    let mut lines = console.split_inclusive('\n');
    let Some(line) = lines.find_map(|line| line.strip_prefix(REPORT_PREFIX)) else {
        return Ok(None);
    };
    let line = line.strip_suffix('\n').ok_or(ReportError::Truncated)?;
    let (sum, json) = line.trim_end_matches('\r').split_once(' ').ok_or(ReportError::Damaged)?;
    if sha256(json.as_bytes()) != sum {
        return Err(ReportError::Damaged);
    }
    serde_json::from_str(json).map(Some).map_err(ReportError::Version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_visits_every_cpu_once_in_an_order_that_depends_on_the_seed() {
        let all: Vec<usize> = (0..32).step_by(2).collect();
        let order =
            |seed| -> Vec<usize> { CpuSchedule::new(seed, &all).map(|(cpu, _)| cpu).collect() };
        let orders: std::collections::BTreeSet<_> = (1..32).map(order).collect();

        let mut cpus = order(7);
        cpus.sort_unstable();

        assert_eq!(cpus, all);
        assert_eq!(order(7), order(7));
        assert_eq!(orders.len(), 31);
        let first = CpuSchedule::new(7, &[0, 2, 4, 6]).collect::<Vec<_>>();
        assert_eq!(
            first,
            [(6, 4400), (0, 152_811), (4, 65_386), (2, 86_003)],
            "recorded results depend on this sequence"
        );
        assert!(CpuSchedule::new(7, &all).all(|(_, spins)| spins < 1 << 18));
    }

    fn sample_report() -> JobReport {
        JobReport {
            ending: TestEnding::Killed { signal: 9 },
            host: Some(HostInfo::default()),
            stdout: "one\n@@granule report x {}\n".to_owned(),
            stderr: String::new(),
            results: "{\"a\":1}\n{\"b\":2}\n".to_owned(),
        }
    }

    /// Returns the log of a serial console, with CR LF line ends.
    fn console_log() -> String {
        let mut sent = b"[    0.0] Booting Linux\n".to_vec();
        send_report(&mut sent, &sample_report()).unwrap();
        String::from_utf8(sent).unwrap().replace('\n', "\r\n")
    }

    #[test]
    fn a_report_is_received_as_sent() {
        assert_eq!(receive_report(&console_log()).unwrap(), Some(sample_report()));
        assert_eq!(receive_report("Kernel panic - not syncing\r\n").unwrap(), None);
    }

    #[test]
    fn a_truncated_or_interrupted_report_is_an_error() {
        let whole = console_log();
        let starts = whole.find(REPORT_PREFIX).unwrap() + REPORT_PREFIX.len();
        for cut in starts..whole.len() - 2 {
            assert!(receive_report(&whole[..cut]).is_err(), "cut at {cut}");
        }

        let interrupted = whole.replace("one", "o[    1.0] BUG: x\r\nne");

        assert!(matches!(receive_report(&interrupted), Err(ReportError::Damaged)));
    }
}
