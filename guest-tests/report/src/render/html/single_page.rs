// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! HTML page of a single kernel's figures: medians, spread, counts, provenance.

use std::collections::BTreeMap;

use super::{
    super::{columns::Cell, number::Unit, words},
    charts::{Lane, bars},
    comparison_page::cell,
    page::{self, Figures, Report, Section, escaped, provenance, rendered},
};
use crate::{
    comparison::{self, Group},
    provenance::Side,
    sample::{AnyPhase, Sample},
    stats::Spread,
};
use granule_types::units::counted;

/// Selects the counts of one kind from a sample; each count name belongs to one kind.
type SelectCounts = fn(&Sample) -> &BTreeMap<String, u64>;
const KINDS: [SelectCounts; 3] =
    [|sample| &sample.events, |sample| &sample.gauges, |sample| &sample.counters];

/// Column beside each time: its heading, and a predicate of the counters that it sums.
type Sum = (&'static str, fn(&str) -> bool);
const SUMS: [Sum; 4] = [
    ("guest aborts", |name| name == "guest_aborts"),
    ("DC lines", |name| name.starts_with("DC C")),
    ("IC", |name| name.starts_with("IC ")),
    ("TLBI", |name| name.starts_with("TLBI ")),
];

/// Renders the page of one kernel's samples. `command` is the command line that generates it again.
pub fn single(samples: &[Sample], label: &str, command: Option<&str>) -> String {
    let side = Side::of(label.to_owned(), samples);
    let groups = comparison::groups(samples, true);
    let time = side.is_emulated().then_some(words::WORK);
    let heading = if time.is_some() { "Virtual time of each phase" } else { "Time of each phase" };
    let charts = groups.iter().filter_map(chart).collect();
    let report = Report {
        class: "inconclusive",
        verdict: vec!["One kernel: no comparison and no verdict.".to_owned()],
        overview: String::new(),
        notes: time.iter().map(|time| format!("time: {time}")).collect(),
        sections: Section::of(heading, "", &[charts]).into_iter().collect(),
        judged: false,
        configurations: groups.iter().map(figures).collect(),
        provenance: provenance(&[(label, &side)]),
        command,
    };
    page::page(&format!("Figures of {label}"), &rendered(&report))
}

fn name(group: &Group) -> String {
    let name = group.key.setup.name();
    match (group.key.engine == group.key.setup.subject, name.is_empty()) {
        (false, false) => format!("{name}, by {}", group.key.engine),
        _ => name,
    }
}

fn time(group: &Group, phase: &AnyPhase) -> Option<Spread> {
    Spread::of(group.of_phase(phase).map(|sample| sample.ns))
}

fn chart(group: &Group) -> Option<String> {
    let lane = |phase: &AnyPhase| {
        let median = time(group, phase)?.median;
        Some(Lane {
            name: phase.name().to_owned(),
            bars: vec![(median, Unit::of_nanoseconds(median).value(median))],
        })
    };
    let lanes: Vec<Lane> = group.phases().into_iter().filter_map(lane).collect();
    bars(&name(group), "medians, all to one scale", &lanes)
}

fn spread_cell(unit: Unit, spread: Option<Spread>) -> String {
    cell(Cell::Spread(unit.median(spread), unit.range(spread)))
}

fn figures(group: &Group) -> Figures {
    let sums = if group.has_counters() { &SUMS[..] } else { &[] };
    let names = sums.iter().map(|(name, _)| *name);
    let head: Vec<&str> = ["phase", "runs", "time"].into_iter().chain(names).collect();
    let mut rows = Vec::new();
    let mut counts = Vec::new();
    for phase in group.phases() {
        let Some(time) = time(group, phase) else {
            continue;
        };
        let unit = Unit::of_nanoseconds(time.median);
        let time_cell = spread_cell(unit, Some(time));
        let mut row = vec![escaped(phase.name()), time.runs.to_string(), time_cell];
        row.extend(sums.iter().map(|(_, belongs)| {
            let sum = |sample: &Sample| {
                let counters = sample.counters.iter();
                Some(counters.filter(|(name, _)| belongs(name)).map(|(_, count)| count).sum())
            };
            spread_cell(Unit::Count, group.spread(phase, sum))
        }));
        rows.push(row);
        for kind in KINDS {
            for name in group.nonzero_counts(phase, kind) {
                let spread = group.spread(phase, |sample| kind(sample).get(name).copied());
                let name = format!("{}: {}", escaped(phase.name()), escaped(name));
                counts.push(vec![name, spread_cell(Unit::Count, spread)]);
            }
        }
    }
    Figures {
        title: format!("{}; {}", name(group), counted(group.runs().len(), "run")),
        figures: page::table(&head, &rows),
        counts: (!counts.is_empty()).then(|| page::table(&["phase and count", "median"], &counts)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        sample::samples,
        tests::{record, runs},
    };

    #[test]
    fn the_page_of_one_kernel_has_every_figure_and_no_verdict() {
        let samples = samples(&runs(&[10, 30, 20], &[7, 7, 7]));
        let page = single(&samples, "<base>", Some("granule lab"));

        for expected in [
            "<title>Figures of &#60;base&#62;</title>",
            "One kernel",
            "anonymous_hugetlb_2mb, 64M, 16 vCPUs",
            "; 3 runs</h3>",
            "<td>create</td><td>3</td>",
            "DC lines",
            "create: DC CIVAC",
            "data-marks=\"2\"",
            "<pre>granule lab</pre>",
            "<h2>Provenance</h2>",
        ] {
            assert!(page.contains(expected), "{expected}\n{page}");
        }
        for unexpected in ["<script", "http:", "https:", "src=", "url(", "Holm"] {
            assert!(!page.contains(unexpected), "{unexpected}");
        }
    }

    #[test]
    fn columns_of_missing_counts_are_omitted() {
        let mut one = record();
        one.counters.clear();
        one.events.clear();
        let page = single(&samples(&[one]), "base", None);
        assert!(!page.contains("DC lines") && !page.contains("<details>"), "{page}");
        assert!(page.contains("; 1 run</h3>"));
    }
}
