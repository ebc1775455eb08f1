// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two sets of results side by side: before and after.
//!
//! ```text
//! results.jsonl ─┐
//! run directory ─┼─ input ─ [Record] ─┐
//! raw log ─ raw_log ─┘                ├─ Comparison::of ─┬─ render::text
//!                (and once more) ─────┘   (provenance)   ├─ render::markdown
//!                                                        └─ render::json
//! ```
//!
//! Records are put into one group for each configuration (engine, mode, backing, size, vCPUs) and
//! phase; seeds and iterations are the runs within a group. Medians are set against each other,
//! with the least and the greatest beside them. Before any figure is given, the two sides must have
//! the same provenance ([`provenance`]). A phase whose median grew by more than the least effect
//! asked for, and under emulation by more than a timer tick may add, is a regression; counts explain
//! a time and are judged by the reader.

mod error;
mod group;
pub mod input;
mod notes;
pub mod provenance;
pub mod raw_log;
pub mod render;
mod side;
mod spread;

#[cfg(test)]
mod fixture;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use self::group::{Group, Key};
pub use self::{
    error::CompareError,
    provenance::Difference,
    side::Side,
    spread::{Change, Spread},
};
use crate::{config::Backing, phase::Phase, results::Record, units::Bytes};

/// The schema of a comparison in JSON.
pub const SCHEMA: &str = "granule.comparison/1";

/// How to compare.
#[derive(Debug, Clone)]
pub struct Options {
    /// What the two sides are called: a file, a directory, a series.
    pub labels: [String; 2],
    /// Compare in spite of unequal provenance.
    pub force: bool,
    /// How much slower a phase must be to be a regression, as a share of before (0.03 is 3%).
    pub min_effect: f64,
}

impl Default for Options {
    /// Nothing forced, regressions from 3% on.
    fn default() -> Self {
        Self {
            labels: ["before".to_owned(), "after".to_owned()],
            force: false,
            min_effect: 0.03,
        }
    }
}

/// Two sets of results, configuration by configuration and phase by phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// What stood before.
    pub before: Side,
    /// What stands after.
    pub after: Side,
    /// From which share of before on a slower phase is a regression.
    pub min_effect: f64,
    /// What differs in provenance; empty unless forced.
    pub differences: Vec<Difference>,
    /// What a reader must know to judge the figures.
    pub notes: Vec<String>,
    /// One for each configuration that both sides have, in the order of before.
    pub configurations: Vec<Configuration>,
}

/// One configuration on both sides.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Configuration {
    /// What ran the guest; empty where different ones are compared by force.
    pub engine: String,
    /// The guest mode, as the kernel's test prints it.
    pub mode: String,
    /// What was asked for behind the region.
    pub backing: Backing,
    /// The region's size.
    pub memory: Bytes,
    /// How many vCPUs.
    pub vcpus: u32,
    /// Whether the host's memory was populated beforehand.
    pub prefault: bool,
    /// Further options that change figures, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
    /// Its phases that both sides have, in the order in which they run.
    pub phases: Vec<PhaseChange>,
}

/// One phase on both sides.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PhaseChange {
    /// Which phase.
    pub phase: Phase,
    /// Its time in nanoseconds.
    pub time: Change,
    /// Whether it became slower by more than the least effect.
    pub regression: bool,
    /// System instructions by name; emulation only. Those that never occur are left out.
    pub counters: BTreeMap<String, Change>,
    /// The host kernel's events by name. Those that never occur are left out.
    pub events: BTreeMap<String, Change>,
}

impl Comparison {
    /// Compares `after` with `before`.
    ///
    /// # Errors
    /// A side is empty, no configuration and phase is on both, or the provenance is unequal and
    /// nothing forces the comparison. Raw logs on both sides tell nothing of where they come from,
    /// and compare all the same, with a note.
    pub fn of(
        before: &[Record],
        after: &[Record],
        options: &Options,
    ) -> Result<Self, CompareError> {
        for (records, label) in [before, after].iter().zip(&options.labels) {
            if records.is_empty() {
                return Err(CompareError::Empty(label.clone()));
            }
        }
        let by_engine = group::by_engine(before, after);
        let (groups_before, groups_after) = (
            group::groups(before, by_engine),
            group::groups(after, by_engine),
        );
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
        let configurations: Vec<_> = pairs
            .iter()
            .map(|(before, after)| configuration(before, after, options.min_effect))
            .filter(|configuration| !configuration.phases.is_empty())
            .collect();
        if configurations.is_empty() {
            return Err(CompareError::NothingInCommon {
                before: group::names(&groups_before),
                after: group::names(&groups_after),
            });
        }
        let [label_before, label_after] = options.labels.clone();
        let mut comparison = Self {
            schema: SCHEMA,
            before: Side::of(label_before, before),
            after: Side::of(label_after, after),
            min_effect: options.min_effect,
            differences,
            notes: Vec::new(),
            configurations,
        };
        comparison.notes = notes::notes(&comparison, &groups_before, &groups_after, raw);
        Ok(comparison)
    }

    /// The phases that became slower by more than the least effect.
    pub fn regressions(&self) -> impl Iterator<Item = (&Configuration, &PhaseChange)> {
        self.configurations.iter().flat_map(|configuration| {
            let slower = configuration.phases.iter().filter(|phase| phase.regression);
            slower.map(move |phase| (configuration, phase))
        })
    }

    /// Whether a time here is the virtual time of an emulator on both sides.
    pub fn is_emulated(&self) -> bool {
        self.before.is_emulated() && self.after.is_emulated()
    }
}

/// Whether a record was read from a raw log, which tells nothing of its host.
fn is_raw(record: &Record) -> bool {
    [raw_log::ENGINE, raw_log::BENCH_ENGINE].contains(&record.engine.as_str())
        && !provenance::is_known(&record.host)
}

/// What differs in provenance, over all pairs, each difference once.
fn differences(pairs: &[(&Group, &Group)]) -> Vec<Difference> {
    let mut found = Vec::new();
    for (before, after) in pairs {
        for difference in provenance::differences(&before.records, &after.records) {
            if !found.contains(&difference) {
                found.push(difference);
            }
        }
    }
    found
}

fn configuration(before: &Group, after: &Group, min_effect: f64) -> Configuration {
    let Key {
        engine,
        mode,
        backing,
        memory,
        vcpus,
        prefault,
        options,
    } = before.key.clone();
    let phases = group::phases()
        .filter_map(|phase| phase_change(phase, before, after, min_effect))
        .collect();
    Configuration {
        engine,
        mode,
        backing,
        memory,
        vcpus,
        prefault,
        options,
        phases,
    }
}

/// Whether a time grew by no more than the timer ticks that may fall into it by chance. Under
/// emulation one costs up to 30 us of work, several times what the host alone does in its phases.
fn is_within_ticks(time: &Change, before: &Group, after: &Group) -> bool {
    const TICKS: u64 = 60_000; // nanoseconds
    let emulated = |group: &Group| group.records.iter().all(|r| r.host.emulator.is_some());
    let grown = match (time.before, time.after) {
        (Some(before), Some(after)) => after.median.saturating_sub(before.median),
        _ => return false,
    };
    emulated(before) && emulated(after) && grown < TICKS
}

fn phase_change(phase: Phase, before: &Group, after: &Group, effect: f64) -> Option<PhaseChange> {
    let time = Change::between(
        before.spread(phase, |record| Some(record.ns.0)),
        after.spread(phase, |record| Some(record.ns.0)),
    );
    time.before.and(time.after)?;
    let counter = |group: &Group, name: &str| {
        let counted = group.has_counters();
        group.spread(phase, |record| {
            // A counted run that did not meet the instruction counts 0.
            counted.then(|| record.counters.get(name).copied().unwrap_or(0))
        })
    };
    let event =
        |group: &Group, name: &str| group.spread(phase, |record| record.events.get(name).copied());
    let changes = |names: BTreeSet<&str>, spread: &dyn Fn(&Group, &str) -> Option<Spread>| {
        let change = |name| Change::between(spread(before, name), spread(after, name));
        names
            .into_iter()
            .map(|name| (name.to_owned(), change(name)))
            .collect()
    };
    let occurring = |counts| {
        let mut names = before.occurring(phase, counts);
        names.extend(after.occurring(phase, counts));
        names
    };
    Some(PhaseChange {
        phase,
        time,
        regression: time.ratio.is_some_and(|ratio| ratio > 1.0 + effect)
            && !is_within_ticks(&time, before, after),
        counters: changes(occurring(|record| &record.counters), &counter),
        events: changes(occurring(|record| &record.events), &event),
    })
}
