// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs the page-table test on each candidate, in passes over all of them, so that a disturbance by
//! other load affects few runs of each.

use std::{
    error::Error,
    fs,
    time::{Duration, Instant},
};

use granule_pgtable_test::{
    harness::{self, RunEvent},
    machine::{Machine, MachineError},
};
use granule_types::{
    error_text,
    phase::Phase,
    record::{Record, ResidentPages},
    units::{Bytes, Nanoseconds},
};
use granule_vmm::memory::kib_field;

use super::candidates::{Candidate, LeftOut};
use crate::bench::{Args, PreparedRun};

/// Gauge of `create` with the time that the host took to populate the memory before it.
const POPULATE_GAUGE: &str = "populate_ns";

/// Figures of one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurement {
    /// Size of the memory under test.
    pub memory: Bytes,
    /// Time to populate the memory before the guest starts; zero without prefault.
    pub populate: Nanoseconds,
    /// Time of the first touch by the vCPUs.
    pub first_touch: Nanoseconds,
    /// Time of the calls that start and stop dirty logging.
    pub switch_logging: Nanoseconds,
    /// Time of the rounds under dirty logging.
    pub rounds: Nanoseconds,
    /// Number of guest writes in the rounds.
    pub writes: u64,
    /// Page tables of the memory in host and stage 2 after the first touch.
    pub table_bytes: Option<Bytes>,
    pub resident_pages: Option<ResidentPages>,
}

impl Measurement {
    /// Combines the records of a run; `None` if it lacks the phases of a migration.
    fn new(records: &[Record], populate: Nanoseconds, table_bytes: Option<Bytes>) -> Option<Self> {
        let of = |phase| records.iter().filter(move |record| record.phase == phase);
        let create = of(Phase::Create).next()?;
        let sum = |name: &str| {
            let values = of(Phase::Round).map(|round| {
                round.gauges.get(name).or_else(|| round.events.get(name)).copied().unwrap_or(0)
            });
            values.sum::<u64>()
        };
        let writes = sum("guest_writes");
        let switches = of(Phase::LoggingOn).chain(of(Phase::LoggingOff));
        (writes > 0).then(|| Self {
            memory: create.config.memory,
            populate,
            first_touch: create.ns,
            switch_logging: Nanoseconds(switches.map(|record| record.ns.0).sum()),
            rounds: Nanoseconds(sum("round_ns")),
            writes,
            table_bytes,
            resident_pages: create.resident_pages.clone(),
        })
    }
}

/// Results of a sweep.
#[derive(Debug, Default)]
pub struct SweepResult {
    pub measurements: Vec<(Candidate, Measurement)>,
    pub records: Vec<Record>,
    /// Candidates that could not be measured.
    pub left_out: Vec<LeftOut>,
    /// Warning about times that this machine's KVM distorts.
    pub warning: Option<String>,
    /// Number of complete passes.
    pub passes: u32,
}

/// Limits of a sweep.
#[derive(Debug, Clone, Copy)]
pub struct SweepLimits {
    pub passes: u32,
    /// Time after which no run starts.
    pub time: Duration,
}

/// Measures the candidates. `common` holds arguments of `granule bench` for all of them, and
/// `progress` is called before each run with its pass and candidate.
///
/// # Errors
/// A check of the test failed, or no candidate could be measured.
pub fn sweep(
    candidates: &[Candidate],
    common: &[String],
    limits: SweepLimits,
    mut progress: impl FnMut(u32, &Candidate),
) -> Result<SweepResult, Box<dyn Error>> {
    let mut result = SweepResult::default();
    let start = Instant::now();
    let mut durations = vec![Some(Duration::ZERO); candidates.len()];
    for pass in 0..limits.passes {
        for (candidate, duration) in candidates.iter().zip(&mut durations) {
            let Some(expected) = *duration else { continue };
            if start.elapsed() + expected > limits.time {
                if pass == 0 {
                    let seconds = limits.time.as_secs();
                    let reason = format!(
                        "the time limit of {seconds} s was over; raise --time-limit or reduce -b"
                    );
                    result.left_out.push(LeftOut::new(candidate, reason));
                    *duration = None;
                    continue;
                }
                return Ok(result);
            }
            progress(pass, candidate);
            let begin = Instant::now();
            *duration = match prepare(candidate, common) {
                Ok(prepared) => {
                    result.measure(candidate, pass, prepared)?;
                    Some(begin.elapsed())
                }
                // The host lacks a resource of this candidate only.
                Err(error) => {
                    result.left_out.push(LeftOut::new(candidate, error_text(error.as_ref())));
                    None
                }
            };
        }
        if result.measurements.is_empty() {
            let first = result.left_out.first().map(|one| format!("{}: {}", one.what, one.reason));
            return Err(first.unwrap_or_else(|| "no candidate".to_owned()).into());
        }
        result.passes += 1;
    }
    Ok(result)
}

/// Creates the machine of a candidate. Memory that was free for long may have to be compacted, or to
/// be backed by a hypervisor below, so it is populated and freed before each run.
fn prepare(candidate: &Candidate, common: &[String]) -> Result<PreparedRun, Box<dyn Error>> {
    let parse = |one: &Candidate| Args::from_arguments(&one.bench_arguments(common));
    if !candidate.prefault {
        // An error would occur again below, unless only the population fails.
        let populated = parse(&Candidate { prefault: true, ..*candidate })?.prepare();
        drop(populated);
    }
    parse(candidate)?.prepare()
}

impl SweepResult {
    fn measure(
        &mut self,
        candidate: &Candidate,
        pass: u32,
        prepared: PreparedRun,
    ) -> Result<(), Box<dyn Error>> {
        let PreparedRun { mut machine, plan, warning } = prepared;
        self.warning = self.warning.take().or(warning);
        let populate = match candidate.prefault {
            true => time_populate(machine.as_mut())?,
            false => Nanoseconds(0),
        };
        let tables_before = if candidate.prefault { None } else { table_bytes() };
        let mut tables = None;
        let mut records = Vec::new();
        harness::run(machine.as_mut(), &plan, &mut |event| {
            let RunEvent::PhaseComplete(record) = event else { return Ok(()) };
            let mut record = record.clone();
            record.config.iteration = pass;
            if record.phase == Phase::Create {
                tables = table_bytes();
                record.gauges.insert(POPULATE_GAUGE.to_owned(), populate.0);
            }
            records.push(record);
            Ok(())
        })
        .map_err(|error| format!("{candidate}: {}", error_text(&error)))?;
        let table_bytes = tables_before
            .zip(tables)
            .map(|(before, after)| Bytes(after.0.saturating_sub(before.0)));
        let measurement = Measurement::new(&records, populate, table_bytes)
            .ok_or_else(|| format!("{candidate}: the guest wrote nothing under dirty logging"))?;
        self.measurements.push((*candidate, measurement));
        self.records.append(&mut records);
        Ok(())
    }
}

/// Drops the memory of a prefaulted machine and returns the time to populate it again.
fn time_populate(machine: &mut dyn Machine) -> Result<Nanoseconds, MachineError> {
    machine.drop_backing()?;
    let start = Instant::now();
    machine.restore_backing()?;
    Ok(Nanoseconds(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)))
}

/// Returns the size of this process's page tables plus that of all stage-2 tables of the host.
fn table_bytes() -> Option<Bytes> {
    let field = |path: &str, name: &str| kib_field(&fs::read_to_string(path).ok()?, name);
    let host = field("/proc/self/status", "VmPTE")?;
    let stage2 = field("/proc/meminfo", "SecPageTables").unwrap_or(Bytes(0));
    Some(Bytes(host.0 + stage2.0))
}

#[cfg(test)]
mod tests {
    use granule_types::record::RunConfig;

    use super::*;

    fn record(phase: Phase, ns: u64) -> Record {
        let config = RunConfig { memory: Bytes::mib(64), ..RunConfig::default() };
        Record { phase, ns: Nanoseconds(ns), config, ..Record::default() }
    }

    fn round(writes: u64, ns: u64) -> Record {
        let mut round = record(Phase::Round, 1);
        round.events.insert("guest_writes".to_owned(), writes);
        round.gauges.insert("round_ns".to_owned(), ns);
        round
    }

    #[test]
    fn rounds_and_switches_of_logging_are_summed() {
        let records = [
            record(Phase::Create, 700),
            record(Phase::LoggingOn, 20),
            round(10, 1000),
            round(30, 3000),
            record(Phase::Stop, 5),
            record(Phase::LoggingOff, 3),
        ];

        let found = Measurement::new(&records, Nanoseconds(9), Some(Bytes(4096))).unwrap();

        assert_eq!((found.first_touch, found.switch_logging), (Nanoseconds(700), Nanoseconds(23)));
        assert_eq!((found.rounds, found.writes), (Nanoseconds(4000), 40));
        assert_eq!((found.populate, found.memory), (Nanoseconds(9), Bytes::mib(64)));
    }

    #[test]
    fn a_run_without_writes_or_without_create_is_no_measurement() {
        let measure = |records: &[Record]| Measurement::new(records, Nanoseconds(0), None);

        assert_eq!(measure(&[record(Phase::Create, 1), round(0, 5)]), None);
        assert_eq!(measure(&[round(4, 5)]), None);
    }

    #[test]
    fn a_host_without_the_first_candidates_resource_reports_it() {
        let backing = "anonymous_hugetlb_8kb".parse().unwrap();
        let logging = crate::advise::candidates::LoggingMode {
            dirty_log: Default::default(),
            eager_split: None,
        };
        let candidate = Candidate { backing, prefault: false, logging };
        let limits = SweepLimits { passes: 1, time: Duration::from_secs(60) };

        let error = sweep(&[candidate], &[], limits, |_, _| {}).unwrap_err().to_string();

        assert!(error.starts_with("anonymous_hugetlb_8kb, prefault off, plain: "), "{error}");
    }
}
