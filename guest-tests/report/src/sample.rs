// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One step of one run, of any test that can be compared: what all inputs are brought to.

use std::{borrow::Cow, collections::BTreeMap, fmt};

use serde::{Serialize, Serializer};

use granule_types::{
    backing::Backing,
    phase::Phase,
    record::{Host, Obtained, Record},
    units::{Bytes, counted},
};

/// One step of one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Where it ran; the default where the input does not tell.
    pub host: Host,
    /// What ran it: `kvm`, `model`, or the name of a foreign test.
    pub engine: String,
    /// What was run.
    pub setup: Setup,
    /// Which interleaving.
    pub seed: u64,
    /// Which repeat.
    pub iteration: u32,
    /// What really backed the memory.
    pub obtained: Option<Obtained>,
    /// Which step.
    pub step: Step,
    /// Its time in nanoseconds.
    pub ns: f64,
    /// Each vCPU's own time in nanoseconds.
    pub vcpu_ns: Vec<f64>,
    /// Instructions and functions counted by the emulator's plugin.
    pub counters: BTreeMap<String, u64>,
    /// The host kernel's events.
    pub events: BTreeMap<String, u64>,
    /// What stood at the end of the step.
    pub gauges: BTreeMap<String, u64>,
}

/// What makes two samples runs of the same thing, but for what ran them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Setup {
    /// What a foreign test is called; empty for the page-table test.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub subject: String,
    /// The guest mode, as the kernel's tests print it, its white space made plain.
    pub mode: String,
    /// What was asked for behind the region, where the input tells.
    pub backing: Option<Backing>,
    /// The region's size, where the input tells.
    pub memory: Option<Bytes>,
    /// How many vCPUs, where the input tells.
    pub vcpus: Option<u32>,
    /// Whether the host's memory was populated beforehand.
    pub prefault: bool,
    /// Further options that change figures, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
}

impl Setup {
    /// What a reader calls it: `anonymous_thp, 64M, 16 vCPUs`.
    pub fn name(&self) -> String {
        let mut parts = Vec::new();
        if !self.subject.is_empty() {
            parts.push(self.subject.clone());
        }
        parts.extend(self.backing.map(|backing| backing.to_string()));
        parts.extend(self.memory.map(|memory| memory.to_string()));
        parts.extend(self.vcpus.map(|vcpus| counted(vcpus, "vCPU")));
        if self.prefault {
            parts.push("prefaulted".to_owned());
        }
        let option = |(name, value)| format!("{name}={value}");
        parts.extend(self.options.iter().map(option));
        parts.join(", ")
    }
}

/// Room for the rounds of a phase between it and the next one.
const ROUNDS: usize = 1 << 20;

/// What was timed: a phase of the page-table test, or a step of another test. Steps are ordered as
/// they run.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Step {
    rank: usize,
    name: Cow<'static, str>,
}

impl Step {
    /// A step of a foreign test; `rank` says where in its order.
    pub const fn foreign(rank: usize, name: &'static str) -> Self {
        Self {
            rank: Phase::IN_ORDER.len() * ROUNDS + rank,
            name: Cow::Borrowed(name),
        }
    }

    /// The step of a record: its phase, or the round of it.
    fn of(record: &Record) -> Self {
        let phase = Self::from(record.phase);
        match record.round {
            None => phase,
            Some(round) => Self {
                rank: phase.rank + usize::try_from(round).map_or(ROUNDS - 1, |n| n.min(ROUNDS - 1)),
                name: format!("{}-{round}", phase.name).into(),
            },
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl From<Phase> for Step {
    fn from(phase: Phase) -> Self {
        let at = Phase::IN_ORDER.iter().position(|&known| known == phase);
        Self {
            rank: at.unwrap_or(Phase::IN_ORDER.len()) * ROUNDS,
            name: Cow::Borrowed(phase.name()),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

impl Serialize for Step {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.name)
    }
}

impl From<&Record> for Sample {
    fn from(record: &Record) -> Self {
        let config = &record.config;
        Self {
            host: host(&record.host),
            engine: printable(&record.engine),
            setup: Setup {
                subject: String::new(),
                mode: printable(&plain(&config.mode)),
                backing: Some(config.backing),
                memory: Some(config.memory),
                vcpus: Some(config.vcpus),
                prefault: config.prefault,
                options: named(&config.options)
                    .map(|(name, value)| (name, printable(value)))
                    .collect(),
            },
            seed: config.seed,
            iteration: config.iteration,
            obtained: record.obtained.clone(),
            step: Step::of(record),
            ns: record.ns.0 as f64,
            vcpu_ns: record.vcpu_ns.iter().map(|ns| ns.0 as f64).collect(),
            counters: counts(&record.counters),
            events: counts(&record.events),
            gauges: counts(&record.gauges),
        }
    }
}

/// What a map holds, by names that can be printed.
fn named<V>(map: &BTreeMap<String, V>) -> impl Iterator<Item = (String, &V)> {
    map.iter().map(|(name, value)| (printable(name), value))
}

fn counts(map: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    named(map).map(|(name, &count)| (name, count)).collect()
}

/// A host whose words can be printed.
fn host(host: &Host) -> Host {
    let mut host = host.clone();
    for word in [&mut host.arch, &mut host.kernel] {
        *word = printable(word);
    }
    for word in [&mut host.image_sha256, &mut host.cpu, &mut host.emulator] {
        *word = word.as_deref().map(printable);
    }
    for series in host.series.iter_mut().flatten() {
        series.name = printable(&series.name);
    }
    host.features = named(&host.features)
        .map(|(name, &on)| (name, on))
        .collect();
    host
}

/// Records as samples.
pub fn samples(records: &[Record]) -> Vec<Sample> {
    records.iter().map(Sample::from).collect()
}

/// Text in which `?` stands for each character that is more than text to a terminal, a table or a
/// test runner: control characters, and those that turn the direction of what follows them.
pub fn printable(text: &str) -> String {
    let turns = |c| matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let breaks = |c| matches!(c, '\u{2028}' | '\u{2029}');
    text.chars()
        .map(|c| match c {
            c if c.is_control() || turns(c) || breaks(c) => '?',
            c => c,
        })
        .collect()
}

/// Text with its white space made plain.
pub fn plain(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::record;

    #[test]
    fn steps_come_in_the_order_in_which_they_run() {
        let mut steps = [
            Step::foreign(0, "populate"),
            Phase::Whole.into(),
            Phase::Update.into(),
            Phase::Create.into(),
        ];
        steps.sort();
        let names: Vec<_> = steps.iter().map(Step::name).collect();
        assert_eq!(names, ["create", "update", "whole", "populate"]);
    }

    #[test]
    fn rounds_are_steps_of_their_own_in_the_order_of_their_numbers() {
        let of = |phase, round| {
            Step::of(&Record {
                phase,
                round,
                ..record()
            })
        };
        let mut steps = [
            of(Phase::Stop, None),
            of(Phase::Round, Some(10)),
            of(Phase::LoggingOn, None),
            of(Phase::Round, Some(9)),
        ];
        steps.sort();
        let names: Vec<_> = steps.iter().map(Step::name).collect();
        assert_eq!(names, ["logging-on", "round-9", "round-10", "stop"]);
    }

    #[test]
    fn a_setup_is_called_by_what_is_known_of_it() {
        let sample = Sample::from(&record());
        let foreign = Setup {
            subject: "demand_paging_test".to_owned(),
            ..Setup::default()
        };
        assert_eq!(sample.setup.name(), "anonymous_hugetlb_2mb, 64M, 16 vCPUs");
        assert_eq!(sample.setup.mode, "PA-bits:48, VA-bits:48, 4K pages");
        assert_eq!(foreign.name(), "demand_paging_test");
    }
}
