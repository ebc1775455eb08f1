// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Samples: one phase of one run of any test. Every input is converted to samples.

use std::{borrow::Cow, collections::BTreeMap, fmt};

use serde::Serialize;
use serde_json::Value;

use crate::metric::count;
use granule_types::{
    backing::Backing,
    make_printable,
    phase::Phase,
    record::{GUEST_PROGRAM, HOST_PROGRAM, HostInfo, PROGRAM_OPTION, Record, ResidentPages},
    units::{Bytes, pluralize},
};

/// Names of engines whose inputs are logs or benchmark files without a host.
pub(crate) mod engine {
    pub const PAGE_TABLE_TEST: &str = "kvm_page_table_test";
    pub const BENCH_LINES: &str = "granule bench, its lines";
    pub const DIRTY_LOG_TEST: &str = "dirty_log_perf_test";
    pub const DEMAND_PAGING_TEST: &str = "demand_paging_test";
    pub const CRITERION: &str = "criterion";

    pub(super) const WITHOUT_HOST: [&str; 5] =
        [PAGE_TABLE_TEST, BENCH_LINES, DIRTY_LOG_TEST, DEMAND_PAGING_TEST, CRITERION];
}

/// Column of a sum of counters: its heading, and a predicate that selects the counters.
pub(crate) type CounterSum = (&'static str, fn(&str) -> bool);
pub(crate) const COUNTER_SUMS: [CounterSum; 4] = [
    ("guest aborts", |name| name == "guest_aborts"),
    ("DC lines", |name| name.starts_with("DC C")),
    ("IC", |name| name.starts_with("IC ")),
    ("TLBI", |name| name.starts_with("TLBI ")),
];

/// One phase of one run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Sample {
    /// Host; the default if the input does not describe it.
    pub(crate) host: HostInfo,
    /// Engine: `kvm`, `model`, or the name of another test.
    pub(crate) engine: String,
    /// SHA-256 of the known programs that made the result, by name.
    pub(crate) programs: BTreeMap<String, String>,
    pub(crate) setup: RunSetup,
    pub(crate) seed: u64,
    pub(crate) iteration: u32,
    /// Index of the invocation of the test on its side: that of a file, or of a part of a file.
    pub(crate) invocation: u32,
    /// Page sizes that backed the memory.
    pub(crate) resident_pages: Option<ResidentPages>,
    pub(crate) phase: AnyPhase,
    /// Time in nanoseconds; under emulation the work of all CPUs.
    pub(crate) ns: f64,
    /// Elapsed time of the emulated CPUs in nanoseconds, if it was measured.
    pub(crate) elapsed_ns: Option<f64>,
    /// Time of each vCPU in nanoseconds.
    pub(crate) vcpu_ns: Vec<f64>,
    /// Instructions and kernel functions that the emulator's plugin counted.
    pub(crate) counters: BTreeMap<String, u64>,
    /// Events of the host kernel.
    pub(crate) events: BTreeMap<String, u64>,
    /// Gauges at the end of the phase.
    pub(crate) gauges: BTreeMap<String, u64>,
}

/// Setup of a run without its engine. A value is absent if the input does not state it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub(crate) struct RunSetup {
    /// Name of another test or benchmark; empty for the page-table test.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub subject: String,
    /// Guest mode as the kernel's tests print it, with single spaces.
    pub mode: String,
    /// Requested backing.
    pub backing: Option<Backing>,
    pub memory: Option<Bytes>,
    pub vcpus: Option<u32>,
    /// Indicates that the host populated the memory before the first phase.
    pub prefault: bool,
    /// Further options that affect figures, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
}

impl RunSetup {
    /// Formats the setup for readers: `anonymous_thp, 64M, 16 vCPUs`.
    pub(crate) fn name(&self) -> String {
        let mut parts = Vec::new();
        if !self.subject.is_empty() {
            parts.push(self.subject.clone());
        }
        parts.extend(self.backing.map(|backing| backing.to_string()));
        parts.extend(self.memory.map(|memory| memory.to_string()));
        parts.extend(self.vcpus.map(|vcpus| pluralize(vcpus, "vCPU")));
        if self.prefault {
            parts.push("prefaulted".to_owned());
        }
        let option = |(name, value)| format!("{name}={value}");
        parts.extend(self.options.iter().map(option));
        parts.join(", ")
    }
}

/// Distance between the ranks of two phases, for the rounds of the first.
const RANKS_PER_PHASE: usize = 1 << 20;

/// Phase of the page-table test or of another test, ordered by execution.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default, Serialize)]
#[serde(transparent)]
pub(crate) struct AnyPhase {
    #[serde(skip)]
    rank: usize,
    name: Cow<'static, str>,
}

impl AnyPhase {
    /// Returns the phase at position `rank` of another test.
    pub(crate) const fn of_other_test(rank: usize, name: &'static str) -> Self {
        Self { rank: Phase::TABLE_ORDER.len() * RANKS_PER_PHASE + rank, name: Cow::Borrowed(name) }
    }

    /// Returns the phase of a record, with its round if it has one.
    fn of_record(record: &Record) -> Self {
        let phase = Self::from(record.phase);
        match record.round {
            None => phase,
            Some(round) => Self {
                rank: phase.rank
                    + usize::try_from(round)
                        .map_or(RANKS_PER_PHASE - 1, |n| n.min(RANKS_PER_PHASE - 1)),
                name: format!("{}-{round}", phase.name).into(),
            },
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Reports whether a name on the command line selects this phase: `round` selects every round.
    pub fn is_named(&self, name: &str) -> bool {
        let phase = Phase::TABLE_ORDER.get(self.rank / RANKS_PER_PHASE);
        self.name == name || phase.is_some_and(|phase| phase.name() == name)
    }

    /// Returns the phase to which a round belongs, and any other phase itself.
    pub fn without_round(&self) -> Self {
        match Phase::TABLE_ORDER.get(self.rank / RANKS_PER_PHASE) {
            Some(Phase::Round) => Phase::Round.into(),
            _ => self.clone(),
        }
    }
}

impl From<Phase> for AnyPhase {
    fn from(phase: Phase) -> Self {
        let at = Phase::TABLE_ORDER.iter().position(|&known| known == phase);
        Self {
            rank: at.unwrap_or(Phase::TABLE_ORDER.len()) * RANKS_PER_PHASE,
            name: Cow::Borrowed(phase.name()),
        }
    }
}

impl fmt::Display for AnyPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

impl Sample {
    /// Returns a count, or the sum over a class of instructions (see [`count`]).
    pub(crate) fn count(&self, name: &str) -> Option<u64> {
        count(&self.counters, [&self.events, &self.gauges], name)
    }

    /// Returns the sum of counters; `None` in a run without counters.
    pub(crate) fn counter_sum(&self, belongs: fn(&str) -> bool) -> Option<u64> {
        let counters = self.counters.iter().filter(|(name, _)| belongs(name));
        (!self.counters.is_empty()).then(|| counters.map(|(_, count)| count).sum())
    }

    /// Returns the time in nanoseconds: the elapsed time if `elapsed` is true and it was measured.
    pub(crate) fn time(&self, elapsed: bool) -> f64 {
        self.elapsed_ns.filter(|_| elapsed).unwrap_or(self.ns)
    }

    /// Reports whether the sample comes from an input that does not describe its host.
    pub(crate) fn is_without_host(&self) -> bool {
        engine::WITHOUT_HOST.contains(&self.engine.as_str()) && self.host == HostInfo::default()
    }
}

impl From<&Record> for Sample {
    fn from(record: &Record) -> Self {
        // Cannot fail: replacing characters in strings leaves the JSON of a record valid.
        let record: Record = serde_json::to_value(record)
            .and_then(|value| serde_json::from_value(make_value_printable(value)))
            .unwrap_or_default();
        let phase = AnyPhase::of_record(&record);
        let mut config = record.config;
        let has_guest = record.engine != HOST_PROGRAM;
        let mut subject = String::new();
        if [HOST_PROGRAM, GUEST_PROGRAM].contains(&record.engine.as_str()) {
            subject = config.options.remove(PROGRAM_OPTION).unwrap_or_default();
        }
        if !has_guest {
            config.options.insert("cpus".to_owned(), config.vcpus.to_string());
        }
        Self {
            host: record.host,
            engine: record.engine,
            programs: record.programs,
            setup: RunSetup {
                subject,
                mode: collapse_spaces(&config.mode),
                backing: has_guest.then_some(config.backing),
                memory: has_guest.then_some(config.memory),
                vcpus: has_guest.then_some(config.vcpus),
                prefault: config.prefault,
                options: config.options,
            },
            seed: config.seed,
            iteration: config.iteration,
            invocation: 0,
            resident_pages: record.resident_pages,
            phase,
            ns: record.ns.0 as f64,
            elapsed_ns: record.elapsed_ns.map(|ns| ns.0 as f64),
            vcpu_ns: record.vcpu_ns.iter().map(|ns| ns.0 as f64).collect(),
            counters: record.counters,
            events: record.events,
            gauges: record.gauges,
        }
    }
}

fn make_value_printable(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(make_printable(&text)),
        Value::Array(list) => list.into_iter().map(make_value_printable).collect(),
        Value::Object(map) => map
            .into_iter()
            .map(|(name, v)| (make_printable(&name), make_value_printable(v)))
            .collect(),
        other => other,
    }
}

pub(crate) fn samples(records: &[Record]) -> Vec<Sample> {
    records.iter().map(Sample::from).collect()
}

/// Collapses each run of white space into one space.
pub(crate) fn collapse_spaces(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::record;

    #[test]
    fn phases_and_rounds_sort_in_execution_order() {
        let of = |phase, round| AnyPhase::of_record(&Record { phase, round, ..record() });
        let mut phases = [
            AnyPhase::of_other_test(0, "populate"),
            of(Phase::Stop, None),
            of(Phase::Round, Some(10)),
            Phase::WholeRun.into(),
            of(Phase::Round, Some(9)),
            Phase::Update.into(),
            Phase::Create.into(),
        ];
        phases.sort();
        assert_eq!(phases[3].without_round(), of(Phase::Round, None));
        assert_eq!(phases[6].without_round(), phases[6]);
        assert!(phases[3].is_named("round") && phases[3].is_named("round-10"));
        assert!(!phases[3].is_named("round-9") && !phases[6].is_named("whole"));
        assert_eq!(
            phases.each_ref().map(AnyPhase::name),
            ["create", "update", "round-9", "round-10", "stop", "whole", "populate"]
        );
    }

    #[test]
    fn a_setup_is_named_by_its_known_parts() {
        let sample = Sample::from(&record());
        let other = RunSetup { subject: "demand_paging_test".to_owned(), ..RunSetup::default() };
        assert_eq!(sample.setup.name(), "anonymous_hugetlb_2mb, 64M, 16 vCPUs");
        assert_eq!(sample.setup.mode, "PA-bits:48, VA-bits:48, 4K pages");
        assert_eq!(other.name(), "demand_paging_test");
    }
}
