// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! HTML reports of selftests and of guest boots, built from the components of a comparison's report.

use std::fmt::Write;

use granule_report::{
    command_line,
    render::{Lane, bars, page},
    series_line,
};
use granule_types::units::counted;

use crate::{jobs::planned_job::PlannedJob, kernel::Kernel};

/// Kernels, jobs and emulator of a run.
#[derive(Debug, Clone, Copy)]
pub struct RunInfo<'a> {
    pub kernels: &'a [Kernel],
    pub jobs: &'a [PlannedJob],
    /// Version of the emulator.
    pub emulator: &'a str,
}

/// A chart of one figure of all boots.
#[derive(Debug)]
pub struct Chart {
    pub title: &'static str,
    pub subtitle: &'static str,
    /// One lane for each guest.
    pub lanes: Vec<Lane>,
}

/// A table with HTML cells.
#[derive(Debug)]
pub struct Table {
    pub name: &'static str,
    pub head: Vec<&'static str>,
    pub rows: Vec<Vec<String>>,
}

/// A failure: its job and kernel, and the message.
pub type Failure = (String, String);

impl RunInfo<'_> {
    /// Returns the report of selftests, with a row of HTML cells for each test.
    pub fn selftests(
        self,
        class: &str,
        summary: &[String],
        rows: &[Vec<String>],
        failures: &[Failure],
    ) -> String {
        let mut head = vec!["selftest"];
        head.extend(self.kernels.iter().map(|kernel| kernel.name.as_str()));
        head.push("");
        let mut out: String = summary.iter().map(|line| page::verdict(class, line)).collect();
        out.push_str("<h2>All selftests</h2>\n");
        out.push_str(&page::table(&head, rows));
        self.finish(&mut out, failures);
        page::page(&format!("KVM selftests: {}", self.names()), &out)
    }

    /// Returns the report of guest boots: verdict and its class, tables and charts.
    pub fn guests(
        self,
        (class, verdict): (&str, &str),
        tables: &[Table],
        charts: &[Chart],
        failures: &[Failure],
    ) -> String {
        let mut out = page::verdict(class, verdict);
        out.push_str(
            "<ul>\n<li>time: virtual, one nanosecond an instruction of any CPU; not hardware time</li>\n<li>×: ratio to the first kernel</li>\n</ul>\n",
        );
        let charts =
            charts.iter().filter_map(|chart| bars(chart.title, chart.subtitle, &chart.lanes));
        let charts: String = charts.collect();
        // Writing to a String cannot fail.
        if !charts.is_empty() {
            let _ = write!(out, "<h2>At a glance</h2>\n<div class=\"charts\">\n{charts}</div>\n");
        }
        for Table { name, head, rows } in tables.iter().filter(|table| !table.rows.is_empty()) {
            let _ = write!(out, "<h2>{name}</h2>\n{}", page::table(head, rows));
        }
        self.finish(&mut out, failures);
        page::page(&format!("Boots of a guest: {}", self.names()), &out)
    }

    /// Returns `series against base`.
    fn names(self) -> String {
        let names: Vec<&str> = self.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
        match names.as_slice() {
            [first, rest @ ..] if !rest.is_empty() => {
                format!("{} against {first}", rest.join(", "))
            }
            names => names.join(", "),
        }
    }

    /// Appends failures and provenance.
    fn finish(self, out: &mut String, failures: &[Failure]) {
        if !failures.is_empty() {
            out.push_str("<h2>Failures</h2>\n");
        }
        for (place, message) in failures {
            let (first, rest) = message.split_once('\n').unwrap_or((message, ""));
            let summary = format!("{place}: {first}");
            match rest.trim() {
                "" => {
                    let _ = writeln!(out, "<p>{}</p>", page::escaped(&summary));
                }
                rest => out.push_str(&page::details(&summary, rest)),
            }
        }
        let columns: Vec<&str> = self.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
        let of = |fact: &dyn Fn(&Kernel) -> Option<String>| self.kernels.iter().map(fact).collect();
        let emulator = format!("{} {}", self.emulator, self.hardware());
        let rows = [
            ("series", of(&|kernel| series_line(kernel.series.as_deref()))),
            ("image, SHA-256", of(&|kernel| Some(kernel.image_sha256.clone()))),
            ("emulator", of(&|_| Some(emulator.clone()))),
        ];
        out.push_str("<h2>Provenance</h2>\n");
        out.push_str(&page::facts(&columns, &rows));
        out.push_str(&page::made_by(&command_line()));
    }

    /// Describes the emulated hardware, which may differ between jobs.
    fn hardware(self) -> String {
        let mut kinds: Vec<String> = Vec::new();
        for job in self.jobs {
            let kind = job.hardware.describe();
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        match kinds.as_slice() {
            [first, rest @ ..] if !rest.is_empty() => {
                format!("{first} (and {} of other sizes)", counted(rest.len(), "host"))
            }
            kinds => kinds.concat(),
        }
    }
}
