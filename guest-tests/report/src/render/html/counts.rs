// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Charts of counts: two bars for each count of a configuration, stacked by step.

use super::{
    super::{columns::rows, number::Unit, words},
    page::escaped,
    svg::{Anchor, Svg, WIDTH, figure},
};
use crate::comparison::{Comparison, Configuration};

const LEFT: f64 = 8.0;
const BARS: f64 = WIDTH - 2.0 * LEFT;
/// Sums of both sides that are nearer than this share count as unchanged.
const ALIKE: f64 = 0.01;

/// Returns the key of the colours of steps.
pub fn key(comparison: &Comparison) -> String {
    let items: String = comparison
        .steps()
        .into_iter()
        .enumerate()
        .map(|(at, step)| {
            format!("<li><i class=\"swatch p{}\"></i>{}</li>", at % 8, escaped(step.name()))
        })
        .collect();
    format!("<ul class=\"key\">{items}</ul>\n")
}

/// Returns the chart of one configuration; `None` without counts.
pub fn breakdown(comparison: &Comparison, configuration: &Configuration) -> Option<String> {
    let (changed, unchanged): (Vec<Count>, Vec<Count>) =
        counts(comparison, configuration).into_iter().partition(|count| {
            let [before, after] = count.sums();
            (before - after).abs() > ALIKE * before.max(after)
        });
    if changed.is_empty() && unchanged.is_empty() {
        return None;
    }
    let mut svg = Svg::default();
    for count in &changed {
        bar_pair(&mut svg, count);
    }
    if changed.is_empty() {
        let words = "no count changed by more than 1%";
        svg.text(LEFT, 14.0, Anchor::Start, "soft", words);
        svg.height = 22.0;
    }
    let mut words =
        "sums of the medians of each phase; upper bar before, lower bar after".to_owned();
    if !unchanged.is_empty() {
        let names: Vec<&str> = unchanged.iter().map(|count| count.name.as_str()).collect();
        words += &format!(". Within 1%: {}", names.join(", "));
    }
    Some(figure(&words::short_title(comparison, configuration), &words, svg))
}

/// One count, step by step.
struct Count {
    name: String,
    /// Place and name of each step, and its medians before and after.
    parts: Vec<(usize, String, [f64; 2])>,
}

impl Count {
    fn sums(&self) -> [f64; 2] {
        [0, 1].map(|side| self.parts.iter().map(|(_, _, medians)| medians[side]).sum())
    }
}

/// Returns the counts of a configuration, in the order of tables. Gauges do not add up over steps.
fn counts(comparison: &Comparison, configuration: &Configuration) -> Vec<Count> {
    let steps: Vec<_> = comparison.steps().into_iter().collect();
    let mut counts: Vec<Count> = Vec::new();
    for phase in &configuration.phases {
        for row in rows(comparison, phase).iter().filter(|row| !row.is_time()) {
            let is_gauge = configuration.phases.iter().any(|p| p.gauges.contains_key(row.metric));
            if !is_gauge && !counts.iter().any(|count| count.name == row.metric) {
                counts.push(Count { name: row.metric.to_owned(), parts: Vec::new() });
            }
        }
    }
    for count in &mut counts {
        for phase in &configuration.phases {
            let at = steps.iter().position(|step| **step == phase.phase);
            let change = phase.count(&count.name);
            let sides = change.map_or([None; 2], |change| [change.before, change.after]);
            let medians = sides.map(|spread| spread.map_or(0.0, |spread| spread.median));
            count.parts.extend(at.map(|at| (at, phase.phase.name().to_owned(), medians)));
        }
    }
    counts
}

fn bar_pair(svg: &mut Svg, count: &Count) {
    let top = svg.height;
    let sums = count.sums();
    let [before, after] = sums.map(|sum| Unit::Count.value(sum));
    svg.text(LEFT, top + 12.0, Anchor::Start, "", &count.name);
    svg.text(LEFT, top + 25.0, Anchor::Start, "soft", &format!("{before} → {after}"));
    for (side, class) in ["before", "after"].into_iter().enumerate() {
        let y = top + 30.0 + 10.0 * side as f64;
        let mut x = LEFT;
        for (at, step, medians) in count.parts.iter().filter(|(_, _, m)| m[side] > 0.0) {
            let width = medians[side] / sums[0].max(sums[1]) * (BARS - 6.0);
            let title = format!("{class}, {step}: {}", Unit::Count.value(medians[side]));
            let part = [x + 6.0, y, width.max(0.3), 8.0];
            svg.rect(part, &format!("p{}", at % 8), Some(&title));
            x += width;
        }
        svg.rect([LEFT, y, 3.0, 8.0], class, None);
    }
    svg.height += 58.0;
}
