// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables without a comparison: the phases of one kernel, or a row for each of several kernels.

use std::collections::BTreeMap;

use granule_types::{phase::Phase, record::Record, units::counted};

/// A heading and the predicate of the counts that it sums.
type Column = (&'static str, fn(&str) -> bool);

/// Counts in the table.
const COLUMNS: [Column; 4] = [
    ("aborts", |name| name == "guest_aborts"),
    ("DC lines", |name| name.starts_with("DC C")),
    ("IC", |name| name.starts_with("IC ")),
    ("TLBI", |name| name.starts_with("TLBI ")),
];

/// Describes the configuration of a record, without seed and iteration.
fn configuration(record: &Record) -> String {
    let config = &record.config;
    format!(
        "{}, {}, {} ({})",
        config.backing,
        config.memory,
        counted(config.vcpus, "vCPU"),
        record.engine
    )
}

/// Returns all configurations, in order of appearance.
fn configurations<'a>(records: impl Iterator<Item = &'a Record>) -> Vec<String> {
    let mut names = Vec::new();
    for record in records {
        let name = configuration(record);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Returns a table of medians over seeds and iterations for each configuration of one kernel.
pub fn phases(records: &[Record]) -> String {
    let mut text = String::new();
    for name in configurations(records.iter()) {
        text.push_str(&format!("{name}\n  {:12} {:>12}", "phase", "work ms"));
        for (heading, _) in COLUMNS {
            text.push_str(&format!(" {heading:>12}"));
        }
        text.push('\n');
        for phase in Phase::IN_ORDER {
            let of_phase: Vec<&Record> = records
                .iter()
                .filter(|record| record.phase == phase && configuration(record) == name)
                .collect();
            if of_phase.is_empty() {
                continue;
            }
            text.push_str(&format!("  {phase:12} {:>12}", milliseconds(&of_phase)));
            for (_, belongs) in COLUMNS {
                let count = median(of_phase.iter().map(|record| total(record, belongs)));
                text.push_str(&format!(" {count:>12}"));
            }
            text.push('\n');
        }
    }
    text
}

/// Returns a Markdown table for each configuration, with a row for each kernel: the time of each
/// phase and the counts of all phases. Medians over seeds and iterations.
pub fn kernels(sides: &[(String, Vec<Record>)]) -> String {
    let all = || sides.iter().flat_map(|(_, records)| records);
    let mut text = String::new();
    for name in configurations(all()) {
        let shown: Vec<Phase> = Phase::IN_ORDER
            .into_iter()
            .filter(|phase| all().any(|r| r.phase == *phase && configuration(r) == name))
            .collect();
        let headings: String = shown
            .iter()
            .map(|phase| format!(" {phase} ms |"))
            .chain(COLUMNS.iter().map(|(heading, _)| format!(" {heading} |")))
            .collect();
        let rule = "---:|".repeat(shown.len() + COLUMNS.len());
        text.push_str(&format!("{name}\n\n| kernel |{headings}\n|---|{rule}\n"));
        for (kernel, records) in sides {
            text.push_str(&format!("| {kernel} |"));
            for phase in &shown {
                let of_phase: Vec<&Record> = records
                    .iter()
                    .filter(|record| record.phase == *phase && configuration(record) == name)
                    .collect();
                text.push_str(&format!(" {} |", milliseconds(&of_phase)));
            }
            for (_, belongs) in COLUMNS {
                let mut runs = BTreeMap::<_, u64>::new();
                for record in records.iter().filter(|r| configuration(r) == name) {
                    let run = (record.config.seed, record.config.iteration);
                    *runs.entry(run).or_default() += total(record, belongs);
                }
                text.push_str(&format!(" {} |", median(runs.into_values())));
            }
            text.push('\n');
        }
        text.push('\n');
    }
    text
}

fn total(record: &Record, belongs: fn(&str) -> bool) -> u64 {
    let counters = record.counters.iter();
    counters.filter(|(n, _)| belongs(n)).map(|(_, c)| c).sum()
}

fn milliseconds(records: &[&Record]) -> String {
    if records.is_empty() {
        return "-".to_owned();
    }
    let us = (median(records.iter().map(|record| record.ns.0)) + 500) / 1000;
    format!("{}.{:03}", us / 1000, us % 1000)
}

/// Returns the median; the midpoint of two values.
fn median(values: impl Iterator<Item = u64>) -> u64 {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    match (values.len(), values.len() / 2) {
        (0, _) => 0,
        (n, half) if n % 2 == 1 => values[half],
        (_, half) => values[half - 1].midpoint(values[half]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(phase: &str, seed: u64, ns: u64, aborts: u64) -> Record {
        serde_json::from_value(serde_json::json!({
            "schema": "", "engine": "kvm", "phase": phase, "ns": ns,
            "config": {"mode": "", "backing": "anonymous", "memory": 65536, "vcpus": 2,
                       "seed": seed, "iteration": 0},
            "counters": {"guest_aborts": aborts, "DC CIVAC": 5, "DC ZVA": 9},
        }))
        .unwrap()
    }

    #[test]
    fn each_phase_is_one_line_of_medians_over_seeds() {
        let records = [
            record("create", 0, 3_000_000, 30),
            record("create", 1, 1_000_000, 10),
            record("create", 2, 2_000_000, 20),
            record("update", 0, 7_500, 1),
        ];

        let table = phases(&records);

        let lines: Vec<Vec<&str>> = table.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines.len(), 4);
        assert_eq!(lines[2], ["create", "2.000", "20", "5", "0", "0"]);
        assert_eq!(lines[3], ["update", "0.008", "1", "5", "0", "0"]);
    }

    #[test]
    fn each_kernel_is_one_row_with_the_counts_of_all_phases() {
        let run = |aborts| {
            vec![record("create", 0, 1_000_000, aborts), record("update", 0, 2_000_000, 1)]
        };

        let table = kernels(&[("base".to_owned(), run(10)), ("one-1".to_owned(), run(4))]);

        assert!(table.contains("| base | 1.000 | 2.000 | 11 | 10 | 0 | 0 |"), "{table}");
        assert!(table.contains("| one-1 | 1.000 | 2.000 | 5 | 10 | 0 | 0 |"), "{table}");
    }
}
