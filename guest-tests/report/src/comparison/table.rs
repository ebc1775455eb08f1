// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Builds the table of a comparison: pairs the groups of both sides, has the rows judged, and takes
//! their ratios together.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    CompareError, Comparison, Configuration, LEAST_EFFECT, LEAST_EFFECT_EMULATED, Options,
    PhaseChange, Runs, SCHEMA, Together,
    group::{self, Group},
    growth, notes,
};
use crate::{
    input,
    judge::{self, Row},
    provenance::{self, Difference},
    sample::{Sample, Step},
    side::Side,
    spread::{Change, Spread},
    stats::{self, Resampled},
};

/// What judges where no count is asked for.
const TIME: &str = "time";

/// See [`Comparison::of`].
pub fn compare(
    before: &[Sample],
    after: &[Sample],
    options: &Options,
) -> Result<Comparison, CompareError> {
    for (samples, label) in [before, after].iter().zip(&options.labels) {
        if samples.is_empty() {
            return Err(CompareError::Empty(label.clone()));
        }
    }
    let by_engine = group::by_engine(before, after);
    let mut sides = [before, after].map(|side| group::groups(side, by_engine));
    if !options.phases.is_empty() {
        for group in sides.iter_mut().flatten() {
            let wanted = |sample: &&Sample| options.phases.iter().any(|p| p == sample.step.name());
            group.samples.retain(wanted);
        }
    }
    let [groups_before, groups_after] = &sides;
    let pairs: Vec<(&Group, &Group)> = groups_before
        .iter()
        .filter_map(|one| Some((one, groups_after.iter().find(|two| two.key == one.key)?)))
        .collect();
    let mut differences = differences(&pairs);
    let raw = before.iter().chain(after).all(is_raw);
    if raw {
        // There is nothing else that a log could tell.
        differences.retain(|difference| difference.field == provenance::ENGINE_FIELD);
    }
    if !differences.is_empty() && !options.force {
        return Err(CompareError::Unequal(differences));
    }
    let sides = [
        Side::of(options.labels[0].clone(), before),
        Side::of(options.labels[1].clone(), after),
    ];
    let emulated = sides.iter().all(Side::is_emulated);
    let default = if emulated {
        LEAST_EFFECT_EMULATED
    } else {
        LEAST_EFFECT
    };
    let [side_before, side_after] = sides;
    let mut comparison = Comparison {
        schema: SCHEMA,
        before: side_before,
        after: side_after,
        min_effect: options.min_effect.unwrap_or(default),
        metric: options.metric.clone().unwrap_or_else(|| TIME.to_owned()),
        paired: options.paired,
        command: options.command.clone(),
        differences,
        notes: Vec::new(),
        geomeans: Vec::new(),
        growth: Vec::new(),
        configurations: Vec::new(),
    };
    let mut rows = Vec::new();
    for (before, after) in &pairs {
        if options.paired && runs_of(before) != runs_of(after) {
            return Err(CompareError::Unpaired(before.key.setup.name()));
        }
        let mut configuration = configuration(before, after);
        for phase in &mut configuration.phases {
            let row = row(&phase.phase, before, after, options);
            phase.counted = row.as_ref().filter(|row| !row.time).map(|row| Runs {
                before: row.before.clone(),
                after: row.after.clone(),
            });
            rows.push(row);
        }
        if !configuration.phases.is_empty() {
            comparison.configurations.push(configuration);
        }
    }
    if comparison.configurations.is_empty() {
        return Err(CompareError::NothingInCommon {
            before: group::names(groups_before),
            after: group::names(groups_after),
            phases: options.phases.clone(),
        });
    }
    judge_all(&mut comparison, rows)?;
    comparison.geomeans = geomeans(&comparison);
    comparison.growth = growth::growth(&comparison);
    comparison.notes = notes::notes(&comparison, groups_before, groups_after, raw);
    Ok(comparison)
}

/// Whether a sample comes from an input that tells nothing of its host.
fn is_raw(sample: &Sample) -> bool {
    input::FOREIGN_ENGINES.contains(&sample.engine.as_str()) && !provenance::is_known(&sample.host)
}

/// What differs in provenance, over all pairs, each difference once.
fn differences(pairs: &[(&Group, &Group)]) -> Vec<Difference> {
    let mut found = Vec::new();
    for (before, after) in pairs {
        if before.samples.is_empty() || after.samples.is_empty() {
            continue;
        }
        for difference in provenance::differences(&before.samples, &after.samples) {
            if !found.contains(&difference) {
                found.push(difference);
            }
        }
    }
    found
}

/// Which runs a group has.
fn runs_of(group: &Group) -> BTreeSet<(u64, u32)> {
    let samples = group.samples.iter();
    samples
        .map(|sample| (sample.seed, sample.iteration))
        .collect()
}

fn configuration(before: &Group, after: &Group) -> Configuration {
    let common = before.steps();
    let common = common
        .intersection(&after.steps())
        .copied()
        .cloned()
        .collect::<Vec<_>>();
    Configuration {
        engine: before.key.engine.clone(),
        setup: before.key.setup.clone(),
        phases: common
            .iter()
            .map(|step| phase_change(step, before, after))
            .collect(),
    }
}

fn times(group: &Group, step: &Step) -> Vec<f64> {
    group.of_step(step).map(|sample| sample.ns).collect()
}

fn phase_change(step: &Step, before: &Group, after: &Group) -> PhaseChange {
    let vcpus = |group: &Group| -> Vec<f64> {
        let samples = group.of_step(step);
        samples
            .flat_map(|sample| sample.vcpu_ns.iter().copied())
            .collect()
    };
    let runs = Runs {
        before: times(before, step),
        after: times(after, step),
    };
    let spread = |values: &[f64]| Spread::of(values.iter().copied());
    let changes = |counts: fn(&Sample) -> &BTreeMap<String, u64>, counted: fn(&Group) -> bool| {
        let mut names = before.occurring(step, counts);
        names.extend(after.occurring(step, counts));
        let spread = |group: &Group, name: &str| {
            // A counted run that did not meet the instruction counts 0.
            let missing = counted(group).then_some(0);
            group.spread(step, |sample| counts(sample).get(name).copied().or(missing))
        };
        let change = |name: &str| Change::between(spread(before, name), spread(after, name));
        names
            .into_iter()
            .map(|name| (name.to_owned(), change(name)))
            .collect()
    };
    PhaseChange {
        phase: step.clone(),
        time: Change::between(spread(&runs.before), spread(&runs.after)),
        runs,
        counted: None,
        vcpus: Runs {
            before: vcpus(before),
            after: vcpus(after),
        },
        verdict: None,
        tested: None,
        counters: changes(|sample| &sample.counters, |group| group.has_counters()),
        events: changes(|sample| &sample.events, |_| false),
        gauges: changes(|sample| &sample.gauges, |_| false),
    }
}

/// What is judged of one step; `None` where the step does not have it.
fn row(step: &Step, before: &Group, after: &Group, options: &Options) -> Option<Row> {
    let figures = |group: &Group| -> Option<Vec<f64>> {
        let mut samples: Vec<&Sample> = group.of_step(step).collect();
        if options.paired {
            samples.sort_by_key(|sample| (sample.seed, sample.iteration));
        }
        let Some(name) = &options.metric else {
            return Some(samples.iter().map(|sample| sample.ns).collect());
        };
        let count = |sample: &&Sample| {
            let kinds = [&sample.counters, &sample.events, &sample.gauges];
            let found = kinds.into_iter().find_map(|counts| counts.get(name));
            let missing = (!sample.counters.is_empty()).then_some(0);
            found.copied().or(missing).map(|count| count as f64)
        };
        samples.iter().map(count).collect()
    };
    let emulated = |group: &Group| group.samples.iter().all(|s| s.host.emulator.is_some());
    let (figures_before, figures_after) = (figures(before)?, figures(after)?);
    // A count that never occurs here says nothing.
    let occurs = figures_before
        .iter()
        .chain(&figures_after)
        .any(|&figure| figure != 0.0);
    (options.metric.is_none() || occurs).then(|| Row {
        before: figures_before,
        after: figures_after,
        paired: options.paired,
        emulated: emulated(before) && emulated(after),
        time: options.metric.is_none(),
    })
}

/// Judges the rows, which are those of all configurations one after another.
fn judge_all(comparison: &mut Comparison, rows: Vec<Option<Row>>) -> Result<(), CompareError> {
    let has: Vec<bool> = rows.iter().map(Option::is_some).collect();
    let rows: Vec<Row> = rows.into_iter().flatten().collect();
    if rows.is_empty() {
        let mut known = BTreeSet::new();
        for (_, phase) in comparison.rows() {
            let kinds = [&phase.counters, &phase.events, &phase.gauges];
            known.extend(kinds.into_iter().flat_map(|counts| counts.keys().cloned()));
        }
        return Err(CompareError::Metric {
            name: comparison.metric.clone(),
            known: known.into_iter().collect(),
        });
    }
    let mut judged = judge::judge(&rows, comparison.min_effect).into_iter();
    let phases = comparison
        .configurations
        .iter_mut()
        .flat_map(|c| &mut c.phases);
    for (phase, has) in phases.zip(has) {
        if let (true, Some((tested, verdict))) = (has, if has { judged.next() } else { None }) {
            phase.tested = tested;
            phase.verdict = Some(verdict);
        }
    }
    Ok(())
}

/// The ratios of times of each step that several configurations have, and of all steps.
fn geomeans(comparison: &Comparison) -> Vec<Together> {
    let together = |wanted: Option<&Step>| {
        let rows: Vec<Resampled> = comparison
            .rows()
            .filter(|(_, phase)| wanted.is_none_or(|step| phase.phase == *step))
            .map(|(_, phase)| Resampled {
                before: &phase.runs.before,
                after: &phase.runs.after,
                paired: comparison.paired,
            })
            .collect();
        let mean = stats::geomean(&rows).filter(|_| rows.len() > 1)?;
        Some(Together {
            phase: wanted.cloned(),
            rows: rows.len(),
            ratio: mean.ratio,
            interval: mean.interval.map(|(low, high)| [low, high]),
        })
    };
    let steps: BTreeSet<&Step> = comparison.rows().map(|(_, phase)| &phase.phase).collect();
    let each = steps.into_iter().filter_map(|step| together(Some(step)));
    each.chain(together(None)).collect()
}
