// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Charts of times: a phase over all configurations, and over growing numbers of vCPUs or sizes.

use super::{
    super::{
        figures::{self, Unit},
        short_title,
    },
    scale::Scale,
    svg::{Anchor, Svg, WIDTH, figure},
};
use crate::{
    Comparison, Configuration, PhaseChange, Spread, Step,
    comparison::{self, Family, Growing},
};
use granule_types::units::counted;

const LEFT: f64 = 8.0;
const RIGHT: f64 = WIDTH - 10.0;

/// What is drawn of one side.
#[derive(Clone, Copy)]
struct Drawn {
    median: f64,
    /// The ends of its line: quartiles, or the least and the greatest of fewer than four runs.
    ends: [f64; 2],
    quartiles: bool,
    runs: usize,
}

impl Drawn {
    fn of(spread: Spread, quartiles: bool) -> Self {
        Self {
            median: spread.median,
            ends: if quartiles {
                [spread.q1, spread.q3]
            } else {
                [spread.min, spread.max]
            },
            quartiles,
            runs: spread.runs,
        }
    }

    fn all(self) -> [f64; 3] {
        let [low, high] = self.ends;
        [low, self.median, high]
    }

    fn tooltip(self, side: &str, unit: Unit) -> String {
        let [low, median, high] = self.all().map(|ns| unit.value(ns));
        let ends = if self.quartiles {
            "quartiles"
        } else {
            "all from"
        };
        let runs = counted(self.runs, "run");
        format!("{side}: {median}, {ends} {low} to {high}, {runs}")
    }
}

/// Both sides with the names of their classes.
fn sides(phase: &PhaseChange) -> [(&'static str, Option<Drawn>); 2] {
    let quartiles = figures::has_quartiles(&phase.time);
    let drawn = |spread: Option<Spread>| spread.map(|spread| Drawn::of(spread, quartiles));
    [
        ("before", drawn(phase.time.before)),
        ("after", drawn(phase.time.after)),
    ]
}

/// What the lines about medians are.
fn ends_words(mut drawn: impl Iterator<Item = Drawn> + Clone) -> &'static str {
    match (
        drawn.clone().any(|drawn| drawn.quartiles),
        drawn.any(|drawn| !drawn.quartiles),
    ) {
        (true, true) => "median and quartiles, or least and greatest of fewer than four runs",
        (false, true) => "median, least and greatest",
        _ => "median and quartiles",
    }
}

/// One phase: a lane for each configuration, in it before and after with their spread.
pub fn by_configuration(comparison: &Comparison, step: &Step) -> String {
    let rows: Vec<(&Configuration, &PhaseChange)> = comparison
        .rows()
        .filter(|(_, phase)| phase.phase == *step)
        .collect();
    let spreads = || {
        rows.iter()
            .flat_map(|(_, phase)| sides(phase))
            .filter_map(|(_, s)| s)
    };
    let scale = Scale::of(spreads().flat_map(Drawn::all));
    let unit = Unit::of_nanoseconds(spreads().map(|s| s.median).fold(0.0, f64::max));
    let x = |ns: f64| LEFT + scale.at(ns) * (RIGHT - LEFT);
    let mut svg = Svg::default();
    const ROW: f64 = 52.0;
    let bottom = ROW * rows.len() as f64 + 6.0;
    for tick in scale.ticks() {
        svg.line([x(tick), 0.0, x(tick), bottom], "rule");
    }
    for (at, (configuration, phase)) in rows.iter().enumerate() {
        let top = ROW * at as f64;
        let name = short_title(comparison, configuration);
        svg.text(LEFT, top + 12.0, Anchor::Start, "", &name);
        let own = Unit::of_time(&phase.time);
        let medians = [phase.time.before, phase.time.after].map(|spread| own.median(spread));
        let mut told = format!(
            "{} → {}, ×{}",
            medians[0],
            medians[1],
            figures::ratio(&phase.time)
        );
        if let Some([low, high]) = phase.tested.and_then(|tested| tested.interval) {
            told += &format!(" ({} to {})", figures::factor(low), figures::factor(high));
        }
        svg.text(LEFT, top + 25.0, Anchor::Start, "soft", &told);
        for (lane, (side, spread)) in sides(phase).into_iter().enumerate() {
            let Some(spread) = spread else { continue };
            let y = top + 33.0 + 9.0 * lane as f64;
            let [low, high] = spread.ends;
            svg.line([x(low), y, x(high), y], side);
            let told = spread.tooltip(side, own);
            svg.circle(x(spread.median), y, 4.0, side, &told);
        }
    }
    ticks(&mut svg, scale, unit, bottom, x);
    let scaled = match scale {
        Scale::Log(..) => ", logarithmic",
        Scale::Linear(_) => "",
    };
    let words = format!("{}{scaled}; {}", unit_name(unit), ends_words(spreads()));
    figure(&format!("{step}, by configuration"), &words, svg)
}

/// The names of ticks below a drawing, which ends there.
fn ticks(svg: &mut Svg, scale: Scale, unit: Unit, bottom: f64, x: impl Fn(f64) -> f64) {
    for tick in scale.ticks() {
        let at = x(tick);
        let anchor = match at {
            at if at < LEFT + 20.0 => Anchor::Start,
            at if at > RIGHT - 20.0 => Anchor::End,
            _ => Anchor::Middle,
        };
        svg.text(at, bottom + 12.0, anchor, "soft", &name_of(tick, unit));
    }
    svg.height = bottom + 18.0;
}

/// A tick in as few digits as it takes.
fn name_of(tick: f64, unit: Unit) -> String {
    let text = match unit {
        Unit::Count => figures::short(tick),
        Unit::Time(size, _) => format!("{:.4}", tick / f64::from(size)),
    };
    if text.contains('.') && !text.ends_with(char::is_alphabetic) {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

fn unit_name(unit: Unit) -> &'static str {
    match unit {
        Unit::Count => "count",
        Unit::Time(_, name) => name,
    }
}

/// Charts of one phase over what grows, one for each family of configurations.
pub fn by_growth(comparison: &Comparison, step: &Step, growing: Growing) -> Vec<String> {
    let families = comparison::families(comparison, step, growing);
    families
        .iter()
        .map(|family| {
            curves(
                step,
                growing,
                family,
                comparison::is_exact(comparison, family),
            )
        })
        .collect()
}

fn curves(step: &Step, growing: Growing, family: &Family, exact: bool) -> String {
    let points = &family.points;
    const GUTTER: f64 = 46.0;
    const TOP: f64 = 10.0;
    const BOTTOM: f64 = 170.0;
    let spreads = || {
        points
            .iter()
            .flat_map(|(_, p)| sides(p))
            .filter_map(|(_, s)| s)
    };
    let scale = Scale::from_zero(spreads().flat_map(|s| [s.median, s.ends[1]]));
    let unit = Unit::of_nanoseconds(spreads().map(|s| s.median).fold(0.0, f64::max));
    let y = |ns: f64| BOTTOM - scale.at(ns) * (BOTTOM - TOP);
    let (first, last) = (points[0].0 as f64, points[points.len() - 1].0 as f64);
    let room = RIGHT - 14.0 - GUTTER;
    let x = |value: u64| GUTTER + 8.0 + (value as f64 / first).ln() / (last / first).ln() * room;
    let mut svg = Svg::default();
    for tick in scale.ticks() {
        svg.line([GUTTER, y(tick), RIGHT, y(tick)], "rule");
        svg.text(
            GUTTER - 5.0,
            y(tick) + 4.0,
            Anchor::End,
            "soft",
            &name_of(tick, unit),
        );
    }
    let mut taken = f64::NEG_INFINITY;
    for (value, _) in points {
        let label = growing.label(*value);
        let half = label.len() as f64 * 3.4;
        if x(*value) - half > taken {
            svg.text(x(*value), BOTTOM + 15.0, Anchor::Middle, "soft", &label);
            taken = x(*value) + half + 3.0;
        }
    }
    for side in 0..2 {
        let of: Vec<(u64, &str, Drawn)> = points
            .iter()
            .filter_map(|(value, phase)| {
                let (class, spread) = sides(phase)[side];
                Some((*value, class, spread?))
            })
            .collect();
        let Some((_, class, _)) = of.first() else {
            continue;
        };
        let line: Vec<_> = of.iter().map(|(v, _, s)| (x(*v), y(s.median))).collect();
        svg.path(&line, class);
        for (value, class, spread) in &of {
            let title = format!("{}, {}", growing.words(*value), spread.tooltip(class, unit));
            let [low, high] = spread.ends;
            svg.line([x(*value), y(low), x(*value), y(high)], class);
            svg.circle(x(*value), y(spread.median), 4.0, class, &title);
        }
    }
    svg.height = BOTTOM + 20.0;
    let (of, by) = (family.rest.name(), growing.name());
    let mut words = format!("{of}: {} by {by}", unit_name(unit));
    let fits = [
        (
            "before",
            comparison::fit(family, exact, |phase| phase.time.before),
        ),
        (
            "after",
            comparison::fit(family, exact, |phase| phase.time.after),
        ),
    ];
    for (side, fit) in fits {
        if let Some(fit) = fit {
            words += &format!("; power {side}: {}", fit.words());
        }
    }
    figure(&format!("{step}, by {}", growing.name()), &words, svg)
}
