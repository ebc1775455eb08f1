// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables of the page: all ratios of times at a glance, every figure, and where all comes from.

use std::fmt::Write;

use super::{
    super::{
        counts, detectable, estimate,
        figures::{self, Unit},
        page, phases, short_title, title,
    },
    svg::escaped,
};
use crate::{Change, Comparison, Configuration, PhaseChange, Side, Verdict};

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Options,
        fixture::{patched, runs},
        samples,
    };

    /// Create better, update worse, on hardware.
    fn comparison(options: &Options) -> Comparison {
        let side = |create: u64, update: u64| {
            let about = |us| (0..10).map(|run| us + run).collect::<Vec<u64>>();
            let mut records = runs(&about(create), &about(update));
            for record in &mut records {
                record.host.emulator = None;
            }
            records
        };
        let (before, after) = (side(2000, 1000), patched(side(1000, 2000)));
        Comparison::of(&samples(&before), &samples(&after), options).unwrap()
    }

    /// The text of every cell of every row, tags left out.
    fn cells(html: &str) -> Vec<Vec<String>> {
        let plain = |cell: &str| {
            let mut text = String::new();
            for part in cell.split('<') {
                text += part.split_once('>').map_or("", |(_, text)| text);
            }
            text.trim().to_owned()
        };
        let rows = html.split("<tr").skip(1);
        rows.map(|row| {
            row.split("<td")
                .skip(1)
                .map(|cell| plain(&format!("<td{cell}")))
                .collect()
        })
        .collect()
    }

    #[test]
    fn the_overview_has_a_ratio_with_its_verdict_for_each_step() {
        let table = overview(&comparison(&Options::default()));

        assert!(table.contains("<th>time after ÷ before</th><th>create</th><th>update</th>"));
        assert!(
            table.contains("<span class=\"tag better\">0.501</span>"),
            "{table}"
        );
        assert!(
            table.contains("<span class=\"tag worse\">1.996!</span>"),
            "{table}"
        );
    }

    #[test]
    fn a_row_has_a_cell_for_each_heading() {
        let comparison = comparison(&Options::default());
        let table = figures_of(&comparison, &comparison.configurations[0]);
        let (times, counts) = table.split_once("<details>").unwrap();

        let headings = HEAD.matches("<th>").count();
        let rows = cells(times);
        assert_eq!(rows.len(), 1 + 2, "a heading and two phases");
        assert!(
            rows[1..].iter().all(|row| row.len() == headings),
            "{rows:?}"
        );
        let [create, update] = [&rows[1], &rows[2]];
        assert_eq!(
            create[..5],
            [
                "create",
                "2.005 ms 2.002..2.007",
                "1.004 ms 1.002..1.007",
                "0.501",
                "+49.9%"
            ]
        );
        assert!(create[5].starts_with("0.501 (0.5"), "{create:?}");
        assert_eq!(create[8..], ["-1.00", "better"]);
        assert_eq!(update[8..], ["+1.00", "worse"]);
        assert!(
            cells(counts)
                .iter()
                .any(|row| row.first().is_some_and(|c| c == "DC CIVAC"))
        );
        assert!(!times.contains("DC CIVAC"), "counts fold away");
    }

    #[test]
    fn what_is_judged_stands_with_the_times() {
        let options = Options {
            metric: Some("DC CIVAC".to_owned()),
            ..Options::default()
        };
        let comparison = comparison(&options);
        let table = figures_of(&comparison, &comparison.configurations[0]);
        let rows = cells(table.split_once("<details>").unwrap().0);

        let names: Vec<&str> = rows[1..].iter().map(|row| row[0].as_str()).collect();
        assert_eq!(names, ["create", "DC CIVAC", "update", "DC CIVAC"]);
        let verdicts: Vec<&str> = rows[1..].iter().map(|row| row[9].as_str()).collect();
        assert_eq!(verdicts, ["", "better", "", "worse"]);
        assert!(
            !overview(&comparison).contains("worse"),
            "no time is judged"
        );
    }

    #[test]
    fn where_it_comes_from_is_told_for_each_side() {
        let comparison = comparison(&Options::default());
        let table = provenance(&[("before", &comparison.before), ("after", &comparison.after)]);

        for wanted in [
            "<th>before</th><th>after</th>",
            "<th>kernel</th><td>5.10.262</td><td>5.10.262-granule</td>",
            "<td>no series</td><td>stage2-fault-path (6 patches)</td>",
            "<th>CPU</th><td colspan=\"2\">neoverse-n1</td>",
            "<th>emulator</th><td colspan=\"2\"><span class=\"soft\">not known</span></td>",
        ] {
            assert!(table.contains(wanted), "{wanted}\n{table}");
        }
    }
}
