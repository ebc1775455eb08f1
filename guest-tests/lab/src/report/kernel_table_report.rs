// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Report of `granule lab boot`: what the page tables of each kernel cost, by memory.

use std::{collections::BTreeSet, fmt::Write};

use granule_report::render::{BarGroup, bar_chart, group_digits, page};
use granule_types::units::{Bytes, Nanoseconds, pluralize};

use crate::{
    error::LabError,
    host::costs::CostTable,
    jobs::{JobResults, run_directory::RunDirectory},
    kernel::image::PAGING_FUNCTION,
    options::BootMatrix,
    report::{
        FailedJob, RunInfo, RunStatus,
        count_table::{
            Records, failure_text, failures, html, markdown, places, rows, write_records,
        },
        publish,
        table_figures::{BootRecord, COUNT_COLUMNS},
        tlb_figures::LoadWalks,
    },
};

/// Records or error messages of all boots: `[job][kernel]`.
type Boots = Records<BootRecord>;

/// Headings of the columns before the counts.
const NAME_COLUMNS: [&str; 2] = ["boot", "kernel"];
const MEMORY_COLUMNS: [&str; 5] =
    ["MemTotal kB", "MemFree kB", "PageTables kB", "linear tables kB", "dump"];

/// Report in both formats, and the status of the run.
struct Report {
    text: String,
    html: String,
    status: RunStatus,
}

/// Publishes the report, and writes the records of each kernel. A failed boot fails the run, and a
/// kernel whose linear map differs from that of the first one.
pub fn report(
    run_directory: &RunDirectory,
    run: RunInfo<'_>,
    results: JobResults,
    (matrix, costs): (&BootMatrix, Option<&CostTable>),
) -> Result<RunStatus, LabError> {
    let boots: Boots = write_records(run_directory, run, results, |job, outcome| {
        BootRecord::from_outcome(job, outcome, costs)
    })?;
    let report = Report::new(run, &boots, (matrix, costs));
    publish(run_directory, &report.text, &report.html)?;
    Ok(report.status)
}

impl Report {
    fn new(
        run: RunInfo<'_>,
        boots: &Boots,
        (matrix, costs): (&BootMatrix, Option<&CostTable>),
    ) -> Self {
        let changes = dump_changes(run, boots);
        let failures = failures(run, boots);
        let is_refused = !changes.is_empty() && !matrix.accept_dump_change;
        let status = match failures.is_empty() && !is_refused {
            true => RunStatus::Passed,
            false => RunStatus::Failed,
        };
        let columns = Columns { has_guest: matrix.guest.is_some(), has_model: costs.is_some() };
        let (costs_head, memory_head) = (columns.cost_headings(), memory_headings());
        let tables = [
            (
                format!("{PAGING_FUNCTION}()"),
                costs_head.clone(),
                rows(run, boots, |boot| columns.costs(boot)),
            ),
            ("Per GiB".to_owned(), costs_head, columns.slopes(run, boots)),
            ("Memory".to_owned(), memory_head, rows(run, boots, memory_cells)),
        ];
        let tables = tables.into_iter().chain(walks_table(run, boots, matrix));
        let tables: Vec<Table> = tables.filter(|(_, _, rows)| !rows.is_empty()).collect();
        let remarks = remarks(costs, matrix);
        let mut text = String::new();
        for (title, head, rows) in &tables {
            text += &format!("{title}\n\n{}\n", markdown(head, rows));
        }
        for remark in remarks.iter().chain(&changes) {
            text += &format!("{remark}\n");
        }
        text += &failure_text(&failures);
        let html = page_of(run, boots, (&tables, &remarks, &changes), (&failures, status));
        Self { text, html, status }
    }
}

/// Columns of a report.
struct Columns {
    has_guest: bool,
    has_model: bool,
}

impl Columns {
    /// Returns the number of columns of counts: only a guest has aborts.
    const fn counts(&self) -> usize {
        COUNT_COLUMNS.len() - if self.has_guest { 0 } else { 1 }
    }

    fn cost_headings(&self) -> Vec<String> {
        let counts = COUNT_COLUMNS.iter().take(self.counts()).map(|(heading, _)| *heading);
        let model = self.has_model.then_some("model ms");
        NAME_COLUMNS.into_iter().chain(counts).chain(model).map(str::to_owned).collect()
    }

    fn costs(&self, record: &BootRecord) -> Vec<String> {
        let counts = record.counts().into_iter().take(self.counts());
        let counts = counts.map(|count| group_digits(&count.to_string()));
        let model = self.has_model.then(|| record.model_ns.map_or("–".to_owned(), milliseconds));
        counts.chain(model).collect()
    }

    /// Returns a row for each kernel and value of `rodata` with two sizes of memory.
    fn slopes(&self, run: RunInfo<'_>, boots: &Boots) -> Vec<Vec<String>> {
        let values: BTreeSet<_> =
            run.jobs.iter().filter_map(|job| Some(job.work.measured_boot()?.rodata)).collect();
        let mut rows = Vec::new();
        for rodata in values {
            for (index, kernel) in run.kernels.iter().enumerate() {
                let of_kernel = boots.iter().filter_map(|boots| boots[index].as_ref().ok());
                let records: Vec<_> = of_kernel.filter(|boot| boot.rodata == rodata).collect();
                let slope = |figure: &dyn Fn(&BootRecord) -> f64| {
                    let gib = |boot: &&BootRecord| boot.memory.0 as f64 / (1 << 30) as f64;
                    slope(&records.iter().map(|boot| (gib(boot), figure(boot))).collect::<Vec<_>>())
                };
                let counts = (0..self.counts())
                    .map(|column| Some(rounded(slope(&|boot| boot.counts()[column] as f64)?)));
                let nanoseconds = |boot: &BootRecord| boot.model_ns.map_or(0.0, |ns| ns.0 as f64);
                let model = self
                    .has_model
                    .then(|| slope(&nanoseconds).map(|ns| format!("{:.3}", ns / 1e6)));
                let Some(cells) = counts.chain(model).collect::<Option<Vec<_>>>() else { continue };
                rows.push([vec![format!("rodata-{rodata}"), kernel.name.clone()], cells].concat());
            }
        }
        rows
    }
}

/// Returns the slope of the line of least squares; `None` if all `x` are equal.
fn slope(points: &[(f64, f64)]) -> Option<f64> {
    let count = points.len() as f64;
    let mean = |value: fn(&(f64, f64)) -> f64| points.iter().map(value).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    let products: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    (spread > 0.0).then(|| products / spread)
}

/// Formats a slope without decimals.
fn rounded(slope: f64) -> String {
    let digits = group_digits(&format!("{:.0}", slope.abs()));
    if slope <= -0.5 { format!("-{digits}") } else { digits }
}

fn memory_headings() -> Vec<String> {
    NAME_COLUMNS.into_iter().chain(MEMORY_COLUMNS).map(str::to_owned).collect()
}

fn memory_cells(record: &BootRecord) -> Vec<String> {
    let tables = &record.tables;
    let sizes = [
        Some(tables.mem_total),
        Some(tables.mem_free),
        Some(tables.page_tables),
        tables.linear_tables,
    ];
    let kibibytes = |size: Bytes| group_digits(&(size.0 >> 10).to_string());
    let sizes = sizes.into_iter().map(|size| size.map_or("–".to_owned(), kibibytes));
    let hash = tables.dump_sha256.as_deref().map_or("–", |hash| hash.get(..12).unwrap_or(hash));
    sizes.chain([hash.to_owned()]).collect()
}

/// Formats nanoseconds in milliseconds.
fn milliseconds(ns: Nanoseconds) -> String {
    format!("{:.3}", ns.0 as f64 / 1e6)
}

fn remarks(costs: Option<&CostTable>, matrix: &BootMatrix) -> Vec<String> {
    let mut remarks = vec![format!(
        "Counts of one call of {PAGING_FUNCTION}(){}; dump: SHA-256 of the linear map in the \
         kernel's dump of its tables.",
        if matrix.guest.is_some() { " in the guest, with the host's work for it" } else { "" }
    )];
    remarks.extend(costs.map(|costs| {
        format!("model ms: the counts by the costs of {}, no measured time.", costs.machine())
    }));
    remarks.extend(matrix.tlb_model().map(|model| {
        format!(
            "Walks: data accesses that miss a model of the TLBs ({}), whose copies differ in the \
             leaves of the linear map; counts, no measured time.",
            model.sizes
        )
    }));
    remarks
}

/// Returns the table of walks, if TLBs are modelled.
fn walks_table(run: RunInfo<'_>, boots: &Boots, matrix: &BootMatrix) -> Option<Table> {
    let model = matrix.tlb_model()?;
    let rows = places(run, boots).flat_map(|(job, kernel, boot)| {
        let loads = boot.as_ref().map_or(&[][..], |boot| &boot.loads);
        let row =
            |load: &LoadWalks| [vec![job.to_owned(), kernel.to_owned()], load.cells()].concat();
        loads.iter().map(row).collect::<Vec<_>>()
    });
    let names = NAME_COLUMNS.into_iter().map(str::to_owned);
    let headings = names.chain(LoadWalks::headings(&model)).collect();
    Some(("TLB walks".to_owned(), headings, rows.collect()))
}

/// Returns the number of boots whose linear map is compared with that of the first kernel.
fn compared_dumps(boots: &Boots) -> usize {
    let has_dump = |boot: &&Result<BootRecord, String>| {
        boot.as_ref().is_ok_and(|boot| boot.tables.dump.is_some())
    };
    let with_dump = boots.iter().filter(|boots| boots.first().as_ref().is_some_and(has_dump));
    with_dump.map(|boots| boots.iter().skip(1).filter(has_dump).count()).sum()
}

/// Returns a sentence for each boot whose linear map differs from that of the first kernel.
fn dump_changes(run: RunInfo<'_>, boots: &Boots) -> Vec<String> {
    let mut changes = Vec::new();
    for (job, boots) in run.jobs.iter().zip(boots) {
        let dump = |boot: &Result<BootRecord, String>| boot.as_ref().ok()?.tables.dump.clone();
        let Some(first) = boots.first().and_then(dump) else { continue };
        for (kernel, boot) in run.kernels.iter().zip(boots).skip(1) {
            let Some(other) = dump(boot).filter(|other| *other != first) else { continue };
            let mut lines = first.lines().zip(other.lines());
            let differ = lines.find(|(one, other)| one != other);
            let (one, other) = differ.unwrap_or(("its last line", "another number of lines"));
            changes.push(format!(
                "{}: the linear map of '{}' differs from that of '{}': '{}' instead of '{}'",
                job.name,
                kernel.name,
                run.kernels[0].name,
                other.trim(),
                one.trim()
            ));
        }
    }
    changes
}

type Table = (String, Vec<String>, Vec<Vec<String>>);

fn page_of(
    run: RunInfo<'_>,
    boots: &Boots,
    (tables, remarks, changes): (&[Table], &[String], &[String]),
    (failures, status): (&[FailedJob], RunStatus),
) -> String {
    let all = pluralize(places(run, boots).count(), "boot");
    let dumps = match (compared_dumps(boots), changes.len()) {
        (0, _) => "no linear map was compared".to_owned(),
        (_, 0) => "no linear map differs".to_owned(),
        (_, count) => format!("{} of the linear map", pluralize(count, "difference")),
    };
    let class = if status == RunStatus::Passed { "" } else { "regression" };
    let words = format!("{all}, {} failed; {dumps}.", failures.len());
    let mut body = page::verdict(class, &words);
    let items: String = remarks
        .iter()
        .chain(changes)
        .map(|remark| format!("<li>{}</li>\n", page::escape_html(remark)))
        .collect();
    let _ = write!(body, "<ul>\n{items}</ul>\n");
    let charts = charts(run, boots);
    if !charts.is_empty() {
        let _ = write!(body, "<h2>By memory</h2>\n<div class=\"charts\">\n{charts}</div>\n");
    }
    for (title, head, rows) in tables {
        // Writing to a String cannot fail.
        let _ = write!(body, "<h2>{title}</h2>\n{}", html(head, rows));
    }
    run.page("Kernel page tables", body, failures)
}

/// Returns a chart for each column of counts, with a lane for each boot and a bar for each kernel.
fn charts(run: RunInfo<'_>, boots: &Boots) -> String {
    let chart = |(column, (heading, _)): (usize, &(&'static str, _))| {
        let lanes = run.jobs.iter().zip(boots).map(|(job, boots)| {
            let bars = run.kernels.iter().zip(boots).filter_map(|(kernel, boot)| {
                let count = boot.as_ref().ok()?.counts()[column];
                let text = format!("{}: {}", kernel.name, group_digits(&count.to_string()));
                Some((count as f64, text))
            });
            BarGroup { name: job.name.clone(), bars: bars.collect() }
        });
        let lanes: Vec<_> = lanes.filter(|lane| !lane.bars.is_empty()).collect();
        bar_chart(heading, &format!("of one call of {PAGING_FUNCTION}()"), &lanes)
    };
    COUNT_COLUMNS.iter().enumerate().filter_map(chart).collect()
}

#[cfg(test)]
mod tests {
    use granule_report::render::browser::check_page;

    use super::*;
    use crate::{
        jobs::matrix::{self, tests::options},
        kernel::Kernel,
        options::Workload,
        report::table_figures::tests::record,
        values::PageSize,
    };

    const DUMP: &str = "0x0-0x1000 4K PTE RW\n0x1000-0x2000 4K PTE RO\n";

    /// Returns the report on two kernels and two sizes, of the second kernel with this dump.
    fn report_with(dump: &str, line: &str) -> Report {
        let options = options(line);
        let Workload::Boot(matrix) = &options.workload else { panic!("{line}") };
        let jobs = &matrix::jobs(&options, PageSize::Kib4, &[]);
        let kernels =
            ["base", "series"].map(|name| Kernel::placeholder(name.to_owned(), "Image".into()));
        let run = RunInfo { kernels: &kernels, jobs, emulator: "QEMU 7.2" };
        let boots = [4, 16].map(|gib| {
            let memory = Bytes::gib(gib);
            vec![Ok(record(memory, 1000 * gib + 7, DUMP)), Ok(record(memory, 1, dump))]
        });
        Report::new(run, &boots.to_vec(), (matrix, None))
    }

    #[test]
    fn the_report_has_every_count_and_its_slope() {
        let report = report_with(DUMP, "boot");

        let text = &report.text;
        assert!(
            text.contains("| boot-16G-rodata-full | base | 128,056 | 0 | 3 | 16,008 |"),
            "{text}"
        );
        assert!(text.contains("| rodata-full | base | 8,000 | 0 | 0 | 1,000 |"), "{text}");
        assert!(
            text.contains("| boot-4G-rodata-full | series | 4,194,304 | 4,194,304 | 16 |"),
            "{text}"
        );
        assert!(!text.contains("aborts") && !text.contains("model"), "{text}");
        assert_eq!(report.status, RunStatus::Passed);
        assert!(report.html.contains("<b>TLBI broadcast</b>"));
        assert!(report.html.contains("4 boots, 0 failed; no linear map differs."));
    }

    #[test]
    fn another_linear_map_is_an_error_unless_it_is_accepted() {
        let dump = DUMP.replace("RO", "RW");
        let refused = report_with(&dump, "boot");
        let accepted = report_with(&dump, "boot --accept-dump-change");

        let sentence = "boot-4G-rodata-full: the linear map of 'series' differs from that of 'base': \
                        '0x1000-0x2000 4K PTE RW' instead of '0x1000-0x2000 4K PTE RO'";
        assert!(refused.text.contains(sentence), "{}", refused.text);
        assert_eq!(refused.status, RunStatus::Failed);
        assert!(accepted.text.contains(sentence));
        assert_eq!(accepted.status, RunStatus::Passed);
    }

    #[test]
    fn the_slope_is_that_of_least_squares() {
        assert_eq!(slope(&[(1.0, 5.0), (2.0, 7.0), (3.0, 9.0)]), Some(2.0));
        assert_eq!(slope(&[(0.0, 0.0), (1.0, 0.0), (2.0, 3.0)]), Some(1.5));
        assert_eq!(slope(&[(4.0, 1.0)]), None);
        assert_eq!([-1234.0, -0.2, 123.4].map(rounded), ["-1,234", "0", "123"]);
    }

    #[test]
    #[ignore = "requires Chromium; scripts/test runs it if that is installed"]
    fn in_chromium_the_kernel_table_report_is_legible() {
        check_page(&report_with("other", "boot").html, 3);
    }
}
