// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Charts: bars of a figure by kernel, bars of counts stacked by phase, and boxes of vCPU times.

use granule_types::phase::Phase;

use super::{
    super::{columns::table_rows, number::Unit, sentences},
    page::escape_html,
    svg::{Scale, Svg, WIDTH, figure_element},
};
use crate::{
    comparison::{Comparison, Configuration, PhaseChange},
    sample::AnyPhase,
    stats::Spread,
};

const MARGIN: f64 = 8.0;
const PLOT_WIDTH: f64 = WIDTH - 2.0 * MARGIN;
/// Counts whose sums differ by at most this share are charted as unchanged.
const MAX_UNCHANGED_SHARE: f64 = 0.01;
/// Maximum number of dots of a side; more values are reduced to quantiles.
const MAX_DOTS: usize = 160;

/// Group of bars with a common name in a bar chart.
#[derive(Debug, Clone)]
pub struct BarGroup {
    /// Name printed above the bars.
    pub name: String,
    /// Length of each bar and the text above it.
    pub bars: Vec<(f64, String)>,
}

/// Returns a chart whose bars share one scale; `None` if all lengths are 0.
pub fn bar_chart(title: &str, words: &str, groups: &[BarGroup]) -> Option<String> {
    let bars = groups.iter().flat_map(|lane| &lane.bars);
    let greatest = bars.map(|(value, _)| *value).fold(0.0, f64::max);
    if greatest <= 0.0 {
        return None;
    }
    let mut svg = Svg::default();
    for lane in groups {
        svg.text(MARGIN, svg.height + 12.0, "start", "", &lane.name);
        svg.height += 16.0;
        for (at, (value, label)) in lane.bars.iter().enumerate() {
            // The first bar has the colour of *before* and the last that of *after*.
            let class = match at {
                at if at + 1 == lane.bars.len() => "after".to_owned(),
                0 => "before".to_owned(),
                at => format!("p{}", at % 8),
            };
            svg.text(MARGIN, svg.height + 11.0, "start", "soft", label);
            let width = (value / greatest * PLOT_WIDTH).max(0.5);
            svg.rect([MARGIN, svg.height + 16.0, width, 6.0], &class, Some(label));
            svg.height += 25.0;
        }
        svg.height += 8.0;
    }
    Some(figure_element(title, words, svg))
}

/// Returns the colour key of the phases.
pub fn phase_key(comparison: &Comparison) -> String {
    let item = |(at, phase): (usize, &AnyPhase)| {
        format!("<li><i class=\"swatch p{}\"></i>{}</li>", at % 8, escape_html(phase.name()))
    };
    let items: String = comparison.phases().into_iter().enumerate().map(item).collect();
    format!("<ul class=\"key\">{items}</ul>\n")
}

/// Returns the chart of a configuration's counts, stacked by phase; `None` without counts.
pub fn count_chart(comparison: &Comparison, configuration: &Configuration) -> Option<String> {
    let (changed, unchanged): (Vec<Count>, Vec<Count>) =
        counts(comparison, configuration).into_iter().partition(|count| {
            let [before, after] = count.sums();
            (before - after).abs() > MAX_UNCHANGED_SHARE * before.max(after)
        });
    if changed.is_empty() && unchanged.is_empty() {
        return None;
    }
    let mut svg = Svg::default();
    for count in &changed {
        draw_bar_pair(&mut svg, count);
    }
    if changed.is_empty() {
        let words = "no count changed by more than 1%";
        svg.text(MARGIN, 14.0, "start", "soft", words);
        svg.height = 22.0;
    }
    let mut words =
        "sums of the medians of each phase; upper bar before, lower bar after".to_owned();
    if !unchanged.is_empty() {
        let names: Vec<&str> = unchanged.iter().map(|count| count.name.as_str()).collect();
        words += &format!(". Within 1%: {}", names.join(", "));
    }
    Some(figure_element(&sentences::short_title(comparison, configuration), &words, svg))
}

struct Count {
    name: String,
    /// Index and name of each phase, and the medians of both sides.
    phase_medians: Vec<(usize, String, [f64; 2])>,
}

impl Count {
    fn sums(&self) -> [f64; 2] {
        [0, 1].map(|side| self.phase_medians.iter().map(|(_, _, medians)| medians[side]).sum())
    }
}

/// Returns a configuration's counts in table order, without gauges: their phases have no sum.
fn counts(comparison: &Comparison, configuration: &Configuration) -> Vec<Count> {
    let phases = comparison.phases();
    let is_gauge =
        |name: &str| configuration.phases.iter().any(|change| change.gauges.contains_key(name));
    let whole = Phase::WholeRun.into();
    let is_whole = |change: &PhaseChange| change.phase == whole && !change.counters.is_empty();
    let has_whole = configuration.phases.iter().any(is_whole);
    let mut counts: Vec<Count> = Vec::new();
    // A whole run has the counts of its steps.
    let changes = configuration.phases.iter().filter(|change| !has_whole || is_whole(change));
    for row in changes.flat_map(table_rows) {
        if row.is_duration() || is_gauge(row.metric) {
            continue;
        }
        let phase = &row.phase.phase;
        let at = phases.iter().position(|known| *known == phase).unwrap_or_default();
        let medians = [row.change.before, row.change.after]
            .map(|spread| spread.map_or(0.0, |spread| spread.median));
        let part = (at, phase.name().to_owned(), medians);
        match counts.iter_mut().find(|count| count.name == row.metric) {
            Some(count) => count.phase_medians.push(part),
            None => counts.push(Count { name: row.metric.to_owned(), phase_medians: vec![part] }),
        }
    }
    counts
}

fn draw_bar_pair(svg: &mut Svg, count: &Count) {
    let top = svg.height;
    let sums = count.sums();
    let [before, after] = sums.map(|sum| Unit::Count.value(sum));
    svg.text(MARGIN, top + 12.0, "start", "", &count.name);
    svg.text(MARGIN, top + 25.0, "start", "soft", &format!("{before} → {after}"));
    for (side, class) in ["before", "after"].into_iter().enumerate() {
        let y = top + 30.0 + 10.0 * side as f64;
        let mut x = MARGIN;
        for (at, phase, medians) in count.phase_medians.iter().filter(|(_, _, m)| m[side] > 0.0) {
            let width = medians[side] / sums[0].max(sums[1]) * (PLOT_WIDTH - 6.0);
            let title = format!("{class}, {phase}: {}", Unit::Count.value(medians[side]));
            let part = [x + 6.0, y, width.max(0.3), 8.0];
            svg.rect(part, &format!("p{}", at % 8), Some(&title));
            x += width;
        }
        svg.rect([MARGIN, y, 3.0, 8.0], class, None);
    }
    svg.height += 58.0;
}

/// Returns the chart of vCPU times in one phase: a box between the quartiles, a line from minimum
/// to maximum, and a dot for each vCPU of each run. `None` if no time is known.
pub fn vcpu_time_chart(comparison: &Comparison, phase: &AnyPhase) -> Option<String> {
    let rows: Vec<_> = comparison
        .rows()
        .filter(|(_, change)| change.phase == *phase)
        .filter(|(_, change)| !change.vcpus.before.is_empty() || !change.vcpus.after.is_empty())
        .collect();
    if rows.is_empty() {
        return None;
    }
    let mut svg = Svg::default();
    for (configuration, change) in &rows {
        let name = sentences::short_title(comparison, configuration);
        draw_boxes(&mut svg, &name, [&change.vcpus.before, &change.vcpus.after]);
    }
    svg.height -= 8.0;
    let words = "a dot for every vCPU of every run; box between the quartiles";
    Some(figure_element(&format!("{phase}, time of each vCPU"), words, svg))
}

/// Draws both sides of a configuration on a scale of their own.
fn draw_boxes(svg: &mut Svg, name: &str, sides: [&[f64]; 2]) {
    let top = svg.height;
    let times = || sides.into_iter().flatten().copied();
    let greatest = times().fold(0.0, f64::max);
    let (scale, unit) = (Scale::from_zero(times()), Unit::of_nanoseconds(greatest));
    let x = |ns: f64| MARGIN + scale.position(ns) * (PLOT_WIDTH - 2.0);
    svg.text(MARGIN, top + 12.0, "start", "", name);
    let words = format!("from 0 to {}", unit.value(greatest));
    svg.text(MARGIN, top + 25.0, "start", "soft", &words);
    for end in [x(0.0), x(greatest)] {
        svg.line([end, top + 30.0, end, top + 70.0], "rule");
    }
    for (lane, (class, times)) in ["before", "after"].into_iter().zip(sides).enumerate() {
        let Some(spread) = Spread::new(times.iter().copied()) else {
            continue;
        };
        let y = top + 40.0 + 20.0 * lane as f64;
        svg.line([x(spread.min), y, x(spread.max), y], class);
        let width = (x(spread.q3) - x(spread.q1)).max(1.0);
        let between = [x(spread.q1), y - 7.0, width, 14.0];
        svg.rect(between, &format!("box {class}"), None);
        let mut sorted = times.to_vec();
        sorted.sort_by(f64::total_cmp);
        let dots = sorted.len().min(MAX_DOTS);
        for dot in 0..dots {
            let ns = sorted[dot * (sorted.len() - 1) / dots.max(2).saturating_sub(1)];
            // Vertical offsets keep dots of equal times visible.
            let off = (dot % 5) as f64 * 2.0 - 4.0;
            svg.circle(x(ns), y + off, 1.6, &format!("dot {class}"), &unit.value(ns));
        }
        let median = x(spread.median);
        svg.line([median, y - 7.0, median, y + 7.0], class);
    }
    svg.height += 84.0;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bar_is_a_mark_with_its_label() {
        let lane = |name: &str, values: &[f64]| BarGroup {
            name: name.to_owned(),
            bars: values.iter().map(|v| (*v, format!("label {v}"))).collect(),
        };
        let chart = bar_chart("t", "", &[lane("a", &[4.0, 2.0, 1.0]), lane("b", &[0.0])]).unwrap();

        assert!(chart.contains("data-marks=\"4\"") && chart.contains("label 2"));
        assert!(chart.contains("width=\"344.0\"") && chart.contains("width=\"86.0\""));
        assert_eq!(bar_chart("title", "", &[lane("a", &[0.0])]), None);
        assert_eq!(bar_chart("title", "", &[]), None);
    }
}
