// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! HTML page of a comparison: verdict, ratios, charts, figures, provenance.

use super::{
    super::{
        columns::{COLUMNS, Cell, TableRow, table_rows},
        sentences,
    },
    charts,
    page::{
        ConfigurationTables, ReportBody, SIDE_KEY, Section, escape_html, page, provenance,
        render_template, table_with_class,
    },
    time_charts,
};
use crate::{
    comparison::{Comparison, ComparisonSet, Configuration, SweepParameter},
    judge::Verdict,
};

/// Renders a comparison as an HTML page.
pub fn html(comparison: &Comparison) -> String {
    page(&title(comparison), &body(comparison))
}

/// Renders the comparisons of a set as one HTML page.
pub fn html_set(set: &ComparisonSet) -> String {
    let [first, further @ ..] = set.comparisons() else {
        return String::new();
    };
    let further = further.iter().map(|comparison| {
        format!("<h1>{}</h1>\n{}", escape_html(&title(comparison)), body(comparison))
    });
    page(&title(first), &further.fold(body(first), |page, body| page + &body))
}

fn title(comparison: &Comparison) -> String {
    format!("{} against {}", comparison.after.label, comparison.before.label)
}

fn body(comparison: &Comparison) -> String {
    let Comparison { before, after, .. } = comparison;
    let class = [Verdict::Regression, Verdict::Inconclusive]
        .into_iter()
        .find(|verdict| comparison.count(*verdict) > 0);
    let means = sentences::geometric_means(comparison).into_iter();
    let head = sentences::head(comparison).into_iter();
    let head = head.filter(|(name, _)| *name == "time" || *name == "guest");
    let head = head.map(|(name, words)| format!("{name}: {words}"));
    let report = ReportBody {
        class: class.map_or("", Verdict::name),
        verdict: sentences::verdict(comparison),
        overview: overview(comparison),
        notes: means.chain(sentences::notes(comparison)).chain(head).collect(),
        sections: sections(comparison),
        has_verdicts: true,
        configurations: comparison
            .configurations
            .iter()
            .map(|configuration| tables(comparison, configuration))
            .collect(),
        provenance: provenance(&[("before", before), ("after", after)]),
        command: comparison.command.as_deref(),
    };
    render_template(&report)
}

/// Returns the table of all time ratios, with a row for each configuration.
fn overview(comparison: &Comparison) -> String {
    let phases = comparison.phases();
    let title = format!("{} after ÷ before", sentences::time_name(comparison));
    let names = phases.iter().map(|phase| phase.name());
    let head: Vec<&str> = [title.as_str()].into_iter().chain(names).collect();
    let row = |configuration: &Configuration| {
        let cells = phases.iter().map(|phase| {
            let (ratio, verdict) = sentences::time_ratio(configuration, phase);
            let tag = tag(verdict, &format!("{ratio}{}", verdict.map_or("", Verdict::mark)));
            if ratio.is_empty() { ratio } else { tag }
        });
        let name = escape_html(&sentences::short_title(comparison, configuration));
        ("", [name].into_iter().chain(cells).collect())
    };
    let rows: Vec<_> = comparison.configurations.iter().map(row).collect();
    table_with_class(&head, &rows)
}

fn sections(comparison: &Comparison) -> Vec<Section> {
    let phases = comparison.phases();
    let mut times: Vec<Vec<String>> = Vec::new();
    for phase in &phases {
        let mut charts = vec![time_charts::chart_by_configuration(comparison, phase)];
        for parameter in SweepParameter::ALL {
            charts.extend(time_charts::charts_by_parameter(comparison, phase, parameter));
        }
        times.push(charts);
    }
    // Without growth, the charts of all phases form one group.
    if times.iter().all(|charts| charts.len() == 1) {
        times = vec![times.concat()];
    }
    let configurations = comparison.configurations.iter();
    let counted = configurations.filter_map(|one| charts::count_chart(comparison, one));
    let vcpus = phases.iter().filter_map(|phase| charts::vcpu_time_chart(comparison, phase));
    let time = capitalize(sentences::time_name(comparison));
    let [by_phase, by_vcpu] = ["phase", "vCPU"].map(|of| format!("{time} of each {of}"));
    let sections = [
        Section::new(&by_phase, SIDE_KEY, &times),
        Section::new("Counts", &charts::phase_key(comparison), &[counted.collect()]),
        Section::new(&by_vcpu, SIDE_KEY, &[vcpus.collect()]),
    ];
    sections.into_iter().flatten().collect()
}

fn capitalize(text: &str) -> String {
    let (first, rest) = text.split_at(1);
    first.to_uppercase() + rest
}

/// Returns the tables of one configuration. The counts of a phase are collapsed unless judged.
fn tables(comparison: &Comparison, configuration: &Configuration) -> ConfigurationTables {
    let all = configuration.phases.iter().flat_map(table_rows);
    let (main, counts): (Vec<TableRow>, Vec<TableRow>) =
        all.clone().partition(|row| row.is_time() || row.verdict().is_some());
    let has_counts = !counts.is_empty() || main.iter().any(|row| !row.is_time());
    ConfigurationTables {
        title: sentences::title(comparison, configuration),
        figures: table(&main),
        counts: has_counts.then(|| table(&all.collect::<Vec<_>>())),
    }
}

fn table(rows: &[TableRow]) -> String {
    let headings = COLUMNS.iter().map(|column| column.heading);
    let head: Vec<&str> = ["phase"].into_iter().chain(headings).collect();
    let row = |row: &TableRow| {
        let cells = COLUMNS.iter().map(|column| cell_html((column.cell)(row)));
        let class = if row.is_time() { "time" } else { "count" };
        (class, [escape_html(row.name())].into_iter().chain(cells).collect())
    };
    table_with_class(&head, &rows.iter().map(row).collect::<Vec<_>>())
}

pub fn cell_html(cell: Cell) -> String {
    let small = |text: &str| format!("<small>{}</small>", escape_html(text));
    match cell {
        Cell::Text(text) => escape_html(&text),
        Cell::Spread(median, None) => escape_html(&median),
        Cell::Spread(median, Some(range)) => format!("{} {}", escape_html(&median), small(&range)),
        Cell::Verdict(verdict, remark) => {
            let words =
                verdict.map(|verdict| tag(Some(verdict), &verdict.name().replace('-', " ")));
            let remark = remark.map(|remark| format!("<br>{}", small(&remark)));
            words.unwrap_or_default() + &remark.unwrap_or_default()
        }
    }
}

fn tag(verdict: Option<Verdict>, text: &str) -> String {
    let class = verdict.map_or("", Verdict::name);
    format!("<span class=\"tag {class}\">{}</span>", escape_html(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ComparisonOptions, SetupField,
        render::{
            browser::{check_page, probe_findings},
            single_kernel,
        },
        sample::samples,
        tests::{compare_with, record, runs, with_series, without_emulator},
    };
    use granule_types::{phase::Phase, record::Record, units::Nanoseconds};

    /// Returns a comparison on hardware in which one phase improves and one regresses.
    fn comparison(metric: Option<&str>) -> Comparison {
        let about = |us: u64| (0..10).map(|run| us + run).collect::<Vec<u64>>();
        let side = |create, update| without_emulator(runs(&about(create), &about(update)));
        let options = ComparisonOptions {
            metrics: metric.map(Into::into).into_iter().collect(),
            ..ComparisonOptions::default()
        };
        compare_with(&side(2000, 1000), &with_series(side(1000, 2000)), &options).unwrap()
    }

    #[test]
    fn tables_have_a_cell_for_each_heading_and_tags_for_verdicts() {
        let comparison = comparison(None);
        let figures = tables(&comparison, &comparison.configurations[0]);

        let rows: Vec<&str> = figures.figures.split("<tr").skip(2).collect();
        let [create, update] = rows.as_slice() else {
            panic!("{rows:?}");
        };
        assert!(
            rows.iter().all(|row| row.matches("<td>").count() == 1 + COLUMNS.len()),
            "{rows:?}"
        );
        for (text, expected) in [
            (overview(&comparison), "<th>time after ÷ before</th><th>create</th><th>update</th>"),
            (overview(&comparison), "<span class=\"tag improvement\">0.501</span>"),
            (overview(&comparison), "<span class=\"tag regression\">1.996!</span>"),
            (create.to_string(), "<td>create</td><td>2.005 ms <small>2.002..2.007</small></td>"),
            (create.to_string(), "<td>1.004 ms <small>1.002..1.007</small></td><td>0.501</td>"),
            (create.to_string(), "<td>+49.9%</td><td>0.501 (0.5"),
            (create.to_string(), "<td>-1.00</td><td><span class=\"tag improvement\">"),
            (update.to_string(), "<td>+1.00</td><td><span class=\"tag regression\">"),
            (figures.counts.unwrap(), "<td>DC CIVAC</td>"),
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
        assert!(!figures.figures.contains("DC CIVAC"), "counts fold away");
    }

    #[test]
    fn verdicts_are_in_the_rows_of_the_judged_count() {
        let comparison = comparison(Some("DC CIVAC"));
        let table = tables(&comparison, &comparison.configurations[0]).figures;

        let judged: Vec<&str> = table.split("<tr").filter(|row| row.contains("tag ")).collect();
        let [fewer, more] = judged.as_slice() else {
            panic!("{judged:?}");
        };
        assert!(fewer.contains("<td>DC CIVAC</td>") && fewer.contains(">improvement<"), "{fewer}");
        assert!(more.contains("<td>DC CIVAC</td>") && more.contains(">regression<"), "{more}");
        assert!(!overview(&comparison).contains("regression"), "no time is judged");
    }

    /// Returns ten runs of all phases for two backings, four vCPU counts and two sizes: times from
    /// nanoseconds to minutes, counts from 0 to billions, and names that are wider than a chart.
    fn matrix(factor: u64) -> Vec<Record> {
        let mut records = Vec::new();
        let vcpus = [1, 2, 8, 80].into_iter();
        for (vcpus, run) in vcpus.flat_map(|vcpus| (0..10).map(move |run| (vcpus, run))) {
            let two_or_one = 1 + u64::from(vcpus % 2);
            let sizes = [("anonymous", 1), ("anonymous", 4), ("anonymous_hugetlb_2mb", two_or_one)];
            for (place, phase) in (0..).zip(Phase::ALL) {
                let ns = 7_u64.pow(place * 2) * u64::from(vcpus) * factor + u64::from(run * 3 % 7);
                for (backing, scale) in sizes {
                    let mut one = record();
                    one.config.backing = backing.parse().unwrap();
                    one.config.memory.0 *= scale;
                    one.config.vcpus = vcpus;
                    one.config.iteration = run;
                    if backing != "anonymous" {
                        let option = "a value that goes on for longer than any chart".to_owned();
                        one.config.options.insert("dirty-log".to_owned(), option);
                    }
                    one.phase = phase;
                    one.ns = Nanoseconds(ns * scale);
                    if phase.runs_vcpus() {
                        let of = |vcpu| Nanoseconds(ns * (100 - u64::from(vcpu) % 31) / 100);
                        one.vcpu_ns = (0..vcpus).map(of).collect();
                    }
                    one.counters.insert("DC CIVAC".to_owned(), ns * 3);
                    one.gauges.insert("pages_2m".to_owned(), 32 * factor);
                    records.push(one);
                }
            }
        }
        without_emulator(records)
    }

    fn matrix_page() -> String {
        let options = ComparisonOptions {
            labels: Some([
                "before <&>".to_owned(),
                "a/quite/long/path/that/must/break/somewhere/".repeat(3),
            ]),
            command: Some("granule compare \"<before>\" after".to_owned()),
            ..ComparisonOptions::default()
        };
        html(&compare_with(&matrix(10), &with_series(matrix(7)), &options).unwrap())
    }

    #[test]
    fn the_page_is_one_file_and_escapes_text() {
        let page = matrix_page();
        for unexpected in ["<script", "http:", "https:", "src=", "@import", "url("] {
            assert!(!page.contains(unexpected), "{unexpected}");
        }
        assert!(page.contains("before &#60;&#38;&#62;") && !page.contains("before <&>"));
        assert!(page.contains("granule compare &#34;&#60;before&#62;&#34; after"));
        for expected in [
            "create, by configuration",
            "create, by vCPUs",
            "rebuild, by size",
            "create, time of each vCPU",
            "prefers-color-scheme: dark",
            "Every figure",
            "<th>kernel</th><td>5.10.262</td><td>5.10.262-granule</td>",
            "<td>no series</td><td>stage2-fault-path (6 patches)</td>",
            "<th>CPU</th><td colspan=\"2\">neoverse-n1</td>",
            "<th>emulator</th><td colspan=\"2\"><span class=\"soft\">not known</span></td>",
        ] {
            assert!(page.contains(expected), "{expected}");
        }
    }

    #[test]
    fn charts_and_tables_show_the_same_range() {
        let page = |runs_a_side: &[u64]| {
            let [before, after] = [runs(runs_a_side, &[]), with_series(runs(runs_a_side, &[]))];
            html(&compare_with(&before, &after, &ComparisonOptions::default()).unwrap())
        };
        let (one, few, enough) = (page(&[10]), page(&[10, 20, 60]), page(&[10, 20, 60, 70]));

        assert!(one.contains("data-marks=\"2\"") && one.contains("no regression"), "{one}");

        assert!(
            few.contains("before: 20.000 us, all from 10.000 us to 60.000 us, 3 runs"),
            "{few}"
        );
        assert!(
            few.contains("; median, least and greatest") && !few.contains("; median and quartiles")
        );
        assert!(enough.contains(", quartiles 17.500 us to 62.500 us, 4 runs"), "{enough}");
        assert!(enough.contains("; median and quartiles"));
    }

    #[test]
    #[ignore = "needs Chromium; scripts/test runs it where it is installed"]
    fn in_chromium_charts_are_complete_and_do_not_overlap() {
        let folder = tempfile::tempdir().unwrap();
        let spoilt = matrix_page().replace("y=\"12.0\"", "y=\"25.0\"");
        assert!(
            probe_findings(folder.path(), &spoilt, 0).contains("lies upon"),
            "the probe finds nothing"
        );
        check_page(&matrix_page(), 30);
    }

    #[test]
    #[ignore = "needs Chromium; scripts/test runs it where it is installed"]
    fn in_chromium_a_page_of_several_comparisons_is_legible() {
        let options = ComparisonOptions::default();
        let set = ComparisonSet::by(&samples(&matrix(7)), SetupField::Vcpus, &options).unwrap();
        check_page(&html_set(&set), 30);
    }

    #[test]
    #[ignore = "needs Chromium; scripts/test runs it where it is installed"]
    fn in_chromium_a_page_of_one_kernel_is_legible() {
        check_page(&single_kernel(&samples(&matrix(7)), "a series", Some("granule lab")), 8);
    }
}
