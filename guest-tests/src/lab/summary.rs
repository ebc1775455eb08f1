// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The figures of one kernel, where there is none to compare it with.

use crate::{phase::Phase, results::Record};

/// A heading, and which names are added up below it.
type Column = (&'static str, fn(&str) -> bool);

/// Counts shown beside the time.
const COLUMNS: [Column; 4] = [
    ("aborts", |name| name == "guest_aborts"),
    ("DC lines", |name| name.starts_with("DC C")),
    ("IC", |name| name.starts_with("IC ")),
    ("TLBI", |name| name.starts_with("TLBI ")),
];

/// A table of medians over seeds and iterations, one for each configuration.
pub fn table(records: &[Record]) -> String {
    let mut groups: Vec<(String, Vec<&Record>)> = Vec::new();
    for record in records {
        let config = &record.config;
        let name = format!(
            "{} {} {} vCPUs ({})",
            config.backing, config.memory, config.vcpus, record.engine
        );
        match groups.iter_mut().find(|(known, _)| *known == name) {
            Some((_, group)) => group.push(record),
            None => groups.push((name, vec![record])),
        }
    }
    let mut text = String::new();
    for (name, group) in &groups {
        text.push_str(&format!("{name}\n  {:12} {:>12}", "phase", "work ms"));
        for (heading, _) in COLUMNS {
            text.push_str(&format!(" {heading:>12}"));
        }
        text.push('\n');
        for phase in Phase::ALL.into_iter().chain([Phase::Whole]) {
            let of_phase: Vec<&Record> =
                group.iter().copied().filter(|r| r.phase == phase).collect();
            if of_phase.is_empty() {
                continue;
            }
            let us = median(of_phase.iter().map(|record| record.ns.0 / 1000));
            let (ms, rest) = (us / 1000, us % 1000);
            text.push_str(&format!("  {phase:12} {:>12}", format!("{ms}.{rest:03}")));
            for (_, belongs) in COLUMNS {
                let count = median(of_phase.iter().map(|record| {
                    let counters = record.counters.iter();
                    counters.filter(|(n, _)| belongs(n)).map(|(_, c)| c).sum()
                }));
                text.push_str(&format!(" {count:>12}"));
            }
            text.push('\n');
        }
    }
    text
}

fn median(values: impl Iterator<Item = u64>) -> u64 {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_phase_with_medians_over_seeds() {
        let record = |phase: &str, ns: u64, aborts: u64| -> Record {
            serde_json::from_value(serde_json::json!({
                "schema": "", "engine": "kvm", "phase": phase, "ns": ns,
                "config": {"mode": "", "backing": "anonymous", "memory": 65536, "vcpus": 2,
                           "seed": 0, "iteration": 0},
                "counters": {"guest_aborts": aborts, "DC CIVAC": 5, "DC ZVA": 9},
            }))
            .unwrap()
        };
        let records = [
            record("create", 3_000_000, 30),
            record("create", 1_000_000, 10),
            record("create", 2_000_000, 20),
            record("update", 7_500, 1),
        ];

        let table = table(&records);

        let lines: Vec<Vec<&str>> = table
            .lines()
            .map(|l| l.split_whitespace().collect())
            .collect();
        assert_eq!(lines.len(), 4);
        assert_eq!(lines[2], ["create", "2.000", "20", "5", "0", "0"]);
        assert_eq!(lines[3], ["update", "0.007", "1", "5", "0", "0"]);
    }
}
