// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Instructions of kernel functions in each phase: a table of those that differ most between the
//! first and the last kernel, and a file with all of them for each kernel.
//!
//! The counts of all schedules of a load are added up, as are those of repeated phases. A job that failed
//! on any kernel is left out on all of them.

use std::collections::BTreeMap;

use granule_report::render::group_digits;
use serde::Serialize;

use crate::{
    check::SymbolTable,
    error::LabError,
    jobs::{
        JobResult, JobResults,
        functions::{FunctionCounts, Functions, functions_of_phases},
        run_directory::RunDirectory,
    },
    kernel::Kernel,
    report::RunInfo,
    shell::{self, Shell},
};

/// Number of functions in a table.
const ROWS: usize = 20;
/// Name of the row with the sum of the functions that are not listed.
const REMAINDER: &str = "(remaining functions)";

/// A load and its phase: the name of the job without the seed, and the name of the phase.
type Place = (String, String);
/// Functions of each load and phase, in order.
type Profile = Vec<(Place, Functions)>;

/// Line of `functions.jsonl`.
#[derive(Serialize)]
struct Line<'a> {
    load: &'a str,
    phase: &'a str,
    functions: &'a Functions,
}

/// Writes `functions.jsonl` of each kernel, and returns the tables as text. `shows` selects phases by
/// name.
///
/// # Errors
/// A file cannot be read or written.
pub fn publish(
    run_directory: &RunDirectory,
    run: RunInfo<'_>,
    results: &JobResults,
    shows: impl Fn(&str) -> bool,
) -> Result<String, LabError> {
    let has_records = |result: &JobResult, job| matches!(result, Some(Ok(outcome)) if outcome.records(job).is_ok());
    let is_complete = |index: &usize| {
        results.iter().all(|results| has_records(&results[*index], &run.jobs[*index]))
    };
    let complete: Vec<usize> = (0..run.jobs.len()).filter(is_complete).collect();
    let mut profiles = Vec::new();
    for (kernel, results) in run.kernels.iter().zip(results) {
        let map = kernel.system_map.as_deref().map(shell::read).transpose()?.unwrap_or_default();
        let symbols = SymbolTable::parse(&String::from_utf8_lossy(&map));
        let mut profile = Profile::new();
        for &index in &complete {
            let Some(Ok(outcome)) = &results[index] else { continue };
            let load = run.jobs[index].cost_class();
            for (phase, functions) in functions_of_phases(&outcome.segments, &symbols) {
                add(&mut profile, (load.to_owned(), phase), functions);
            }
        }
        let mut lines = String::new();
        for ((load, phase), functions) in &profile {
            lines += &(serde_json::to_string(&Line { load, phase, functions })? + "\n");
        }
        Shell::new(false).write(&run_directory.functions_path(kernel), lines)?;
        profiles.push(profile);
    }
    Ok(render(run.kernels, &profiles, shows))
}

fn find<'a>(profile: &'a Profile, place: &Place) -> Option<&'a Functions> {
    profile.iter().find(|(other, _)| other == place).map(|(_, functions)| functions)
}

fn add(profile: &mut Profile, place: Place, functions: Functions) {
    match profile.iter_mut().find(|(other, _)| *other == place) {
        Some((_, sums)) => {
            functions.into_iter().for_each(|(name, own)| *sums.entry(name).or_default() += own);
        }
        None => profile.push((place, functions)),
    }
}

/// Returns a table for each place. All kernels have the same ones, as they ran the same jobs.
fn render(kernels: &[Kernel], profiles: &[Profile], shows: impl Fn(&str) -> bool) -> String {
    let mut text = String::new();
    for (place, _) in profiles.first().into_iter().flatten() {
        let of_kernel = |profile| find(profile, place);
        let Some(columns) = profiles.iter().map(of_kernel).collect::<Option<Vec<_>>>() else {
            continue;
        };
        let (load, phase) = place;
        if shows(phase) {
            text += &format!("\n{load}, {phase}: instructions (calls) of functions\n\n");
            text += &table(kernels, &columns);
        }
    }
    text
}

/// Formats the functions of each kernel. Several kernels are sorted by the change from the first to the
/// last one, a single one by instructions.
fn table(kernels: &[Kernel], columns: &[&Functions]) -> String {
    let mut rows: BTreeMap<&str, Vec<FunctionCounts>> = BTreeMap::new();
    for (index, functions) in columns.iter().enumerate() {
        for (name, counts) in *functions {
            let none = || vec![FunctionCounts::default(); columns.len()];
            rows.entry(name).or_insert_with(none)[index] = *counts;
        }
    }
    let mut rows: Vec<_> = rows.into_iter().collect();
    let weight = |counts: &[FunctionCounts]| match counts {
        [own] => own.instructions,
        [first, .., last] => first.instructions.abs_diff(last.instructions),
        [] => 0,
    };
    rows.sort_by_key(|(name, counts)| (std::cmp::Reverse(weight(counts)), *name));
    let sum = |rows: &[(&str, Vec<FunctionCounts>)]| {
        let of_kernel = |index: usize| {
            let instructions = rows.iter().map(|(_, counts)| counts[index].instructions).sum();
            FunctionCounts { calls: 0, instructions }
        };
        (0..columns.len()).map(of_kernel).collect::<Vec<_>>()
    };
    let all = sum(&rows);
    let hidden = rows.split_off(rows.len().min(ROWS));
    if !hidden.is_empty() {
        rows.push((REMAINDER, sum(&hidden)));
    }
    rows.push(("all code", all));
    format_rows(kernels, &rows)
}

fn format_rows(kernels: &[Kernel], rows: &[(&str, Vec<FunctionCounts>)]) -> String {
    let mut head: Vec<String> = vec!["function".to_owned()];
    head.extend(kernels.iter().map(|kernel| kernel.name.clone()));
    head.extend((kernels.len() > 1).then(|| "change".to_owned()));
    let cells = rows.iter().map(|(name, counts)| {
        let mut cells = vec![(*name).to_owned()];
        cells.extend(counts.iter().map(|own| {
            let instructions = group_digits(&own.instructions.to_string());
            match own.calls {
                0 => instructions,
                calls => format!("{instructions} ({})", group_digits(&calls.to_string())),
            }
        }));
        if let [first, .., last] = counts.as_slice() {
            let change = last.instructions.abs_diff(first.instructions);
            let sign = if last.instructions < first.instructions { "-" } else { "+" };
            cells.push(format!("{sign}{}", group_digits(&change.to_string())));
        }
        cells
    });
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(cells).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..rows[0].len()).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in &rows {
        let mut line = format!("  {:<1$}", row[0], widths[0]);
        for (cell, width) in row.iter().zip(&widths).skip(1) {
            line += &format!("  {cell:>width$}");
        }
        text += &(line + "\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn functions(counts: &[(&str, u64, u64)]) -> Functions {
        let counts = counts.iter().map(|(name, calls, instructions)| {
            let own = FunctionCounts { calls: *calls, instructions: *instructions };
            ((*name).to_owned(), own)
        });
        counts.collect()
    }

    fn kernels(names: &[&str]) -> Vec<Kernel> {
        names.iter().map(|name| Kernel::placeholder((*name).to_owned(), "Image".into())).collect()
    }

    fn profile(phase: &str, functions: Functions) -> Profile {
        vec![(("thp-64M-4v".to_owned(), phase.to_owned()), functions)]
    }

    #[test]
    fn functions_are_sorted_by_their_change() {
        let before = functions(&[("f", 2, 1000), ("g", 1, 5), ("gone", 1, 100)]);
        let after = functions(&[("f", 2, 1001), ("g", 3, 2005)]);

        let text = render(
            &kernels(&["base", "series"]),
            &[profile("create", before), profile("create", after)],
            |_| true,
        );

        let expected = "\nthp-64M-4v, create: instructions (calls) of functions\n\n  \
                        function       base     series  change\n  \
                        g             5 (1)  2,005 (3)  +2,000\n  \
                        gone        100 (1)          0    -100\n  \
                        f         1,000 (2)  1,001 (2)      +1\n  \
                        all code      1,105      3,006  +1,901\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn functions_of_one_kernel_are_sorted_by_instructions_and_limited() {
        let many: Vec<_> = (0..ROWS as u64 + 2).map(|at| (format!("f{at:02}"), 1, at)).collect();
        let many: Vec<_> = many.iter().map(|(name, c, i)| (name.as_str(), *c, *i)).collect();

        let text = render(&kernels(&["base"]), &[profile("update", functions(&many))], |_| true);

        let lines: Vec<_> = text.lines().skip(3).collect();
        assert!(!text.contains("change"));
        assert!(lines[1].contains("f21") && lines[ROWS].contains("f02"), "{text}");
        assert!(lines[ROWS + 1].contains(REMAINDER) && lines[ROWS + 1].ends_with(" 1"), "{text}");
        assert!(lines[ROWS + 2].ends_with("231"), "{text}");
    }

    #[test]
    fn only_selected_phases_are_shown() {
        let profiles = [profile("create", functions(&[("f", 1, 1)]))];

        assert_eq!(render(&kernels(&["base"]), &profiles, |phase| phase == "update"), "");
    }

    #[test]
    fn counts_of_schedules_are_added_up() {
        let mut sums = profile("create", functions(&[("f", 1, 10)]));

        let place = sums[0].0.clone();
        add(&mut sums, place, functions(&[("f", 2, 5), ("g", 1, 1)]));

        assert_eq!(sums, profile("create", functions(&[("f", 3, 15), ("g", 1, 1)])));
    }
}
