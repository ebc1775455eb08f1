// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Samples of one configuration, gathered over seeds and iterations.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    sample::{Sample, Setup, Step},
    spread::Spread,
};

/// What makes two samples runs of the same thing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// Empty where engines are compared with each other.
    pub engine: String,
    /// Its options are empty where engines are compared with each other: each has its own.
    pub setup: Setup,
}

impl Key {
    fn of(sample: &Sample, by_engine: bool) -> Self {
        let mut key = Self {
            engine: sample.engine.clone(),
            setup: sample.setup.clone(),
        };
        if !by_engine {
            key.engine.clear();
            key.setup.options.clear();
        }
        key
    }
}

/// The samples of one key on one side.
#[derive(Debug)]
pub struct Group<'a> {
    pub key: Key,
    pub samples: Vec<&'a Sample>,
}

impl Group<'_> {
    /// The samples of one step, in the order of runs.
    pub fn of_step<'b>(&'b self, step: &'b Step) -> impl Iterator<Item = &'b Sample> {
        let samples = self.samples.iter().copied();
        samples.filter(move |sample| sample.step == *step)
    }

    /// Its steps, in the order in which they run.
    pub fn steps(&self) -> BTreeSet<&Step> {
        self.samples.iter().map(|sample| &sample.step).collect()
    }

    /// A figure's spread over the runs that have it.
    pub fn spread(&self, step: &Step, figure: impl Fn(&Sample) -> Option<u64>) -> Option<Spread> {
        let figures = self.of_step(step).filter_map(figure);
        Spread::of(figures.map(|figure| figure as f64))
    }

    /// Whether instructions were counted here at all.
    pub fn has_counters(&self) -> bool {
        self.samples
            .iter()
            .any(|sample| !sample.counters.is_empty())
    }

    /// Whether what really backs the region was read back anywhere.
    pub fn has_obtained(&self) -> bool {
        self.samples.iter().any(|sample| sample.obtained.is_some())
    }

    /// The names of what was counted more than 0 times in a phase.
    pub fn occurring(
        &self,
        step: &Step,
        counts: fn(&Sample) -> &BTreeMap<String, u64>,
    ) -> BTreeSet<&str> {
        let samples = self.samples.iter().filter(|sample| sample.step == *step);
        samples
            .flat_map(|sample| counts(sample))
            .filter(|&(_, &count)| count > 0)
            .map(|(name, _)| name.as_str())
            .collect()
    }
}

/// Whether samples of different engines are different things. They are, unless each side has one
/// engine and not the same: then the engines themselves are compared, which takes force.
pub fn by_engine(before: &[Sample], after: &[Sample]) -> bool {
    let engines = |samples: &[Sample]| -> BTreeSet<_> {
        samples.iter().map(|sample| sample.engine.clone()).collect()
    };
    let (before, after) = (engines(before), engines(after));
    before == after || before.len() != 1 || after.len() != 1
}

/// The samples by key, in the order in which keys first appear.
pub fn groups(samples: &[Sample], by_engine: bool) -> Vec<Group<'_>> {
    let mut groups: Vec<Group> = Vec::new();
    for sample in samples {
        let key = Key::of(sample, by_engine);
        match groups.iter_mut().find(|group| group.key == key) {
            Some(group) => group.samples.push(sample),
            None => groups.push(Group {
                key,
                samples: vec![sample],
            }),
        }
    }
    groups
}

/// What a side's groups are called, each name once.
pub fn names(groups: &[Group]) -> Vec<String> {
    let mut names = Vec::new();
    for group in groups {
        let name = group.key.setup.name();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Every seed of a side.
pub fn seeds(groups: &[Group]) -> BTreeSet<u64> {
    let samples = groups.iter().flat_map(|group| &group.samples);
    samples.map(|sample| sample.seed).collect()
}

/// What one side has and the other has not: whole configurations, or steps of one.
pub fn only_in(here: &[Group], there: &[Group]) -> Vec<String> {
    let mut alone = Vec::new();
    for group in here {
        let Some(other) = there.iter().find(|other| other.key == group.key) else {
            alone.push(group.key.setup.name());
            continue;
        };
        let known = other.steps();
        let steps: Vec<_> = group
            .steps()
            .into_iter()
            .filter(|step| !known.contains(step))
            .map(Step::name)
            .collect();
        if !steps.is_empty() {
            alone.push(format!(
                "{} of {}",
                steps.join(", "),
                group.key.setup.name()
            ));
        }
    }
    alone
}
