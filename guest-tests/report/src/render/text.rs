// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Plain text within 75 columns, ASCII as far as the input is, so that it pastes into a mail.

use std::fmt::Write;

use super::figures::{self, Unit};
use crate::{Change, Comparison, PhaseChange, Step};

/// No line is longer; a single word that is, such as a path, is broken.
const WIDTH: usize = 75;
/// The widths of name, before, after, ratio and gain.
const NAME: usize = 26;
const FIGURE: usize = 15;
const RATIO: usize = 8;
const GAIN: usize = 9;

/// The comparison as text.
pub fn text(comparison: &Comparison) -> String {
    let mut out = String::new();
    for (name, words) in super::head(comparison) {
        wrap(&mut out, &format!("{name:<10}"), &words);
    }
    for configuration in &comparison.configurations {
        out.push('\n');
        wrap(&mut out, "", &super::title(comparison, configuration));
        row(
            &mut out,
            "  phase",
            ["before", "after", "ratio", "gain"],
            "",
        );
        for phase in &configuration.phases {
            phase_rows(&mut out, comparison, phase);
        }
    }
    if comparison.configurations.len() > 1 {
        out.push('\n');
        overview(&mut out, comparison);
    }
    out.push('\n');
    for note in super::foot(comparison) {
        wrap(&mut out, "", &note);
    }
    out
}

fn phase_rows(out: &mut String, comparison: &Comparison, phase: &PhaseChange) {
    let judged = |name: &str| phase.verdict.filter(|_| name == comparison.metric);
    let mark = |name: &str| judged(name).map_or("", |verdict| verdict.mark());
    let name = format!("  {}", phase.phase);
    let unit = Unit::of_time(&phase.time);
    change_rows(out, &name, &phase.time, unit, mark("time"));
    if judged("time").is_some() {
        tested_rows(out, phase);
    }
    for (name, change) in super::counts(phase) {
        change_rows(out, &format!("    {name}"), change, Unit::Count, mark(name));
        if judged(name).is_some() {
            tested_rows(out, phase);
        }
    }
}

/// What the test says, below its row.
fn tested_rows(out: &mut String, phase: &PhaseChange) {
    for line in super::tested(phase) {
        wrap(out, "      ", &line);
    }
}

/// All ratios of times on a page: a column for each phase, two lines for each configuration. Phases
/// that do not fit beside the others follow below.
fn overview(out: &mut String, comparison: &Comparison) {
    out.push_str("Time after through time before:\n");
    let phases = super::phases(comparison);
    let mut phases = phases.as_slice();
    while !phases.is_empty() {
        let fit = |count: &usize| {
            let columns = phases.iter().take(*count).map(|phase| width(phase));
            columns.sum::<usize>() < WIDTH
        };
        let more = (2..=phases.len()).take_while(fit).count();
        let (now, later) = phases.split_at(1 + more);
        ratios(out, comparison, now);
        phases = later;
    }
}

/// The width of a phase's column, its mark included.
fn width(phase: &Step) -> usize {
    phase.name().len().max("0.00000".len()) + 1
}

/// The ratios of some phases, with their names above.
fn ratios(out: &mut String, comparison: &Comparison, phases: &[&Step]) {
    let mut head = " ".to_owned();
    for &phase in phases {
        // Writing into a String cannot fail.
        let _ = write!(head, "{:>1$} ", phase.name(), width(phase) - 1);
    }
    out.push_str(head.trim_end());
    out.push('\n');
    for configuration in &comparison.configurations {
        wrap(out, "", &super::short_title(comparison, configuration));
        let mut line = " ".to_owned();
        for &wanted in phases {
            let found = configuration.phases.iter().find(|p| p.phase == *wanted);
            let ratio = found.map_or(String::new(), |phase| {
                format!(
                    "{}{:1}",
                    figures::ratio(&phase.time),
                    super::time_mark(comparison, phase)
                )
            });
            let _ = write!(line, "{ratio:>0$}", width(wanted));
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
}

/// A figure's row and, where its runs differ, their range below it.
fn change_rows(out: &mut String, name: &str, change: &Change, unit: Unit, mark: &str) {
    let medians = [unit.median(change.before), unit.median(change.after)];
    let [before, after] = &medians;
    let (ratio, gain) = (figures::ratio(change), figures::gain(change));
    row(out, name, [before, after, &ratio, &gain], mark);
    let quartiles = figures::has_quartiles(change);
    let ranges = [change.before, change.after].map(|spread| unit.range(spread, quartiles));
    if ranges.iter().any(Option::is_some) {
        let [before, after] = ranges.map(|range| range.unwrap_or_else(|| "same".to_owned()));
        let name = if quartiles {
            "      quartiles"
        } else {
            "      min..max"
        };
        row(out, name, [&before, &after, "", ""], "");
    }
}

fn row(out: &mut String, name: &str, cells: [&str; 4], mark: &str) {
    let mut line = name.to_owned();
    if line.len() > NAME {
        // A long name stands on its own line.
        let words = line.trim_start();
        wrap(out, &line[..line.len() - words.len()], words);
        line.clear();
    }
    let [before, after, ratio, gain] = cells;
    // Writing into a String cannot fail.
    let _ = write!(
        line,
        "{:<pad$}{before:>FIGURE$}{after:>FIGURE$}{ratio:>RATIO$}{gain:>GAIN$} {mark}",
        "",
        pad = NAME - line.len(),
    );
    out.push_str(line.trim_end());
    out.push('\n');
}

/// Words wrapped behind a name, the following lines indented under the first word.
fn wrap(out: &mut String, name: &str, words: &str) {
    let indent = " ".repeat(name.len());
    let options = textwrap::Options::new(WIDTH)
        .initial_indent(name)
        .subsequent_indent(&indent)
        .break_words(true);
    for line in textwrap::wrap(words, options) {
        out.push_str(line.trim_end());
        out.push('\n');
    }
}
