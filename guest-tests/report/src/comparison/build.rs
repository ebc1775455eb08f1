// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Builds a comparison: pairs the groups of both sides, checks their provenance, judges the rows and
//! adds means, growth and notes.

use std::collections::BTreeSet;

use super::{
    configuration::{Configuration, Runs},
    error::CompareError,
    group::{self, Group, Key},
    growth, notes,
    options::{MIN_EFFECT, MIN_EFFECT_EMULATED, Options},
    table::{Comparison, GeometricMean, SCHEMA, TIME},
};
use crate::{
    judge::{self, Row},
    provenance::{self, Difference},
    sample::{Sample, Step},
    side::Side,
    stats::{self, Design, Resampled},
};

/// Groups of one configuration on both sides.
type Pair<'a> = (&'a Group<'a>, &'a Group<'a>);

impl Comparison {
    /// Compares `after` with `before`.
    ///
    /// # Errors
    /// A side is empty, no configuration and step is on both, the count to judge is missing, runs
    /// cannot be paired, or the provenance differs and the comparison is not forced. Inputs without
    /// a host compare with a note.
    pub fn of(
        before: &[Sample],
        after: &[Sample],
        options: &Options,
    ) -> Result<Self, CompareError> {
        for (samples, label) in [before, after].iter().zip(&options.labels) {
            if samples.is_empty() {
                return Err(CompareError::Empty(label.clone()));
            }
        }
        let by_engine = group::is_by_engine(before, after);
        let [groups_before, groups_after] = [before, after].map(|side| {
            let mut groups = group::groups(side, by_engine);
            retain_phases(&mut groups, &options.phases);
            groups
        });
        let partner = |key: &Key| groups_after.iter().find(|group| group.key == *key);
        let pairs = groups_before.iter();
        let pairs: Vec<Pair> = pairs.filter_map(|one| Some((one, partner(&one.key)?))).collect();
        let raw = before.iter().chain(after).all(|sample| sample.is_without_host());
        let differences = differences(&pairs, raw);
        if !differences.is_empty() && !options.force {
            return Err(CompareError::Unequal(differences));
        }
        let mut comparison = Self::empty(before, after, options, differences);
        let rows = comparison.add_configurations(&pairs, options)?;
        if comparison.configurations.is_empty() {
            return Err(CompareError::NothingInCommon {
                before: names(&groups_before),
                after: names(&groups_after),
                phases: options.phases.clone(),
            });
        }
        comparison.judge(rows)?;
        comparison.geomeans = geometric_means(&comparison);
        comparison.growth = growth::growth(&comparison.configurations, comparison.is_emulated());
        comparison.notes = notes::notes(&comparison, &groups_before, &groups_after, raw);
        Ok(comparison)
    }

    fn empty(
        before: &[Sample],
        after: &[Sample],
        options: &Options,
        differences: Vec<Difference>,
    ) -> Self {
        let [label_before, label_after] = options.labels.clone();
        let (before, after) = (Side::of(label_before, before), Side::of(label_after, after));
        let default = if before.is_emulated() && after.is_emulated() {
            MIN_EFFECT_EMULATED
        } else {
            MIN_EFFECT
        };
        Self {
            schema: SCHEMA,
            before,
            after,
            min_effect: options.min_effect.unwrap_or(default),
            metric: options.metric.clone().unwrap_or_else(|| TIME.to_owned()),
            paired: options.paired,
            command: options.command.clone(),
            differences,
            notes: Vec::new(),
            geomeans: Vec::new(),
            growth: Vec::new(),
            configurations: Vec::new(),
        }
    }

    /// Adds the configurations of both sides and returns the row to judge of each of their steps.
    fn add_configurations(
        &mut self,
        pairs: &[Pair],
        options: &Options,
    ) -> Result<Vec<Option<Row>>, CompareError> {
        let mut rows = Vec::new();
        for (before, after) in pairs {
            if options.paired && before.runs() != after.runs() {
                return Err(CompareError::Unpaired(before.key.setup.name()));
            }
            let mut configuration = Configuration::of(before, after);
            for phase in &mut configuration.phases {
                let row =
                    row(&phase.phase, before, after, options.metric.as_deref(), self.design());
                phase.counted = row
                    .as_ref()
                    .filter(|row| !row.time)
                    .map(|row| Runs { before: row.before.clone(), after: row.after.clone() });
                rows.push(row);
            }
            if !configuration.phases.is_empty() {
                self.configurations.push(configuration);
            }
        }
        Ok(rows)
    }

    /// Judges the rows, one for each step of all configurations.
    fn judge(&mut self, rows: Vec<Option<Row>>) -> Result<(), CompareError> {
        let has: Vec<bool> = rows.iter().map(Option::is_some).collect();
        let rows: Vec<Row> = rows.into_iter().flatten().collect();
        if rows.is_empty() {
            let known: BTreeSet<&String> = self.rows().flat_map(|(_, p)| p.count_names()).collect();
            return Err(CompareError::Metric {
                name: self.metric.clone(),
                known: known.into_iter().cloned().collect(),
            });
        }
        let judged = judge::judge(&rows, self.min_effect);
        let phases = self.configurations.iter_mut().flat_map(|c| &mut c.phases);
        let phases = phases.zip(has).filter(|(_, has)| *has);
        for ((phase, _), (tested, verdict)) in phases.zip(judged) {
            phase.tested = tested;
            phase.verdict = Some(verdict);
        }
        Ok(())
    }
}

fn retain_phases(groups: &mut [Group], phases: &[String]) {
    let wanted = |sample: &&Sample| phases.iter().any(|phase| phase == sample.step.name());
    for group in groups.iter_mut().filter(|_| !phases.is_empty()) {
        group.samples.retain(wanted);
    }
}

/// Returns the differences in provenance over all pairs, each once. Of inputs without a host, only
/// the engine can differ.
fn differences(pairs: &[Pair], raw: bool) -> Vec<Difference> {
    let mut found = Vec::new();
    for (before, after) in pairs {
        if before.samples.is_empty() || after.samples.is_empty() {
            continue;
        }
        for difference in provenance::differences(&before.samples, &after.samples) {
            let is_relevant = !raw || difference.field == provenance::ENGINE_FIELD;
            if is_relevant && !found.contains(&difference) {
                found.push(difference);
            }
        }
    }
    found
}

/// Returns the names of groups, each once.
fn names(groups: &[Group]) -> Vec<String> {
    let mut names = Vec::new();
    for name in groups.iter().map(|group| group.key.setup.name()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Returns the figures to judge of one step; `None` if the step lacks the count `metric`, or if it
/// is 0 in every run.
fn row(
    step: &Step,
    before: &Group,
    after: &Group,
    metric: Option<&str>,
    design: Design,
) -> Option<Row> {
    let figures = |group: &Group| -> Option<Vec<f64>> {
        let mut samples: Vec<&Sample> = group.of_step(step).collect();
        if design == Design::Paired {
            samples.sort_by_key(|sample| (sample.seed, sample.iteration));
        }
        let Some(name) = metric else {
            return Some(samples.iter().map(|sample| sample.ns).collect());
        };
        let figures = samples.iter().map(|sample| sample.count(name));
        figures.map(|count| count.map(|count| count as f64)).collect()
    };
    let is_emulated = |group: &Group| group.samples.iter().all(|s| s.host.emulator.is_some());
    let row = Row {
        before: figures(before)?,
        after: figures(after)?,
        design,
        emulated: is_emulated(before) && is_emulated(after),
        time: metric.is_none(),
    };
    let mut all = row.before.iter().chain(&row.after);
    (row.time || all.any(|&figure| figure != 0.0)).then_some(row)
}

/// Returns the means of each step that several configurations have, and of all steps.
fn geometric_means(comparison: &Comparison) -> Vec<GeometricMean> {
    let mean = |wanted: Option<&Step>| {
        let rows = comparison.rows().map(|(_, phase)| phase);
        let rows = rows.filter(|phase| wanted.is_none_or(|step| phase.phase == *step));
        let rows: Vec<Resampled> = rows
            .map(|phase| Resampled {
                before: &phase.runs.before,
                after: &phase.runs.after,
                design: comparison.design(),
            })
            .collect();
        let (ratio, interval) = stats::geometric_mean(&rows).filter(|_| rows.len() > 1)?;
        Some(GeometricMean { phase: wanted.cloned(), rows: rows.len(), ratio, interval })
    };
    let steps = comparison.steps().into_iter().map(Some);
    steps.chain([None]).filter_map(mean).collect()
}
