// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Machine-readable formats: JSON, CSV, KTAP, and the Go benchmark format.

use std::fmt::Write;

use super::{
    columns::{self, COLUMNS, table_rows},
    number, sentences,
};
use crate::{
    comparison::{Comparison, ComparisonSet, Configuration, Judgement, PhaseChange, TIME_METRIC},
    judge::Verdict,
};

/// Renders a comparison as JSON, schema `granule.comparison/2`.
///
/// # Errors
/// The JSON writer fails, which is not expected.
pub fn json(comparison: &Comparison) -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(comparison).map(|text| text + "\n")
}

/// Renders the comparisons of a set as a JSON array of `granule.comparison/2`.
///
/// # Errors
/// The JSON writer fails, which is not expected.
pub fn json_set(set: &ComparisonSet) -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(set.comparisons()).map(|text| text + "\n")
}

/// Names of the CSV fields before those of [`COLUMNS`].
const HEADER: &str = "engine,subject,mode,backing,memory_bytes,vcpus,prefault,options,phase,metric";

/// Renders a comparison as CSV (RFC 4180, but with line feeds): a row for each time and count of
/// each phase. Unknown fields are empty; times are in nanoseconds.
pub fn csv(comparison: &Comparison) -> String {
    let mut out = String::new();
    push_line(&mut out, csv_header());
    push_rows(&mut out, comparison, &[]);
    out
}

/// Renders the comparisons of a set as CSV; the first two fields are the labels of the sides.
pub fn csv_set(set: &ComparisonSet) -> String {
    let mut out = String::new();
    push_line(&mut out, ["before_label", "after_label"].into_iter().chain(csv_header()));
    for comparison in set.comparisons() {
        push_rows(&mut out, comparison, &[&comparison.before.label, &comparison.after.label]);
    }
    out
}

fn csv_header() -> impl Iterator<Item = &'static str> {
    let fields = COLUMNS.iter().flat_map(|column| column.csv);
    HEADER.split(',').chain(fields.map(|(name, _)| *name))
}

/// Writes a line for each row of a comparison, which begins with `labels`.
fn push_rows(out: &mut String, comparison: &Comparison, labels: &[&str]) {
    let fields = || COLUMNS.iter().flat_map(|column| column.csv);
    for (configuration, change) in comparison.rows() {
        for row in table_rows(change) {
            let mut line = setup_fields(configuration);
            line.extend([change.phase.to_string(), row.metric.to_owned()]);
            line.extend(fields().map(|(_, value)| value(&row).unwrap_or_default()));
            push_line(out, labels.iter().copied().chain(line.iter().map(String::as_str)));
        }
    }
}

fn setup_fields(configuration: &Configuration) -> Vec<String> {
    let setup = &configuration.setup;
    let options = setup.options.iter().map(|(name, value)| format!("{name}={value}"));
    vec![
        configuration.engine.clone(),
        setup.subject.clone(),
        setup.mode.clone(),
        setup.backing.map(|backing| backing.to_string()).unwrap_or_default(),
        setup.memory.map(|memory| memory.0.to_string()).unwrap_or_default(),
        setup.vcpus.map(|vcpus| vcpus.to_string()).unwrap_or_default(),
        setup.prefault.to_string(),
        options.collect::<Vec<_>>().join(" "),
    ]
}

/// Writes a line, and quotes fields that contain a separator.
fn push_line<'a>(out: &mut String, fields: impl Iterator<Item = &'a str>) {
    let quoted = fields.map(|field| {
        if field.contains([',', '"', '\n', '\r']) {
            format!("\"{}\"", field.replace('"', "\"\""))
        } else {
            field.to_owned()
        }
    });
    out.push_str(&quoted.collect::<Vec<_>>().join(","));
    out.push('\n');
}

/// Renders a comparison as KTAP, version 1, with a test for each judged figure. A regression is
/// `not ok`; an inconclusive figure is skipped. With several metrics, a name ends with its metric.
pub fn ktap(comparison: &Comparison) -> String {
    let judged: Vec<_> = comparison
        .rows()
        .flat_map(|(c, change)| change.judgements().map(move |judgement| (c, change, judgement)))
        .collect();
    let mut out = format!("KTAP version 1\n1..{}\n", judged.len());
    for (number, (configuration, change, judgement)) in (1..).zip(&judged) {
        let mut name =
            format!("{} {}", sentences::short_title(comparison, configuration), change.phase);
        if !comparison.further_metrics.is_empty() {
            name += &format!(" {}", judgement.metric);
        }
        // `#` would begin a directive.
        let name = name.replace('#', "").replace(", ", " ");
        let reason = verdict_reason(change, judgement);
        out += &match judgement.verdict {
            Verdict::Regression => format!("# {name}: {reason}\nnot ok {number} {name}\n"),
            Verdict::Inconclusive => {
                format!("ok {number} {name} # SKIP inconclusive: {reason}\n")
            }
            Verdict::Improvement | Verdict::NoRegression => {
                format!("# {name}: {reason}\nok {number} {name}\n")
            }
        };
    }
    let [failed, skipped] =
        [Verdict::Regression, Verdict::Inconclusive].map(|verdict| comparison.count(verdict));
    let passed = judged.len() - failed - skipped;
    out + &format!("# Totals: pass:{passed} fail:{failed} xfail:0 xpass:0 skip:{skipped} error:0\n")
}

fn verdict_reason(phase: &PhaseChange, judgement: &Judgement) -> String {
    let metric = &judgement.metric;
    let change = phase.count(metric).unwrap_or(&phase.time);
    let mut reason = format!("{metric} ratio {}", number::ratio(change));
    if let Some(tested) = &judgement.tested_row {
        if let Some(estimate) = columns::hodges_lehmann_text(tested) {
            reason += &format!(", Hodges-Lehmann {estimate}");
        }
        reason += &format!(", p after Holm {}", number::p_value(tested.p_holm));
    }
    reason
}

/// Renders the judged figures of each run in the Go benchmark format for `benchstat`.
///
/// Each side has a configuration line above its runs, so the command is `benchstat -col side
/// FILE`. Any other configuration line that differs between sides would split the table.
pub fn benchstat(comparison: &Comparison) -> String {
    let mut out = String::new();
    for side in ["before", "after"] {
        // Writing into a String cannot fail.
        let _ = writeln!(out, "side: {side}\n");
        for (configuration, change) in comparison.rows() {
            let benchmark = benchmark_name(configuration, change);
            for Judgement { metric, runs, .. } in change.judgements() {
                let unit = benchmark_unit(metric);
                for figure in if side == "before" { &runs.before } else { &runs.after } {
                    let _ = writeln!(out, "{benchmark} 1 {figure} {unit}");
                }
            }
        }
        out.push('\n');
    }
    out
}

/// Returns the unit of a metric, one word. For unknown units, benchstat treats lower values as
/// better.
fn benchmark_unit(metric: &str) -> String {
    match metric {
        TIME_METRIC => "ns/op".to_owned(),
        count => count.split_whitespace().collect::<Vec<_>>().join("-") + "/op",
    }
}

/// Returns the name `BenchmarkStage2/phase=create/backing=anonymous/...`. It has no spaces and no
/// final dash and number, which benchstat would parse as GOMAXPROCS.
fn benchmark_name(configuration: &Configuration, change: &PhaseChange) -> String {
    let setup = &configuration.setup;
    let subject = Some(setup.subject.clone()).filter(|s| *s != configuration.engine);
    let mut parts = vec![
        ("engine", Some(configuration.engine.clone())),
        ("subject", subject),
        ("mode", Some(setup.mode.clone())),
    ];
    parts.extend(setup.options.iter().map(|(key, value)| (key.as_str(), Some(value.clone()))));
    parts.extend([
        ("prefault", setup.prefault.then(|| "on".to_owned())),
        ("backing", setup.backing.map(|backing| backing.to_string())),
        ("size", setup.memory.map(|memory| memory.to_string())),
        ("vcpus", setup.vcpus.map(|vcpus| vcpus.to_string())),
    ]);
    let word = |text: &str| text.replace(|c: char| c.is_whitespace() || c == '/' || c == '-', "_");
    let mut name = format!("BenchmarkStage2/phase={}", change.phase);
    for (key, value) in parts {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            name += &format!("/{}={}", word(key), word(&value));
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use granule_types::{phase::Phase, record::Record};

    use super::*;
    use crate::{
        ComparisonOptions,
        tests::{compare_with, runs, with_series},
    };

    fn benchstat_text(metric: Option<&str>, change: impl Fn(&mut Record)) -> String {
        let mut sides = [runs(&[10, 12], &[30, 31]), with_series(runs(&[8, 9], &[30, 33]))];
        sides.iter_mut().flatten().for_each(change);
        let options = ComparisonOptions {
            metrics: metric.map(Into::into).into_iter().collect(),
            ..ComparisonOptions::default()
        };
        benchstat(&compare_with(&sides[0], &sides[1], &options).unwrap())
    }

    #[test]
    fn every_run_has_a_line_below_its_side() {
        let name = |phase| {
            format!(
                "BenchmarkStage2/phase={phase}/engine=kvm/mode=PA_bits:48,_VA_bits:48,_4K_pages/\
                 backing=anonymous_hugetlb_2mb/size=64M/vcpus=16"
            )
        };
        let (create, update) = (name("create"), name("update"));
        let times = format!(
            "side: before\n\n\
             {create} 1 10000 ns/op\n{create} 1 12000 ns/op\n\
             {update} 1 30000 ns/op\n{update} 1 31000 ns/op\n\n\
             side: after\n\n\
             {create} 1 8000 ns/op\n{create} 1 9000 ns/op\n\
             {update} 1 30000 ns/op\n{update} 1 33000 ns/op\n\n"
        );
        assert_eq!(benchstat_text(None, |_| ()), times);
        let count = benchstat_text(Some("DC CIVAC"), |record| {
            if record.phase == Phase::Update {
                record.counters.insert("DC CIVAC".to_owned(), 0);
            }
        });
        assert_eq!(
            count,
            format!(
                "side: before\n\n{create} 1 8000 DC-CIVAC/op\n{create} 1 9600 DC-CIVAC/op\n\n\
                 side: after\n\n{create} 1 6400 DC-CIVAC/op\n{create} 1 7200 DC-CIVAC/op\n\n"
            ),
            "a judged count is printed where a phase has it"
        );
    }

    #[test]
    fn a_name_is_one_word_for_any_options() {
        let text = benchstat_text(None, |record| {
            let options = [("dirty-log", "manual"), ("pin", "0-3 8/9"), ("empty", "")];
            let options = options.map(|(name, value)| (name.to_owned(), value.to_owned()));
            record.config.options = options.into();
            record.config.prefault = true;
        });

        for line in text.lines().filter(|line| line.starts_with("Benchmark")) {
            let words: Vec<&str> = line.split(' ').collect();
            assert_eq!((words.len(), words[1], words[3]), (4, "1", "ns/op"), "{line}");
            assert!(!words[0].contains('-'), "{line}");
            assert!(line.contains("/dirty_log=manual/pin=0_3_8_9/prefault=on/"), "{line}");
        }
        assert_eq!(text.matches("side:").count(), 2, "a further line would split the table");
    }
}
