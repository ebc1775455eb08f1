// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Report of `granule lab boot`: what the page tables of each kernel cost, by memory.
//!
//! ```text
//! kernel_table_report ─┬─ boot_columns   figures of a boot and their growth
//!                      ├─ linear_maps    comparison of the kernels' dumps
//!                      └─ table_figures  records
//! ```

use std::fmt::Write;

use granule_report::render::{BarGroup, bar_chart, group_digits, page};
use granule_types::units::{Bytes, pluralize};

use crate::{
    error::LabError,
    host::costs::CostTable,
    jobs::{JobResults, run_directory::RunDirectory},
    kernel::image::PAGING_FUNCTION,
    options::BootMatrix,
    report::{
        FailedJob, RunInfo, RunStatus,
        boot_columns::{Figure, growth_rows},
        count_table::{
            Records, failure_text, failures, html, markdown, places, rows, write_records,
        },
        linear_maps::LinearMaps,
        publish,
        table_figures::BootRecord,
        tlb_figures::LoadWalks,
    },
};

/// Records or error messages of all boots: `[job][kernel]`.
type Boots = Records<BootRecord>;

/// Headings of the columns before the figures.
const NAME_COLUMNS: [&str; 2] = ["boot", "kernel"];
const MEMORY_COLUMNS: [&str; 5] =
    ["MemTotal kB", "MemFree kB", "PageTables kB", "linear tables kB", "dump"];

/// Table with its title.
struct Table {
    title: String,
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Returns a table whose first columns are those of names.
    fn new(
        title: impl Into<String>,
        columns: impl IntoIterator<Item = impl Into<String>>,
        rows: Vec<Vec<String>>,
    ) -> Self {
        let names = NAME_COLUMNS.into_iter().map(str::to_owned);
        let head = names.chain(columns.into_iter().map(Into::into)).collect();
        Self { title: title.into(), head, rows }
    }
}

/// Contents of the report, and the status of the run.
struct Report {
    figures: Vec<Figure>,
    tables: Vec<Table>,
    remarks: Vec<String>,
    maps: LinearMaps,
    failures: Vec<FailedJob>,
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
    publish(run_directory, &report.text(), &report.html(run, &boots))?;
    Ok(report.status)
}

impl Report {
    fn new(
        run: RunInfo<'_>,
        boots: &Boots,
        (matrix, costs): (&BootMatrix, Option<&CostTable>),
    ) -> Self {
        let maps = LinearMaps::compare(run, boots);
        let failures = failures(run, boots);
        let is_refused = !maps.changes.is_empty() && !matrix.accept_dump_change;
        let status = match failures.is_empty() && !is_refused {
            true => RunStatus::Passed,
            false => RunStatus::Failed,
        };
        let figures = Figure::of_report(matrix.guest.is_some(), costs.is_some());
        let headings = || figures.iter().map(|figure| figure.heading());
        let cells = |boot: &BootRecord| figures.iter().map(|figure| figure.cell(boot)).collect();
        let tables = [
            Table::new(format!("{PAGING_FUNCTION}()"), headings(), rows(run, boots, cells)),
            Table::new("Per GiB", headings(), growth_rows(&figures, run, boots)),
            Table::new("Memory", MEMORY_COLUMNS, rows(run, boots, memory_cells)),
        ];
        let tables = tables.into_iter().chain(walks_table(run, boots, matrix));
        let tables = tables.filter(|table| !table.rows.is_empty()).collect();
        let remarks = remarks(costs, matrix);
        Self { figures, tables, remarks, maps, failures, status }
    }

    /// Returns the remarks and the differences of linear maps.
    fn sentences(&self) -> impl Iterator<Item = &String> {
        self.remarks.iter().chain(&self.maps.changes)
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for Table { title, head, rows } in &self.tables {
            text += &format!("{title}\n\n{}\n", markdown(head, rows));
        }
        for sentence in self.sentences() {
            text += &format!("{sentence}\n");
        }
        text + &failure_text(&self.failures)
    }

    fn html(&self, run: RunInfo<'_>, boots: &Boots) -> String {
        let all = pluralize(places(run, boots).count(), "boot");
        let dumps = match (self.maps.compared, self.maps.changes.len()) {
            (0, _) => "no linear map was compared".to_owned(),
            (_, 0) => "no linear map differs".to_owned(),
            (_, count) => format!("{} of the linear map", pluralize(count, "difference")),
        };
        let class = if self.status == RunStatus::Passed { "" } else { "regression" };
        let words = format!("{all}, {} failed; {dumps}.", self.failures.len());
        let mut body = page::verdict(class, &words);
        let item = |sentence: &String| format!("<li>{}</li>\n", page::escape_html(sentence));
        let items: String = self.sentences().map(item).collect();
        // Writing to a String cannot fail.
        let _ = write!(body, "<ul>\n{items}</ul>\n");
        let charts = self.charts(run, boots);
        if !charts.is_empty() {
            let _ = write!(body, "<h2>By memory</h2>\n<div class=\"charts\">\n{charts}</div>\n");
        }
        for Table { title, head, rows } in &self.tables {
            let _ = write!(body, "<h2>{title}</h2>\n{}", html(head, rows));
        }
        run.page("Kernel page tables", body, &self.failures)
    }

    /// Returns a chart for each count, with a lane for each boot and a bar for each kernel.
    fn charts(&self, run: RunInfo<'_>, boots: &Boots) -> String {
        let counts = self.figures.iter().filter(|figure| matches!(figure, Figure::Count(_)));
        let chart = |figure: &Figure| {
            let lanes = run.jobs.iter().zip(boots).map(|(job, boots)| {
                let bars = run.kernels.iter().zip(boots).filter_map(|(kernel, boot)| {
                    let count = figure.value(boot.as_ref().ok()?)?;
                    Some((count, format!("{}: {}", kernel.name, figure.format(count))))
                });
                BarGroup { name: job.name.clone(), bars: bars.collect() }
            });
            let lanes: Vec<_> = lanes.filter(|lane| !lane.bars.is_empty()).collect();
            let words = format!("of one call of {PAGING_FUNCTION}()");
            bar_chart(figure.heading(), &words, &lanes)
        };
        counts.filter_map(chart).collect()
    }
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
    Some(Table::new("TLB walks", LoadWalks::headings(&model), rows.collect()))
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

    /// Returns text, HTML and status of the report on two kernels and two sizes, of the second kernel
    /// with this dump.
    fn report_with(dump: &str, line: &str) -> (String, String, RunStatus) {
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
        let boots = boots.to_vec();
        let report = Report::new(run, &boots, (matrix, None));
        (report.text(), report.html(run, &boots), report.status)
    }

    #[test]
    fn the_report_has_every_count_and_its_slope() {
        let (text, html, status) = report_with(DUMP, "boot");

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
        assert_eq!(status, RunStatus::Passed);
        assert!(html.contains("<b>TLBI broadcast</b>"));
        assert!(html.contains("4 boots, 0 failed; no linear map differs."));
    }

    #[test]
    fn another_linear_map_is_an_error_unless_it_is_accepted() {
        let dump = DUMP.replace("RO", "RW");
        let (refused, _, refused_status) = report_with(&dump, "boot");
        let (accepted, _, accepted_status) = report_with(&dump, "boot --accept-dump-change");

        let sentence = "boot-4G-rodata-full: the linear map of 'series' differs from that of 'base': \
                        '0x1000-0x2000 4K PTE RW' instead of '0x1000-0x2000 4K PTE RO'";
        assert!(refused.contains(sentence) && accepted.contains(sentence), "{refused}");
        let statuses = (refused_status, accepted_status);
        assert_eq!(statuses, (RunStatus::Failed, RunStatus::Passed));
    }

    #[test]
    #[ignore = "requires Chromium; scripts/test runs it if that is installed"]
    fn in_chromium_the_kernel_table_report_is_legible() {
        check_page(&report_with("other", "boot").1, 3);
    }
}
