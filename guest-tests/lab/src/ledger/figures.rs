// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Figures of a page: values of one configuration of a line, and rows of its tables.

use granule_report::render::group_digits;
use granule_types::{phase::Phase, units::Nanoseconds};

use super::line::{ConfigurationFigures, Line, Outcome, PhaseFigures};

/// Unit of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    Count,
    /// Virtual nanoseconds, printed as milliseconds.
    Time,
}

/// Figure of a configuration.
#[derive(Debug, Clone, Copy)]
pub struct Figure {
    pub heading: &'static str,
    pub unit: Unit,
    /// `None` if the kernel does not provide the value.
    pub value: fn(&ConfigurationFigures) -> Option<u64>,
    /// Indicates that the chart has a line for the figure.
    pub is_in_chart: bool,
}

/// Figures of the tables, in the order of their columns.
pub const FIGURES: [Figure; 8] = [
    chart("guest aborts", Unit::Count, |of| count(of, "guest_aborts")),
    column("translation faults", Unit::Count, |of| count(of, "translation_faults")),
    column("permission faults", Unit::Count, |of| count(of, "permission_faults")),
    chart("DC CIVAC", Unit::Count, |of| count(of, "DC CIVAC")),
    column("TLBI", Unit::Count, |of| count(of, "TLBI")),
    column("update, elapsed ms", Unit::Time, |of| {
        sum(of, |phase| (phase.phase == Phase::Update).then_some(ns(phase.elapsed_ns)))
    }),
    chart("all, elapsed ms", Unit::Time, |of| sum(of, |phase| Some(ns(phase.elapsed_ns)))),
    chart("all, work ms", Unit::Time, |of| sum(of, |phase| Some(ns(phase.work_ns)))),
];

type Value = fn(&ConfigurationFigures) -> Option<u64>;

const fn column(heading: &'static str, unit: Unit, value: Value) -> Figure {
    Figure { heading, unit, value, is_in_chart: false }
}

const fn chart(heading: &'static str, unit: Unit, value: Value) -> Figure {
    Figure { heading, unit, value, is_in_chart: true }
}

const fn ns(Nanoseconds(ns): Nanoseconds) -> u64 {
    ns
}

fn count(of: &ConfigurationFigures, name: &str) -> Option<u64> {
    sum(of, |phase| phase.counts.get(name).copied())
}

/// Returns the sum over the phases that have a value; `None` if no phase has one.
fn sum(of: &ConfigurationFigures, value: impl Fn(&PhaseFigures) -> Option<u64>) -> Option<u64> {
    of.phases.iter().filter_map(value).fold(None, |sum, value| Some(sum.unwrap_or(0) + value))
}

/// Returns one of each configuration that the lines contain, in order.
pub fn configurations<'a>(lines: &[&'a Line]) -> Vec<&'a ConfigurationFigures> {
    let mut found: Vec<&ConfigurationFigures> = Vec::new();
    for line in lines {
        let Outcome::Results(results) = &line.outcome else { continue };
        for result in results {
            if !found.iter().any(|known| known.is_same(result)) {
                found.push(result);
            }
        }
    }
    found
}

/// A measured line and its results of one configuration.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    pub line: &'a Line,
    pub figures: &'a ConfigurationFigures,
}

/// Returns the rows of a configuration, in the order of the lines.
pub fn rows<'a>(lines: &[&'a Line], configuration: &ConfigurationFigures) -> Vec<Row<'a>> {
    let row = |line: &&'a Line| {
        let line: &'a Line = line;
        let Outcome::Results(results) = &line.outcome else { return None };
        let figures = results.iter().find(|result| result.is_same(configuration))?;
        Some(Row { line, figures })
    };
    lines.iter().filter_map(row).collect()
}

impl Row<'_> {
    /// Returns the name of the kernel: its release, and the revision if it is another text.
    pub fn label(&self) -> String {
        label(self.line)
    }

    /// Returns whether the figures of two rows can be compared.
    pub fn has_same_setup(&self, other: &Self) -> bool {
        self.line.key.has_same_setup(&other.line.key)
    }

    /// Formats a figure with its change against the row before, if both have the same setup.
    pub fn cell(&self, figure: &Figure, before: Option<&Self>) -> String {
        let Some(value) = (figure.value)(self.figures) else { return "-".to_owned() };
        let before = before
            .filter(|before| before.has_same_setup(self))
            .and_then(|before| (figure.value)(before.figures));
        let text = match figure.unit {
            Unit::Count => group_digits(&value.to_string()),
            Unit::Time => {
                let micros = value.div_ceil(1000);
                format!("{}.{:03}", group_digits(&(micros / 1000).to_string()), micros % 1000)
            }
        };
        text + &before.map_or_else(String::new, |before| change(before, value))
    }
}

/// Returns the name of a line on a page.
pub fn label(line: &Line) -> String {
    let release = line.linux.to_string();
    match line.revision.as_str() {
        revision if release.starts_with(revision) => release,
        hash if hash.len() == 40 => format!("{} ({release})", &hash[..12]),
        revision => format!("{revision} ({release})"),
    }
}

#[expect(clippy::cast_precision_loss, reason = "a percentage need not be exact")]
fn change(before: u64, after: u64) -> String {
    match before {
        _ if before == after => " (=)".to_owned(),
        0 => String::new(),
        before => format!(" ({:+.1}%)", 100.0 * (after as f64 / before as f64 - 1.0)),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::line::tests::line, *};

    fn cells(before: &Line, after: &Line) -> Vec<String> {
        let (Outcome::Results(first), Outcome::Results(second)) = (&before.outcome, &after.outcome)
        else {
            unreachable!()
        };
        let before = Row { line: before, figures: &first[0] };
        let row = Row { line: after, figures: &second[0] };
        FIGURES.iter().map(|figure| row.cell(figure, Some(&before))).collect()
    }

    #[test]
    fn a_figure_has_its_change_against_the_row_before() {
        let found = cells(&line("6.1.2", 1000), &line("6.12.1", 1234));

        assert_eq!(found[0], "2,468 (+23.4%)");
        assert_eq!(found[2], "-", "a count that the kernel does not provide");
        assert_eq!(found[5], "1.234 (+23.4%)");
        assert_eq!(found[7], "4.936 (+23.4%)");
        assert_eq!(cells(&line("6.1.2", 5), &line("6.12.1", 5))[0], "10 (=)");
    }

    #[test]
    fn a_row_of_another_setup_has_no_change() {
        let mut other = line("6.12.1", 1234);
        other.key.program = "other".to_owned();

        assert_eq!(cells(&line("6.1.2", 1000), &other)[0], "2,468");
    }

    #[test]
    fn a_label_has_release_and_revision() {
        let mut of = line("6.12.117", 1);
        let mut label_of = |revision: &str| {
            of.revision = revision.to_owned();
            label(&of)
        };

        assert_eq!(label_of("6.12"), "6.12.117");
        assert_eq!(label_of("HEAD~1"), "HEAD~1 (6.12.117)");
        assert_eq!(label_of(&"ab".repeat(20)), "abababababab (6.12.117)");
    }
}
