// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Charts of the times of vCPUs: a box between the quartiles, a line between the least and the
//! greatest, and a dot for each vCPU of each run.

use super::{
    super::{number::Unit, words},
    scale::Scale,
    svg::{Anchor, Svg, WIDTH, figure},
};
use crate::{comparison::Comparison, sample::Step, spread::Spread};

const LEFT: f64 = 8.0;
const RIGHT: f64 = WIDTH - 10.0;
/// Largest number of dots of a side; more are thinned to as many quantiles.
const MOST_DOTS: usize = 160;
/// Height of a configuration, which has a scale of its own.
const ROW: f64 = 84.0;

/// Returns the chart of one step; `None` if no time of a vCPU is known.
pub fn distribution(comparison: &Comparison, step: &Step) -> Option<String> {
    let rows: Vec<_> = comparison
        .rows()
        .filter(|(_, phase)| phase.phase == *step)
        .filter(|(_, phase)| !phase.vcpus.before.is_empty() || !phase.vcpus.after.is_empty())
        .collect();
    if rows.is_empty() {
        return None;
    }
    let mut svg = Svg::default();
    for (configuration, phase) in &rows {
        let name = words::short_title(comparison, configuration);
        row(&mut svg, &name, [&phase.vcpus.before, &phase.vcpus.after]);
    }
    svg.height -= 8.0;
    let words = "a dot for every vCPU of every run; box between the quartiles";
    Some(figure(&format!("{step}, time of each vCPU"), words, svg))
}

fn row(svg: &mut Svg, name: &str, sides: [&[f64]; 2]) {
    let top = svg.height;
    let times = || sides.into_iter().flatten().copied();
    let greatest = times().fold(0.0, f64::max);
    let (scale, unit) = (Scale::from_zero(times()), Unit::of_nanoseconds(greatest));
    let x = |ns: f64| LEFT + scale.at(ns) * (RIGHT - LEFT);
    svg.text(LEFT, top + 12.0, Anchor::Start, "", name);
    let words = format!("from 0 to {}", unit.value(greatest));
    svg.text(LEFT, top + 25.0, Anchor::Start, "soft", &words);
    for end in [x(0.0), x(greatest)] {
        svg.line([end, top + 30.0, end, top + 70.0], "rule");
    }
    for (lane, (class, times)) in ["before", "after"].into_iter().zip(sides).enumerate() {
        let Some(spread) = Spread::of(times.iter().copied()) else {
            continue;
        };
        let y = top + 40.0 + 20.0 * lane as f64;
        svg.line([x(spread.min), y, x(spread.max), y], class);
        let width = (x(spread.q3) - x(spread.q1)).max(1.0);
        let between = [x(spread.q1), y - 7.0, width, 14.0];
        svg.rect(between, &format!("box {class}"), None);
        let mut sorted = times.to_vec();
        sorted.sort_by(f64::total_cmp);
        let dots = sorted.len().min(MOST_DOTS);
        for dot in 0..dots {
            let ns = sorted[dot * (sorted.len() - 1) / dots.max(2).saturating_sub(1)];
            // Moved up and down, so that equal times do not hide each other.
            let off = (dot % 5) as f64 * 2.0 - 4.0;
            svg.circle(x(ns), y + off, 1.6, &format!("dot {class}"), &unit.value(ns));
        }
        let median = x(spread.median);
        svg.line([median, y - 7.0, median, y + 7.0], class);
    }
    svg.height += ROW;
}
