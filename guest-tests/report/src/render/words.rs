// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sentences about a comparison that all formats for readers share: its head, titles, notes and
//! verdict.

use super::number;
use crate::{
    comparison::{Comparison, Configuration, Fit, GeometricMean, Growth, PhaseChange},
    judge::{self, Verdict},
    side::Side,
    spread::{Change, Spread},
};
use granule_types::{record::SIMULATOR, units::counted};

/// Returns the head of a report, each entry a name and its words.
pub fn head(comparison: &Comparison) -> Vec<(&'static str, String)> {
    let Comparison { before, after, .. } = comparison;
    let side = |side: &Side| match side.kernel_line() {
        Some(kernel) => format!("{}: {kernel}", side.label),
        None => side.label.clone(),
    };
    let mut head = vec![("before", side(before)), ("after", side(after))];
    if let (Some(cpu), Some(page)) = (&after.cpu, after.page_size) {
        head.push(("CPU", format!("{cpu}, {page} pages; {}", after.features)));
    }
    head.extend(after.emulator.clone().map(|emulator| ("emulator", emulator)));
    if comparison.is_emulated() {
        let time = time_words(after.emulator.as_deref());
        head.extend(time.map(|time| ("time", time.to_owned())));
    }
    head.extend(one_mode(comparison).map(|mode| ("guest", mode.to_owned())));
    head
}

/// Returns the meaning of a time under an emulator; `None` on hardware.
pub fn time_words(emulator: Option<&str>) -> Option<&'static str> {
    Some(match emulator? {
        SIMULATOR => "virtual: the time of a simulated machine, not hardware time",
        _ => "virtual: the work of all CPUs as the emulator counts it, not hardware time",
    })
}

/// Returns the name of a time: virtual under emulation.
pub fn time_name(comparison: &Comparison) -> &'static str {
    if comparison.is_emulated() { "virtual time" } else { "time" }
}

/// Returns the guest mode if all configurations share one.
fn one_mode(comparison: &Comparison) -> Option<&str> {
    let setups = comparison.configurations.iter().map(|c| &c.setup);
    let mut modes = setups.map(|setup| setup.mode.as_str());
    let first = modes.next()?;
    (!first.is_empty() && modes.all(|mode| mode == first)).then_some(first)
}

/// Returns the title of a configuration with its number of runs.
pub fn title(comparison: &Comparison, configuration: &Configuration) -> String {
    let title = short_title(comparison, configuration);
    let runs = |side: fn(&Change) -> Option<Spread>| {
        let phases = configuration.phases.iter();
        let runs = phases.filter_map(|phase| Some(side(&phase.time)?.runs));
        runs.max().unwrap_or(0)
    };
    match (runs(|change| change.before), runs(|change| change.after)) {
        (before, after) if before == after => {
            format!("{title}; {} a side", counted(before, "run"))
        }
        (before, after) => format!("{title}; runs: {before} before, {after} after"),
    }
}

/// Returns the title of a configuration without its runs.
pub fn short_title(comparison: &Comparison, configuration: &Configuration) -> String {
    let mut title = configuration.setup.name();
    if one_mode(comparison).is_none() && !configuration.setup.mode.is_empty() {
        title += &format!(", {}", configuration.setup.mode);
    }
    let engine = &configuration.engine;
    let mut others = comparison.configurations.iter();
    if *engine != configuration.setup.subject && others.any(|other| other.engine != *engine) {
        title += &format!(", by {engine}");
    }
    title
}

/// Returns the ratio of the time of a step, with the mark of its verdict.
pub fn time_ratio(comparison: &Comparison, phase: &PhaseChange) -> (String, Option<Verdict>) {
    let verdict = phase.verdict.filter(|_| comparison.judges_time());
    (number::ratio(&phase.time), verdict)
}

/// Returns the lines below the tables: notes, means, growth, and the verdict last.
pub fn foot(comparison: &Comparison) -> Vec<String> {
    let mut foot = notes(comparison);
    foot.extend(comparison.geomeans.iter().map(geometric_mean));
    foot.extend(growth(comparison));
    foot.extend(verdict(comparison));
    foot
}

/// Returns the limits of the figures, with the differences that --force overrides.
pub fn notes(comparison: &Comparison) -> Vec<String> {
    let mut notes = comparison.notes.clone();
    if !comparison.differences.is_empty() {
        let differences = comparison.differences.iter().map(ToString::to_string);
        notes.push(format!(
            "Compared with --force although these differ or are unknown: {}.",
            differences.collect::<Vec<_>>().join("; ")
        ));
    }
    notes
}

/// Returns a geometric mean in one line.
pub fn geometric_mean(mean: &GeometricMean) -> String {
    let of = mean.phase.as_ref().map_or("all", |step| step.name());
    let ends = mean.interval.map(|ends| format!(", 95% {}", number::interval(ends)));
    format!(
        "Geometric mean of {} of {of}: {}{}.",
        counted(mean.rows, "ratio"),
        number::factor(mean.ratio),
        ends.unwrap_or_default()
    )
}

/// Returns a line for each conclusive growth, and the number of others.
fn growth(comparison: &Comparison) -> Vec<String> {
    let all = &comparison.growth;
    let conclusive = all.iter().filter(|growth| growth.is_conclusive());
    let mut lines: Vec<String> = conclusive.map(growth_line).collect();
    let is_single_run = |growth: &&Growth| {
        let sides = [growth.before, growth.after];
        !growth.is_conclusive() && sides.iter().flatten().any(Fit::is_single_run)
    };
    let single = all.iter().filter(is_single_run).count();
    let other = all.len() - lines.len() - single;
    for (count, reason) in [(single, "one run a point"), (other, "no power law")] {
        if count > 0 {
            let times = counted(all.len(), "time");
            lines.push(format!("Growth of {count} of {times}: inconclusive, {reason}."));
        }
    }
    lines
}

fn growth_line(growth: &Growth) -> String {
    let words = |fit: Option<Fit>| fit.map_or_else(|| "not known".to_owned(), |fit| fit.words());
    format!(
        "{} of {} grows with {} to the power of: before {}; after {}.",
        growth.phase,
        growth.of,
        growth.with.name(),
        words(growth.before),
        words(growth.after)
    )
}

const ONE_SIDED: &str = "A regression needs p after Holm below 0.09: p is two-sided, and a \
    regression lies on one side. An improvement needs 0.05.";

/// Returns the verdict on the whole comparison.
pub fn verdict(comparison: &Comparison) -> Vec<String> {
    let time = comparison.judges_time();
    let mut effect = number::percent(comparison.min_effect * 100.0);
    if comparison.is_emulated() && time {
        effect += " and a timer tick";
    }
    let more = match (time, comparison.is_emulated()) {
        (true, true) => "slower in virtual time".to_owned(),
        (true, false) => "slower".to_owned(),
        (false, _) => format!("higher in {}", comparison.metric),
    };
    let judged = comparison.rows().filter(|(_, phase)| phase.verdict.is_some());
    let judged = judged.count();
    let regressions = comparison.count(Verdict::Regression);
    let inconclusive = comparison.count(Verdict::Inconclusive);
    let of = match judged {
        1 => "the phase".to_owned(),
        judged if regressions > 0 => format!("{regressions} of {judged} phases"),
        judged => format!("{judged} phases"),
    };
    let mut lines = vec![match (regressions, inconclusive) {
        (0, 0) if judged == 1 => {
            format!("No regression: {of} is not {more} by more than {effect}.")
        }
        (0, 0) => format!("No regression: none of {of} is {more} by more than {effect}."),
        (0, _) if judged == 1 => {
            format!("No regression shown: {of} is not shown to be {more} by more than {effect}.")
        }
        (0, _) => {
            format!(
                "No regression shown: none of {of} is shown to be {more} by more than {effect}."
            )
        }
        _ => format!("Regression: {of} {more} by more than {effect}, marked with !."),
    }];
    let is_one_sided = |phase: &PhaseChange| phase.tested.is_some_and(|tested| !tested.is_found());
    if comparison.regressions().any(|(_, phase)| is_one_sided(phase)) {
        lines.push(ONE_SIDED.to_owned());
    }
    if inconclusive > 0 {
        lines.push(inconclusive_line(comparison, inconclusive, judged));
    }
    lines
}

/// Returns the reason of inconclusive rows, and the number of runs that they need.
fn inconclusive_line(comparison: &Comparison, inconclusive: usize, rows: usize) -> String {
    let least = judge::least_runs(rows, comparison.design());
    let too_few = |phase: &PhaseChange| {
        phase.verdict == Some(Verdict::Inconclusive)
            && phase.runs.before.len().min(phase.runs.after.len()) < least
    };
    let (of, table) = match rows {
        1 => (String::new(), "One phase".to_owned()),
        rows => (format!(" for {inconclusive} of {rows}"), format!("A table of {rows}")),
    };
    if comparison.rows().any(|(_, phase)| too_few(phase)) {
        format!(
            "Inconclusive{of}, marked with ?: too few runs or too wide a spread. {table} needs at \
             least {least} runs a side."
        )
    } else {
        format!("Inconclusive{of}, marked with ?: too wide a spread. More runs may narrow it.")
    }
}
