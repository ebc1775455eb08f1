// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables of the page: all ratios of times at a glance, every figure, and where all comes from.

use std::fmt::Write;

use super::{
    super::{
        super::{Change, Comparison, Configuration, PhaseChange, Side, Verdict},
        counts, detectable, estimate,
        figures::{self, Unit},
        page, phases, short_title, title,
    },
    svg::escaped,
};

fn tag(verdict: Verdict) -> String {
    let words = match verdict {
        Verdict::Worse => "worse",
        Verdict::Better => "better",
        Verdict::NotWorse => "not worse",
        Verdict::CannotTell => "cannot tell",
    };
    format!("<span class=\"tag {}\">{words}</span>", verdict.name())
}

fn small(text: String) -> String {
    format!("<br><small>{}</small>", escaped(&text))
}

/// All ratios of times, a row for each configuration.
pub fn overview(comparison: &Comparison) -> String {
    let steps = phases(comparison);
    let mut out =
        String::from("<div class=\"scroll\"><table><thead><tr><th>time after ÷ before</th>");
    // Writing into a String cannot fail.
    for step in &steps {
        let _ = write!(out, "<th>{}</th>", escaped(step.name()));
    }
    out.push_str("</tr></thead><tbody>\n");
    for configuration in &comparison.configurations {
        let name = short_title(comparison, configuration);
        let _ = write!(out, "<tr><td>{}</td>", escaped(&name));
        for step in &steps {
            let found = configuration
                .phases
                .iter()
                .find(|phase| phase.phase == **step);
            let cell = found.map(|phase| {
                let verdict = phase.verdict.filter(|_| comparison.metric == "time");
                let class = verdict.map_or("", Verdict::name);
                let mark = verdict.map_or("", |verdict| verdict.mark());
                format!(
                    "<span class=\"tag {class}\">{}{mark}</span>",
                    figures::ratio(&phase.time)
                )
            });
            let _ = write!(out, "<td>{}</td>", cell.unwrap_or_default());
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
    out
}

/// Every figure of one configuration; the counts of a phase fold away.
pub fn figures_of(comparison: &Comparison, configuration: &Configuration) -> String {
    let heading = escaped(&title(comparison, configuration));
    let mut out = format!("<h3>{heading}</h3>\n<div class=\"scroll\"><table>{HEAD}<tbody>\n");
    for phase in &configuration.phases {
        let unit = Unit::of_time(&phase.time);
        let judged = judged(comparison, "time", phase);
        row(
            &mut out,
            "time",
            phase.phase.name(),
            &phase.time,
            unit,
            judged,
        );
        if let Some(change) = phase.count(&comparison.metric) {
            row(
                &mut out,
                "count",
                &comparison.metric,
                change,
                Unit::Count,
                Some(phase),
            );
        }
    }
    out.push_str("</tbody></table></div>\n");
    if configuration
        .phases
        .iter()
        .all(|phase| counts(phase).next().is_none())
    {
        return out;
    }
    out.push_str("<details><summary>Every count of every phase</summary>\n");
    let _ = writeln!(out, "<div class=\"scroll\"><table>{HEAD}<tbody>");
    for phase in &configuration.phases {
        let unit = Unit::of_time(&phase.time);
        let times = judged(comparison, "time", phase);
        row(
            &mut out,
            "time",
            phase.phase.name(),
            &phase.time,
            unit,
            times,
        );
        for (name, change) in counts(phase) {
            let judged = judged(comparison, name, phase);
            row(&mut out, "count", name, change, Unit::Count, judged);
        }
    }
    out.push_str("</tbody></table></div></details>\n");
    out
}

const HEAD: &str = "<thead><tr><th>phase</th><th>before</th><th>after</th><th>ratio</th>\
    <th>gain</th><th>Hodges-Lehmann, 95%</th><th>p</th><th>p, Holm</th><th>delta</th><th>verdict</th>\
    </tr></thead>";

fn judged<'a>(
    comparison: &Comparison,
    name: &str,
    phase: &'a PhaseChange,
) -> Option<&'a PhaseChange> {
    (comparison.metric == name).then_some(phase)
}

fn row(
    out: &mut String,
    class: &str,
    name: &str,
    change: &Change,
    unit: Unit,
    judged: Option<&PhaseChange>,
) {
    let quartiles = figures::has_quartiles(change);
    let [before, after] = [change.before, change.after].map(|spread| {
        let range = unit.range(spread, quartiles);
        let range = range.map(|range| format!(" <small>{range}</small>"));
        escaped(&unit.median(spread)) + &range.unwrap_or_default()
    });
    let tested = judged.and_then(|phase| phase.tested);
    let text = |value: Option<String>| value.unwrap_or_default();
    let cells = [
        before,
        after,
        figures::ratio(change),
        figures::gain(change),
        text(tested.and_then(|tested| estimate(&tested))),
        text(tested.map(|tested| figures::p_value(tested.p))),
        text(tested.map(|tested| figures::p_value(tested.p_holm))),
        text(tested.map(|tested| format!("{:+.2}", tested.delta))),
        text(judged.and_then(|phase| phase.verdict).map(tag))
            + &text(judged.and_then(detectable).map(small)),
    ];
    let _ = writeln!(
        out,
        "<tr class=\"{class}\"><td>{}</td><td>{}</td></tr>",
        escaped(name),
        cells.join("</td><td>")
    );
}

/// Where each side comes from.
pub fn provenance(sides: &[(&str, &Side)]) -> String {
    type Fact = (&'static str, fn(&Side) -> Option<String>);
    const FACTS: [Fact; 8] = [
        ("input", |side| Some(side.label.clone())),
        ("kernel", |side| Some(side.kernel.clone())),
        ("series", |side| side.series_line()),
        ("image, SHA-256", |side| side.image_sha256.clone()),
        ("CPU", |side| side.cpu.clone()),
        ("CPU features", |side| Some(side.features.clone())),
        ("base page", |side| {
            side.page_size.map(|size| size.to_string())
        }),
        ("emulator", |side| side.emulator.clone()),
    ];
    let names: Vec<&str> = sides.iter().map(|(name, _)| *name).collect();
    let of = |fact: fn(&Side) -> Option<String>| sides.iter().map(|(_, side)| fact(side)).collect();
    let rows: Vec<_> = FACTS
        .iter()
        .map(|(name, fact)| (*name, of(*fact)))
        .collect();
    page::facts(&names, &rows)
}
