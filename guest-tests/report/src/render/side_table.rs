// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Table of a configuration with a row for each side: times of the phases, and counts.

use std::{collections::BTreeSet, fmt::Write};

use super::{
    lines::{push_trimmed, wrap},
    number::{UNKNOWN, Unit},
};
use crate::{
    comparison::{ComparisonSet, ConfigurationInSet, Group},
    sample::{AnyPhase, Sample},
    stats::Spread,
};

/// Maximum width of the labels in the first column; a longer label is on a separate line.
const MAX_LABEL_WIDTH: usize = 20;
const INDENT: usize = 2;
/// Distance between two columns.
const GAP: usize = 2;

/// Column of the table: its heading, and a cell for each side.
pub struct SideColumn {
    heading: String,
    cells: Vec<String>,
}

impl SideColumn {
    fn width(&self) -> usize {
        let cells = self.cells.iter().chain([&self.heading]);
        GAP + cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    }
}

/// Writes the table in lines of at most `width`. Columns that do not fit follow below the others.
pub fn side_table(
    out: &mut String,
    width: usize,
    set: &ComparisonSet,
    mut columns: Vec<SideColumn>,
) {
    let comparisons = set.comparisons();
    let further = comparisons.iter().map(|comparison| comparison.after.label.as_str());
    let reference = comparisons.iter().take(1).map(|comparison| comparison.before.label.as_str());
    let labels: Vec<&str> = reference.chain(further).collect();
    let longest = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0);
    let label_width = longest.min(MAX_LABEL_WIDTH);
    let room = width - INDENT - label_width;
    for column in &mut columns {
        column.heading = column.heading.chars().take(room - GAP).collect();
    }
    let mut columns = columns.as_slice();
    while !columns.is_empty() {
        let fits =
            |&count: &usize| columns[..count].iter().map(SideColumn::width).sum::<usize>() <= room;
        let fitting = (2..=columns.len()).take_while(fits).last().unwrap_or(1);
        let (now, later) = columns.split_at(fitting);
        let headings = now.iter().map(|column| (column.width(), column.heading.as_str()));
        row(out, width, label_width, "", headings);
        for (at, label) in labels.iter().enumerate() {
            let cells = now.iter().map(|column| (column.width(), column.cells[at].as_str()));
            row(out, width, label_width, label, cells);
        }
        columns = later;
        if !columns.is_empty() {
            out.push('\n');
        }
    }
}

fn row<'a>(
    out: &mut String,
    width: usize,
    label_width: usize,
    label: &str,
    cells: impl Iterator<Item = (usize, &'a str)>,
) {
    let mut label = label;
    if label.chars().count() > label_width {
        wrap(out, width, "  ", label);
        label = "";
    }
    let mut line = format!("{:INDENT$}{label:label_width$}", "");
    for (width, cell) in cells {
        // Writing into a String cannot fail.
        let _ = write!(line, "{cell:>width$}");
    }
    push_trimmed(out, &line);
}

/// Returns the columns of the times of phases.
pub fn time_columns(
    set: &ComparisonSet,
    configuration: &ConfigurationInSet,
    phases: &BTreeSet<AnyPhase>,
) -> Vec<SideColumn> {
    let elapsed = set.has_elapsed_times();
    phases.iter().map(|phase| time_column(configuration, phase, elapsed)).collect()
}

/// Returns the columns of the counts that are known and not 0, as sums over the phases of a run.
pub fn count_columns(configuration: &ConfigurationInSet, counts: &[&str]) -> Vec<SideColumn> {
    counts.iter().filter_map(|name| count_column(configuration, name)).collect()
}

fn time_column(configuration: &ConfigurationInSet, phase: &AnyPhase, elapsed: bool) -> SideColumn {
    let median = |group: &Option<Group>, elapsed: bool| {
        let times = group.as_ref()?.of_phase(phase).map(|sample| sample.time(elapsed));
        Some(Spread::new(times)?.median)
    };
    let groups = &configuration.groups;
    let greatest = groups.iter().filter_map(|group| median(group, elapsed)).fold(0.0, f64::max);
    let unit = Unit::of_nanoseconds(greatest);
    let cell = |group: &Option<Group>| {
        let [time, work] = [elapsed, false].map(|elapsed| median(group, elapsed));
        let Some((time, work)) = time.zip(work) else {
            return UNKNOWN.to_owned();
        };
        let [time, work] = [time, work].map(|value| unit.short(value));
        if elapsed { format!("{time} ({work})") } else { time }
    };
    SideColumn {
        heading: format!("{phase} {}", unit.name()),
        cells: groups.iter().map(cell).collect(),
    }
}

fn count_column(configuration: &ConfigurationInSet, name: &str) -> Option<SideColumn> {
    // A gauge has no sum over phases.
    let count = |sample: &Sample| sample.count(name).filter(|_| !sample.gauges.contains_key(name));
    let groups = configuration.groups.iter();
    let sums: Vec<Option<Spread>> =
        groups.map(|group| group.as_ref()?.spread_of_sums(count)).collect();
    let is_counted = sums.iter().flatten().any(|sum| sum.max > 0.0);
    is_counted.then(|| SideColumn {
        heading: name.to_owned(),
        cells: sums.into_iter().map(|sum| Unit::Count.median(sum)).collect(),
    })
}
