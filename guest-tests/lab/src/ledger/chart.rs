// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The chart of a page: a panel for each configuration, in which each line is a figure relative to
//! the first kernel of the same setup, and ends where the setup changes. The SVG is a file of its own or
//! part of an HTML page, so it has fixed colours.

use granule_report::render::page::escape_html;

use super::{
    figures::{FIGURES, Figure, Row, configurations, rows},
    line::Line,
};

const WIDTH: f64 = 760.0;
const PANEL_WIDTH: f64 = 300.0;
const PANEL_HEIGHT: f64 = 130.0;
const LEFT: f64 = 50.0;
const COLUMN: f64 = 380.0;
const ROW: f64 = 200.0;
/// Colours of the lines, distinct in lightness and hue, and their dashes.
const STYLES: [(&str, &str); 4] =
    [("#0b6e99", ""), ("#c2541b", "6 3"), ("#5b6670", "2 3"), ("#3d7a3d", "")];
/// Number of labels that fit below a panel.
const MAX_LABELS: usize = 5;

/// Returns the chart, in one line.
pub fn chart(lines: &[&Line]) -> String {
    let mut parts = String::new();
    let panels = configurations(lines);
    for (index, configuration) in panels.iter().enumerate() {
        let x = LEFT + if index % 2 == 0 { 0.0 } else { COLUMN };
        let y = 40.0 + ROW * float(index / 2);
        parts += &text(x, y - 12.0, "start", 13, &configuration.title());
        parts += &panel(x, y, &rows(lines, configuration));
    }
    let bottom = 40.0 + ROW * float(panels.len().div_ceil(2));
    let mut x = LEFT;
    for (figure, style) in charted().zip(STYLES) {
        parts += &polyline(&[(x, bottom - 4.0), (x + 24.0, bottom - 4.0)], style);
        parts += &text(x + 30.0, bottom, "start", 11, figure.heading.trim_end_matches(" ms"));
        x += 150.0;
    }
    let height = bottom + 16.0;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"system-ui, sans-serif\" role=\"img\" \
         aria-label=\"Figures of each kernel, relative to the first of its setup\">\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>{parts}</svg>\n"
    )
}

fn charted() -> impl Iterator<Item = &'static Figure> {
    FIGURES.iter().filter(|figure| figure.is_in_chart)
}

/// Returns a panel with its upper left corner at `x` and `y`.
fn panel(x: f64, y: f64, rows: &[Row<'_>]) -> String {
    let series: Vec<Vec<Option<f64>>> = charted().map(|figure| relative(rows, figure)).collect();
    let largest = series.iter().flatten().flatten().fold(1.0_f64, |most, value| most.max(*value));
    let top = (largest * 2.0).ceil() / 2.0;
    let across = |index: usize| x + PANEL_WIDTH * (float(index) + 0.5) / float(rows.len().max(1));
    let down = |value: f64| y + PANEL_HEIGHT * (1.0 - value / top);
    let mut parts = String::new();
    for tick in [0.0, top / 2.0, top] {
        let y = down(tick);
        parts += &format!(
            "<rect x=\"{x}\" y=\"{y:.1}\" width=\"{PANEL_WIDTH}\" height=\"0.5\" fill=\"#dfe4e8\"/>"
        );
        parts += &text(x - 4.0, y + 4.0, "end", 10, &format!("{:.0}%", tick * 100.0));
    }
    let step = rows.len().div_ceil(MAX_LABELS).max(1);
    for (index, row) in rows.iter().enumerate().step_by(step) {
        parts += &text(across(index), y + PANEL_HEIGHT + 14.0, "middle", 10, &row.label());
    }
    for (values, style) in series.iter().zip(STYLES) {
        let mut points = values.iter().enumerate();
        for rows in rows.chunk_by(|row, next| row.has_same_setup(next)) {
            let points = points.by_ref().take(rows.len());
            let points: Vec<(f64, f64)> = points
                .filter_map(|(index, value)| Some((across(index), down((*value)?))))
                .collect();
            parts += &polyline(&points, style);
            for (x, y) in points {
                let colour = style.0;
                parts +=
                    &format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\" fill=\"{colour}\"/>");
            }
        }
    }
    parts
}

/// Returns the values of a figure relative to the first row of the same setup that has one above
/// zero.
#[expect(clippy::cast_precision_loss, reason = "a position need not be exact")]
fn relative(rows: &[Row<'_>], figure: &Figure) -> Vec<Option<f64>> {
    let value = |row: &Row<'_>| (figure.value)(row.figures);
    let relative = |row: &Row<'_>| {
        let of_setup = rows.iter().filter(|other| other.has_same_setup(row));
        let first = of_setup.filter_map(value).find(|value| *value > 0)?;
        Some(value(row)? as f64 / first as f64)
    };
    rows.iter().map(relative).collect()
}

fn text(x: f64, y: f64, anchor: &str, size: u32, words: &str) -> String {
    let words = escape_html(words);
    format!(
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"#1c2329\" \
         font-size=\"{size}\">{words}</text>"
    )
}

fn polyline(points: &[(f64, f64)], (colour, dash): (&str, &str)) -> String {
    let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let points = points.join(" ");
    format!(
        "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" \
         stroke-dasharray=\"{dash}\"/>"
    )
}

#[expect(clippy::cast_precision_loss, reason = "a position need not be exact")]
fn float(number: usize) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::{super::line::tests::line, *};

    #[test]
    fn each_configuration_has_a_panel_with_a_mark_for_each_figure_and_kernel() {
        let (first, second) = (line("5.10.1", 100), line("6.1.2", 200));

        let chart = chart(&[&first, &second]);

        assert_eq!(chart.matches("anonymous, 16M, 4 vCPUs").count(), 1);
        assert_eq!(chart.matches("<circle").count(), 8);
        assert!(chart.contains(">200%<") && chart.contains(">6.1.2<"), "{chart}");
        assert!(charted().count() <= STYLES.len());
    }

    #[test]
    fn kernels_of_another_setup_are_relative_to_its_first() {
        let mut others = [line("6.12.1", 1000), line("7.3.1", 1100)];
        for other in &mut others {
            other.key.program = "other".to_owned();
        }
        let first = line("6.1.2", 100);
        let lines = [&first, &others[0], &others[1]];

        let chart = chart(&lines);

        let work = charted().last().unwrap();
        let rows = rows(&lines, configurations(&lines)[0]);
        assert_eq!(relative(&rows, work), [Some(1.0), Some(1.0), Some(1.1)]);
        let lines_of_kernels = chart.matches("<polyline").count() - charted().count();
        assert_eq!(lines_of_kernels, 2 * charted().count(), "{chart}");
    }
}
