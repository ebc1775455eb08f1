// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Pages of runs that compare no times: selftests by their verdict, guests by what their boots cost.
//! They look as a comparison's page does and are made of the same parts.

use std::fmt::Write;

use super::{kernel::Kernel, matrix::PlannedJob};
use granule_report::{
    command_line,
    render::{Lane, bars, page},
    series_line,
};
use granule_types::units::counted;

/// What a run was made of.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    pub kernels: &'a [Kernel],
    pub jobs: &'a [PlannedJob],
    /// The emulator's version.
    pub emulator: &'a str,
}

/// A figure that a boot has, for a chart of all of them.
#[derive(Debug)]
pub struct Chart {
    pub title: &'static str,
    pub words: &'static str,
    /// A lane for each guest.
    pub lanes: Vec<Lane>,
}

/// Figures, their cells HTML.
#[derive(Debug)]
pub struct Table {
    pub name: &'static str,
    pub head: Vec<&'static str>,
    pub rows: Vec<Vec<String>>,
}

/// What went wrong: where, and what was said.
pub type Remark = (String, String);

impl Run<'_> {
    /// The verdicts of selftests: a row for each test, its cells HTML.
    pub fn selftests(
        self,
        class: &str,
        summary: &[String],
        rows: &[Vec<String>],
        remarks: &[Remark],
    ) -> String {
        let mut head = vec!["selftest"];
        head.extend(self.kernels.iter().map(|kernel| kernel.name.as_str()));
        head.push("");
        let mut out: String = summary
            .iter()
            .map(|line| page::verdict(class, line))
            .collect();
        out.push_str("<h2>Every verdict</h2>\n");
        out.push_str(&page::table(&head, rows));
        self.end(&mut out, remarks);
        page::page(&format!("KVM selftests: {}", self.names()), &out)
    }

    /// What the boots of guests cost: how it came out with its class, charts and tables.
    pub fn guests(
        self,
        (class, told): (&str, &str),
        tables: &[Table],
        charts: &[Chart],
        remarks: &[Remark],
    ) -> String {
        let mut out = page::verdict(class, told);
        out.push_str(
            "<ul>\n<li>time: virtual: the work of all CPUs together as the emulator counts it, not \
             hardware time</li>\n<li>×: the figure divided by the first kernel's</li>\n</ul>\n",
        );
        let drawn = charts
            .iter()
            .filter_map(|one| bars(one.title, one.words, &one.lanes));
        let drawn: String = drawn.collect();
        // Writing into a String cannot fail.
        if !drawn.is_empty() {
            let _ = write!(
                out,
                "<h2>At a glance</h2>\n<div class=\"charts\">\n{drawn}</div>\n"
            );
        }
        for Table { name, head, rows } in tables.iter().filter(|table| !table.rows.is_empty()) {
            let _ = write!(out, "<h2>{name}</h2>\n{}", page::table(head, rows));
        }
        self.end(&mut out, remarks);
        page::page(&format!("Boots of a guest: {}", self.names()), &out)
    }

    /// `series against base`.
    fn names(self) -> String {
        let names: Vec<&str> = self
            .kernels
            .iter()
            .map(|kernel| kernel.name.as_str())
            .collect();
        match names.as_slice() {
            [first, rest @ ..] if !rest.is_empty() => {
                format!("{} against {first}", rest.join(", "))
            }
            names => names.join(", "),
        }
    }

    /// What failed, and where all comes from.
    fn end(self, out: &mut String, remarks: &[Remark]) {
        if !remarks.is_empty() {
            out.push_str("<h2>What went wrong</h2>\n");
        }
        for (place, said) in remarks {
            let (first, rest) = said.split_once('\n').unwrap_or((said, ""));
            let summary = format!("{place}: {first}");
            match rest.trim() {
                "" => {
                    let _ = writeln!(out, "<p>{}</p>", page::escaped(&summary));
                }
                rest => out.push_str(&page::details(&summary, rest)),
            }
        }
        let columns: Vec<&str> = self
            .kernels
            .iter()
            .map(|kernel| kernel.name.as_str())
            .collect();
        let of = |fact: &dyn Fn(&Kernel) -> Option<String>| self.kernels.iter().map(fact).collect();
        let emulator = format!("{} {}", self.emulator, self.hardware());
        let rows = [
            (
                "series",
                of(&|kernel| series_line(kernel.series.as_deref())),
            ),
            (
                "image, SHA-256",
                of(&|kernel| Some(kernel.image_sha256.clone())),
            ),
            ("emulator", of(&|_| Some(emulator.clone()))),
        ];
        out.push_str("<h2>Where it comes from</h2>\n");
        out.push_str(&page::facts(&columns, &rows));
        out.push_str(&page::made_by(&command_line()));
    }

    /// The emulated hardware; jobs may differ in it.
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
                format!(
                    "{first} (and {} of other sizes)",
                    counted(rest.len(), "host")
                )
            }
            kinds => kinds.concat(),
        }
    }
}
