// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Charts of times: of a phase by configuration, and by number of vCPUs or size.

use super::{
    super::{
        number::{self, Unit},
        words,
    },
    svg::{Scale, Svg, WIDTH, figure},
};
use crate::{
    comparison::{self, Comparison, Configuration, PhaseChange, Sweep, SweepParameter},
    sample::AnyPhase,
    stats::Spread,
};
use granule_types::units::counted;

const LEFT: f64 = 8.0;
const RIGHT: f64 = WIDTH - 10.0;

/// Name of a side, which also is its CSS class, and the spread of its times.
type Times = (&'static str, Spread);

fn times_of(change: &PhaseChange) -> impl Iterator<Item = Times> {
    let sides = [("before", change.time.before), ("after", change.time.after)];
    sides.into_iter().filter_map(|(side, spread)| Some((side, spread?)))
}

fn tooltip((side, spread): Times, unit: Unit) -> String {
    let [low, high] = spread.ends().map(|ns| unit.value(ns));
    let median = unit.value(spread.median);
    let ends = if spread.quartiles { "quartiles" } else { "all from" };
    format!("{side}: {median}, {ends} {low} to {high}, {}", counted(spread.runs, "run"))
}

fn unit_of(times: &[Times]) -> Unit {
    let medians = times.iter().map(|(_, spread)| spread.median);
    Unit::of_nanoseconds(medians.fold(0.0, f64::max))
}

fn ends_words(times: &[Times]) -> &'static str {
    let quartiles = times.iter().filter(|(_, spread)| spread.quartiles).count();
    match quartiles {
        0 if !times.is_empty() => "median, least and greatest",
        count if count < times.len() => {
            "median and quartiles, or least and greatest of fewer than four runs"
        }
        _ => "median and quartiles",
    }
}

/// Returns the chart of one phase: a lane for each configuration with the spread of both sides.
pub fn by_configuration(comparison: &Comparison, phase: &AnyPhase) -> String {
    const ROW: f64 = 52.0;
    let rows = comparison.rows().filter(|(_, change)| change.phase == *phase);
    let rows: Vec<(&Configuration, &PhaseChange)> = rows.collect();
    let times: Vec<Times> = rows.iter().flat_map(|(_, change)| times_of(change)).collect();
    let scale = Scale::of(times.iter().flat_map(|(_, spread)| {
        let [low, high] = spread.ends();
        [low, spread.median, high]
    }));
    let unit = unit_of(&times);
    let x = |ns: f64| LEFT + scale.at(ns) * (RIGHT - LEFT);
    let bottom = ROW * rows.len() as f64 + 6.0;
    let mut svg = Svg::default();
    for tick in scale.ticks() {
        svg.line([x(tick), 0.0, x(tick), bottom], "rule");
    }
    for (at, (configuration, change)) in rows.iter().enumerate() {
        let top = ROW * at as f64;
        let name = words::short_title(comparison, configuration);
        svg.text(LEFT, top + 12.0, "start", "", &name);
        svg.text(LEFT, top + 25.0, "start", "soft", &change_words(change));
        for (side, spread) in times_of(change) {
            let y = top + if side == "before" { 33.0 } else { 42.0 };
            let [low, high] = spread.ends();
            svg.line([x(low), y, x(high), y], side);
            let tooltip = tooltip((side, spread), Unit::of_time(&change.time));
            svg.circle(x(spread.median), y, 4.0, side, &tooltip);
        }
    }
    ticks(&mut svg, scale, unit, bottom, x);
    let scaled = match scale {
        Scale::Log(..) => ", logarithmic",
        Scale::Linear(_) => "",
    };
    let words = format!("{}{scaled}; {}", unit.name(), ends_words(&times));
    figure(&format!("{phase}, by configuration"), &words, svg)
}

/// Formats both medians, and the ratio with its interval.
fn change_words(change: &PhaseChange) -> String {
    let unit = Unit::of_time(&change.time);
    let [before, after] = [change.time.before, change.time.after].map(|spread| unit.median(spread));
    let ends = change.tested.and_then(|tested| tested.interval);
    let ends = ends.map(|ends| ends.map(number::factor));
    let ends = ends.map(|[low, high]| format!(" ({low} to {high})"));
    let ratio = number::ratio(&change.time);
    format!("{before} → {after}, ×{ratio}{}", ends.unwrap_or_default())
}

/// Adds the tick labels below a drawing and sets its final height.
fn ticks(svg: &mut Svg, scale: Scale, unit: Unit, bottom: f64, x: impl Fn(f64) -> f64) {
    for tick in scale.ticks() {
        let at = x(tick);
        let anchor = match at {
            at if at < LEFT + 20.0 => "start",
            at if at > RIGHT - 20.0 => "end",
            _ => "middle",
        };
        svg.text(at, bottom + 12.0, anchor, "soft", &tick_label(tick, unit));
    }
    svg.height = bottom + 18.0;
}

/// Formats a tick of a time axis in as few digits as possible.
fn tick_label(tick: f64, unit: Unit) -> String {
    let size = match unit {
        Unit::Time(size, _) => f64::from(size),
        Unit::Count => 1.0,
    };
    let text = format!("{:.4}", tick / size);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Returns the charts of one phase over a parameter, one for each sweep.
pub fn by_parameter(
    comparison: &Comparison,
    phase: &AnyPhase,
    parameter: SweepParameter,
) -> Vec<String> {
    let (all, emulated) = (&comparison.configurations, comparison.is_emulated());
    let sweeps = comparison::sweeps(all, emulated, phase, parameter);
    sweeps.iter().map(|sweep| curves(phase, parameter, sweep)).collect()
}

/// Left edge of the plot, to the right of its tick labels.
const GUTTER: f64 = 46.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 170.0;

fn curves(phase: &AnyPhase, parameter: SweepParameter, sweep: &Sweep) -> String {
    let points = &sweep.points;
    let times: Vec<Times> = points.iter().flat_map(|(_, change)| times_of(change)).collect();
    let scale = Scale::from_zero(times.iter().flat_map(|(_, t)| [t.median, t.ends()[1]]));
    let unit = unit_of(&times);
    let y = |ns: f64| BOTTOM - scale.at(ns) * (BOTTOM - TOP);
    let (first, last) = (points[0].0 as f64, points[points.len() - 1].0 as f64);
    let room = RIGHT - 14.0 - GUTTER;
    let x = |value: u64| GUTTER + 8.0 + (value as f64 / first).ln() / (last / first).ln() * room;
    let mut svg = Svg::default();
    for tick in scale.ticks() {
        svg.line([GUTTER, y(tick), RIGHT, y(tick)], "rule");
        let label = tick_label(tick, unit);
        svg.text(GUTTER - 5.0, y(tick) + 4.0, "end", "soft", &label);
    }
    let labels = points.iter().map(|(value, _)| (x(*value), parameter.label(*value)));
    value_labels(&mut svg, labels);
    for side in ["before", "after"] {
        let of = |(value, change): &(u64, &PhaseChange)| {
            let (_, spread) = times_of(change).find(|(known, _)| *known == side)?;
            Some((*value, spread))
        };
        let of: Vec<(u64, Spread)> = points.iter().filter_map(of).collect();
        if of.is_empty() {
            continue;
        }
        let line: Vec<_> = of.iter().map(|(v, spread)| (x(*v), y(spread.median))).collect();
        svg.path(&line, side);
        for (value, spread) in of {
            let tooltip = format!("{}, {}", parameter.words(value), tooltip((side, spread), unit));
            let [low, high] = spread.ends();
            svg.line([x(value), y(low), x(value), y(high)], side);
            svg.circle(x(value), y(spread.median), 4.0, side, &tooltip);
        }
    }
    svg.height = BOTTOM + 20.0;
    let mut words = format!("{}: {} by {}", sweep.rest.name(), unit.name(), parameter.name());
    for (side, fit) in ["before", "after"].into_iter().zip(sweep.fits()) {
        if let Some(fit) = fit {
            words += &format!("; power {side}: {}", fit.words());
        }
    }
    figure(&format!("{phase}, by {}", parameter.name()), &words, svg)
}

/// Adds the parameter values below the plot and omits those that would overlap.
fn value_labels(svg: &mut Svg, labels: impl Iterator<Item = (f64, String)>) {
    let mut taken = f64::NEG_INFINITY;
    for (x, label) in labels {
        let half = label.len() as f64 * 3.4;
        if x - half > taken {
            svg.text(x, BOTTOM + 15.0, "middle", "soft", &label);
            taken = x + half + 3.0;
        }
    }
}
