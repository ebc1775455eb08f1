// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Report of guest boots: the figures of each boot on each kernel.

use std::fmt::Write;

use granule_report::render::{Lane, page::escaped};
use granule_types::units::counted;

use crate::{
    error::{LabError, with_causes},
    jobs::{
        job_queue::JobResults, planned_job::PlannedJob, records::NO_BOOT,
        run_directory::RunDirectory,
    },
    report::{
        boot_figures::{BootFigures, millions},
        html::{Chart, Failure, RunInfo, Table},
        output::{RunStatus, publish},
    },
    shell::Shell,
};

/// Headings before the figures.
const NAMES: [&str; 2] = ["guest", "kernel"];
/// Number of figures in the first table of the HTML report.
const FIRST_TABLE: usize = 7;

/// Figures or error message of one boot.
type Boot = Result<BootFigures, String>;
/// Boots of all jobs: `[job][kernel]`.
type Boots = Vec<Vec<Boot>>;

/// Publishes the report. A failed boot fails the run.
pub fn report(
    shell: Shell,
    run_directory: &RunDirectory,
    run: RunInfo<'_>,
    results: JobResults,
) -> Result<RunStatus, LabError> {
    if shell.is_dry() {
        return Ok(RunStatus::Passed);
    }
    let mut columns: Vec<_> = results.into_iter().map(Vec::into_iter).collect();
    let mut boots_of = |job: &PlannedJob| {
        let boots = columns.iter_mut().map(|column| match column.next().flatten() {
            Some(Ok(outcome)) => {
                BootFigures::of(job, &outcome).map_err(|error| with_causes(&error))
            }
            Some(Err(error)) => Err(with_causes(&error)),
            None => Err(NO_BOOT.to_owned()),
        });
        boots.collect()
    };
    let boots: Boots = run.jobs.iter().map(&mut boots_of).collect();
    let (table, status) = table(run, &boots);
    publish(run_directory, &table, &html(run, &boots))?;
    Ok(status)
}

/// Returns the table in Markdown with the failures, and the status of the run.
fn table(run: RunInfo<'_>, boots: &Boots) -> (String, RunStatus) {
    let mut status = RunStatus::Passed;
    let mut table = format!(
        "| {} | {} |\n|---|---|{}\n",
        NAMES.join(" | "),
        BootFigures::HEADINGS.join(" | "),
        "--:|".repeat(BootFigures::HEADINGS.len())
    );
    let mut failures = String::new();
    for (job, boots) in run.jobs.iter().zip(boots) {
        for (kernel, boot) in run.kernels.iter().zip(boots) {
            let (job, kernel) = (&job.name, &kernel.name);
            // Writing to a String cannot fail.
            let _ = match boot {
                Ok(figures) => {
                    let cells = figures.cells().join(" | ");
                    writeln!(table, "| {job} | {kernel} | {cells} |")
                }
                Err(error) => {
                    status = RunStatus::Failed;
                    writeln!(failures, "\n{job} on {kernel}: {error}")
                }
            };
        }
    }
    (table + &failures, status)
}

/// Returns the report as HTML.
fn html(run: RunInfo<'_>, boots: &Boots) -> String {
    let (mut costs, mut memory) = (Vec::new(), Vec::new());
    let mut failures: Vec<Failure> = Vec::new();
    for (job, boots) in run.jobs.iter().zip(boots) {
        let first = boots.first().and_then(|boot| boot.as_ref().ok());
        for (at, (kernel, boot)) in run.kernels.iter().zip(boots).enumerate() {
            let names = [escaped(&job.name), escaped(&kernel.name)];
            match boot {
                Ok(figures) => {
                    let cells = cells_with_ratio(figures, first.filter(|_| at > 0));
                    let (cost, rest) = cells.split_at(FIRST_TABLE);
                    costs.push([&names[..], cost].concat());
                    memory.push([&names[..], rest, &[levels(figures)]].concat());
                }
                Err(error) => {
                    failures.push((format!("{} on {}", job.name, kernel.name), error.clone()));
                    let failed = "<span class=\"tag regression\">failed</span>".to_owned();
                    let mut cells = [&names[..], &[failed]].concat();
                    cells.resize(NAMES.len() + FIRST_TABLE, String::new());
                    costs.push(cells);
                }
            }
        }
    }
    let all = counted(boots.iter().map(Vec::len).sum::<usize>(), "boot");
    let (class, verdict) = match failures.len() {
        0 => ("", format!("{all}; every guest booted and powered off.")),
        failed => ("regression", format!("{failed} of {all} failed.")),
    };
    let (first, rest) = BootFigures::HEADINGS.split_at(FIRST_TABLE);
    let tables = [
        Table { name: "All boots", head: [&NAMES, first].concat(), rows: costs },
        Table {
            name: "Memory, and faults by level",
            head: [&NAMES, rest, &["faults by level"]].concat(),
            rows: memory,
        },
    ];
    run.guests((class, &verdict), &tables, &charts(run, boots), &failures)
}

fn charts(run: RunInfo<'_>, boots: &Boots) -> [Chart; 4] {
    type Figure = fn(&BootFigures) -> Option<(u64, String)>;
    let charts: [(_, _, Figure); 4] = [
        ("Time to init", "virtual ms from the start", |boot| {
            Some((boot.boot_ns, millions(boot.boot_ns) + " ms"))
        }),
        ("Time to login", "virtual ms from the start", |boot| {
            boot.ready_ns.map(|ns| (ns, millions(ns) + " ms"))
        }),
        ("Faults on memory", "of the whole run", |boot| {
            boot.faults.map(|faults| (faults, faults.to_string()))
        }),
        ("DC CIVAC", "cache lines, host and guest together", |boot| {
            Some((boot.lines, boot.lines.to_string()))
        }),
    ];
    charts.map(|(title, subtitle, figure)| Chart {
        title,
        subtitle,
        lanes: lanes(run, boots, figure),
    })
}

/// Returns a lane for each guest that has this figure on any kernel.
fn lanes(
    run: RunInfo<'_>,
    boots: &Boots,
    figure: fn(&BootFigures) -> Option<(u64, String)>,
) -> Vec<Lane> {
    let lane = |(job, boots): (&PlannedJob, &Vec<Boot>)| {
        let bars: Vec<_> = run
            .kernels
            .iter()
            .zip(boots)
            .filter_map(|(kernel, boot)| {
                let (value, text) = figure(boot.as_ref().ok()?)?;
                Some((value as f64, format!("{}: {text}", kernel.name)))
            })
            .collect();
        (!bars.is_empty()).then(|| Lane { name: job.name.clone(), bars })
    };
    run.jobs.iter().zip(boots).filter_map(lane).collect()
}

/// Returns the cells of a boot, with the ratios to the same guest on the first kernel.
fn cells_with_ratio(figures: &BootFigures, first: Option<&BootFigures>) -> [String; 10] {
    let mut cells = figures.cells();
    if let Some(first) = first {
        for ((cell, own), first) in cells.iter_mut().zip(figures.values()).zip(first.values()) {
            if let (Some(own), Some(first @ 1..)) = (own, first) {
                let ratio = own as f64 / first as f64;
                *cell += &format!(" <small>×{ratio:.3}</small>");
            }
        }
    }
    cells
}

fn levels(figures: &BootFigures) -> String {
    let levels = figures.levels.iter();
    let levels: Vec<_> = levels.map(|(name, count)| format!("{} {count}", escaped(name))).collect();
    levels.join(", ")
}

#[cfg(test)]
mod tests {
    use granule_report::render::browser::look_at;

    use super::*;
    use crate::{
        jobs::{guest_matrix, matrix},
        kernel::Kernel,
        options::{Matrix, Test},
        report::boot_figures::tests::sample,
    };

    /// Returns text, status and HTML of two guests on two kernels with one failed boot.
    fn report_with_failure() -> (String, RunStatus, String) {
        let matrix =
            Matrix { test: Test::Guest, vcpus: vec![1], seeds: 1, ..matrix::tests::matrix() };
        let jobs = &guest_matrix::jobs(&matrix)[..2];
        let kernels =
            ["base", "series"].map(|name| Kernel::planned(name.to_owned(), "Image".into(), None));
        let run = RunInfo { kernels: &kernels, jobs, emulator: "QEMU 7.2" };
        let lost = Err("the guest died\n  | <oops>".to_owned());
        let boots = vec![vec![Ok(sample(100)), Ok(sample(46))], vec![Ok(sample(100)), lost]];

        let (text, status) = table(run, &boots);
        (text, status, html(run, &boots))
    }

    #[test]
    #[ignore = "requires Chromium; scripts/test runs it if that is installed"]
    fn in_chromium_the_guest_boot_report_is_legible() {
        look_at(&report_with_failure().2, 4);
    }

    #[test]
    fn the_html_report_has_every_boot_and_its_figures() {
        let (text, status, page) = report_with_failure();

        for wanted in [
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
            "| &lt;oops&gt;",
            "image, SHA-256",
            "QEMU 7.2 -M virt",
        ] {
            assert!(page.contains(wanted), "{wanted}\n{page}");
        }
        assert!(!page.contains("<script") && !page.contains("http"));
        assert_eq!(status, RunStatus::Failed);
        assert_eq!(text.lines().filter(|line| line.starts_with("| guest-")).count(), 3, "{text}");
        assert!(text.starts_with("| guest | kernel | start M instr. |"));
    }
}
