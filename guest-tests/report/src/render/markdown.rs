// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Markdown: a list, a table for each configuration, and the notes.

use std::fmt::Write;

use super::figures::{self, Unit};
use crate::{Change, Comparison, PhaseChange};

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
        out.push_str(
            "| phase | before | after | ratio | gain | Hodges-Lehmann, 95% | p | Holm | delta |\n",
        );
        out.push_str("|---|--:|--:|--:|--:|--:|--:|--:|--:|\n");
        for phase in &configuration.phases {
            phase_rows(&mut out, comparison, phase);
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
            let found = configuration.phases.iter().find(|p| p.phase == *wanted);
            let ratio = found.map_or(String::new(), |phase| {
                let ratio = figures::ratio(&phase.time);
                format!("{ratio} {}", super::time_mark(comparison, phase))
            });
            let _ = write!(out, " {} |", ratio.trim_end());
        }
        out.push('\n');
    }
}

fn phase_rows(out: &mut String, comparison: &Comparison, phase: &PhaseChange) {
    let judged = |name: &str| (name == comparison.metric).then_some(phase);
    let name = format!("**{}**", phase.phase);
    let unit = Unit::of_time(&phase.time);
    row(out, &name, &phase.time, unit, judged("time"));
    for (name, change) in super::counts(phase) {
        row(out, &escaped(name), change, Unit::Count, judged(name));
    }
}

fn row(out: &mut String, name: &str, change: &Change, unit: Unit, judged: Option<&PhaseChange>) {
    let quartiles = figures::has_quartiles(change);
    let [before, after] = [change.before, change.after].map(|spread| {
        let range = unit
            .range(spread, quartiles)
            .map(|range| format!(" ({range})"));
        unit.median(spread) + &range.unwrap_or_default()
    });
    let (ratio, gain) = (figures::ratio(change), figures::gain(change));
    let mark = judged
        .and_then(|phase| phase.verdict)
        .map_or("", |verdict| verdict.mark());
    let tested = judged.and_then(|phase| phase.tested).map(|tested| {
        let estimate = super::estimate(&tested).unwrap_or_default();
        let [p, holm] = [tested.p, tested.p_holm].map(figures::p_value);
        format!("{estimate} | {p} | {holm} | {:+.2}", tested.delta)
    });
    let tested = tested.unwrap_or_else(|| " | | |".to_owned());
    let name = format!("{name} {mark}");
    let name = name.trim_end();
    let _ = writeln!(
        out,
        "| {name} | {before} | {after} | {ratio} | {gain} | {tested} |"
    );
}

/// What Markdown would take for its own is escaped.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(
            c,
            '|' | '*' | '_' | '`' | '<' | '&' | '~' | '[' | ']' | '\\'
        ) {
            out.push('\\');
        }
        out.push(c);
    }
    out
}
