// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sentences of the formats for readers: head, titles, notes and verdict of a comparison.

use super::number;
use crate::{
    comparison::{
        Comparison, Configuration, Fit, GeometricMean, Growth, Judgement, TICK_NS, TIME_METRIC,
    },
    judge::{self, Verdict},
    provenance::{Side, series_line},
    sample::AnyPhase,
    stats::{Change, Spread},
};
use granule_types::units::pluralize;

/// Returns the head of a report: names and their values.
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
        let time = if comparison.has_elapsed_times { ELAPSED_NOTE } else { WORK_NOTE };
        head.push(("time", time.to_owned()));
    }
    head.extend(common_mode(comparison).map(|mode| ("guest", mode.to_owned())));
    head
}

/// Returns the machine of a comparison, and the kind of its times if they are virtual.
pub fn machine(comparison: &Comparison) -> String {
    let Side { cpu, page_size, emulator, .. } = &comparison.after;
    let cpu = cpu.as_deref().unwrap_or("a CPU without a recorded name");
    let page = page_size.map(|page| format!(" with {page} pages")).unwrap_or_default();
    match emulator {
        Some(emulator) => {
            // The package and the options follow the version.
            let end = [" (", " -"].into_iter().filter_map(|mark| emulator.find(mark)).min();
            let version = &emulator[..end.unwrap_or(emulator.len())];
            let times = match comparison.has_elapsed_times {
                true => ": elapsed is that of the CPUs in parallel, work is the sum over all CPUs",
                false => ": the work of all CPUs",
            };
            format!(
                "Emulated {cpu}{page} ({version}). Times are virtual, not hardware time{times}."
            )
        }
        None if comparison.after.kernel.is_empty() => {
            "The inputs do not describe their machine.".to_owned()
        }
        None => format!("Measured on {cpu}{page}."),
    }
}

/// Returns the label, the kernel and the series of a side.
pub fn kernel(side: &Side) -> String {
    let Side { label, kernel, series, .. } = side;
    let series = series_line(series.as_deref()).map(|series| format!(", {series}"));
    match kernel.as_str() {
        "" => label.clone(),
        kernel => format!("{label}: Linux {kernel}{}", series.unwrap_or_default()),
    }
}

/// Returns the definition of the figures and of the verdicts of a comparison.
pub fn definitions(comparison: &Comparison) -> String {
    let name = |metric: &str| match metric {
        TIME_METRIC => time_name(comparison).to_owned(),
        count => count.to_owned(),
    };
    let metrics: Vec<String> = comparison.metrics().map(name).collect();
    let judges_time = comparison.metrics().any(|metric| metric == TIME_METRIC);
    let tick = match comparison.is_emulated() && judges_time {
        true if metrics.len() > 1 => ", and of a time by more than a timer tick",
        true => " and a timer tick",
        false => "",
    };
    format!(
        "Figures are medians over runs. A regression or improvement is a significant change of {} \
         by more than {}{tick}.",
        metrics.join(" or "),
        number::percent(comparison.min_effect * 100.0),
    )
}

pub const ELAPSED_NOTE: &str = "virtual: what the emulated CPUs would take side by side; work is \
    the sum over all CPUs. Neither is hardware time";

pub const WORK_NOTE: &str =
    "virtual: the work of all CPUs as the emulator counts it, not hardware time";

/// Returns the name of the judged time, which is virtual under emulation.
pub fn time_name(comparison: &Comparison) -> &'static str {
    match comparison {
        _ if comparison.has_elapsed_times => "elapsed virtual time",
        _ if comparison.is_emulated() => "virtual time",
        _ => "time",
    }
}

/// Returns the guest mode if all configurations share one.
fn common_mode(comparison: &Comparison) -> Option<&str> {
    let setups = comparison.configurations.iter().map(|c| &c.setup);
    let mut modes = setups.map(|setup| setup.mode.as_str());
    let first = modes.next()?;
    (!first.is_empty() && modes.all(|mode| mode == first)).then_some(first)
}

/// Returns the title of a configuration, with its number of runs.
pub fn title(comparison: &Comparison, configuration: &Configuration) -> String {
    let title = short_title(comparison, configuration);
    let runs = |side: fn(&Change) -> Option<Spread>| {
        let changes = configuration.phases.iter();
        let runs = changes.filter_map(|change| Some(side(&change.time)?.runs));
        runs.max().unwrap_or(0)
    };
    match (runs(|change| change.before), runs(|change| change.after)) {
        (before, after) if before == after => {
            format!("{title}; {} a side", pluralize(before, "run"))
        }
        (before, after) => format!("{title}; runs: {before} before, {after} after"),
    }
}

/// Returns the title of a configuration without the number of runs.
pub fn short_title(comparison: &Comparison, configuration: &Configuration) -> String {
    let mut title = configuration.setup.name();
    if common_mode(comparison).is_none() && !configuration.setup.mode.is_empty() {
        title += &format!(", {}", configuration.setup.mode);
    }
    let engine = &configuration.engine;
    let mut others = comparison.configurations.iter();
    if *engine != configuration.setup.subject && others.any(|other| other.engine != *engine) {
        title += &format!(", by {engine}");
    }
    title
}

pub fn ratios_title(comparison: &Comparison) -> String {
    format!("Ratio of {}s, after to before", time_name(comparison))
}

/// Formats the time ratio of a phase in a configuration, with its verdict; empty if the
/// configuration lacks the phase.
pub fn time_ratio(configuration: &Configuration, phase: &AnyPhase) -> (String, Option<Verdict>) {
    let Some(change) = configuration.phase(phase) else {
        return (String::new(), None);
    };
    let verdict = change.judgement_of(TIME_METRIC).map(|judgement| judgement.verdict);
    (number::ratio(&change.time), verdict)
}

/// Returns the lines below the tables: notes, means, growth, and the verdict last.
pub fn footer(comparison: &Comparison) -> Vec<String> {
    let mut footer = notes(comparison);
    footer.extend(geometric_means(comparison));
    footer.extend(growth(comparison));
    footer.extend(verdict(comparison));
    footer
}

/// Returns the notes on the limits of the figures, with the differences that --force overrides.
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

/// Returns a line for each geometric mean, and one with the number of ratios in no mean.
pub fn geometric_means(comparison: &Comparison) -> Vec<String> {
    let mut lines: Vec<String> = comparison.geomeans.iter().map(geometric_mean).collect();
    let omitted = comparison.rows().filter(|(_, change)| change.is_below_tick).count();
    let ratios = pluralize(comparison.rows().count(), "ratio");
    let reason = format!(
        "of phases shorter than a timer tick ({} ms), which occurs in some of their runs only",
        TICK_NS / 1e6
    );
    match (omitted, lines.is_empty()) {
        (0, _) => {}
        (_, false) => lines.push(format!("In no mean: {omitted} of {ratios}, {reason}.")),
        (_, true) => lines.push(format!("No geometric mean: {omitted} of {ratios} {reason}.")),
    }
    lines
}

fn geometric_mean(mean: &GeometricMean) -> String {
    let of = mean.phase.as_ref().map_or("all", |phase| phase.name());
    let ends = mean.interval.map(|ends| format!(", 95% {}", number::interval(ends)));
    format!(
        "Geometric mean of {} of {of}: {}{}.",
        pluralize(mean.rows, "ratio"),
        number::factor(mean.ratio),
        ends.unwrap_or_default()
    )
}

/// Returns a line for each conclusive growth, and the number of inconclusive ones by reason.
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
            let times = pluralize(all.len(), "time");
            lines.push(format!("Growth of {count} of {times}: inconclusive, {reason}."));
        }
    }
    lines
}

fn growth_line(growth: &Growth) -> String {
    let words = |fit: Option<Fit>| fit.map_or_else(|| "not known".to_owned(), |fit| fit.to_text());
    format!(
        "{} of {} grows with {} to the power of: before {}; after {}.",
        growth.phase,
        growth.setup,
        growth.parameter.name(),
        words(growth.before),
        words(growth.after)
    )
}

const ONE_SIDED_NOTE: &str = "A regression needs p after Holm below 0.09: p is two-sided, and a \
    regression lies on one side. An improvement needs 0.05.";

/// Returns the verdict on the whole comparison: a sentence for each metric, and its limits.
pub fn verdict(comparison: &Comparison) -> Vec<String> {
    let mut lines: Vec<String> =
        comparison.metrics().map(|metric| metric_verdict(comparison, metric)).collect();
    let is_one_sided = |judgement: &Judgement| {
        judgement.verdict == Verdict::Regression
            && judgement.tested_row.is_some_and(|tested| !tested.is_significant())
    };
    if comparison.judgements().any(is_one_sided) {
        lines.push(ONE_SIDED_NOTE.to_owned());
    }
    let inconclusive = comparison.count(Verdict::Inconclusive);
    if inconclusive > 0 {
        let judged = comparison.judgements().count();
        lines.push(inconclusive_line(comparison, inconclusive, judged));
    }
    lines
}

fn metric_verdict(comparison: &Comparison, metric: &str) -> String {
    let time = metric == TIME_METRIC;
    let mut effect = number::percent(comparison.min_effect * 100.0);
    if comparison.is_emulated() && time {
        effect += " and a timer tick";
    }
    let more = match (time, comparison.is_emulated()) {
        (true, true) => "slower in virtual time".to_owned(),
        (true, false) => "slower".to_owned(),
        (false, _) => format!("higher in {metric}"),
    };
    let judged = || comparison.judgements().filter(|judgement| judgement.metric == metric);
    let [regressions, inconclusive] = [Verdict::Regression, Verdict::Inconclusive]
        .map(|verdict| judged().filter(|judgement| judgement.verdict == verdict).count());
    let judged = judged().count();
    if comparison.is_unjudged(metric) {
        return format!("Inconclusive: no phase has {metric} in all runs.");
    }
    if judged == 0 {
        return format!("No regression: no phase of either side has {metric}.");
    }
    if regressions > 0 {
        let of = match judged {
            1 => "the phase".to_owned(),
            _ => format!("{regressions} of {judged} phases"),
        };
        return format!("Regression: {of} {more} by more than {effect}, marked with !.");
    }
    let (shown, is_shown) = if inconclusive > 0 { (" shown", " shown to be") } else { ("", "") };
    let of = match judged {
        1 => format!("the phase is not{is_shown}"),
        _ => format!("none of {judged} phases is{is_shown}"),
    };
    format!("No regression{shown}: {of} {more} by more than {effect}.")
}

/// Returns the line with the reason of inconclusive rows and the number of runs that they need.
fn inconclusive_line(comparison: &Comparison, inconclusive: usize, rows: usize) -> String {
    let least = judge::min_runs(rows, comparison.design());
    let too_few = |judgement: &Judgement| {
        judgement.verdict == Verdict::Inconclusive && judgement.runs.runs_per_side() < least
    };
    let (of, table) = match rows {
        1 => (String::new(), "One phase".to_owned()),
        rows => (format!(" for {inconclusive} of {rows}"), format!("A table of {rows}")),
    };
    if comparison.judgements().any(too_few) {
        format!(
            "Inconclusive{of}, marked with ?: too few runs or too wide a spread. {table} needs at \
             least {least} runs a side."
        )
    } else {
        format!("Inconclusive{of}, marked with ?: too wide a spread. More runs may narrow it.")
    }
}
