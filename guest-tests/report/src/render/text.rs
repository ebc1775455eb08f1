// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Plain text within 75 columns, ASCII where the input is, for a mail.

use std::fmt::Write;

use super::{
    columns::{COLUMNS, Cell, Row, rows},
    words,
};
use crate::{
    comparison::{Comparison, PhaseChange},
    judge::Verdict,
    sample::Step,
};

/// Length of the longest line. A longer word, such as a path, is broken.
const WIDTH: usize = 75;
/// Width of the name of a row.
const NAME: usize = 26;

/// Renders a comparison as text.
pub fn text(comparison: &Comparison) -> String {
    let mut out = String::new();
    for (name, words) in words::head(comparison) {
        wrap(&mut out, &format!("{name:<10}"), &words);
    }
    for configuration in &comparison.configurations {
        out.push('\n');
        wrap(&mut out, "", &words::title(comparison, configuration));
        let headings = COLUMNS.iter().map(|column| column.heading.to_owned());
        line(&mut out, "  phase", headings, "");
        for phase in &configuration.phases {
            phase_lines(&mut out, comparison, phase);
        }
    }
    if comparison.configurations.len() > 1 {
        out.push('\n');
        overview(&mut out, comparison);
    }
    out.push('\n');
    for note in words::foot(comparison) {
        wrap(&mut out, "", &note);
    }
    out
}

/// Writes each row of a step, the range of its runs where they differ, and its test.
fn phase_lines(out: &mut String, comparison: &Comparison, phase: &PhaseChange) {
    for row in rows(comparison, phase) {
        let indent = if row.is_time() { "  " } else { "    " };
        let cells: Vec<Cell> = COLUMNS.iter().map(|column| (column.cell)(&row)).collect();
        let medians = cells.iter().map(|cell| match cell {
            Cell::Spread(median, _) => median.clone(),
            cell => cell.clone().text(),
        });
        line(out, &format!("{indent}{}", row.name()), medians, row.mark());
        range_line(out, &row, &cells);
        for test in row.test_lines() {
            wrap(out, "      ", &test);
        }
    }
}

fn range_line(out: &mut String, row: &Row, cells: &[Cell]) {
    if !cells.iter().any(|cell| matches!(cell, Cell::Spread(_, Some(_)))) {
        return;
    }
    let ranges = cells.iter().map(|cell| match cell {
        Cell::Spread(_, Some(range)) => range.clone(),
        Cell::Spread(_, None) => "same".to_owned(),
        _ => String::new(),
    });
    let quartiles = row.change.has_quartiles();
    line(out, if quartiles { "      quartiles" } else { "      min..max" }, ranges, "");
}

/// Writes one line of a table; a long name has a line of its own.
fn line(out: &mut String, name: &str, cells: impl Iterator<Item = String>, mark: &str) {
    let mut line = name.to_owned();
    if line.len() > NAME {
        let words = line.trim_start();
        wrap(out, &line[..line.len() - words.len()], words);
        line.clear();
    }
    line = format!("{line:<NAME$}");
    for (column, cell) in COLUMNS.iter().zip(cells) {
        if column.text_width > 0 {
            // Writing into a String cannot fail.
            let _ = write!(line, "{cell:>0$}", column.text_width);
        }
    }
    push_trimmed(out, &format!("{line} {mark}"));
}

/// Writes all ratios of times: a column for each step, two lines for each configuration. Steps that
/// do not fit beside the others follow below.
fn overview(out: &mut String, comparison: &Comparison) {
    let _ = writeln!(out, "Ratio of {}s, after to before:", words::time_name(comparison));
    let steps: Vec<&Step> = comparison.steps().into_iter().collect();
    let mut steps = steps.as_slice();
    while !steps.is_empty() {
        let fit =
            |count: &usize| steps.iter().take(*count).map(|s| width(s)).sum::<usize>() < WIDTH;
        let more = (2..=steps.len()).take_while(fit).count();
        let (fitting, later) = steps.split_at(1 + more);
        ratios(out, comparison, fitting);
        steps = later;
    }
}

/// Returns the width of a step's column with its mark.
fn width(step: &Step) -> usize {
    step.name().len().max("0.00000".len()) + 1
}

fn ratios(out: &mut String, comparison: &Comparison, steps: &[&Step]) {
    let mut head = " ".to_owned();
    for step in steps {
        let _ = write!(head, "{:>1$} ", step.name(), width(step) - 1);
    }
    push_trimmed(out, &head);
    for configuration in &comparison.configurations {
        wrap(out, "", &words::short_title(comparison, configuration));
        let mut line = " ".to_owned();
        for step in steps {
            let ratio = configuration.phase(step).map(|phase| {
                let (ratio, verdict) = words::time_ratio(comparison, phase);
                format!("{ratio}{:1}", verdict.map_or("", Verdict::mark))
            });
            let _ = write!(line, "{:>1$}", ratio.unwrap_or_default(), width(step));
        }
        push_trimmed(out, &line);
    }
}

/// Writes words behind a name; further lines are indented below the first word.
fn wrap(out: &mut String, name: &str, words: &str) {
    let indent = " ".repeat(name.len());
    let options = textwrap::Options::new(WIDTH)
        .initial_indent(name)
        .subsequent_indent(&indent)
        .break_words(true);
    for line in textwrap::wrap(words, options) {
        push_trimmed(out, &line);
    }
}

fn push_trimmed(out: &mut String, line: &str) {
    out.push_str(line.trim_end());
    out.push('\n');
}
