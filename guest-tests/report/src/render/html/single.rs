// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A page of one kernel's figures, where there is none to compare it with: medians, how far runs lie
//! apart, counts, and where all comes from.

use std::{collections::BTreeMap, fmt::Write};

use super::{
    super::{figures::Unit, page, time_words},
    bars::{Lane, bars},
    svg::escaped,
    tables,
};
use crate::{
    Sample, Side, Spread, Step,
    comparison::{self, Group},
};
use granule_types::units::counted;

/// Kinds of counts, each name belonging to one at most.
type Kind = fn(&Sample) -> &BTreeMap<String, u64>;
const KINDS: [Kind; 3] = [
    |sample| &sample.events,
    |sample| &sample.gauges,
    |sample| &sample.counters,
];

/// Sums shown beside each time, where instructions were counted.
type Sum = (&'static str, fn(&str) -> bool);
const SUMS: [Sum; 4] = [
    ("guest aborts", |name| name == "guest_aborts"),
    ("DC lines", |name| name.starts_with("DC C")),
    ("IC", |name| name.starts_with("IC ")),
    ("TLBI", |name| name.starts_with("TLBI ")),
];

/// The page of some samples of one kernel; `command` made it.
pub fn single(samples: &[Sample], label: &str, command: Option<&str>) -> String {
    let side = Side::of(label.to_owned(), samples);
    let groups = comparison::groups(samples, true);
    let mut out = page::verdict(
        "cannot-tell",
        "One kernel: there is nothing it is compared with, so nothing is judged.",
    );
    if let (true, Some(words)) = (side.is_emulated(), time_words(side.emulator.as_deref())) {
        // Writing into a String cannot fail.
        let _ = write!(out, "<ul>\n<li>time: {}</li>\n</ul>\n", escaped(words));
    }
    let charts: String = groups.iter().filter_map(chart).collect();
    if !charts.is_empty() {
        let _ = write!(
            out,
            "<h2>Time of each phase</h2>\n<div class=\"charts\">\n{charts}</div>\n"
        );
    }
    out.push_str(
        "<h2>Every figure</h2>\n<p class=\"soft\">Medians, beside them quartiles (least and \
         greatest of fewer than four runs).</p>\n",
    );
    for group in &groups {
        out.push_str(&figures_of(group));
    }
    out.push_str("<h2>Where it comes from</h2>\n");
    out.push_str(&tables::provenance(&[(label, &side)]));
    if let Some(command) = command {
        out.push_str(&page::made_by(command));
    }
    page::page(&format!("Figures of {label}"), &out)
}

fn name(group: &Group) -> String {
    let name = group.key.setup.name();
    match (group.key.engine == group.key.setup.subject, name.is_empty()) {
        (false, false) => format!("{name}, by {}", group.key.engine),
        _ => name,
    }
}

fn time(group: &Group, step: &Step) -> Option<Spread> {
    Spread::of(group.of_step(step).map(|sample| sample.ns))
}

fn chart(group: &Group) -> Option<String> {
    let lane = |step: &&Step| {
        let median = time(group, step)?.median;
        Some(Lane {
            name: step.name().to_owned(),
            bars: vec![(median, Unit::of_nanoseconds(median).value(median))],
        })
    };
    let steps = group.steps();
    let lanes: Vec<Lane> = steps.iter().filter_map(lane).collect();
    bars(&name(group), "medians, all to one scale", &lanes)
}

/// A spread in its cell.
fn cell(unit: Unit, spread: Option<Spread>) -> String {
    let range = unit.range(spread, spread.is_some_and(|spread| spread.runs >= 4));
    let range = range.map(|range| format!(" <small>{range}</small>"));
    escaped(&unit.median(spread)) + &range.unwrap_or_default()
}

fn figures_of(group: &Group) -> String {
    let counted_here = group.has_counters();
    let mut head = vec!["phase", "runs", "time"];
    if counted_here {
        head.extend(SUMS.map(|(name, _)| name));
    }
    let mut rows = Vec::new();
    let mut counts = Vec::new();
    for step in group.steps() {
        let Some(time) = time(group, step) else {
            continue;
        };
        let unit = Unit::of_nanoseconds(time.median);
        let mut row = vec![
            escaped(step.name()),
            time.runs.to_string(),
            cell(unit, Some(time)),
        ];
        if counted_here {
            row.extend(SUMS.map(|(_, belongs)| {
                let sum = |sample: &Sample| {
                    let counters = sample.counters.iter();
                    Some(
                        counters
                            .filter(|(n, _)| belongs(n))
                            .map(|(_, count)| count)
                            .sum(),
                    )
                };
                cell(Unit::Count, group.spread(step, sum))
            }));
        }
        rows.push(row);
        for kind in KINDS {
            for name in group.occurring(step, kind) {
                let count = |sample: &Sample| kind(sample).get(name).copied();
                let spread = group.spread(step, count);
                counts.push(vec![
                    format!("{}: {}", escaped(step.name()), escaped(name)),
                    cell(Unit::Count, spread),
                ]);
            }
        }
    }
    let mut runs: Vec<_> = group
        .samples
        .iter()
        .map(|s| (s.seed, s.iteration))
        .collect();
    runs.sort_unstable();
    runs.dedup();
    let heading = format!("{}; {}", name(group), counted(runs.len(), "run"));
    let mut out = format!(
        "<h3>{}</h3>\n{}",
        escaped(&heading),
        page::table(&head, &rows)
    );
    if !counts.is_empty() {
        let table = page::table(&["phase and count", "median"], &counts);
        let _ = write!(
            out,
            "<details><summary>Every count of every phase</summary>\n{table}</details>\n"
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fixture::{record, runs},
        samples,
    };

    #[test]
    fn a_page_of_one_kernel_has_every_figure_and_no_judgement() {
        let page = single(
            &samples(&runs(&[10, 30, 20], &[7, 7, 7])),
            "<base>",
            Some("granule lab"),
        );

        for wanted in [
            "<title>Figures of &lt;base&gt;</title>",
            "One kernel",
            "anonymous_hugetlb_2mb, 64M, 16 vCPUs",
            "; 3 runs</h3>",
            "<td>create</td><td>3</td>",
            "DC lines",
            "create: DC CIVAC",
            "data-marks=\"2\"",
            "<pre>granule lab</pre>",
            "Where it comes from",
        ] {
            assert!(page.contains(wanted), "{wanted}\n{page}");
        }
        for foreign in ["<script", "http:", "https:", "src=", "url(", "Holm"] {
            assert!(!page.contains(foreign), "{foreign}");
        }
    }

    #[test]
    fn what_was_not_counted_is_in_no_column() {
        let mut one = record();
        one.counters.clear();
        one.events.clear();
        let page = single(&samples(&[one]), "base", None);
        assert!(
            !page.contains("DC lines") && !page.contains("<details>"),
            "{page}"
        );
        assert!(page.contains("; 1 run</h3>"));
    }
}
