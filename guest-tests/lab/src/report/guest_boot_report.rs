// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Report of guest boots: the figures of each boot on each kernel.

use std::fmt::Write;

use granule_report::render::{BarGroup, bar_chart, page};
use granule_types::units::pluralize;

use crate::{
    error::{LabError, with_causes},
    jobs::{JobResults, KERNEL_DOES_NOT_BOOT, run_directory::RunDirectory},
    report::{
        FailedJob, RunInfo, RunStatus,
        boot_figures::{BootColumn, BootFigures},
        count_table::{Records, failure_text, failures, markdown, rows},
        publish,
    },
};

/// Headings of the columns before the figures.
const NAME_COLUMNS: [&str; 2] = ["guest", "kernel"];
/// Number of figures in the first table of the HTML report.
const FIRST_TABLE_FIGURES: usize = 7;

/// Figures of all boots.
type Boots = Records<BootFigures>;

/// Publishes the report. A failed boot fails the run.
pub fn report(
    run_directory: &RunDirectory,
    run: RunInfo<'_>,
    results: JobResults,
) -> Result<RunStatus, LabError> {
    let boots = run.group_by_job(results, |job, result| match result {
        Some(Ok(outcome)) => BootFigures::from_outcome(job, &outcome).map_err(|e| with_causes(&e)),
        Some(Err(error)) => Err(with_causes(&error)),
        None => Err(KERNEL_DOES_NOT_BOOT.to_owned()),
    });
    let (table, status) = table(run, &boots);
    publish(run_directory, &table, &html(run, &boots))?;
    Ok(status)
}

/// Returns the columns that a guest of the run has.
fn columns(boots: &Boots) -> Vec<BootColumn> {
    let mut figures = boots.iter().flatten().filter_map(|boot| boot.as_ref().ok());
    let is_paging_measured = figures.any(|figures| figures.value(BootColumn::PagingInit).is_some());
    let columns = BootColumn::ALL.into_iter();
    columns.filter(|column| is_paging_measured || !column.is_of_paging()).collect()
}

fn headings(columns: &[BootColumn]) -> Vec<&'static str> {
    columns.iter().map(|column| column.heading()).collect()
}

/// Returns the Markdown table with the failures below it, and the status of the run.
fn table(run: RunInfo<'_>, boots: &Boots) -> (String, RunStatus) {
    let columns = columns(boots);
    let head = [&NAME_COLUMNS[..], &headings(&columns)].concat();
    let head: Vec<_> = head.into_iter().map(str::to_owned).collect();
    let cells = |figures: &BootFigures| columns.iter().map(|one| figures.cell(*one)).collect();
    let failures = failures(run, boots);
    let status = match failures.is_empty() {
        true => RunStatus::Passed,
        false => RunStatus::Failed,
    };
    (markdown(&head, &rows(run, boots, cells)) + &failure_text(&failures), status)
}

fn html(run: RunInfo<'_>, boots: &Boots) -> String {
    let (mut costs, mut memory) = (Vec::new(), Vec::new());
    let mut failures: Vec<FailedJob> = Vec::new();
    let columns = columns(boots);
    for (job, boots) in run.jobs.iter().zip(boots) {
        let first = boots.first().and_then(|boot| boot.as_ref().ok());
        for (at, (kernel, boot)) in run.kernels.iter().zip(boots).enumerate() {
            let names = [page::escape_html(&job.name), page::escape_html(&kernel.name)];
            match boot {
                Ok(figures) => {
                    let first = first.filter(|_| at > 0);
                    let cell = |column: &BootColumn| cell_with_ratio(*column, figures, first);
                    let cells: Vec<_> = columns.iter().map(cell).collect();
                    let (cost, rest) = cells.split_at(FIRST_TABLE_FIGURES);
                    costs.push([&names[..], cost].concat());
                    memory.push([&names[..], rest, &[format_levels(figures)]].concat());
                }
                Err(error) => {
                    failures.push((format!("{} on {}", job.name, kernel.name), error.clone()));
                    let failed = "<span class=\"tag regression\">failed</span>".to_owned();
                    let mut cells = [&names[..], &[failed]].concat();
                    cells.resize(NAME_COLUMNS.len() + FIRST_TABLE_FIGURES, String::new());
                    costs.push(cells);
                }
            }
        }
    }
    let all = pluralize(boots.iter().map(Vec::len).sum::<usize>(), "boot");
    let (class, verdict) = match failures.len() {
        0 => ("", format!("{all}; every guest booted and powered off.")),
        failed => ("regression", format!("{failed} of {all} failed.")),
    };
    let mut body = page::verdict(class, &verdict);
    body.push_str(
        "<ul>\n<li>time: virtual, one nanosecond an instruction of any CPU; not hardware time</li>\n\
         <li>×: ratio to the first kernel</li>\n</ul>\n",
    );
    let charts = charts(run, boots);
    if !charts.is_empty() {
        let _ = write!(body, "<h2>At a glance</h2>\n<div class=\"charts\">\n{charts}</div>\n");
    }
    let headings = headings(&columns);
    let (first, rest) = headings.split_at(FIRST_TABLE_FIGURES);
    for (name, head, rows) in [
        ("All boots", [&NAME_COLUMNS, first].concat(), costs),
        (
            "Cache, TLB, memory, and faults by level",
            [&NAME_COLUMNS, rest, &["faults by level"]].concat(),
            memory,
        ),
    ] {
        if !rows.is_empty() {
            let _ = write!(body, "<h2>{name}</h2>\n{}", page::table(&head, &rows));
        }
    }
    run.page("Boots of a guest", body, &failures)
}

/// Returns a chart for each figure, with a lane for each guest.
fn charts(run: RunInfo<'_>, boots: &Boots) -> String {
    let charts = [
        ("Time to init", "virtual ms from the start", BootColumn::TimeToInit, " ms"),
        ("Time to login", "virtual ms from the start", BootColumn::TimeToLogin, " ms"),
        ("Faults on memory", "of the whole run", BootColumn::Faults, ""),
        ("DC CIVAC", "cache lines, host and guest together", BootColumn::DcCivac, ""),
    ];
    let chart = |(title, subtitle, column, unit)| {
        let lanes = run.jobs.iter().zip(boots).filter_map(|(job, boots)| {
            let bars: Vec<_> = run
                .kernels
                .iter()
                .zip(boots)
                .filter_map(|(kernel, boot)| {
                    let figures = boot.as_ref().ok()?;
                    let value = figures.value(column)?;
                    let text = format!("{}: {}{unit}", kernel.name, figures.cell(column));
                    Some((value as f64, text))
                })
                .collect();
            (!bars.is_empty()).then(|| BarGroup { name: job.name.clone(), bars })
        });
        bar_chart(title, subtitle, &lanes.collect::<Vec<_>>())
    };
    charts.into_iter().filter_map(chart).collect()
}

/// Formats a figure of a boot, for some columns with the ratio to `first`, the same guest's boot on the
/// first kernel.
fn cell_with_ratio(
    column: BootColumn,
    figures: &BootFigures,
    first: Option<&BootFigures>,
) -> String {
    let first = first.filter(|_| column.has_ratio()).and_then(|first| first.value(column));
    let cell = figures.cell(column);
    match (figures.value(column), first) {
        (Some(own), Some(first @ 1..)) => {
            format!("{cell} <small>×{:.3}</small>", own as f64 / first as f64)
        }
        _ => cell,
    }
}

fn format_levels(figures: &BootFigures) -> String {
    let levels = figures.faults_by_level.iter();
    let levels: Vec<_> =
        levels.map(|(name, count)| format!("{} {count}", page::escape_html(name))).collect();
    levels.join(", ")
}

#[cfg(test)]
mod tests {
    use granule_report::render::browser::check_page;

    use super::*;
    use crate::{
        jobs::matrix::{self, tests::options},
        kernel::Kernel,
        report::boot_figures::tests::sample,
        values::PageSize,
    };

    /// Returns text, status and HTML of a report on two guests and two kernels, with a failed boot.
    fn report_with_failure() -> (String, RunStatus, String) {
        let jobs = &matrix::jobs(&options("guest -s 4k -s 2m -v 1 --seeds 1"), PageSize::Kib4, &[]);
        let kernels =
            ["base", "series"].map(|name| Kernel::placeholder(name.to_owned(), "Image".into()));
        let run = RunInfo { kernels: &kernels, jobs, emulator: "QEMU 7.2" };
        let failure = Err("the guest died\n  | <oops>".to_owned());
        let boots = vec![vec![Ok(sample(100)), Ok(sample(46))], vec![Ok(sample(100)), failure]];

        let (text, status) = table(run, &boots);
        (text, status, html(run, &boots))
    }

    #[test]
    #[ignore = "requires Chromium; scripts/test runs it if that is installed"]
    fn in_chromium_the_guest_boot_report_is_legible() {
        check_page(&report_with_failure().2, 4);
    }

    #[test]
    fn the_html_report_has_every_boot_and_its_figures() {
        let (text, status, page) = report_with_failure();

        for expected in [
            "Boots of a guest: series against base",
            "<p class=\"verdict regression\">1 of 4 boots failed.</p>",
            "<td>306.102</td>",
            "<td>54 <small>×0.500</small></td>",
            "translation.level2 14, translation.level3 47",
            "<th>faults by level</th>",
            "80K",
            "<b>Time to init</b>",
            "<b>Time to login</b>",
            "data-marks=\"3\"",
            "on series: the guest died</summary>",
            "| &#60;oops&#62;",
            "image, SHA-256",
            "QEMU 7.2 -M virt",
        ] {
            assert!(page.contains(expected), "{expected}\n{page}");
        }
        assert!(!page.contains("<script") && !page.contains("http"));
        assert_eq!(status, RunStatus::Failed);
        assert_eq!(text.lines().filter(|line| line.starts_with("| guest-")).count(), 3, "{text}");
        assert!(text.starts_with("| guest | kernel | start M instr. |"));
    }
}
