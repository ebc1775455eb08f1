// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Records of one configuration, gathered over seeds and iterations.

use std::collections::{BTreeMap, BTreeSet};

use super::Spread;
use crate::{config::Backing, phase::Phase, results::Record, units::Bytes};

/// Every phase a record can be of, in the order in which a reader wants them.
pub fn phases() -> impl Iterator<Item = Phase> {
    Phase::ALL.into_iter().chain([Phase::Whole])
}

/// What makes two records runs of the same thing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// Empty where engines are compared with each other.
    pub engine: String,
    /// With its white space made plain.
    pub mode: String,
    pub backing: Backing,
    pub memory: Bytes,
    pub vcpus: u32,
    pub prefault: bool,
    /// Empty where engines are compared with each other: each has options of its own.
    pub options: BTreeMap<String, String>,
}

impl Key {
    fn of(record: &Record, by_engine: bool) -> Self {
        let config = &record.config;
        Self {
            engine: if by_engine {
                record.engine.clone()
            } else {
                String::new()
            },
            mode: config.mode.split_whitespace().collect::<Vec<_>>().join(" "),
            backing: config.backing,
            memory: config.memory,
            vcpus: config.vcpus,
            prefault: config.prefault,
            options: if by_engine {
                config.options.clone()
            } else {
                BTreeMap::new()
            },
        }
    }

    /// What a reader calls it: `anonymous_thp, 64M, 16 vCPUs`.
    pub fn name(&self) -> String {
        name(
            self.backing,
            self.memory,
            self.vcpus,
            self.prefault,
            &self.options,
        )
    }
}

/// The same from the parts.
pub fn name(
    backing: Backing,
    memory: Bytes,
    vcpus: u32,
    prefault: bool,
    options: &BTreeMap<String, String>,
) -> String {
    let prefault = if prefault { ", prefaulted" } else { "" };
    let plural = if vcpus == 1 { "" } else { "s" };
    let options: String = options
        .iter()
        .map(|(name, value)| format!(", {name}={value}"))
        .collect();
    format!("{backing}, {memory}, {vcpus} vCPU{plural}{prefault}{options}")
}

/// The records of one key on one side.
#[derive(Debug)]
pub struct Group<'a> {
    pub key: Key,
    pub records: Vec<&'a Record>,
}

impl Group<'_> {
    fn of_phase(&self, phase: Phase) -> impl Iterator<Item = &Record> {
        let records = self.records.iter().copied();
        records.filter(move |record| record.phase == phase)
    }

    /// A figure's spread over the runs that have it.
    pub fn spread(&self, phase: Phase, figure: impl Fn(&Record) -> Option<u64>) -> Option<Spread> {
        Spread::of(self.of_phase(phase).filter_map(figure))
    }

    /// Whether instructions were counted here at all.
    pub fn has_counters(&self) -> bool {
        self.records
            .iter()
            .any(|record| !record.counters.is_empty())
    }

    /// Whether what really backs the region was read back anywhere.
    pub fn has_obtained(&self) -> bool {
        self.records.iter().any(|record| record.obtained.is_some())
    }

    /// The names of what was counted more than 0 times in a phase.
    pub fn occurring(
        &self,
        phase: Phase,
        counts: fn(&Record) -> &BTreeMap<String, u64>,
    ) -> BTreeSet<&str> {
        self.of_phase(phase)
            .flat_map(counts)
            .filter(|&(_, &count)| count > 0)
            .map(|(name, _)| name.as_str())
            .collect()
    }
}

/// Whether records of different engines are different things. They are, unless each side has one
/// engine and not the same: then the engines themselves are compared, which takes force.
pub fn by_engine(before: &[Record], after: &[Record]) -> bool {
    let engines = |records: &[Record]| -> BTreeSet<_> {
        records.iter().map(|record| record.engine.clone()).collect()
    };
    let (before, after) = (engines(before), engines(after));
    before == after || before.len() != 1 || after.len() != 1
}

/// The records by key, in the order in which keys first appear.
pub fn groups(records: &[Record], by_engine: bool) -> Vec<Group<'_>> {
    let mut groups: Vec<Group> = Vec::new();
    for record in records {
        let key = Key::of(record, by_engine);
        match groups.iter_mut().find(|group| group.key == key) {
            Some(group) => group.records.push(record),
            None => groups.push(Group {
                key,
                records: vec![record],
            }),
        }
    }
    groups
}

/// What a side's groups are called, each name once.
pub fn names(groups: &[Group]) -> Vec<String> {
    let mut names = Vec::new();
    for group in groups {
        let name = group.key.name();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Every seed of a side.
pub fn seeds(groups: &[Group]) -> BTreeSet<u64> {
    let records = groups.iter().flat_map(|group| &group.records);
    records.map(|record| record.config.seed).collect()
}

/// What one side has and the other has not: whole configurations, or phases of one.
pub fn only_in(here: &[Group], there: &[Group]) -> Vec<String> {
    let mut alone = Vec::new();
    for group in here {
        let Some(other) = there.iter().find(|other| other.key == group.key) else {
            alone.push(group.key.name());
            continue;
        };
        let phases: Vec<_> = phases()
            .filter(|&phase| group.of_phase(phase).next().is_some())
            .filter(|&phase| other.of_phase(phase).next().is_none())
            .map(Phase::name)
            .collect();
        if !phases.is_empty() {
            alone.push(format!("{} of {}", phases.join(", "), group.key.name()));
        }
    }
    alone
}
