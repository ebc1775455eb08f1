// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables without a comparison: the phases of one kernel, or a row for each kernel.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::number::UNKNOWN;
use crate::{
    comparison::{Group, LabelledSide, groups, groups_of_sides},
    sample::{AnyPhase, COUNTER_SUMS, Sample},
    stats::Spread,
};

/// Returns a table of each configuration of one kernel as text, with medians over runs. All rounds
/// of a migration are one phase.
pub fn phase_table(samples: &[Sample]) -> String {
    let mut text = String::new();
    for group in groups(samples, true) {
        let has_elapsed = group.samples.iter().any(|sample| sample.elapsed_ns.is_some());
        let times = ["work ms", "elapsed ms"].into_iter().take(1 + usize::from(has_elapsed));
        let headings = times.chain(COUNTER_SUMS.iter().map(|(heading, _)| *heading));
        let headings: String = headings.map(|heading| format!(" {heading:>12}")).collect();
        // Writing into a String cannot fail.
        let _ = writeln!(text, "{}\n  {:12}{headings}", group.title(), "phase");
        for phase in phases(&group) {
            let group = group.of_phases(|other| other.without_round() == phase);
            let mut cells = vec![milliseconds(work(&group))];
            if has_elapsed {
                cells.push(milliseconds(elapsed(&group)));
            }
            cells.extend(COUNTER_SUMS.iter().map(|(_, belongs)| {
                let counts = group.samples.iter().filter_map(|one| one.counter_sum(*belongs));
                count(Spread::new(counts.map(|count| count as f64)))
            }));
            let cells: String = cells.iter().map(|cell| format!(" {cell:>12}")).collect();
            let _ = writeln!(text, "  {phase:12}{cells}");
        }
    }
    text
}

/// Returns a Markdown table of each configuration with a row for each kernel: elapsed time and (in
/// parentheses) work of each phase, and the counts of all phases. Figures are medians over runs.
pub fn kernel_table(sides: &[LabelledSide]) -> String {
    let mut text = "Elapsed time (work)\n\n".to_owned();
    for groups in groups_of_sides(sides, true) {
        let shown: BTreeSet<AnyPhase> = groups.iter().flatten().flat_map(phases).collect();
        let headings: String = shown
            .iter()
            .map(|phase| format!(" {phase} ms |"))
            .chain(COUNTER_SUMS.iter().map(|(heading, _)| format!(" {heading} |")))
            .collect();
        let rule = "---:|".repeat(shown.len() + COUNTER_SUMS.len());
        let title = groups.iter().flatten().next().map(Group::title).unwrap_or_default();
        let _ = writeln!(text, "{title}\n\n| kernel |{headings}\n|---|{rule}");
        for (side, group) in sides.iter().zip(&groups) {
            let cells: String = match group {
                Some(group) => row_cells(group, &shown).map(|cell| format!(" {cell} |")).collect(),
                None => " - |".repeat(shown.len() + COUNTER_SUMS.len()),
            };
            let _ = writeln!(text, "| {} |{cells}", side.label);
        }
        text.push('\n');
    }
    text
}

fn row_cells(group: &Group, shown: &BTreeSet<AnyPhase>) -> impl Iterator<Item = String> {
    let times = shown.iter().map(|phase| {
        let group = group.of_phases(|other| other.without_round() == *phase);
        match (elapsed(&group), work(&group)) {
            (elapsed @ Some(_), work) => {
                format!("{} ({})", milliseconds(elapsed), milliseconds(work))
            }
            (None, work @ Some(_)) => format!("({})", milliseconds(work)),
            (None, None) => UNKNOWN.to_owned(),
        }
    });
    let sums = COUNTER_SUMS
        .iter()
        .map(|(_, belongs)| count(group.spread_of_sums(|sample| sample.counter_sum(*belongs))));
    times.chain(sums)
}

fn phases(group: &Group) -> BTreeSet<AnyPhase> {
    group.phases().into_iter().map(AnyPhase::without_round).collect()
}

fn work(group: &Group) -> Option<Spread> {
    Spread::new(group.samples.iter().map(|sample| sample.ns))
}

fn elapsed(group: &Group) -> Option<Spread> {
    Spread::new(group.samples.iter().filter_map(|sample| sample.elapsed_ns))
}

fn milliseconds(times: Option<Spread>) -> String {
    times.map_or_else(|| UNKNOWN.to_owned(), |times| format!("{:.3}", times.median / 1e6))
}

fn count(counts: Option<Spread>) -> String {
    counts.map_or_else(|| UNKNOWN.to_owned(), |counts| format!("{:.0}", counts.median))
}

#[cfg(test)]
mod tests {
    use granule_types::{phase::Phase, record::Record, units::Nanoseconds};

    use super::*;
    use crate::{sample::samples, tests::record};

    fn of_phase(phase: Phase, seed: u64, us: u64, aborts: u64) -> Record {
        let mut record = Record { phase, ns: Nanoseconds(us * 1000), ..record() };
        record.elapsed_ns = Some(Nanoseconds(us * 500));
        record.config.seed = seed;
        let counters = [("guest_aborts", aborts), ("DC CIVAC", 5), ("DC ZVA", 9)];
        record.counters = counters.map(|(name, count)| (name.to_owned(), count)).into();
        record
    }

    #[test]
    fn each_phase_is_one_line_of_medians_over_seeds() {
        let mut records: Vec<Record> =
            (1..=3).map(|seed| of_phase(Phase::Create, seed, seed * 1000, seed * 10)).collect();
        records.push(of_phase(Phase::Update, 0, 8, 1));
        for round in [1, 2] {
            let record = of_phase(Phase::Round, 0, 1000 * u64::from(round), 1);
            records.push(Record { round: Some(round), ..record });
        }

        let table = phase_table(&samples(&records));

        let lines: Vec<Vec<&str>> = table.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(
            lines[2..],
            [
                ["create", "2.000", "1.000", "20", "5", "0", "0"],
                ["update", "0.008", "0.004", "1", "5", "0", "0"],
                ["round", "1.500", "0.750", "1", "5", "0", "0"],
            ]
        );
    }

    #[test]
    fn each_kernel_is_one_row_with_the_counts_of_all_phases() {
        let side = |label: &str, aborts| LabelledSide {
            label: label.to_owned(),
            samples: samples(&[
                of_phase(Phase::Create, 0, 1000, aborts),
                of_phase(Phase::Update, 0, 2000, 1),
            ]),
        };

        let table = kernel_table(&[side("base", 10), side("one-1", 4)]);

        for row in [
            "| base | 0.500 (1.000) | 1.000 (2.000) | 11 | 10 | 0 | 0 |",
            "| one-1 | 0.500 (1.000) | 1.000 (2.000) | 5 | 10 | 0 | 0 |",
        ] {
            assert!(table.contains(row), "{table}");
        }
    }
}
