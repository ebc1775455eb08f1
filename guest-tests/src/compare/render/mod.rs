// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A comparison for people and for programs.

mod figures;
mod markdown;
mod text;

pub use self::{markdown::markdown, text::text};
use super::{Change, Comparison, Configuration, PhaseChange, Side, group};
use crate::phase::Phase;

/// The comparison as JSON, schema [`super::SCHEMA`], its fields as in [`Comparison`].
///
/// # Errors
/// None that is known; what the JSON writer says is passed on.
pub fn json(comparison: &Comparison) -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(comparison).map(|text| text + "\n")
}

/// What stands above the tables, each a name and its words.
fn head(comparison: &Comparison) -> Vec<(&'static str, String)> {
    let Comparison { before, after, .. } = comparison;
    let side = |side: &Side| match side.kernel_line() {
        Some(kernel) => format!("{}: {kernel}", side.label),
        None => side.label.clone(),
    };
    let mut head = vec![("before", side(before)), ("after", side(after))];
    if let (Some(cpu), Some(page)) = (&after.cpu, after.page_size) {
        head.push(("CPU", format!("{cpu}, {page} pages; {}", after.features)));
    }
    if let Some(emulator) = &after.emulator {
        head.push(("emulator", emulator.clone()));
    }
    if comparison.is_emulated() {
        head.push((
            "time",
            "virtual: the work of all CPUs together as the emulator counts it, not hardware \
             time"
                .to_owned(),
        ));
    }
    if let Some(mode) = one_mode(comparison) {
        head.push(("guest", mode.to_owned()));
    }
    head
}

/// The guest mode, where there is only one.
fn one_mode(comparison: &Comparison) -> Option<&str> {
    let mut modes = comparison.configurations.iter().map(|c| c.mode.as_str());
    let first = modes.next()?;
    modes.all(|mode| mode == first).then_some(first)
}

/// Every phase that is compared anywhere, in order.
fn phases(comparison: &Comparison) -> Vec<Phase> {
    let compared = |wanted: &Phase| {
        let mut all = comparison.configurations.iter().flat_map(|c| &c.phases);
        all.any(|phase| phase.phase == *wanted)
    };
    group::phases().filter(compared).collect()
}

/// What is counted in a phase: what the kernel did first (its events, its functions), then the
/// instructions, which begin with a capital.
fn counts(phase: &PhaseChange) -> impl Iterator<Item = (&String, &Change)> {
    let is_instruction = |name: &str| name.starts_with(|c: char| c.is_ascii_uppercase());
    let counters = || phase.counters.iter();
    let functions = counters().filter(move |(name, _)| !is_instruction(name));
    let instructions = counters().filter(move |(name, _)| is_instruction(name));
    phase.events.iter().chain(functions).chain(instructions)
}

/// What stands above one table.
fn title(comparison: &Comparison, configuration: &Configuration) -> String {
    let title = short_title(comparison, configuration);
    let phases = &configuration.phases;
    let runs = |side: fn(&Change) -> Option<super::Spread>| {
        let spreads = phases.iter().filter_map(|phase| side(&phase.time));
        spreads.map(|spread| spread.runs).max().unwrap_or(0)
    };
    match (runs(|change| change.before), runs(|change| change.after)) {
        (1, 1) => title + "; 1 run a side",
        (before, after) if before == after => title + &format!("; {before} runs a side"),
        (before, after) => title + &format!("; runs: {before} before, {after} after"),
    }
}

/// The same without the runs.
fn short_title(comparison: &Comparison, configuration: &Configuration) -> String {
    let Configuration {
        engine,
        mode,
        backing,
        memory,
        vcpus,
        prefault,
        options,
        phases: _,
    } = configuration;
    let mut title = group::name(*backing, *memory, *vcpus, *prefault, options);
    if one_mode(comparison).is_none() {
        title += &format!(", {mode}");
    }
    if comparison
        .configurations
        .iter()
        .any(|other| other.engine != *engine)
    {
        title += &format!(", by {engine}");
    }
    title
}

/// What stands below the tables: the notes, what was forced, and the verdict last.
fn foot(comparison: &Comparison) -> Vec<String> {
    let mut foot = comparison.notes.clone();
    if !comparison.differences.is_empty() {
        let differences: Vec<_> = comparison
            .differences
            .iter()
            .map(ToString::to_string)
            .collect();
        foot.push(format!(
            "Compared by force, although unequal or unknown: {}.",
            differences.join("; ")
        ));
    }
    let mut effect = figures::percent(comparison.min_effect * 100.0);
    if comparison.is_emulated() {
        effect += " and a timer tick";
    }
    let slower = comparison.regressions().count();
    let all: usize = comparison
        .configurations
        .iter()
        .map(|c| c.phases.len())
        .sum();
    foot.push(if slower == 0 {
        format!("No phase of {all} is slower by more than {effect}.")
    } else {
        format!("Regression: {slower} of {all} phases slower by more than {effect}, marked with !.")
    });
    foot
}
