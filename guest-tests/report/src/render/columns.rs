// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The columns of a comparison's tables, for text, Markdown, HTML and CSV.
//!
//! To add a column, add a [`Column`] to [`COLUMNS`]: its heading, a function that formats its cell
//! from a [`TableRow`], the formats that show it, and its CSV fields. Text, Markdown, HTML and CSV
//! print these columns; JSON, KTAP and benchstat do not use [`COLUMNS`]. The text format already
//! fills its 75 columns: an additional column needs a `text_width` of 0, which omits it there. The
//! golden test then fails; `GRANULE_GOLDEN=write cargo test -p granule-report` updates its files.
//! "Statistics" in `docs/methodology.md` defines the figures.

use super::number::{self, Unit};
use crate::{
    comparison::{Judgement, PhaseChange, TIME_METRIC, WORK_METRIC},
    judge::{TestedRow, Verdict},
    stats::{Change, Spread},
};

/// Table row: the time or a count of a phase.
#[derive(Debug, Clone, Copy)]
pub struct TableRow<'a> {
    /// [`TIME_METRIC`], [`WORK_METRIC`], or the name of the count.
    pub metric: &'a str,
    pub phase: &'a PhaseChange,
    pub change: &'a Change,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cell {
    Text(String),
    /// Median, and the range of the runs if they differ.
    Spread(String, Option<String>),
    /// Verdict, and a remark on it.
    Verdict(Option<Verdict>, Option<String>),
}

/// CSV field: its name, and a function that returns its value.
type CsvField = (&'static str, fn(&TableRow) -> Option<String>);

#[derive(Debug)]
pub struct Column {
    pub heading: &'static str,
    /// Width in the text format; 0 omits the column.
    pub text_width: usize,
    pub is_in_markdown: bool,
    pub cell: fn(&TableRow) -> Cell,
    /// CSV fields, with full precision.
    pub csv: &'static [CsvField],
}

macro_rules! spread_fields {
    ($side:ident, $($name:literal: $figure:ident),*) => {
        &[$(($name, |row| csv_value(row.change.$side.map(|spread| spread.$figure)))),*]
    };
}

/// Columns after the name of the phase or count.
pub const COLUMNS: &[Column] = &[
    Column {
        heading: "before",
        text_width: 15,
        is_in_markdown: true,
        cell: |row| row.spread(row.change.before),
        csv: spread_fields!(
            before,
            "before_median": median, "before_q1": q1, "before_q3": q3,
            "before_min": min, "before_max": max, "before_runs": runs
        ),
    },
    Column {
        heading: "after",
        text_width: 15,
        is_in_markdown: true,
        cell: |row| row.spread(row.change.after),
        csv: spread_fields!(
            after,
            "after_median": median, "after_q1": q1, "after_q3": q3,
            "after_min": min, "after_max": max, "after_runs": runs
        ),
    },
    Column {
        heading: "ratio",
        text_width: 8,
        is_in_markdown: true,
        cell: |row| Cell::Text(number::ratio(row.change)),
        csv: &[("ratio", |row| csv_value(row.change.ratio))],
    },
    Column {
        heading: "gain",
        text_width: 9,
        is_in_markdown: true,
        cell: |row| Cell::Text(number::gain(row.change)),
        csv: &[],
    },
    Column {
        heading: "Hodges-Lehmann, 95%",
        text_width: 0,
        is_in_markdown: true,
        cell: |row| row.test_text(hodges_lehmann_text),
        csv: &[
            ("hl_ratio", |row| csv_value(row.tested_row()?.ratio)),
            ("hl_low", |row| csv_value(row.tested_row()?.interval.map(|[low, _]| low))),
            ("hl_high", |row| csv_value(row.tested_row()?.interval.map(|[_, high]| high))),
            ("test", |row| csv_value(Some(row.tested_row()?.test))),
        ],
    },
    Column {
        heading: "p",
        text_width: 0,
        is_in_markdown: true,
        cell: |row| row.test_text(|tested| Some(number::p_value(tested.p))),
        csv: &[("p", |row| csv_value(Some(row.tested_row()?.p)))],
    },
    Column {
        heading: "p, Holm",
        text_width: 0,
        is_in_markdown: true,
        cell: |row| row.test_text(|tested| Some(number::p_value(tested.p_holm))),
        csv: &[("p_holm", |row| csv_value(Some(row.tested_row()?.p_holm)))],
    },
    Column {
        heading: "delta",
        text_width: 0,
        is_in_markdown: true,
        cell: |row| row.test_text(|tested| Some(format!("{:+.2}", tested.delta))),
        csv: &[("delta", |row| csv_value(Some(row.tested_row()?.delta)))],
    },
    Column {
        heading: "verdict",
        text_width: 0,
        // Text and Markdown mark the row instead.
        is_in_markdown: false,
        cell: |row| Cell::Verdict(row.verdict(), row.detectable_text()),
        csv: &[
            ("detectable", |row| csv_value(row.tested_row()?.detectable_ratio)),
            ("verdict", |row| csv_value(Some(row.verdict()?.name()))),
        ],
    },
];

fn csv_value(value: Option<impl ToString>) -> Option<String> {
    value.map(|value| value.to_string())
}

/// Formats the Hodges-Lehmann ratio and its interval, which may exclude the ratio of medians.
pub fn hodges_lehmann_text(tested: &TestedRow) -> Option<String> {
    let (ratio, ends) = (tested.ratio?, tested.interval?);
    Some(format!("{} ({})", number::factor(ratio), number::interval(ends)))
}

/// Returns the rows of a phase: its time, its work, then its counts. Kernel events and functions
/// come before instructions, whose names begin with a capital letter.
pub fn table_rows<'a>(phase: &'a PhaseChange) -> Vec<TableRow<'a>> {
    let row = |metric: &'a str, change: &'a Change| TableRow { metric, phase, change };
    let counted = |(name, change): (&'a String, &'a Change)| row(name, change);
    let is_instruction = |row: &TableRow| row.metric.starts_with(|c: char| c.is_ascii_uppercase());
    let (instructions, functions): (Vec<TableRow>, Vec<TableRow>) =
        phase.counters.iter().map(counted).partition(is_instruction);
    let mut rows = vec![row(TIME_METRIC, &phase.time)];
    rows.extend(phase.work.as_ref().map(|work| row(WORK_METRIC, work)));
    rows.extend(phase.events.iter().chain(&phase.gauges).map(counted));
    rows.extend(functions);
    rows.extend(instructions);
    rows
}

impl TableRow<'_> {
    pub fn is_time(&self) -> bool {
        self.metric == TIME_METRIC
    }

    pub fn is_duration(&self) -> bool {
        matches!(self.metric, TIME_METRIC | WORK_METRIC)
    }

    pub fn unit(&self) -> Unit {
        if self.is_duration() { Unit::of_time(self.change) } else { Unit::Count }
    }

    /// Returns the phase name for a time, and the name of the count for a count.
    pub fn name(&self) -> &str {
        if self.is_time() { self.phase.phase.name() } else { self.metric }
    }

    /// Returns the judgement of this figure, if it is judged.
    pub fn judgement(&self) -> Option<&Judgement> {
        self.phase.judgement_of(self.metric)
    }

    pub fn verdict(&self) -> Option<Verdict> {
        Some(self.judgement()?.verdict)
    }

    pub fn mark(&self) -> &'static str {
        self.verdict().map_or("", Verdict::mark)
    }

    pub fn tested_row(&self) -> Option<&TestedRow> {
        self.judgement()?.tested_row.as_ref()
    }

    /// Formats the smallest detectable slowdown if the runs show no difference.
    pub fn detectable_text(&self) -> Option<String> {
        let tested = self.tested_row()?;
        let growth = (tested.detectable_ratio? - 1.0) * 100.0;
        let is_found = tested.is_significant() || self.verdict() == Some(Verdict::Regression);
        (!is_found).then(|| format!("no difference found; growth of {growth:.1}% would be found"))
    }

    /// Describes the test in one or two lines.
    pub fn test_lines(&self) -> Vec<String> {
        let Some(tested) = self.tested_row() else {
            return Vec::new();
        };
        let ratio = tested.ratio.map(|ratio| {
            let ends = tested.interval.map(|ends| format!(", 95% {}", number::interval(ends)));
            format!("ratio {}{}; ", number::factor(ratio), ends.unwrap_or_default())
        });
        let test = if tested.test == "student" { "p (t)" } else { "p" };
        let [p, holm] = [tested.p, tested.p_holm].map(number::p_value);
        let mut lines = vec![format!(
            "{}{test} {p}, Holm {holm}; delta {:+.2}",
            ratio.unwrap_or_default(),
            tested.delta
        )];
        lines.extend(self.detectable_text());
        lines
    }

    fn spread(&self, spread: Option<Spread>) -> Cell {
        let unit = self.unit();
        Cell::Spread(unit.median(spread), unit.range(spread))
    }

    fn test_text(&self, text: fn(&TestedRow) -> Option<String>) -> Cell {
        Cell::Text(self.tested_row().and_then(text).unwrap_or_default())
    }
}

impl Cell {
    pub fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Spread(text, None) => text,
            Self::Spread(median, Some(range)) => format!("{median} ({range})"),
            Self::Verdict(verdict, _) => verdict.map_or("", Verdict::name).to_owned(),
        }
    }
}
