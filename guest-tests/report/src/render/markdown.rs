// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Markdown: a list, a table for each configuration, and the notes.

use std::fmt::Write;

use super::{
    columns::{COLUMNS, Column, rows},
    words,
};
use crate::{comparison::Comparison, judge::Verdict};

/// Renders a comparison as Markdown.
pub fn markdown(comparison: &Comparison) -> String {
    let mut out = String::new();
    // Writing into a String cannot fail.
    for (name, words) in words::head(comparison) {
        let _ = writeln!(out, "- {name}: {}", escaped(&words));
    }
    let columns: Vec<&Column> = COLUMNS.iter().filter(|column| column.in_markdown).collect();
    for configuration in &comparison.configurations {
        let title = escaped(&words::title(comparison, configuration));
        let headings = columns.iter().map(|column| column.heading.to_owned());
        let mut table = vec![["phase".to_owned()].into_iter().chain(headings).collect()];
        for row in configuration.phases.iter().flat_map(|phase| rows(comparison, phase)) {
            let name = escaped(row.name());
            let name = if row.is_time() { format!("**{name}**") } else { name };
            let name = format!("{name} {}", row.mark()).trim_end().to_owned();
            let cells = columns.iter().map(|column| (column.cell)(&row).text());
            table.push([name].into_iter().chain(cells).collect());
        }
        push_table(&mut out, &title, &table);
    }
    if comparison.configurations.len() > 1 {
        overview(&mut out, comparison);
    }
    for note in words::foot(comparison) {
        let _ = writeln!(out, "\n{}", escaped(&note));
    }
    out
}

/// Writes all ratios of times in one table.
fn overview(out: &mut String, comparison: &Comparison) {
    let steps = comparison.steps();
    let names = steps.iter().map(|step| step.name().to_owned());
    let mut table = vec![[String::new()].into_iter().chain(names).collect()];
    for configuration in &comparison.configurations {
        let title = words::short_title(comparison, configuration);
        let ratios = steps.iter().map(|step| match configuration.phase(step) {
            Some(phase) => {
                let (ratio, verdict) = words::time_ratio(comparison, phase);
                format!("{ratio} {}", verdict.map_or("", Verdict::mark)).trim_end().to_owned()
            }
            None => String::new(),
        });
        table.push([escaped(&title)].into_iter().chain(ratios).collect());
    }
    let title = format!("Ratio of {}s, after to before", words::time_name(comparison));
    push_table(out, &title, &table);
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
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if "|*_`<&~[]\\".contains(c) {
            out.push('\\');
        }
        out.push(c);
    }
    out
}
