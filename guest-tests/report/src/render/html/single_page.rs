// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! HTML page of a single kernel's figures: medians, spread, counts, provenance.

use super::{
    super::{columns::Cell, number::Unit, sentences},
    charts::{BarGroup, bar_chart},
    comparison_page::cell_html,
    page::{
        self, ConfigurationTables, ReportBody, Section, escape_html, provenance, render_template,
    },
};
use crate::{
    comparison::{self, Group, SelectCounts},
    provenance::Side,
    sample::{AnyPhase, COUNTER_SUMS, Sample},
    stats::Spread,
};
use granule_types::units::pluralize;

/// Selectors of the kinds of counts; each count name belongs to one kind.
const COUNT_KINDS: [SelectCounts; 3] =
    [|sample| &sample.events, |sample| &sample.gauges, |sample| &sample.counters];

/// Renders the page of one kernel's samples, which `command` repeats.
pub fn single_kernel(samples: &[Sample], label: &str, command: Option<&str>) -> String {
    let side = Side::new(label.to_owned(), samples);
    let groups = comparison::groups(samples, true);
    let time = side.is_emulated().then_some(sentences::WORK_NOTE);
    let heading = if time.is_some() { "Virtual time of each phase" } else { "Time of each phase" };
    let charts = groups.iter().filter_map(phase_time_chart).collect();
    let report = ReportBody {
        class: "inconclusive",
        verdict: vec!["One kernel: no comparison and no verdict.".to_owned()],
        overview: String::new(),
        notes: time.iter().map(|time| format!("time: {time}")).collect(),
        sections: Section::new(heading, "", &[charts]).into_iter().collect(),
        has_verdicts: false,
        configurations: groups.iter().map(group_tables).collect(),
        provenance: provenance(&[(label, &side)]),
        command,
    };
    page::page(&format!("Figures of {label}"), &render_template(&report))
}

fn time_spread(group: &Group, phase: &AnyPhase) -> Option<Spread> {
    Spread::new(group.of_phase(phase).map(|sample| sample.ns))
}

fn phase_time_chart(group: &Group) -> Option<String> {
    let lane = |phase: &AnyPhase| {
        let median = time_spread(group, phase)?.median;
        Some(BarGroup {
            name: phase.name().to_owned(),
            bars: vec![(median, Unit::of_nanoseconds(median).value(median))],
        })
    };
    let groups: Vec<BarGroup> = group.phases().into_iter().filter_map(lane).collect();
    bar_chart(&group.title(), "medians, all to one scale", &groups)
}

fn spread_cell(unit: Unit, spread: Option<Spread>) -> String {
    cell_html(Cell::Spread(unit.median(spread), unit.range(spread)))
}

fn group_tables(group: &Group) -> ConfigurationTables {
    let sums = if group.has_counters() { &COUNTER_SUMS[..] } else { &[] };
    let names = sums.iter().map(|(name, _)| *name);
    let head: Vec<&str> = ["phase", "runs", "time"].into_iter().chain(names).collect();
    let mut rows = Vec::new();
    let mut counts = Vec::new();
    for phase in group.phases() {
        let Some(time) = time_spread(group, phase) else {
            continue;
        };
        let unit = Unit::of_nanoseconds(time.median);
        let time_cell = spread_cell(unit, Some(time));
        let mut row = vec![escape_html(phase.name()), time.runs.to_string(), time_cell];
        row.extend(sums.iter().map(|(_, belongs)| {
            spread_cell(Unit::Count, group.spread(phase, |sample| sample.counter_sum(*belongs)))
        }));
        rows.push(row);
        for kind in COUNT_KINDS {
            for name in group.nonzero_counts(phase, kind) {
                let spread = group.spread(phase, |sample| kind(sample).get(name).copied());
                let name = format!("{}: {}", escape_html(phase.name()), escape_html(name));
                counts.push(vec![name, spread_cell(Unit::Count, spread)]);
            }
        }
    }
    ConfigurationTables {
        title: format!("{}; {}", group.title(), pluralize(group.runs().len(), "run")),
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
        let page = single_kernel(&samples, "<base>", Some("granule lab"));

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
        let page = single_kernel(&samples(&[one]), "base", None);
        assert!(!page.contains("DC lines") && !page.contains("<details>"), "{page}");
        assert!(page.contains("; 1 run</h3>"));
    }
}
