// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Samples of one configuration, over seeds and iterations.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    sample::{Sample, Setup, Step},
    spread::Spread,
};

/// Identity of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// Engine; empty where engines are compared with each other.
    pub engine: String,
    /// Setup; without options where engines are compared, since each engine has its own.
    pub setup: Setup,
}

/// Samples of one configuration on one side.
#[derive(Debug)]
pub struct Group<'a> {
    pub key: Key,
    pub samples: Vec<&'a Sample>,
}

impl Group<'_> {
    /// Returns the samples of one step, in the order of runs.
    pub fn of_step<'b>(&'b self, step: &'b Step) -> impl Iterator<Item = &'b Sample> {
        let samples = self.samples.iter().copied();
        samples.filter(move |sample| sample.step == *step)
    }

    /// Returns the steps in the order in which they run.
    pub fn steps(&self) -> BTreeSet<&Step> {
        self.samples.iter().map(|sample| &sample.step).collect()
    }

    /// Returns the seed and iteration of every run.
    pub fn runs(&self) -> BTreeSet<(u64, u32)> {
        let run = |sample: &&Sample| (sample.seed, sample.iteration);
        self.samples.iter().map(run).collect()
    }

    /// Returns the spread of a figure over the runs that have it.
    pub fn spread(&self, step: &Step, figure: impl Fn(&Sample) -> Option<u64>) -> Option<Spread> {
        let figures = self.of_step(step).filter_map(figure);
        Spread::of(figures.map(|figure| figure as f64))
    }

    /// Reports whether instructions were counted.
    pub fn has_counters(&self) -> bool {
        self.samples.iter().any(|sample| !sample.counters.is_empty())
    }

    /// Returns the names of counts above 0 in a step.
    pub fn occurring(
        &self,
        step: &Step,
        counts: fn(&Sample) -> &BTreeMap<String, u64>,
    ) -> BTreeSet<&str> {
        let samples = self.samples.iter().filter(|sample| sample.step == *step);
        let counts = samples.flat_map(|sample| counts(sample));
        let above_0 = counts.filter(|&(_, &count)| count > 0);
        above_0.map(|(name, _)| name.as_str()).collect()
    }
}

/// Reports whether samples of different engines belong to different configurations. They do, unless
/// each side has a single engine and the two differ: then the engines are compared, by force.
pub fn is_by_engine(before: &[Sample], after: &[Sample]) -> bool {
    let engines = |samples: &[Sample]| -> BTreeSet<String> {
        samples.iter().map(|sample| sample.engine.clone()).collect()
    };
    let (before, after) = (engines(before), engines(after));
    before == after || before.len() != 1 || after.len() != 1
}

/// Groups samples by configuration, in the order in which configurations first appear.
pub fn groups(samples: &[Sample], by_engine: bool) -> Vec<Group<'_>> {
    let mut groups: Vec<Group> = Vec::new();
    for sample in samples {
        let mut key = Key { engine: sample.engine.clone(), setup: sample.setup.clone() };
        if !by_engine {
            key.engine.clear();
            key.setup.options.clear();
        }
        match groups.iter_mut().find(|group| group.key == key) {
            Some(group) => group.samples.push(sample),
            None => groups.push(Group { key, samples: vec![sample] }),
        }
    }
    groups
}
