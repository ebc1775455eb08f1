// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables without a comparison: the phases of one kernel, or one row for each kernel.

use std::collections::BTreeMap;

use granule_types::{
    phase::Phase,
    record::Record,
    units::{Nanoseconds, pluralize},
};

/// Heading of a column, and a predicate that selects the counts of its sum.
type CountColumn = (&'static str, fn(&str) -> bool);

const COUNT_COLUMNS: [CountColumn; 4] = [
    ("aborts", |name| name == "guest_aborts"),
    ("DC lines", |name| name.starts_with("DC C")),
    ("IC", |name| name.starts_with("IC ")),
    ("TLBI", |name| name.starts_with("TLBI ")),
];

/// Groups records by configuration (without seed and iteration), in order of first appearance.
fn group_by_configuration<'a>(
    records: impl Iterator<Item = &'a Record>,
) -> Vec<(String, Vec<&'a Record>)> {
    let mut groups: Vec<(String, Vec<&Record>)> = Vec::new();
    for record in records {
        let config = &record.config;
        let vcpus = pluralize(config.vcpus, "vCPU");
        let name = format!("{}, {}, {vcpus} ({})", config.backing, config.memory, record.engine);
        match groups.iter_mut().find(|(found, _)| *found == name) {
            Some((_, group)) => group.push(record),
            None => groups.push((name, vec![record])),
        }
    }
    groups
}

/// Returns a table for each configuration of one kernel, with medians over seeds and iterations.
pub fn phase_table(records: &[Record]) -> String {
    let mut text = String::new();
    for (name, records) in group_by_configuration(records.iter()) {
        text.push_str(&format!("{name}\n  {:12} {:>12}", "phase", "work ms"));
        let clocked = records.iter().any(|record| record.elapsed_ns.is_some());
        if clocked {
            text.push_str(&format!(" {:>12}", "elapsed ms"));
        }
        for (heading, _) in COUNT_COLUMNS {
            text.push_str(&format!(" {heading:>12}"));
        }
        text.push('\n');
        for phase in Phase::TABLE_ORDER {
            let Some(work) = median_milliseconds(&records, phase, |record| Some(record.ns)) else {
                continue;
            };
            text.push_str(&format!("  {phase:12} {work:>12}"));
            if clocked {
                let elapsed = median_milliseconds(&records, phase, |record| record.elapsed_ns);
                text.push_str(&format!(" {:>12}", elapsed.as_deref().unwrap_or("-")));
            }
            for (_, belongs) in COUNT_COLUMNS {
                let of_phase = records.iter().filter(|record| record.phase == phase);
                let count = median(of_phase.map(|record| sum_counts(record, belongs)));
                text.push_str(&format!(" {count:>12}"));
            }
            text.push('\n');
        }
    }
    text
}

/// Returns a Markdown table for each configuration, with a row for each kernel: elapsed time and
/// (in parentheses) work of each phase, and the counts of all phases. Figures are medians.
pub fn kernel_table(sides: &[(String, Vec<Record>)]) -> String {
    let mut text = "Elapsed time (work)\n\n".to_owned();
    for (name, all) in group_by_configuration(sides.iter().flat_map(|(_, records)| records)) {
        let mut shown = Phase::TABLE_ORDER.to_vec();
        shown.retain(|phase| all.iter().any(|record| record.phase == *phase));
        let headings: String = shown
            .iter()
            .map(|phase| format!(" {phase} ms |"))
            .chain(COUNT_COLUMNS.iter().map(|(heading, _)| format!(" {heading} |")))
            .collect();
        let rule = "---:|".repeat(shown.len() + COUNT_COLUMNS.len());
        text.push_str(&format!("{name}\n\n| kernel |{headings}\n|---|{rule}\n"));
        for (kernel, records) in sides {
            let groups = group_by_configuration(records.iter());
            let own = groups.into_iter().find(|(found, _)| *found == name);
            let own = own.map(|(_, records)| records).unwrap_or_default();
            text.push_str(&format!("| {kernel} |"));
            for phase in &shown {
                let elapsed = median_milliseconds(&own, *phase, |record| record.elapsed_ns);
                let work = median_milliseconds(&own, *phase, |record| Some(record.ns));
                text.push_str(&match (elapsed, work) {
                    (Some(elapsed), Some(work)) => format!(" {elapsed} ({work}) |"),
                    (None, Some(work)) => format!(" ({work}) |"),
                    (_, None) => " - |".to_owned(),
                });
            }
            for (_, belongs) in COUNT_COLUMNS {
                let mut runs = BTreeMap::<_, u64>::new();
                for record in &own {
                    let run = (record.config.seed, record.config.iteration);
                    *runs.entry(run).or_default() += sum_counts(record, belongs);
                }
                text.push_str(&format!(" {} |", median(runs.into_values())));
            }
            text.push('\n');
        }
        text.push('\n');
    }
    text
}

fn sum_counts(record: &Record, belongs: fn(&str) -> bool) -> u64 {
    let counters = record.counters.iter();
    counters.filter(|(n, _)| belongs(n)).map(|(_, c)| c).sum()
}

/// Returns the median time of a phase, if the records contain it.
fn median_milliseconds(
    records: &[&Record],
    phase: Phase,
    time: fn(&Record) -> Option<Nanoseconds>,
) -> Option<String> {
    let of_phase = records.iter().filter(|record| record.phase == phase);
    let times: Vec<u64> = of_phase.filter_map(|record| Some(time(record)?.0)).collect();
    if times.is_empty() {
        return None;
    }
    let us = (median(times.into_iter()) + 500) / 1000;
    Some(format!("{}.{:03}", us / 1000, us % 1000))
}

/// Returns the median: for an even number of values, the midpoint of the middle two.
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
            "schema": "", "engine": "kvm", "phase": phase, "ns": ns, "elapsed_ns": ns / 2,
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

        let table = phase_table(&records);

        let lines: Vec<Vec<&str>> = table.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines.len(), 4);
        assert_eq!(lines[2], ["create", "2.000", "1.000", "20", "5", "0", "0"]);
        assert_eq!(lines[3], ["update", "0.008", "0.004", "1", "5", "0", "0"]);
    }

    #[test]
    fn each_kernel_is_one_row_with_the_counts_of_all_phases() {
        let run = |aborts| {
            vec![record("create", 0, 1_000_000, aborts), record("update", 0, 2_000_000, 1)]
        };

        let table = kernel_table(&[("base".to_owned(), run(10)), ("one-1".to_owned(), run(4))]);

        assert!(
            table.contains("| base | 0.500 (1.000) | 1.000 (2.000) | 11 | 10 | 0 | 0 |"),
            "{table}"
        );
        assert!(
            table.contains("| one-1 | 0.500 (1.000) | 1.000 (2.000) | 5 | 10 | 0 | 0 |"),
            "{table}"
        );
    }
}
