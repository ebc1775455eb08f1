// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Configurations: their samples on each side, and the change of each phase between the sides.

use std::collections::{BTreeMap, BTreeSet};

use granule_types::phase::Phase;
use serde::Serialize;

use super::{
    TIME_METRIC,
    judgement::{Judgement, serialize_first},
    timer_tick,
};
use crate::{
    metric::Metric,
    sample::{AnyPhase, RunSetup, Sample},
    stats::{Change, Runs, Spread},
};

/// Selects the counts of one kind from a sample.
pub type SelectCounts = fn(&Sample) -> &BTreeMap<String, u64>;

/// Identity of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupKey {
    /// Engine; empty if engines are compared with each other.
    pub engine: String,
    /// Setup; without options if engines are compared, since each engine has its own options.
    pub setup: RunSetup,
}

/// Samples of one configuration on one side, over seeds and iterations.
#[derive(Debug, Clone)]
pub struct Group<'a> {
    pub key: GroupKey,
    pub samples: Vec<&'a Sample>,
    /// Number of iterations that were left out because they continue a schedule; `None` before
    /// [`Group::keep_one_iteration_of_schedules`], and if it left the iterations as they are.
    pub omitted_iterations: Option<usize>,
}

impl Group<'_> {
    /// Returns the samples of one phase in run order.
    pub fn of_phase<'b>(&'b self, phase: &'b AnyPhase) -> impl Iterator<Item = &'b Sample> {
        self.samples.iter().copied().filter(move |sample| sample.phase == *phase)
    }

    /// Returns the group with the samples of the selected phases only.
    pub fn of_phases(&self, is_selected: impl Fn(&AnyPhase) -> bool) -> Self {
        let samples = self.samples.iter().copied();
        let samples = samples.filter(|sample| is_selected(&sample.phase)).collect();
        Self { samples, key: self.key.clone(), omitted_iterations: self.omitted_iterations }
    }

    /// Keeps one iteration of each seed of an invocation if an emulator ran all: the one with the median
    /// time, which is the elapsed time if `elapsed` is true. The other iterations continue its schedule,
    /// so they are no further schedules. Steps that a program repeats are no iterations of all phases,
    /// and stay.
    pub fn keep_one_iteration_of_schedules(&mut self, elapsed: bool) {
        let schedule = |sample: &Sample| (sample.invocation, sample.seed);
        let mut iterations: BTreeMap<(u32, u64), BTreeMap<u32, Vec<&Sample>>> = BTreeMap::new();
        for sample in &self.samples {
            let of_schedule = iterations.entry(schedule(sample)).or_default();
            of_schedule.entry(sample.iteration).or_default().push(sample);
        }
        let is_emulated = self.samples.iter().all(|sample| sample.host.emulator.is_some());
        let count = self.phases().len();
        let is_complete = |samples: &Vec<&Sample>| samples.len() == count;
        if !is_emulated || !iterations.values().flat_map(BTreeMap::values).all(is_complete) {
            return;
        }
        let time =
            |samples: &[&Sample]| samples.iter().map(|sample| sample.time(elapsed)).sum::<f64>();
        let median = |iterations: &BTreeMap<u32, Vec<&Sample>>| {
            let mut times: Vec<(f64, u32)> =
                iterations.iter().map(|(at, samples)| (time(samples), *at)).collect();
            times.sort_by(|(one, _), (other, _)| one.total_cmp(other));
            times[(times.len() - 1) / 2].1
        };
        let kept: BTreeMap<(u32, u64), u32> =
            iterations.iter().map(|(key, of_schedule)| (*key, median(of_schedule))).collect();
        let total: usize = iterations.values().map(BTreeMap::len).sum();
        self.omitted_iterations = Some(total - kept.len());
        self.samples.retain(|sample| kept[&schedule(sample)] == sample.iteration);
    }

    /// Returns the phases in execution order.
    pub fn phases(&self) -> BTreeSet<&AnyPhase> {
        self.samples.iter().map(|sample| &sample.phase).collect()
    }

    /// Returns the seed and iteration of every run.
    pub fn runs(&self) -> BTreeSet<(u64, u32)> {
        self.samples.iter().map(|sample| (sample.seed, sample.iteration)).collect()
    }

    /// Returns what identifies each run in a paired comparison: seed and iteration or, if each
    /// invocation has one iteration of a seed, the seed.
    pub fn pairing(&self) -> Vec<(u64, Option<u32>)> {
        let is_reduced = self.omitted_iterations.is_some();
        let runs = self.runs().into_iter();
        runs.map(|(seed, iteration)| (seed, (!is_reduced).then_some(iteration))).collect()
    }

    /// Returns the spread of a figure over the runs that report it.
    pub fn spread(
        &self,
        phase: &AnyPhase,
        figure: impl Fn(&Sample) -> Option<u64>,
    ) -> Option<Spread> {
        let figures = self.of_phase(phase).filter_map(figure);
        Spread::new(figures.map(|figure| figure as f64))
    }

    /// Returns the spread over runs of a figure's sum over the phases of a run.
    pub fn spread_of_sums(&self, figure: impl Fn(&Sample) -> Option<u64>) -> Option<Spread> {
        let mut runs = BTreeMap::<(u64, u32), u64>::new();
        let whole = Phase::WholeRun.into();
        let has_whole = self.of_phase(&whole).any(|sample| figure(sample).is_some());
        // A whole run has the figures of its steps.
        for sample in self.samples.iter().filter(|sample| !has_whole || sample.phase == whole) {
            if let Some(figure) = figure(sample) {
                *runs.entry((sample.seed, sample.iteration)).or_default() += figure;
            }
        }
        Spread::new(runs.into_values().map(|sum| sum as f64))
    }

    /// Formats the setup and the engine for readers.
    pub fn title(&self) -> String {
        let (name, engine) = (self.key.setup.name(), &self.key.engine);
        match *engine == self.key.setup.subject || name.is_empty() {
            true => name,
            false => format!("{name}, by {engine}"),
        }
    }

    pub fn has_counters(&self) -> bool {
        self.samples.iter().any(|sample| !sample.counters.is_empty())
    }

    /// Returns the names of a phase's nonzero counts.
    pub fn nonzero_counts<'b>(
        &'b self,
        phase: &'b AnyPhase,
        counts: SelectCounts,
    ) -> BTreeSet<&'b str> {
        let counts = self.of_phase(phase).flat_map(counts);
        let above_0 = counts.filter(|&(_, &count)| count > 0);
        above_0.map(|(name, _)| name.as_str()).collect()
    }
}

/// Groups samples by configuration, in order of first appearance.
pub fn groups(samples: &[Sample], by_engine: bool) -> Vec<Group<'_>> {
    let mut groups: Vec<Group> = Vec::new();
    for sample in samples {
        let mut key = GroupKey { engine: sample.engine.clone(), setup: sample.setup.clone() };
        if !by_engine {
            key.engine.clear();
            key.setup.options.clear();
        }
        match groups.iter_mut().find(|group| group.key == key) {
            Some(group) => group.samples.push(sample),
            None => groups.push(Group { key, samples: vec![sample], omitted_iterations: None }),
        }
    }
    groups
}

/// Figures of a configuration on both sides.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Configuration {
    /// Engine; empty if different engines are compared (`force`).
    pub engine: String,
    #[serde(flatten)]
    pub setup: RunSetup,
    /// Indicates that an emulator ran every run.
    #[serde(skip)]
    pub is_emulated: bool,
    /// Phases of both sides, in execution order.
    pub phases: Vec<PhaseChange>,
}

/// Selection of the figures of a comparison.
#[derive(Debug, Clone, Copy)]
pub struct FigureSelection<'a> {
    /// Indicates that the time of a phase is its elapsed time.
    pub elapsed: bool,
    /// Metrics to judge.
    pub metrics: &'a [String],
    /// Indicates that runs of the comparison count timer ticks.
    pub has_tick_counts: bool,
}

/// Figures of a phase on both sides.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PhaseChange {
    pub phase: AnyPhase,
    /// Time in nanoseconds.
    pub time: Change,
    /// Work of all CPUs in nanoseconds, if `time` is elapsed time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub work: Option<Change>,
    /// Indicates that the host counts timer ticks and the phase is shorter than one.
    #[serde(rename = "below_timer_tick", skip_serializing_if = "std::ops::Not::not")]
    pub is_below_tick: bool,
    /// Time of every run.
    pub runs: Runs,
    /// Time of every vCPU in every run; empty for phases without vCPUs.
    pub vcpus: Runs,
    /// Judgement of the first metric; `None` if this phase lacks it.
    #[serde(flatten, serialize_with = "serialize_first")]
    pub judgement: Option<Judgement>,
    /// Judgements of the further metrics that this phase has.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub further_judgements: Vec<Judgement>,
    /// Nonzero counts of system instructions and kernel functions, by name.
    pub counters: BTreeMap<String, Change>,
    /// Nonzero counts of kernel events, by name.
    pub events: BTreeMap<String, Change>,
    /// Nonzero gauges at the end of the phase, by name.
    pub gauges: BTreeMap<String, Change>,
}

impl Configuration {
    /// Returns the configuration of two groups with the same key, with untested judgements.
    pub fn new(before: &Group, after: &Group, figures: FigureSelection) -> Self {
        let [phases, others] = [before, after].map(|group| group.phases());
        let phases = phases.intersection(&others);
        let mut samples = before.samples.iter().chain(&after.samples);
        Self {
            engine: before.key.engine.clone(),
            setup: before.key.setup.clone(),
            is_emulated: samples.all(|sample| sample.host.emulator.is_some()),
            phases: phases.map(|phase| PhaseChange::new(phase, before, after, figures)).collect(),
        }
    }

    pub fn phase(&self, phase: &AnyPhase) -> Option<&PhaseChange> {
        self.phases.iter().find(|change| change.phase == *phase)
    }
}

impl PhaseChange {
    fn new(phase: &AnyPhase, before: &Group, after: &Group, figures: FigureSelection) -> Self {
        let FigureSelection { elapsed, metrics, has_tick_counts } = figures;
        let samples = [before, after].map(|group| group.of_phase(phase).collect::<Vec<_>>());
        let both = |figures: &dyn Fn(&Sample) -> Vec<f64>| {
            let [before, after] = samples
                .each_ref()
                .map(|samples| samples.iter().flat_map(|sample| figures(sample)).collect());
            Runs { before, after }
        };
        let runs = both(&|sample| vec![sample.time(elapsed)]);
        let judgement = |metric: &String| {
            let runs = match metric.as_str() {
                TIME_METRIC => runs.clone(),
                name => count_of_runs(phase, before, after, name)?,
            };
            Some(Judgement::untested(metric.clone(), runs))
        };
        let changes = |counts: SelectCounts, is_counter: bool| {
            let mut names = before.nonzero_counts(phase, counts);
            names.extend(after.nonzero_counts(phase, counts));
            let spread = |group: &Group, name: &str| {
                let missing = count_if_absent(group, name).filter(|_| is_counter);
                group.spread(phase, |sample| counts(sample).get(name).copied().or(missing))
            };
            let change = |name: &str| Change::between(spread(before, name), spread(after, name));
            names.into_iter().map(|name| (name.to_owned(), change(name))).collect()
        };
        let mut change = Self {
            phase: phase.clone(),
            time: runs.change(),
            work: elapsed.then(|| both(&|sample| vec![sample.ns]).change()),
            is_below_tick: has_tick_counts && timer_tick::is_shorter_than_tick(&samples),
            vcpus: both(&|sample| sample.vcpu_ns.clone()),
            judgement: metrics.first().and_then(judgement),
            further_judgements: metrics.iter().skip(1).filter_map(judgement).collect(),
            runs,
            counters: changes(|sample| &sample.counters, true),
            events: changes(|sample| &sample.events, false),
            gauges: changes(|sample| &sample.gauges, false),
        };
        change.add_judged_classes();
        change
    }

    /// Adds the sums of judged classes of instructions to the counters.
    fn add_judged_classes(&mut self) {
        let classes = self.judgements().filter(|judgement| {
            judgement.metric != TIME_METRIC && self.count(&judgement.metric).is_none()
        });
        let sums: Vec<_> =
            classes.map(|class| (class.metric.clone(), class.runs.change())).collect();
        self.counters.extend(sums);
    }

    /// Returns the judgements of all metrics that this phase has.
    pub fn judgements(&self) -> impl Iterator<Item = &Judgement> {
        self.judgement.iter().chain(&self.further_judgements)
    }

    pub fn judgements_mut(&mut self) -> impl Iterator<Item = &mut Judgement> {
        self.judgement.iter_mut().chain(&mut self.further_judgements)
    }

    pub fn judgement_of(&self, metric: &str) -> Option<&Judgement> {
        self.judgements().find(|judgement| judgement.metric == metric)
    }

    pub fn counts(&self) -> impl Iterator<Item = (&String, &Change)> {
        [&self.counters, &self.events, &self.gauges].into_iter().flatten()
    }

    pub fn count(&self, name: &str) -> Option<&Change> {
        self.counts().find_map(|(known, change)| (known == name).then_some(change))
    }
}

/// Returns the count that an absent name means: 0 for an instruction that was not executed, if the runs have
/// counters. Any other absent count was not counted.
fn count_if_absent(group: &Group, name: &str) -> Option<u64> {
    (group.has_counters() && Metric::from(name).is_zero_if_absent()).then_some(0)
}

/// Returns the count of every run of a phase, in run order; `None` for a run that lacks it.
fn counts_of_phase(group: &Group, phase: &AnyPhase, name: &str) -> Vec<Option<f64>> {
    let missing = count_if_absent(group, name);
    let count = |sample: &Sample| sample.count(name).or(missing).map(|count| count as f64);
    group.of_phase(phase).map(count).collect()
}

/// Returns the count of every run; `None` if a run lacks it, or if it is 0 in all runs.
fn count_of_runs(phase: &AnyPhase, before: &Group, after: &Group, name: &str) -> Option<Runs> {
    let side = |group: &Group| -> Option<Vec<f64>> {
        counts_of_phase(group, phase, name).into_iter().collect()
    };
    let runs = Runs { before: side(before)?, after: side(after)? };
    let is_counted = runs.sides().concat().iter().any(|&count| count != 0.0);
    is_counted.then_some(runs)
}

/// Returns the common phases in which some runs have a count and others lack it.
pub fn partly_counted_phases(before: &Group, after: &Group, name: &str) -> Vec<String> {
    let (phases, others) = (before.phases(), after.phases());
    let is_partial = |phase: &&&AnyPhase| {
        let counts = [before, after].map(|group| counts_of_phase(group, phase, name)).concat();
        counts.iter().any(Option::is_some) && counts.contains(&None)
    };
    phases.intersection(&others).filter(is_partial).map(ToString::to_string).collect()
}
