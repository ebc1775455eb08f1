// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Builds a comparison: pairs the groups of both sides, checks their provenance, judges the rows
//! and adds means, growth and notes.

use std::collections::BTreeSet;

use super::{
    CompareError, Comparison, ComparisonOptions, GeometricMean, SCHEMA, TIME_METRIC,
    configuration::{
        Configuration, FigureSelection, Group, PhaseChange, groups, partly_counted_phases,
    },
    growth, timer_tick,
};
use crate::{
    judge::{self, RowFigures},
    metric::Metric,
    provenance::{self, Difference, Side},
    sample::{AnyPhase, Sample},
    stats::{self, Runs},
};

/// Default minimum effect: a smaller relative slowdown is no regression.
const MIN_EFFECT: f64 = 0.01;
/// Default minimum effect under emulation, where the schedule alone changes times.
const MIN_EFFECT_EMULATED: f64 = 0.03;

const ONE_EMULATED_RUN: &str = "One run shows one schedule of the vCPUs: its virtual times and \
    counts are exact for that one. Compare several seeds.";
const ONE_RUN: &str = "One run proves nothing for times: repeat it. (From an emulator, times and \
    counts are exact for one schedule.)";
const WITHOUT_HOST: &str =
    "Logs do not name kernel, CPU or emulator: check that the two sides may be compared.";
const UNKNOWN_PAGE_SIZES: &str = "Neither side recorded the page sizes that back the memory.";
const SAME_IMAGE: &str = "Both sides ran the same kernel image.";
const SAME_RELEASE: &str =
    "The results do not distinguish the two kernels: check that they differ.";
const DIFFERENT_SEEDS: &str = "The two sides ran with different seeds.";
const OMITTED_ITERATIONS: &str = "Iterations of an emulated run continue its schedule: of each seed, \
    only the one with the median time is compared.";

/// Subject of a comparison: the difference between the two sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// Two kernels, in equal configurations.
    Kernels,
    /// Two configurations of one kernel.
    Configurations,
}

/// Groups of one configuration on both sides.
type Pair<'a> = (&'a Group<'a>, &'a Group<'a>);

impl Comparison {
    /// Compares `after` with `before`.
    ///
    /// # Errors
    /// A side is empty, the sides have no configuration and phase in common, the count to judge is
    /// missing, runs cannot be paired, or the provenance differs without `force`. Inputs without
    /// a host are compared, with a note.
    pub fn new(
        before: &[Sample],
        after: &[Sample],
        options: &ComparisonOptions,
    ) -> Result<Self, CompareError> {
        Self::of_subject(before, after, options, Subject::Kernels)
    }

    pub(super) fn of_subject(
        before: &[Sample],
        after: &[Sample],
        options: &ComparisonOptions,
        subject: Subject,
    ) -> Result<Self, CompareError> {
        let sides = ["before", "after"].map(str::to_owned);
        let labels = options.labels.clone().unwrap_or(sides);
        check_sides([before, after], &labels, &options.phases)?;
        let by_engine = separates_engines(&[before, after]);
        let [label_before, label_after] = labels;
        let mut both = [Side::new(label_before, before), Side::new(label_after, after)];
        if subject == Subject::Configurations {
            both.iter_mut().for_each(Side::remove_machine_size);
        }
        let [before_side, after_side] = both;
        let is_emulated = before_side.is_emulated() && after_side.is_emulated();
        let mut sides = [before, after].map(|side| selected_groups(side, by_engine, options));
        let mut compared =
            pairs(&sides).into_iter().flat_map(|(one, two)| one.samples.iter().chain(&two.samples));
        let elapsed = is_emulated && compared.all(|sample| sample.elapsed_ns.is_some());
        for group in sides.iter_mut().flatten() {
            group.keep_one_iteration_of_schedules(elapsed);
        }
        let pairs = pairs(&sides);
        let has_tick_counts = [before, after].into_iter().any(timer_tick::has_tick_counts);
        let without_host = before.iter().chain(after).all(|sample| sample.is_without_host());
        let differences = differences(&pairs, without_host, subject);
        if !differences.is_empty() && !options.is_forced {
            return Err(CompareError::ProvenanceDiffers(differences));
        }
        let unpaired = |(one, two): &&Pair| options.is_paired && one.pairing() != two.pairing();
        if let Some((one, _)) = pairs.iter().find(unpaired) {
            return Err(CompareError::UnpairedRuns(one.key.setup.name()));
        }
        let is_counted = |metric: &str| {
            let reports = |sample: &Sample| sample.count(metric).is_some();
            [before, after].iter().all(|side| side.iter().any(reports))
        };
        let default = if is_emulated { MIN_EFFECT_EMULATED } else { MIN_EFFECT };
        let metrics = judged_metrics(&options.metrics);
        let figures = FigureSelection { elapsed, metrics: &metrics, has_tick_counts };
        let configurations: Vec<Configuration> = pairs
            .iter()
            .map(|(one, two)| Configuration::new(one, two, figures))
            .filter(|configuration| !configuration.phases.is_empty())
            .collect();
        if configurations.is_empty() {
            let (sides, phases) =
                (sides.map(|groups| setup_names(&groups)), options.phases.clone());
            return Err(CompareError::NothingInCommon { sides, phases });
        }
        let mut metrics = metrics.into_iter();
        let (metric, further_metrics) = (metrics.next().unwrap_or_default(), metrics.collect());
        let mut comparison = Self {
            schema: SCHEMA,
            before: before_side,
            after: after_side,
            min_effect: options.min_effect.unwrap_or(default),
            has_elapsed_times: elapsed,
            metric,
            further_metrics,
            is_paired: options.is_paired,
            command: options.command.clone(),
            differences,
            notes: Vec::new(),
            geomeans: Vec::new(),
            growth: growth::growth(&configurations, is_emulated),
            configurations,
        };
        comparison.judge(is_counted)?;
        comparison.geomeans = geometric_means(&comparison);
        comparison.notes = notes(&comparison, &sides, &pairs, without_host, subject);
        Ok(comparison)
    }

    /// Computes the verdict of each metric of each phase. `is_counted` reports whether both sides have a
    /// count, which may be 0 in all their runs.
    fn judge(&mut self, is_counted: impl Fn(&str) -> bool) -> Result<(), CompareError> {
        let has_counters = self.rows().any(|(_, change)| !change.counters.is_empty());
        let is_missing = |metric: &&str| {
            let is_judged = self.judgements().any(|judgement| judgement.metric == **metric);
            // Kernels need not execute an instruction: then they do not differ.
            let is_unused = has_counters && Metric::from(*metric).is_of_instructions();
            !(is_judged || is_unused || is_counted(metric))
        };
        if let Some(name) = self.metrics().find(is_missing) {
            let counts = self.rows().flat_map(|(_, change)| change.counts());
            let known: BTreeSet<String> = counts.map(|(name, _)| name.clone()).collect();
            let known = known.into_iter().collect();
            return Err(CompareError::UnknownMetric { name: name.to_owned(), known });
        }
        let design = self.design();
        let mut judged = Vec::new();
        let mut rows = Vec::new();
        for configuration in &mut self.configurations {
            let is_emulated = configuration.is_emulated;
            for judgement in configuration.phases.iter_mut().flat_map(PhaseChange::judgements_mut) {
                let is_time = judgement.metric == TIME_METRIC;
                let runs = judgement.runs.clone();
                rows.push(RowFigures { runs, design, is_emulated, is_time });
                judged.push(judgement);
            }
        }
        for (judgement, (tested, verdict)) in
            judged.into_iter().zip(judge::judge(&rows, self.min_effect))
        {
            judgement.tested_row = tested;
            judgement.verdict = verdict;
        }
        Ok(())
    }
}

/// Returns the groups of each configuration that is on both sides.
fn pairs<'a>(sides: &'a [Vec<Group<'a>>; 2]) -> Vec<Pair<'a>> {
    let [before, after] = sides;
    let partner = |one: &Group| after.iter().find(|other| other.key == one.key);
    before.iter().filter_map(|one| Some((one, partner(one)?))).collect()
}

/// Returns the groups of a side, with the samples of the selected phases.
fn selected_groups<'a>(
    side: &'a [Sample],
    by_engine: bool,
    options: &ComparisonOptions,
) -> Vec<Group<'a>> {
    let phases = &options.phases;
    let is_requested = |sample: &&Sample| {
        phases.is_empty() || phases.iter().any(|phase| sample.phase.is_named(phase))
    };
    let mut groups = groups(side, by_engine);
    for group in &mut groups {
        group.samples.retain(is_requested);
        if options.is_paired {
            group.samples.sort_by_key(|sample| (sample.seed, sample.iteration));
        }
    }
    groups
}

/// Returns the metrics to judge, each once: the time by default.
fn judged_metrics(requested: &[Metric]) -> Vec<String> {
    let mut metrics: Vec<String> = Vec::new();
    for metric in requested.iter().map(Metric::name) {
        if !metrics.iter().any(|known| known == metric) {
            metrics.push(metric.to_owned());
        }
    }
    if metrics.is_empty() {
        metrics.push(TIME_METRIC.to_owned());
    }
    metrics
}

/// Reports whether configurations are separated by engine. If each side has a single engine and they
/// differ, the comparison is between the engines, which requires `force`.
pub fn separates_engines(sides: &[&[Sample]]) -> bool {
    let engines = sides.iter().map(|side| side.iter().map(|sample| &sample.engine).collect());
    let engines: Vec<BTreeSet<_>> = engines.collect();
    engines.iter().all(|other| *other == engines[0])
        || engines.iter().any(|engines| engines.len() != 1)
}

/// Returns the differences in provenance of all pairs, without duplicates. `without_host` limits
/// the check to the engine.
fn differences(pairs: &[Pair], without_host: bool, subject: Subject) -> Vec<Difference> {
    let differences = match subject {
        Subject::Kernels => provenance::differences,
        Subject::Configurations => provenance::host_differences,
    };
    let mut found = Vec::new();
    for (before, after) in pairs {
        if before.samples.is_empty() || after.samples.is_empty() {
            continue;
        }
        for difference in differences(&before.samples, &after.samples) {
            let is_relevant = !without_host || difference.field == provenance::ENGINE_FIELD;
            if is_relevant && !found.contains(&difference) {
                found.push(difference);
            }
        }
    }
    found
}

/// Returns the setup names of groups, without duplicates.
fn setup_names(groups: &[Group]) -> Vec<String> {
    let mut names = Vec::new();
    for name in groups.iter().map(|group| group.key.setup.name()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Returns the mean ratio of each phase that several configurations have, and of all phases, without
/// phases shorter than a timer tick.
fn geometric_means(comparison: &Comparison) -> Vec<GeometricMean> {
    let mean = |phase: Option<&AnyPhase>| {
        let changes = comparison.rows().map(|(_, change)| change);
        let changes = changes.filter(|change| !change.is_below_tick);
        let changes = changes.filter(|change| phase.is_none_or(|phase| change.phase == *phase));
        let rows: Vec<&Runs> = changes.map(|change| &change.runs).collect();
        let mean = stats::geometric_mean(&rows, comparison.design());
        let (ratio, interval) = mean.filter(|_| rows.len() > 1)?;
        Some(GeometricMean { phase: phase.cloned(), rows: rows.len(), ratio, interval })
    };
    comparison.phases().into_iter().map(Some).chain([None]).filter_map(mean).collect()
}

/// Checks that no side is empty and that each selected phase occurs on a side.
fn check_sides(
    sides: [&[Sample]; 2],
    labels: &[String; 2],
    selected: &[String],
) -> Result<(), CompareError> {
    if let Some((_, label)) = sides.iter().zip(labels).find(|(samples, _)| samples.is_empty()) {
        return Err(CompareError::EmptySide(label.clone()));
    }
    let samples = || sides.into_iter().flatten();
    let is_known = |name: &&String| samples().any(|sample| sample.phase.is_named(name));
    let Some(name) = selected.iter().find(|name| !is_known(name)) else { return Ok(()) };
    let known: BTreeSet<_> = samples().map(|sample| sample.phase.to_string()).collect();
    Err(CompareError::UnknownPhase { name: name.clone(), known: known.into_iter().collect() })
}

/// Returns notes on the limits of the figures. `without_host`: no input describes its host.
fn notes(
    comparison: &Comparison,
    sides: &[Vec<Group>; 2],
    pairs: &[Pair],
    without_host: bool,
    subject: Subject,
) -> Vec<String> {
    let (one, two) = (&comparison.before, &comparison.after);
    let image = one.image_sha256.as_ref();
    let unknown = image.is_none() && two.image_sha256.is_none();
    let mut spreads = comparison.rows().flat_map(|(_, change)| change.time.sides());
    let single = spreads.any(|spread| spread.runs == 1);
    let mut samples = sides.iter().flatten().flat_map(|group| &group.samples);
    let is_obtained = samples.any(|sample| sample.resident_pages.is_some());
    let [before, after] = sides;
    let of_kernels = subject == Subject::Kernels;
    let notes = [
        (without_host, WITHOUT_HOST),
        (of_kernels && !without_host && unknown && one.kernel == two.kernel, SAME_RELEASE),
        (of_kernels && image.is_some() && image == two.image_sha256.as_ref(), SAME_IMAGE),
        (!without_host && !is_obtained, UNKNOWN_PAGE_SIZES),
        (single && comparison.is_emulated(), ONE_EMULATED_RUN),
        (single && !comparison.is_emulated(), ONE_RUN),
        (has_different_seeds(pairs), DIFFERENT_SEEDS),
        (omits_iterations(pairs), OMITTED_ITERATIONS),
    ];
    let notes = notes.into_iter().filter(|(holds, _)| *holds);
    let mut notes: Vec<String> = notes.map(|(_, note)| note.to_owned()).collect();
    notes.extend(programs_note(pairs));
    let pages = sides.each_ref().map(|groups| page_sizes(groups));
    if !of_kernels && pages[0] != pages[1] {
        let [before, after] = pages;
        let (one, two) = (&one.label, &two.label);
        notes.push(format!("Pages that back the memory: {one}: {before}; {two}: {after}."));
    }
    for (label, here, there) in [(&one.label, before, after), (&two.label, after, before)] {
        let alone = unmatched_configurations(here, there);
        if !alone.is_empty() {
            notes.push(format!("Only in {label}, not compared: {}.", alone.join("; ")));
        }
    }
    notes.extend(comparison.metrics().filter_map(|metric| partial_count_note(metric, pairs)));
    notes
}

/// Reports whether iterations of a configuration that is on both sides were left out.
fn omits_iterations(pairs: &[Pair]) -> bool {
    let omits = |group: &Group| group.omitted_iterations.is_some_and(|omitted| omitted > 0);
    pairs.iter().any(|(one, two)| omits(one) || omits(two))
}

/// Returns the note on the phases that a metric does not judge because some of their runs lack it.
fn partial_count_note(metric: &str, pairs: &[Pair]) -> Option<String> {
    if metric == TIME_METRIC {
        return None;
    }
    let partial = pairs.iter().filter_map(|(one, two)| {
        let phases = partly_counted_phases(one, two, metric);
        let name = one.key.setup.name();
        (!phases.is_empty()).then(|| format!("{} of {name}", phases.join(", ")))
    });
    let partial: Vec<String> = partial.collect();
    (!partial.is_empty())
        .then(|| format!("{metric} is not judged where some runs lack it: {}.", partial.join("; ")))
}

/// Reports whether the runs of a configuration that is on both sides have different seeds.
fn has_different_seeds(pairs: &[Pair]) -> bool {
    let seeds = |group: &Group| -> BTreeSet<u64> {
        group.samples.iter().map(|sample| sample.seed).collect()
    };
    pairs.iter().any(|(one, other)| {
        let (one, other) = (seeds(one), seeds(other));
        !one.is_empty() && !other.is_empty() && one != other
    })
}

/// Returns the note that names the programs whose builds differ between the sides.
fn programs_note(pairs: &[Pair]) -> Option<String> {
    let names: BTreeSet<&str> = pairs
        .iter()
        .flat_map(|(one, other)| provenance::differing_programs(&one.samples, &other.samples))
        .collect();
    let names: Vec<&str> = names.into_iter().collect();
    (!names.is_empty()).then(|| {
        format!(
            "The two sides ran different builds of {}, which alone change counts and schedules.",
            names.join(" and ")
        )
    })
}

/// Formats the page sizes that back the memory of all groups.
fn page_sizes(groups: &[Group]) -> String {
    let samples = groups.iter().flat_map(|group| group.samples.iter().copied());
    let sizes = provenance::backing_page_sizes(samples).into_iter();
    let sizes: Vec<_> = sizes.map(|sizes| sizes.unwrap_or_else(|| "unknown".to_owned())).collect();
    sizes.join(" or ")
}

/// Returns the names of configurations and phases that only the first side has.
fn unmatched_configurations(here: &[Group], there: &[Group]) -> Vec<String> {
    let mut alone = Vec::new();
    for group in here {
        let name = group.key.setup.name();
        let Some(other) = there.iter().find(|other| other.key == group.key) else {
            alone.push(name);
            continue;
        };
        let (phases, known) = (group.phases(), other.phases());
        let missing: Vec<_> = phases.difference(&known).map(|phase| phase.name()).collect();
        if !missing.is_empty() {
            alone.push(format!("{} of {name}", missing.join(", ")));
        }
    }
    alone
}
