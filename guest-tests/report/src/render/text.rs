// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Plain text for mails, in at most 75 columns and in ASCII unless the input is not; and Markdown.

use std::fmt::Write;

use super::{
    columns::{COLUMNS, Cell, Column, TableRow, table_rows},
    lines::{push_trimmed, wrap},
    sentences,
};
use crate::{
    comparison::{Comparison, PhaseChange},
    judge::Verdict,
    sample::AnyPhase,
};

/// Maximum length of a line. Longer words, such as paths, are broken.
const WIDTH: usize = 75;
const NAME_WIDTH: usize = 26;

/// Renders a comparison as text.
pub fn text(comparison: &Comparison) -> String {
    let mut out = String::new();
    for (name, words) in sentences::head(comparison) {
        wrap(&mut out, WIDTH, &format!("{name:<10}"), &words);
    }
    for configuration in &comparison.configurations {
        out.push('\n');
        wrap(&mut out, WIDTH, "", &sentences::title(comparison, configuration));
        let headings = COLUMNS.iter().map(|column| column.heading.to_owned());
        table_line(&mut out, "  phase", headings, "");
        for change in &configuration.phases {
            phase_lines(&mut out, change);
        }
    }
    if comparison.configurations.len() > 1 {
        out.push('\n');
        text_overview(&mut out, comparison);
    }
    out.push('\n');
    for note in sentences::footer(comparison) {
        wrap(&mut out, WIDTH, "", &note);
    }
    out
}

/// Writes each row of a phase, the range of its runs if they differ, and its test.
fn phase_lines(out: &mut String, change: &PhaseChange) {
    for row in table_rows(change) {
        let indent = if row.is_time() { "  " } else { "    " };
        let cells: Vec<Cell> = COLUMNS.iter().map(|column| (column.cell)(&row)).collect();
        let medians = cells.iter().map(|cell| match cell {
            Cell::Spread(median, _) => median.clone(),
            cell => cell.clone().into_text(),
        });
        table_line(out, &format!("{indent}{}", row.name()), medians, row.mark());
        range_line(out, &row, &cells);
        for test in row.test_lines() {
            wrap(out, WIDTH, "      ", &test);
        }
    }
}

fn range_line(out: &mut String, row: &TableRow, cells: &[Cell]) {
    if !cells.iter().any(|cell| matches!(cell, Cell::Spread(_, Some(_)))) {
        return;
    }
    let ranges = cells.iter().map(|cell| match cell {
        Cell::Spread(_, Some(range)) => range.clone(),
        Cell::Spread(_, None) => "same".to_owned(),
        _ => String::new(),
    });
    let quartiles = row.change.sides().any(|spread| spread.has_quartiles);
    table_line(out, if quartiles { "      quartiles" } else { "      min..max" }, ranges, "");
}

/// Writes one line of a table; a long name is on a separate line.
fn table_line(out: &mut String, name: &str, cells: impl Iterator<Item = String>, mark: &str) {
    let mut line = name.to_owned();
    if line.len() > NAME_WIDTH {
        let words = line.trim_start();
        wrap(out, WIDTH, &line[..line.len() - words.len()], words);
        line.clear();
    }
    line = format!("{line:<NAME_WIDTH$}");
    for (column, cell) in COLUMNS.iter().zip(cells) {
        if column.text_width > 0 {
            // Writing into a String cannot fail.
            let _ = write!(line, "{cell:>0$}", column.text_width);
        }
    }
    push_trimmed(out, &format!("{line} {mark}"));
}

/// Writes all time ratios: a column for each phase, two lines for each configuration. Phases that
/// do not fit into the width follow below the others.
fn text_overview(out: &mut String, comparison: &Comparison) {
    let _ = writeln!(out, "{}:", sentences::ratios_title(comparison));
    let phases: Vec<&AnyPhase> = comparison.phases().into_iter().collect();
    let mut phases = phases.as_slice();
    while !phases.is_empty() {
        let fit = |count: &usize| phases[..*count].iter().map(|p| width(p)).sum::<usize>() < WIDTH;
        let more = (2..=phases.len()).take_while(fit).count();
        let (fitting, later) = phases.split_at(1 + more);
        ratio_lines(out, comparison, fitting);
        phases = later;
    }
}

fn width(phase: &AnyPhase) -> usize {
    phase.name().len().max("0.00000".len()) + 1
}

fn ratio_lines(out: &mut String, comparison: &Comparison, phases: &[&AnyPhase]) {
    let mut head = " ".to_owned();
    for phase in phases {
        let _ = write!(head, "{:>1$} ", phase.name(), width(phase) - 1);
    }
    push_trimmed(out, &head);
    for configuration in &comparison.configurations {
        wrap(out, WIDTH, "", &sentences::short_title(comparison, configuration));
        let mut line = " ".to_owned();
        for phase in phases {
            let (ratio, verdict) = sentences::time_ratio(configuration, phase);
            let ratio = format!("{ratio}{:1}", verdict.map_or("", Verdict::mark));
            let _ = write!(line, "{ratio:>0$}", width(phase));
        }
        push_trimmed(out, &line);
    }
}

/// Renders a comparison as Markdown: a list, a table for each configuration, and the notes.
pub fn markdown(comparison: &Comparison) -> String {
    let mut out = String::new();
    for (name, words) in sentences::head(comparison) {
        let _ = writeln!(out, "- {name}: {}", escape_markdown(&words));
    }
    let columns: Vec<&Column> = COLUMNS.iter().filter(|column| column.is_in_markdown).collect();
    for configuration in &comparison.configurations {
        let title = escape_markdown(&sentences::title(comparison, configuration));
        let headings = columns.iter().map(|column| column.heading.to_owned());
        let mut table = vec![["phase".to_owned()].into_iter().chain(headings).collect()];
        for row in configuration.phases.iter().flat_map(table_rows) {
            let name = escape_markdown(row.name());
            let name = if row.is_time() { format!("**{name}**") } else { name };
            let name = format!("{name} {}", row.mark()).trim_end().to_owned();
            let cells = columns.iter().map(|column| (column.cell)(&row).into_text());
            table.push([name].into_iter().chain(cells).collect());
        }
        push_table(&mut out, &title, &table);
    }
    if comparison.configurations.len() > 1 {
        markdown_overview(&mut out, comparison);
    }
    for note in sentences::footer(comparison) {
        let _ = writeln!(out, "\n{}", escape_markdown(&note));
    }
    out
}

fn markdown_overview(out: &mut String, comparison: &Comparison) {
    let phases = comparison.phases();
    let names = phases.iter().map(|phase| phase.name().to_owned());
    let mut table = vec![[String::new()].into_iter().chain(names).collect()];
    for configuration in &comparison.configurations {
        let title = sentences::short_title(comparison, configuration);
        let ratios = phases.iter().map(|phase| {
            let (ratio, verdict) = sentences::time_ratio(configuration, phase);
            format!("{ratio} {}", verdict.map_or("", Verdict::mark)).trim_end().to_owned()
        });
        table.push([escape_markdown(&title)].into_iter().chain(ratios).collect());
    }
    push_table(out, &sentences::ratios_title(comparison), &table);
}

/// Writes a table below its title; the first row is the heading.
fn push_table(out: &mut String, title: &str, table: &[Vec<String>]) {
    let _ = writeln!(out, "\n**{title}**\n");
    for (at, row) in table.iter().enumerate() {
        let _ = writeln!(out, "| {} |", row.join(" | "));
        if at == 0 {
            let _ = writeln!(out, "|---|{}", "--:|".repeat(row.len() - 1));
        }
    }
}

/// Escapes the characters that Markdown interprets.
fn escape_markdown(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if "|*_`<&~[]\\".contains(c) {
            out.push('\\');
        }
        out.push(c);
    }
    out
}
