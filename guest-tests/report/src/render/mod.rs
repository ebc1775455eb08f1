// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A comparison for people ([`text()`], [`markdown()`], [`html()`]) and for programs ([`json`],
//! [`csv()`], [`ktap()`], [`benchstat()`]).

mod benchstat;
#[cfg(any(test, feature = "browser-test"))]
pub mod browser;
mod csv;
mod figures;
mod html;
mod ktap;
mod markdown;
pub mod page;
mod text;

use std::collections::BTreeSet;

pub use self::{
    benchstat::benchstat,
    csv::csv,
    html::{Lane, bars, html, single},
    ktap::ktap,
    markdown::markdown,
    text::text,
};
use crate::{
    Change, Comparison, Configuration, PhaseChange, Side, Spread, Step, Tested, Together, Verdict,
    comparison::{Fit, Growth},
    judge,
};
use granule_types::record::SIMULATOR;
use granule_types::units::counted;

/// The comparison as JSON, schema [`crate::SCHEMA`], its fields as in [`Comparison`].
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
        let time = time_words(after.emulator.as_deref());
        head.extend(time.map(|time| ("time", time.to_owned())));
    }
    if let Some(mode) = one_mode(comparison) {
        head.push(("guest", mode.to_owned()));
    }
    head
}

/// What a time is that this emulator gives; `None` on hardware.
fn time_words(emulator: Option<&str>) -> Option<&'static str> {
    Some(match emulator? {
        SIMULATOR => "virtual: what a simulated machine would take, not hardware time",
        _ => "virtual: the work of all CPUs together as the emulator counts it, not hardware time",
    })
}

/// The guest mode, where there is only one.
fn one_mode(comparison: &Comparison) -> Option<&str> {
    let setups = comparison.configurations.iter().map(|c| &c.setup);
    let mut modes = setups.map(|setup| setup.mode.as_str());
    let first = modes.next()?;
    (!first.is_empty() && modes.all(|mode| mode == first)).then_some(first)
}

/// Every step that is compared anywhere, in order.
fn phases(comparison: &Comparison) -> Vec<&Step> {
    let steps: BTreeSet<&Step> = comparison.rows().map(|(_, phase)| &phase.phase).collect();
    steps.into_iter().collect()
}

/// What is counted in a phase: what the kernel did first (its events, its functions), then the
/// instructions, which begin with a capital.
fn counts(phase: &PhaseChange) -> impl Iterator<Item = (&String, &Change)> {
    let is_instruction = |name: &str| name.starts_with(|c: char| c.is_ascii_uppercase());
    let counters = || phase.counters.iter();
    let functions = counters().filter(move |(name, _)| !is_instruction(name));
    let instructions = counters().filter(move |(name, _)| is_instruction(name));
    let kernel = phase.events.iter().chain(&phase.gauges);
    kernel.chain(functions).chain(instructions)
}

/// What stands above one table.
fn title(comparison: &Comparison, configuration: &Configuration) -> String {
    let title = short_title(comparison, configuration);
    let phases = &configuration.phases;
    let runs = |side: fn(&Change) -> Option<Spread>| {
        let spreads = phases.iter().filter_map(|phase| side(&phase.time));
        spreads.map(|spread| spread.runs).max().unwrap_or(0)
    };
    match (runs(|change| change.before), runs(|change| change.after)) {
        (before, after) if before == after => {
            title + &format!("; {} a side", counted(before, "run"))
        }
        (before, after) => title + &format!("; runs: {before} before, {after} after"),
    }
}

/// The same without the runs.
fn short_title(comparison: &Comparison, configuration: &Configuration) -> String {
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

/// What stands behind the ratio of a time.
fn time_mark(comparison: &Comparison, phase: &PhaseChange) -> &'static str {
    let judged = phase.verdict.filter(|_| comparison.metric == "time");
    judged.map_or("", Verdict::mark)
}

/// The Hodges-Lehmann ratio with its interval, which need not lie about the ratio of the medians.
fn estimate(tested: &Tested) -> Option<String> {
    let (ratio, ends) = (tested.ratio?, tested.interval?);
    Some(format!("{} ({})", figures::factor(ratio), interval(ends)))
}

/// An interval of a ratio.
fn interval([low, high]: [f64; 2]) -> String {
    format!("{}..{}", figures::factor(low), figures::factor(high))
}

/// What the test of a step says, in a line or two.
fn tested(phase: &PhaseChange) -> Vec<String> {
    let Some(tested) = phase.tested else {
        return Vec::new();
    };
    let ratio = match (tested.ratio, tested.interval) {
        (Some(ratio), Some(ends)) => {
            format!("ratio {}, 95% {}; ", figures::factor(ratio), interval(ends))
        }
        (Some(ratio), None) => format!("ratio {}; ", figures::factor(ratio)),
        _ => String::new(),
    };
    let [p, holm] = [tested.p, tested.p_holm].map(figures::p_value);
    let test = if tested.test == "student" {
        "p (t)"
    } else {
        "p"
    };
    let mut lines = vec![format!(
        "{ratio}{test} {p}, Holm {holm}; delta {:+.2}",
        tested.delta
    )];
    lines.extend(detectable(phase));
    lines
}

/// What would have been found where nothing was.
fn detectable(phase: &PhaseChange) -> Option<String> {
    let tested = phase.tested?;
    let least = (tested.detectable? - 1.0) * 100.0;
    let found = tested.is_found() || phase.is_regression();
    (!found).then(|| format!("nothing found; {least:.1}% more would have been"))
}

/// What stands below the tables: the notes, what was forced, and the verdict last.
fn foot(comparison: &Comparison) -> Vec<String> {
    let mut foot = notes(comparison);
    foot.extend(comparison.geomeans.iter().map(together));
    foot.extend(growths(comparison));
    foot.extend(verdict(comparison));
    foot
}

/// What a reader must know, and what was forced.
fn notes(comparison: &Comparison) -> Vec<String> {
    let mut notes = comparison.notes.clone();
    if !comparison.differences.is_empty() {
        let differences: Vec<_> = comparison
            .differences
            .iter()
            .map(ToString::to_string)
            .collect();
        notes.push(format!(
            "Compared by force, although unequal or unknown: {}.",
            differences.join("; ")
        ));
    }
    notes
}

/// Ratios taken together, in one line.
fn together(together: &Together) -> String {
    let of = together.phase.as_ref().map_or("all", Step::name);
    let ends = together
        .interval
        .map(|ends| format!(", 95% {}", interval(ends)));
    format!(
        "Geometric mean of {} of {of}: {}{}.",
        counted(together.rows, "ratio"),
        figures::factor(together.ratio),
        ends.unwrap_or_default()
    )
}

/// How phases grow, a line for each that can be told.
fn growths(comparison: &Comparison) -> Vec<String> {
    let all = &comparison.growth;
    let mut lines: Vec<String> = all.iter().filter(|one| one.tells()).map(growth).collect();
    let one_draw = |one: &&Growth| {
        let sides = [one.before, one.after];
        !one.tells() && sides.iter().flatten().any(Fit::is_one_draw)
    };
    let single = all.iter().filter(one_draw).count();
    let untold = all.len() - lines.len() - single;
    if single > 0 {
        lines.push(format!(
            "How {single} of {} grow: cannot tell: one run a point.",
            counted(all.len(), "time")
        ));
    }
    if untold > 0 {
        lines.push(format!(
            "How {untold} of {} grow cannot be told: they lie too far off any power.",
            counted(all.len(), "time")
        ));
    }
    lines
}

/// How a phase grows, in one line.
fn growth(growth: &Growth) -> String {
    let words = |fit: Option<Fit>| match fit {
        Some(fit) => fit.words(),
        None => "not known".to_owned(),
    };
    format!(
        "{} of {} grows with {} to the power of: before {}; after {}.",
        growth.phase,
        growth.of,
        growth.with.name(),
        words(growth.before),
        words(growth.after)
    )
}

/// Why a p that is not below 5% shows a regression.
const ONE_SIDED: &str = "To be slower, p after Holm below 0.09 is enough: p is two-sided, and slower \
    is one side. To be faster takes 0.05.";

/// Whether a regression is shown on one side only.
fn is_one_sided(phase: &PhaseChange) -> bool {
    phase.tested.is_some_and(|tested| !tested.is_found())
}

/// The verdict, last.
fn verdict(comparison: &Comparison) -> Vec<String> {
    let time = comparison.metric == "time";
    let mut effect = figures::percent(comparison.min_effect * 100.0);
    if comparison.is_emulated() && time {
        effect += " and a timer tick";
    }
    let more = if time {
        "slower".to_owned()
    } else {
        format!("higher in {}", comparison.metric)
    };
    let judged = comparison
        .rows()
        .filter(|(_, phase)| phase.verdict.is_some())
        .count();
    let worse = comparison.count(Verdict::Worse);
    let unsure = comparison.count(Verdict::CannotTell);
    let mut lines = Vec::new();
    lines.push(match (worse, judged) {
        (0, 1) if unsure == 0 => format!("The phase is not {more} by more than {effect}."),
        (0, 1) => format!("The phase is not shown to be {more} by more than {effect}."),
        (0, _) => {
            let shown = if unsure == 0 { "is" } else { "is shown to be" };
            format!("No phase of {judged} {shown} {more} by more than {effect}.")
        }
        (_, 1) => format!("Regression: the phase is {more} by more than {effect}, marked with !."),
        _ => format!(
            "Regression: {worse} of {judged} phases {more} by more than {effect}, marked with !."
        ),
    });
    if comparison
        .regressions()
        .any(|(_, phase)| is_one_sided(phase))
    {
        lines.push(ONE_SIDED.to_owned());
    }
    if unsure > 0 {
        lines.push(cannot_tell(comparison, unsure, judged));
    }
    lines
}

/// Why so many rows of a table cannot be judged, and what it takes.
fn cannot_tell(comparison: &Comparison, unsure: usize, rows: usize) -> String {
    let least = judge::least_runs(rows, comparison.paired);
    let fewer = comparison
        .rows()
        .filter(|(_, phase)| phase.verdict == Some(Verdict::CannotTell))
        .any(|(_, phase)| phase.runs.before.len().min(phase.runs.after.len()) < least);
    let of = match rows {
        1 => String::new(),
        rows => format!(" for {unsure} of {rows}"),
    };
    let table = match rows {
        1 => "One phase".to_owned(),
        rows => format!("A table of {rows}"),
    };
    if fewer {
        format!(
            "Cannot tell{of}, marked with ?: too few runs or too wide a spread. {table} takes \
             {least} runs a side and more."
        )
    } else {
        format!("Cannot tell{of}, marked with ?: too wide a spread. More runs may show it.")
    }
}
