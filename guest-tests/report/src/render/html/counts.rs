// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Charts of counts: what was counted in one configuration, its two bars made of the phases.

use std::collections::BTreeSet;

use super::{
    super::{counts, figures::Unit, phases, short_title},
    svg::{Anchor, Svg, WIDTH, escaped, figure},
};
use crate::{Change, Comparison, Configuration, Spread};

const LEFT: f64 = 8.0;
const BARS: f64 = WIDTH - 2.0 * LEFT;
/// Nothing changed where the sums of both sides are nearer than this share.
const ALIKE: f64 = 0.01;

/// What the colours of phases are.
pub fn key(comparison: &Comparison) -> String {
    let items: String = phases(comparison)
        .into_iter()
        .enumerate()
        .map(|(at, step)| {
            format!(
                "<li><i class=\"swatch p{}\"></i>{}</li>",
                at % 8,
                escaped(step.name())
            )
        })
        .collect();
    format!("<ul class=\"key\">{items}</ul>\n")
}

/// The chart of one configuration; `None` where nothing was counted.
pub fn breakdown(comparison: &Comparison, configuration: &Configuration) -> Option<String> {
    let all = phases(comparison);
    let mut names: Vec<&str> = Vec::new();
    let mut gauges = BTreeSet::new();
    for phase in &configuration.phases {
        gauges.extend(phase.gauges.keys().map(String::as_str));
        for (name, _) in counts(phase) {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
    }
    // What stands at an end cannot be added up.
    names.retain(|name| !gauges.contains(name));
    let median = |spread: Option<Spread>| spread.map_or(0.0, |spread| spread.median);
    let side = |name: &str, of: fn(&Change) -> Option<Spread>| -> Vec<(usize, f64)> {
        let phases = configuration.phases.iter();
        let count = |change: &Change| median(of(change));
        phases
            .filter_map(|phase| {
                let at = all.iter().position(|step| **step == phase.phase)?;
                Some((at, phase.count(name).map_or(0.0, count)))
            })
            .collect()
    };
    let sum = |parts: &[(usize, f64)]| parts.iter().map(|(_, count)| count).sum::<f64>();
    let mut svg = Svg::default();
    let mut alike = Vec::new();
    for name in names {
        let parts = [
            side(name, |change| change.before),
            side(name, |change| change.after),
        ];
        let [before, after] = [sum(&parts[0]), sum(&parts[1])];
        if (before - after).abs() <= ALIKE * before.max(after) {
            alike.push(name);
            continue;
        }
        let top = svg.height;
        let told = format!(
            "{} → {}",
            Unit::Count.value(before),
            Unit::Count.value(after)
        );
        svg.text(LEFT, top + 12.0, Anchor::Start, "", name);
        svg.text(LEFT, top + 25.0, Anchor::Start, "soft", &told);
        for (lane, (class, parts)) in ["before", "after"].into_iter().zip(&parts).enumerate() {
            let y = top + 30.0 + 10.0 * lane as f64;
            let mut x = LEFT;
            for (at, count) in parts.iter().filter(|(_, count)| *count > 0.0) {
                let width = count / before.max(after) * (BARS - 6.0);
                let title = format!(
                    "{class}, {}: {}",
                    all[*at].name(),
                    Unit::Count.value(*count)
                );
                svg.rect(
                    [x + 6.0, y, width.max(0.3), 8.0],
                    &format!("p{}", at % 8),
                    Some(&title),
                );
                x += width;
            }
            svg.rect([LEFT, y, 3.0, 8.0], class, None);
        }
        svg.height += 58.0;
    }
    let mut words = "medians of each phase, added up; upper bar before, lower bar after".to_owned();
    if !alike.is_empty() {
        words += &format!(". Within 1%: {}", alike.join(", "));
    }
    if svg.height == 0.0 {
        if alike.is_empty() {
            return None;
        }
        svg.text(
            LEFT,
            14.0,
            Anchor::Start,
            "soft",
            "no count changed by more than 1%",
        );
        svg.height = 22.0;
    }
    Some(figure(&short_title(comparison, configuration), &words, svg))
}
