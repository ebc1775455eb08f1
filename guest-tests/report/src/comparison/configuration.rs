// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One configuration on both sides, step by step.

use std::collections::BTreeMap;

use serde::Serialize;

use super::group::Group;
use crate::{
    judge::{Tested, Verdict},
    sample::{Sample, Setup, Step},
    spread::{self, Change, Spread},
};

/// One configuration on both sides.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Configuration {
    /// Engine; empty where different engines are compared by force.
    pub engine: String,
    /// Setup.
    #[serde(flatten)]
    pub setup: Setup,
    /// Steps that both sides have, in the order in which they run.
    pub phases: Vec<PhaseChange>,
}

/// One step on both sides.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PhaseChange {
    /// The step.
    pub phase: Step,
    /// Time in nanoseconds.
    pub time: Change,
    /// Time of every run.
    pub runs: Runs,
    /// Judged count of every run, where a count is judged and this step has it.
    #[serde(skip)]
    pub counted: Option<Runs>,
    /// Time of every vCPU of every run; empty where only the host worked.
    pub vcpus: Runs,
    /// Verdict on the judged metric; `None` where this step does not have it.
    pub verdict: Option<Verdict>,
    /// Test of the judged metric; `None` where there are too few runs.
    pub tested: Option<Tested>,
    /// System instructions and kernel functions by name, without those that never occur.
    pub counters: BTreeMap<String, Change>,
    /// Kernel events by name, without those that never occur.
    pub events: BTreeMap<String, Change>,
    /// State at the end of the step by name, without what is 0 throughout.
    pub gauges: BTreeMap<String, Change>,
}

/// Figures of every run.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Runs {
    /// Figures before.
    #[serde(serialize_with = "spread::figures")]
    pub before: Vec<f64>,
    /// Figures after.
    #[serde(serialize_with = "spread::figures")]
    pub after: Vec<f64>,
}

impl Configuration {
    /// Returns the configuration of two groups of the same key, not judged.
    pub(super) fn of(before: &Group, after: &Group) -> Self {
        let steps = before.steps();
        let after_steps = after.steps();
        let common = steps.intersection(&after_steps);
        Self {
            engine: before.key.engine.clone(),
            setup: before.key.setup.clone(),
            phases: common.map(|step| PhaseChange::of(step, before, after)).collect(),
        }
    }

    /// Returns the change of a step.
    pub fn phase(&self, step: &Step) -> Option<&PhaseChange> {
        self.phases.iter().find(|phase| phase.phase == *step)
    }
}

impl PhaseChange {
    fn of(step: &Step, before: &Group, after: &Group) -> Self {
        let both = |figures: fn(&Sample) -> Vec<f64>| {
            let [before, after] =
                [before, after].map(|group| group.of_step(step).flat_map(figures).collect());
            Runs { before, after }
        };
        let runs = both(|sample| vec![sample.ns]);
        let spread = |values: &[f64]| Spread::of(values.iter().copied());
        let changes = |counts: fn(&Sample) -> &BTreeMap<String, u64>, is_counter: bool| {
            let mut names = before.occurring(step, counts);
            names.extend(after.occurring(step, counts));
            let spread = |group: &Group, name: &str| {
                // An instruction that a counted run did not execute is 0, not unknown.
                let missing = (is_counter && group.has_counters()).then_some(0);
                group.spread(step, |sample| counts(sample).get(name).copied().or(missing))
            };
            let change = |name: &str| Change::between(spread(before, name), spread(after, name));
            let named = names.into_iter().map(|name| (name.to_owned(), change(name)));
            named.collect()
        };
        Self {
            phase: step.clone(),
            time: Change::between(spread(&runs.before), spread(&runs.after)),
            runs,
            counted: None,
            vcpus: both(|sample| sample.vcpu_ns.clone()),
            verdict: None,
            tested: None,
            counters: changes(|sample| &sample.counters, true),
            events: changes(|sample| &sample.events, false),
            gauges: changes(|sample| &sample.gauges, false),
        }
    }

    /// Returns the change of a count.
    pub fn count(&self, name: &str) -> Option<&Change> {
        let kinds = [&self.counters, &self.events, &self.gauges];
        kinds.into_iter().find_map(|counts| counts.get(name))
    }

    /// Returns the names of all counts.
    pub fn count_names(&self) -> impl Iterator<Item = &String> {
        let kinds = [&self.counters, &self.events, &self.gauges];
        kinds.into_iter().flat_map(BTreeMap::keys)
    }

    /// Reports whether the judged metric grew by more than the minimum effect.
    pub fn is_regression(&self) -> bool {
        self.verdict == Some(Verdict::Regression)
    }
}
