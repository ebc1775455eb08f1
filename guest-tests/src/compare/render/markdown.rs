// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Markdown: a list, a table for each configuration, and the notes.

use std::fmt::Write;

use super::{
    super::{Change, Comparison, PhaseChange},
    figures::{self, Unit},
};

/// The comparison as Markdown.
pub fn markdown(comparison: &Comparison) -> String {
    let mut out = String::new();
    // Writing into a String cannot fail.
    for (name, words) in super::head(comparison) {
        let _ = writeln!(out, "- {name}: {}", escaped(&words));
    }
    for configuration in &comparison.configurations {
        let title = escaped(&super::title(comparison, configuration));
        let _ = writeln!(out, "\n**{title}**\n");
        out.push_str("| phase | before | after | ratio | gain |\n|---|--:|--:|--:|--:|\n");
        for phase in &configuration.phases {
            phase_rows(&mut out, phase);
        }
    }
    if comparison.configurations.len() > 1 {
        overview(&mut out, comparison);
    }
    for note in super::foot(comparison) {
        let _ = writeln!(out, "\n{}", escaped(&note));
    }
    out
}

/// All ratios of times in one table.
fn overview(out: &mut String, comparison: &Comparison) {
    let phases = super::phases(comparison);
    let names: Vec<_> = phases.iter().map(|phase| phase.name()).collect();
    let _ = writeln!(out, "\n**Time after through time before**\n");
    let _ = writeln!(
        out,
        "| | {} |\n|---|{}",
        names.join(" | "),
        "--:|".repeat(names.len())
    );
    for configuration in &comparison.configurations {
        let title = super::short_title(comparison, configuration);
        let _ = write!(out, "| {} |", escaped(&title));
        for &wanted in &phases {
            let found = configuration.phases.iter().find(|p| p.phase == wanted);
            let ratio = found.map_or(String::new(), |phase| {
                let mark = if phase.regression { " !" } else { "" };
                figures::ratio(&phase.time) + mark
            });
            let _ = write!(out, " {ratio} |");
        }
        out.push('\n');
    }
}

fn phase_rows(out: &mut String, phase: &PhaseChange) {
    let mark = if phase.regression { " !" } else { "" };
    let name = format!("**{}**{mark}", phase.phase);
    row(out, &name, &phase.time, Unit::of_time(&phase.time));
    for (name, change) in super::counts(phase) {
        row(out, &escaped(name), change, Unit::Count);
    }
}

fn row(out: &mut String, name: &str, change: &Change, unit: Unit) {
    let [before, after] = [change.before, change.after].map(|spread| {
        let range = unit.range(spread).map(|range| format!(" ({range})"));
        unit.median(spread) + &range.unwrap_or_default()
    });
    let (ratio, gain) = (figures::ratio(change), figures::gain(change));
    let _ = writeln!(out, "| {name} | {before} | {after} | {ratio} | {gain} |");
}

/// What Markdown would take for its own is escaped.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '|' | '*' | '_' | '`' | '<' | '[' | ']' | '\\') {
            out.push('\\');
        }
        out.push(c);
    }
    out
}
