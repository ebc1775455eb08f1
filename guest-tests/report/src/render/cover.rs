// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Text for the cover letter of a series: ASCII, in at most 72 columns.
//!
//! Two sides have a table with a row for each figure; more sides have a row each, below the
//! reference.

use std::{collections::BTreeSet, fmt::Write};

use super::{
    lines::{push_trimmed, wrap, wrap_command},
    number::{self, Unit},
    sentences,
    side_table::{count_columns, side_table, time_columns},
};
use crate::{
    comparison::{
        Comparison, ComparisonSet, Configuration, ConfigurationInSet, Group, Judgement,
        PhaseChange, TIME_METRIC, WORK_METRIC,
    },
    judge::Verdict,
    sample::AnyPhase,
    stats::{Change, Spread},
};
use granule_types::units::pluralize;

/// Maximum length of a line: that of a commit message.
pub const WIDTH: usize = 72;
/// Counts in a cover letter, unless the caller judges others.
const DEFAULT_COUNTS: [&str; 3] = ["guest_aborts", "DC CIVAC", "TLBI"];

/// Renders the effect of each further side for a cover letter, with the commands that reproduce it.
///
/// The phases are those that the caller selected or, without a selection, those with a significant
/// difference or a changed count. The counts are the judged ones or, if only the time is judged,
/// guest aborts, `DC CIVAC` and the sum of all TLBI instructions. The text starts with `titles`: the
/// labels of sides, and the subjects of their last patches.
pub fn cover(set: &ComparisonSet, titles: &[(String, String)], commands: &[String]) -> String {
    let Some(first) = set.comparisons().first() else {
        return String::new();
    };
    let mut out = String::new();
    for (label, title) in titles {
        wrap(&mut out, WIDTH, &format!("{label}: "), title);
    }
    out.push_str(if titles.is_empty() { "" } else { "\n" });
    wrap(&mut out, WIDTH, "", &sentences::machine(first));
    out.push('\n');
    let before = if set.comparisons().len() == 1 { "before: " } else { "" };
    wrap(&mut out, WIDTH, before, &sentences::kernel(&first.before));
    if let [comparison] = set.comparisons() {
        wrap(&mut out, WIDTH, "after:  ", &sentences::kernel(&comparison.after));
    }
    let counts = counts(first);
    for configuration in set.configurations() {
        out.push('\n');
        let phases = phases(set, &configuration, &counts);
        match (set.comparisons(), configuration.changes.as_slice()) {
            ([comparison], [Some(change)]) => {
                wrap(&mut out, WIDTH, "", &sentences::title(comparison, change));
                change_table(&mut out, &configuration, &phases, &counts);
                wrap(&mut out, WIDTH, "", &verdict(change));
            }
            _ => {
                let mut columns = time_columns(set, &configuration, &phases);
                let counts = count_columns(&configuration, &counts);
                wrap(&mut out, WIDTH, "", &title(set, &configuration, !counts.is_empty()));
                columns.extend(counts);
                side_table(&mut out, WIDTH, set, columns);
                for (comparison, change) in set.comparisons().iter().zip(&configuration.changes) {
                    let name = format!("{}: ", comparison.after.label);
                    let verdict = change.map_or_else(|| "not compared.".to_owned(), verdict);
                    wrap(&mut out, WIDTH, "", &(name + &verdict));
                }
            }
        }
    }
    out.push('\n');
    wrap(&mut out, WIDTH, "", &sentences::definitions(first));
    let notes: Vec<String> = set.comparisons().iter().flat_map(sentences::notes).collect();
    let unique = notes.iter().enumerate().filter(|(at, note)| !notes[..*at].contains(note));
    unique.for_each(|(_, note)| wrap(&mut out, WIDTH, "", note));
    if !commands.is_empty() {
        push_trimmed(&mut out, "\nTo reproduce:\n");
    }
    commands.iter().for_each(|command| wrap_command(&mut out, WIDTH, command));
    out.replace(|c: char| !c.is_ascii(), "?")
}

/// Returns the title of a table with a row for each side.
fn title(set: &ComparisonSet, configuration: &ConfigurationInSet, has_counts: bool) -> String {
    let mut compared = set.comparisons().iter().zip(&configuration.changes);
    let title = compared.find_map(|(comparison, change)| {
        Some(sentences::short_title(comparison, change.as_ref()?))
    });
    let runs = configuration.groups.iter().flatten().map(|group| group.runs().len());
    let runs = match (runs.clone().min(), runs.max()) {
        (Some(least), Some(most)) if least < most => format!("{least} to {most} runs"),
        (_, most) => pluralize(most.unwrap_or(0), "run"),
    };
    let times = if set.has_elapsed_times() { "elapsed (work)" } else { TIME_METRIC };
    let counts = match (has_counts, set.has_selected_phases()) {
        (true, true) => ", counts of these phases",
        (true, false) => ", counts of all phases",
        (false, _) => "",
    };
    let title = title.unwrap_or_default();
    format!("{title}; {runs}; {times} of a phase{counts}")
}

/// Returns the counts of the tables: the judged ones, or the default.
fn counts(comparison: &Comparison) -> Vec<&str> {
    let judged: Vec<&str> = comparison.metrics().filter(|name| *name != TIME_METRIC).collect();
    if judged.is_empty() { DEFAULT_COUNTS.to_vec() } else { judged }
}

/// Returns the phases of the tables of a configuration: all if none differs.
fn phases(
    set: &ComparisonSet,
    configuration: &ConfigurationInSet,
    counts: &[&str],
) -> BTreeSet<AnyPhase> {
    let changes = || configuration.changes.iter().flatten().flat_map(|one| &one.phases);
    let all = || changes().map(|change| change.phase.clone()).collect();
    if set.has_selected_phases() {
        return all();
    }
    let mut shown = BTreeSet::new();
    for (at, comparison) in set.comparisons().iter().enumerate() {
        let [Some(before), Some(after)] =
            [0, at + 1].map(|side| configuration.groups[side].as_ref())
        else {
            continue;
        };
        let changes = configuration.changes[at].iter().flat_map(|one| &one.phases);
        let differs = |change: &&PhaseChange| {
            let is_changed = |count: &&str| {
                let [before, after] = [before, after].map(|group| count_of(group, change, count));
                is_changed(before, after, comparison.min_effect)
            };
            has_difference(change) || counts.iter().any(is_changed)
        };
        shown.extend(changes.filter(differs).map(|change| change.phase.clone()));
    }
    if shown.is_empty() { all() } else { shown }
}

fn has_difference(change: &PhaseChange) -> bool {
    let mut verdicts = change.judgements().map(|judgement| judgement.verdict);
    verdicts.any(|verdict| matches!(verdict, Verdict::Regression | Verdict::Improvement))
}

fn count_of(group: &Group, change: &PhaseChange, name: &str) -> Option<Spread> {
    group.spread(&change.phase, |sample| sample.count(name))
}

/// Reports whether every run of a side has a greater count than all runs of the other, and the
/// medians differ by more than the minimum effect.
fn is_changed(before: Option<Spread>, after: Option<Spread>, min_effect: f64) -> bool {
    let (Some(before), Some(after)) = (before, after) else {
        return false;
    };
    let is_beyond = |low: Spread, high: Spread| {
        low.max < high.min && high.median > low.median * (1.0 + min_effect)
    };
    is_beyond(before, after) || is_beyond(after, before)
}

/// Writes the table of two sides: the times and counts of each phase.
fn change_table(
    out: &mut String,
    configuration: &ConfigurationInSet,
    phases: &BTreeSet<AnyPhase>,
    counts: &[&str],
) {
    table_line(out, "phase", "", ["before", "after", "change"].map(str::to_owned), "");
    let [Some(before), Some(after)] = configuration.groups.as_slice() else {
        return;
    };
    let changes = configuration.changes.iter().flatten().flat_map(|one| &one.phases);
    for change in changes.filter(|change| phases.contains(&change.phase)) {
        let mut name = change.phase.name();
        let mut line = |figure: &str, metric: &str, figures: &Change, unit: Unit| {
            let [before, after] = [figures.before, figures.after].map(|one| unit.median(one));
            let judgement = change.judgement_of(metric);
            let mark = judgement.map_or("", |judgement| judgement.verdict.mark());
            table_line(out, name, figure, [before, after, number::growth(figures)], mark);
            name = "";
        };
        let time = if change.work.is_some() { "elapsed" } else { TIME_METRIC };
        line(time, TIME_METRIC, &change.time, Unit::of_time(&change.time));
        if let Some(work) = &change.work {
            line(WORK_METRIC, WORK_METRIC, work, Unit::of_time(work));
        }
        for count in counts {
            let [before, after] = [before, after].map(|group| count_of(group, change, count));
            let figures = Change::between(before, after);
            if figures.sides().any(|spread| spread.max > 0.0) {
                line(count, count, &figures, Unit::Count);
            }
        }
    }
}

const PHASE_WIDTH: usize = 12;
const FIGURE_WIDTH: usize = 18;

/// Writes a line of the table of two sides. A long name of a phase is on a separate line.
fn table_line(out: &mut String, phase: &str, figure: &str, cells: [String; 3], mark: &str) {
    let mut phase = phase;
    if phase.len() >= PHASE_WIDTH || figure.len() > FIGURE_WIDTH {
        wrap(out, WIDTH, "  ", format!("{phase} {figure}").trim());
        phase = "";
    }
    let figure = if figure.len() > FIGURE_WIDTH { "" } else { figure };
    let [before, after, change] = cells;
    let mut line = format!("  {phase:<PHASE_WIDTH$}{figure:<FIGURE_WIDTH$}");
    // Writing into a String cannot fail.
    let _ = write!(line, "{before:>14}{after:>14}{change:>9} {mark}");
    push_trimmed(out, &line);
}

/// Returns the verdict on a configuration, with the names of the phases.
fn verdict(configuration: &Configuration) -> String {
    let judged = |verdict: Verdict| -> Vec<String> {
        let judgements = configuration
            .phases
            .iter()
            .flat_map(|change| change.judgements().map(move |judgement| (change, judgement)));
        let judgements = judgements.filter(|(_, judgement)| judgement.verdict == verdict);
        let name = |(change, judgement): (&PhaseChange, &Judgement)| match judgement.metric.as_str()
        {
            TIME_METRIC => change.phase.to_string(),
            count => format!("{count} of {}", change.phase),
        };
        judgements.map(name).collect()
    };
    let verdicts = [Verdict::Regression, Verdict::Improvement, Verdict::Inconclusive].map(judged);
    let [regressions, improvements, inconclusive] = verdicts.each_ref().map(Vec::as_slice);
    let mut sentences = vec![match (regressions, inconclusive) {
        ([], []) => "No regression.".to_owned(),
        ([], _) => "No regression shown.".to_owned(),
        (names, _) => format!("Regression: {}.", names.join(", ")),
    }];
    for (word, names) in [("Improvement", improvements), ("Inconclusive", inconclusive)] {
        if !names.is_empty() {
            sentences.push(format!("{word}: {}.", names.join(", ")));
        }
    }
    sentences.join(" ")
}
