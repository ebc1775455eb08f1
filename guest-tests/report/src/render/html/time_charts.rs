// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Charts of times: of a phase by configuration, and by number of vCPUs or size.

use super::{
    super::{
        number::{self, Unit},
        sentences,
    },
    svg::{Scale, Svg, WIDTH, figure_element},
};
use crate::{
    comparison::{
        self, Comparison, Configuration, PhaseChange, Sweep, SweepParameter, TIME_METRIC,
    },
    sample::AnyPhase,
    stats::Spread,
};
use granule_types::units::pluralize;

const LEFT_EDGE: f64 = 8.0;
const RIGHT_EDGE: f64 = WIDTH - 10.0;

/// Name of a side, which also is its CSS class, and the spread of its times.
type SideSpread = (&'static str, Spread);

fn side_spreads(change: &PhaseChange) -> impl Iterator<Item = SideSpread> {
    let sides = [("before", change.time.before), ("after", change.time.after)];
    sides.into_iter().filter_map(|(side, spread)| Some((side, spread?)))
}

fn spread_tooltip((side, spread): SideSpread, unit: Unit) -> String {
    let [low, high] = spread.range().map(|ns| unit.value(ns));
    let median = unit.value(spread.median);
    let ends = if spread.has_quartiles { "quartiles" } else { "all from" };
    format!("{side}: {median}, {ends} {low} to {high}, {}", pluralize(spread.runs, "run"))
}

fn common_unit(times: &[SideSpread]) -> Unit {
    let medians = times.iter().map(|(_, spread)| spread.median);
    Unit::of_nanoseconds(medians.fold(0.0, f64::max))
}

fn range_text(times: &[SideSpread]) -> &'static str {
    let quartiles = times.iter().filter(|(_, spread)| spread.has_quartiles).count();
    match quartiles {
        0 if !times.is_empty() => "median, least and greatest",
        count if count < times.len() => {
            "median and quartiles, or least and greatest of fewer than four runs"
        }
        _ => "median and quartiles",
    }
}

/// Returns the chart of one phase: a lane for each configuration with the spread of both sides.
pub fn chart_by_configuration(comparison: &Comparison, phase: &AnyPhase) -> String {
    const ROW_HEIGHT: f64 = 52.0;
    let rows = comparison.rows().filter(|(_, change)| change.phase == *phase);
    let rows: Vec<(&Configuration, &PhaseChange)> = rows.collect();
    let times: Vec<SideSpread> = rows.iter().flat_map(|(_, change)| side_spreads(change)).collect();
    let scale = Scale::new(times.iter().flat_map(|(_, spread)| {
        let [low, high] = spread.range();
        [low, spread.median, high]
    }));
    let unit = common_unit(&times);
    let x = |ns: f64| LEFT_EDGE + scale.position(ns) * (RIGHT_EDGE - LEFT_EDGE);
    let bottom = ROW_HEIGHT * rows.len() as f64 + 6.0;
    let mut svg = Svg::default();
    for tick in scale.ticks() {
        svg.line([x(tick), 0.0, x(tick), bottom], "rule");
    }
    for (at, (configuration, change)) in rows.iter().enumerate() {
        let top = ROW_HEIGHT * at as f64;
        let name = sentences::short_title(comparison, configuration);
        svg.text(LEFT_EDGE, top + 12.0, "start", "", &name);
        svg.text(LEFT_EDGE, top + 25.0, "start", "soft", &change_text(change));
        for (side, spread) in side_spreads(change) {
            let y = top + if side == "before" { 33.0 } else { 42.0 };
            let [low, high] = spread.range();
            svg.line([x(low), y, x(high), y], side);
            let tooltip = spread_tooltip((side, spread), Unit::of_time(&change.time));
            svg.circle(x(spread.median), y, 4.0, side, &tooltip);
        }
    }
    draw_ticks(&mut svg, scale, unit, bottom, x);
    let scaled = match scale {
        Scale::Log(..) => ", logarithmic",
        Scale::Linear(_) => "",
    };
    let words = format!("{}{scaled}; {}", unit.name(), range_text(&times));
    figure_element(&format!("{phase}, by configuration"), &words, svg)
}

/// Formats both medians, and the ratio with its interval.
fn change_text(change: &PhaseChange) -> String {
    let unit = Unit::of_time(&change.time);
    let [before, after] = [change.time.before, change.time.after].map(|spread| unit.median(spread));
    let interval = change.judgement_of(TIME_METRIC).and_then(|judged| judged.tested_row?.interval);
    let ends = interval.map(|ends| ends.map(number::factor));
    let ends = ends.map(|[low, high]| format!(" ({low} to {high})"));
    let ratio = number::ratio(&change.time);
    format!("{before} → {after}, ×{ratio}{}", ends.unwrap_or_default())
}

/// Adds the tick labels below a drawing and sets its final height.
fn draw_ticks(svg: &mut Svg, scale: Scale, unit: Unit, bottom: f64, x: impl Fn(f64) -> f64) {
    for tick in scale.ticks() {
        let at = x(tick);
        let anchor = match at {
            at if at < LEFT_EDGE + 20.0 => "start",
            at if at > RIGHT_EDGE - 20.0 => "end",
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
pub fn charts_by_parameter(
    comparison: &Comparison,
    phase: &AnyPhase,
    parameter: SweepParameter,
) -> Vec<String> {
    let (all, emulated) = (&comparison.configurations, comparison.is_emulated());
    let sweeps = comparison::sweeps(all, emulated, phase, parameter);
    sweeps.iter().map(|sweep| sweep_chart(phase, parameter, sweep)).collect()
}

/// Left edge of the plot, to the right of its tick labels.
const GUTTER_WIDTH: f64 = 46.0;
const TOP_EDGE: f64 = 10.0;
const BOTTOM_EDGE: f64 = 170.0;

fn sweep_chart(phase: &AnyPhase, parameter: SweepParameter, sweep: &Sweep) -> String {
    let points = &sweep.points;
    let times: Vec<SideSpread> =
        points.iter().flat_map(|(_, change)| side_spreads(change)).collect();
    let scale = Scale::from_zero(times.iter().flat_map(|(_, t)| [t.median, t.range()[1]]));
    let unit = common_unit(&times);
    let y = |ns: f64| BOTTOM_EDGE - scale.position(ns) * (BOTTOM_EDGE - TOP_EDGE);
    let (first, last) = (points[0].0 as f64, points[points.len() - 1].0 as f64);
    let room = RIGHT_EDGE - 14.0 - GUTTER_WIDTH;
    let x =
        |value: u64| GUTTER_WIDTH + 8.0 + (value as f64 / first).ln() / (last / first).ln() * room;
    let mut svg = Svg::default();
    for tick in scale.ticks() {
        svg.line([GUTTER_WIDTH, y(tick), RIGHT_EDGE, y(tick)], "rule");
        let label = tick_label(tick, unit);
        svg.text(GUTTER_WIDTH - 5.0, y(tick) + 4.0, "end", "soft", &label);
    }
    let labels = points.iter().map(|(value, _)| (x(*value), parameter.label(*value)));
    draw_value_labels(&mut svg, labels);
    for side in ["before", "after"] {
        let of = |(value, change): &(u64, &PhaseChange)| {
            let (_, spread) = side_spreads(change).find(|(known, _)| *known == side)?;
            Some((*value, spread))
        };
        let of: Vec<(u64, Spread)> = points.iter().filter_map(of).collect();
        if of.is_empty() {
            continue;
        }
        let line: Vec<_> = of.iter().map(|(v, spread)| (x(*v), y(spread.median))).collect();
        svg.polyline(&line, side);
        for (value, spread) in of {
            let tooltip =
                format!("{}, {}", parameter.to_text(value), spread_tooltip((side, spread), unit));
            let [low, high] = spread.range();
            svg.line([x(value), y(low), x(value), y(high)], side);
            svg.circle(x(value), y(spread.median), 4.0, side, &tooltip);
        }
    }
    svg.height = BOTTOM_EDGE + 20.0;
    let mut words = format!("{}: {} by {}", sweep.setup.name(), unit.name(), parameter.name());
    for (side, fit) in ["before", "after"].into_iter().zip(sweep.fits()) {
        if let Some(fit) = fit {
            words += &format!("; power {side}: {}", fit.to_text());
        }
    }
    figure_element(&format!("{phase}, by {}", parameter.name()), &words, svg)
}

/// Adds the parameter values below the plot and omits those that would overlap.
fn draw_value_labels(svg: &mut Svg, labels: impl Iterator<Item = (f64, String)>) {
    let mut taken = f64::NEG_INFINITY;
    for (x, label) in labels {
        let half = label.len() as f64 * 3.4;
        if x - half > taken {
            svg.text(x, BOTTOM_EDGE + 15.0, "middle", "soft", &label);
            taken = x + half + 3.0;
        }
    }
}
