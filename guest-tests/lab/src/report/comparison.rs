// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Compares the kernels of a run: the last with the first and, with more than two kernels, each
//! with its predecessor. Each comparison may fail the run.

use granule_report::{
    Comparison, ComparisonOptions, ComparisonSet, LabelledSide, command_line, input, render,
};

use crate::{
    error::LabError,
    jobs::run_directory::RunDirectory,
    kernel::Kernel,
    options::{Options, ReportFormat},
    report::{RunStatus, print, publish_html},
};

pub fn print_commands(run_directory: &RunDirectory, kernels: &[Kernel]) -> Result<(), LabError> {
    for pair in pairs(kernels) {
        let [before, after] = pair.map(|kernel| run_directory.results_path(kernel));
        print(&format!("granule compare {} {}\n", before.display(), after.display()))?;
    }
    Ok(())
}

/// Compares the kernels; `functions` is the text below the comparison. The report names the pairs that
/// cannot be compared, each of which fails the run.
///
/// # Errors
/// No pair can be compared.
pub fn compare(
    options: &Options,
    run_directory: &RunDirectory,
    kernels: &[Kernel],
    functions: &str,
) -> Result<RunStatus, LabError> {
    let kernel_options = &options.common.kernels;
    let settings = ComparisonOptions {
        // Commits and images may be of different versions, which the report then names.
        is_forced: kernel_options.git.is_some() || !kernel_options.images.is_empty(),
        ..options.report.comparison()
    };
    let mut status = RunStatus::Passed;
    let mut report = summary(run_directory, kernels)?;
    let mut markdown = report.clone();
    let mut html = None;
    let (mut compared, mut refused) = (0, None);
    let pairs = pairs(kernels);
    let whole_series = pairs.len().saturating_sub(1);
    for (index, pair) in pairs.into_iter().enumerate() {
        let [before, after] = pair.map(|kernel| run_directory.results_path(kernel));
        if !before.is_file() || !after.is_file() {
            continue;
        }
        let labels = Some(pair.map(|kernel| kernel.name.clone()));
        let settings = ComparisonOptions { labels, ..settings.clone() };
        let (before, after) = (input::read_side(&[before])?, input::read_side(&[after])?);
        let comparison = match Comparison::new(&before, &after, &settings) {
            Ok(comparison) => comparison,
            Err(error) => {
                let [before, after] = pair.map(|kernel| &kernel.name);
                let line = format!("{before} and {after} are not compared: {error}\n\n");
                report.push_str(&line);
                markdown.push_str(&line);
                status = RunStatus::Failed;
                refused.get_or_insert(error);
                continue;
            }
        };
        compared += 1;
        report.push_str(&format!("{}\n", render::text(&comparison)));
        markdown.push_str(&format!("{}\n", render::markdown(&comparison)));
        let page = render::html(&comparison);
        if options.report.fail_on.is_failure(&comparison) {
            status = RunStatus::Failed;
        }
        if index == whole_series {
            html = Some(page);
        } else {
            run_directory.write_html(Some(pair[1]), &page)?;
        }
    }
    report.push_str(functions);
    if !functions.is_empty() {
        markdown.push_str(&format!("```text\n{}```\n", functions.trim_start()));
    }
    run_directory.write_report(&report)?;
    print(&match options.report.format {
        ReportFormat::Cover if kernels.len() > 1 && refused.is_none() => {
            cover(run_directory, kernels, &settings)?
        }
        ReportFormat::Markdown => markdown,
        _ => report,
    })?;
    if html.is_none() {
        html = last_kernel_html(run_directory, kernels)?;
    }
    if let Some(html) = html {
        publish_html(run_directory, &html)?;
    }
    match refused {
        Some(error) if compared == 0 => Err(error.into()),
        _ => Ok(status),
    }
}

/// Returns the text for a cover letter: the subject of each kernel, and the comparison.
fn cover(
    run_directory: &RunDirectory,
    kernels: &[Kernel],
    settings: &ComparisonOptions,
) -> Result<String, LabError> {
    let title = |kernel: &Kernel| Some((kernel.name.clone(), kernel.title.clone()?));
    let titles: Vec<_> = kernels.iter().filter_map(title).collect();
    let set = ComparisonSet::new(sides(run_directory, kernels)?, settings)?;
    Ok(render::cover(&set, &titles, &[command_line()]))
}

/// Reads the results of each kernel that has some.
fn sides(run_directory: &RunDirectory, kernels: &[Kernel]) -> Result<Vec<LabelledSide>, LabError> {
    let with_results = kernels.iter().filter(|kernel| run_directory.results_path(kernel).is_file());
    let side = |kernel: &Kernel| {
        let samples = input::read_side(&[run_directory.results_path(kernel)])?;
        Ok(LabelledSide { label: kernel.name.clone(), samples })
    };
    with_results.map(side).collect()
}

/// Returns the pairs of kernels to compare, ending with the first and the last kernel.
fn pairs(kernels: &[Kernel]) -> Vec<[&Kernel; 2]> {
    let mut pairs: Vec<[&Kernel; 2]> = Vec::new();
    if kernels.len() > 2 {
        pairs.extend(kernels.array_windows().map(|[before, after]| [before, after]));
    }
    if let [first, .., last] = kernels {
        pairs.push([first, last]);
    }
    pairs
}

/// Returns the summary table for one kernel, or for more than two.
fn summary(run_directory: &RunDirectory, kernels: &[Kernel]) -> Result<String, LabError> {
    Ok(match kernels {
        [kernel] => render::phase_table(&input::read_side(&[run_directory.results_path(kernel)])?),
        [_, _, _, ..] => render::kernel_table(&sides(run_directory, kernels)?),
        _ => String::new(),
    })
}

/// Returns the HTML report of the last kernel with results, for runs without a comparison.
fn last_kernel_html(
    run_directory: &RunDirectory,
    kernels: &[Kernel],
) -> Result<Option<String>, LabError> {
    let mut kernels = kernels.iter().rev();
    let Some(kernel) = kernels.find(|kernel| run_directory.results_path(kernel).is_file()) else {
        return Ok(None);
    };
    let samples = input::read_side(&[run_directory.results_path(kernel)])?;
    let command = command_line();
    Ok(Some(render::single_kernel(&samples, &kernel.name, Some(&command))))
}

#[cfg(test)]
mod tests {
    use granule_report::results::record_lines;
    use granule_types::record::Record;

    use super::*;
    use crate::{jobs::matrix::tests::options, options::RunPath, shell::Shell};

    const COMMITS: &str = "lab --git tree a..b --each";

    /// Compares three kernels with these times of `create`, and returns status and report. A time of 0
    /// is that of another configuration.
    fn compare_three(line: &str, times: [u64; 3]) -> (Result<RunStatus, LabError>, String) {
        let directory = tempfile::tempdir().unwrap();
        let kernels = ["before", "1-0123", "after"]
            .map(|name| Kernel::placeholder(name.to_owned(), "Image".into()));
        let run_directory =
            RunDirectory::create(Shell::new(false), &RunPath::Given(directory.path().into()))
                .unwrap();
        run_directory.add_kernels(Shell::new(false), &kernels).unwrap();
        for (kernel, time) in kernels.iter().zip(times) {
            let record = |seed: u64| -> Record {
                serde_json::from_value(serde_json::json!({
                    "schema": granule_types::record::SCHEMA, "engine": "kvm", "phase": "create",
                    "ns": time + seed,
                    "config": {"mode": "", "backing": "anonymous", "memory": 65536,
                               "vcpus": if time == 0 { 2 } else { 1 }, "seed": seed,
                               "iteration": 0},
                }))
                .unwrap()
            };
            let records: Vec<Record> = (0..10).map(record).collect();
            let text = record_lines(&records).unwrap();
            std::fs::write(run_directory.results_path(kernel), text).unwrap();
        }
        let status = compare(&options(line), &run_directory, &kernels, "\nfunctions\n");
        (status, std::fs::read_to_string(directory.path().join("comparison.txt")).unwrap())
    }

    #[test]
    fn a_regression_of_one_commit_fails_the_run_although_a_later_one_compensates_it() {
        let status = |times| compare_three(COMMITS, times).0.unwrap();

        assert_eq!(status([1_000_000, 2_000_000, 1_000_000]), RunStatus::Failed);
        assert_eq!(status([1_000_000; 3]), RunStatus::Passed);
    }

    #[test]
    fn images_are_compared_although_their_versions_are_unknown() {
        let (status, report) = compare_three("lab --image a --image b", [1_000_000; 3]);

        assert_eq!(status.unwrap(), RunStatus::Passed, "{report}");
    }

    #[test]
    fn a_pair_that_cannot_be_compared_leaves_the_other_comparisons() {
        let (status, report) = compare_three(COMMITS, [1_000_000, 0, 1_000_000]);
        let (none, _) = compare_three("lab", [1_000_000; 3]);

        assert_eq!(status.unwrap(), RunStatus::Failed);
        assert!(report.contains("before and 1-0123 are not compared: no phase"), "{report}");
        assert!(report.contains("create"), "{report}");
        assert!(matches!(none.unwrap_err(), LabError::Compare(_)));
    }

    #[test]
    fn functions_are_below_the_comparison() {
        let (_, report) = compare_three(COMMITS, [1_000_000; 3]);

        assert!(report.ends_with("\n\nfunctions\n"), "{report}");
    }

    #[test]
    fn the_html_report_of_one_kernel_has_its_phases() {
        let directory = tempfile::tempdir().unwrap();
        let kernels =
            ["base", "series"].map(|name| Kernel::placeholder(name.to_owned(), "Image".into()));
        let run_directory =
            RunDirectory::create(Shell::new(false), &RunPath::Given(directory.path().into()))
                .unwrap();
        run_directory.add_kernels(Shell::new(false), &kernels).unwrap();
        assert_eq!(last_kernel_html(&run_directory, &kernels).unwrap(), None, "nothing ran");
        let record: Record = serde_json::from_value(serde_json::json!({
            "schema": granule_types::record::SCHEMA, "engine": "kvm", "phase": "create", "ns": 1_234_567,
            "config": {"mode": "", "backing": "anonymous", "memory": 65536, "vcpus": 1,
                       "seed": 0, "iteration": 0},
            "counters": {"DC CIVAC": 5},
        }))
        .unwrap();
        std::fs::write(run_directory.results_path(&kernels[0]), record_lines(&[record]).unwrap())
            .unwrap();

        let page = last_kernel_html(&run_directory, &kernels).unwrap().unwrap();
        publish_html(&run_directory, &page).unwrap();

        let page = std::fs::read_to_string(directory.path().join("report.html")).unwrap();
        assert!(page.contains("Figures of base") && page.contains("1.235 ms"), "{page}");
        assert!(page.contains("anonymous, 64K, 1 vCPU, by kvm; 1 run"), "{page}");
    }
}
