// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What boots of guests cost: a table, and a page of it.
//!
//! `granule run` writes its statistics where other tests write results, and [marks](granule_types::mark) the
//! instructions: *start* is from its own start to the guest's first instruction, *to init* from
//! there to the guest's init, *to login* to its login prompt where it has one. Faults and counts of
//! maintenance are those of the whole run, all counts of host and guest together.

use std::{collections::BTreeMap, fmt::Write};

use serde::Deserialize;

use super::{
    LabError, Verdict,
    counts::Segment,
    execute::{JobError, Outcome},
    guest_init, leave,
    matrix::PlannedJob,
    page::{Chart, Remark, Run, Table},
    pool::Outcomes,
    rundir::{RunDir, chain},
    step::Shell,
};
use granule_report::render::{Lane, page::escaped};
use granule_types::{
    mark,
    units::{Bytes, counted},
};

/// What `granule run --stats` says, as far as it is shown here.
#[derive(Debug, Deserialize)]
struct Life {
    ended: String,
    #[serde(default)]
    marks: Vec<(u8, u64)>,
    phases: Vec<Phase>,
}

#[derive(Debug, Deserialize)]
struct Phase {
    name: String,
    ns: u64,
    #[serde(default)]
    faults: BTreeMap<String, u64>,
    #[serde(default)]
    resident: Vec<BTreeMap<u64, u64>>,
    stage2_tables: Option<u64>,
    overhead: Option<u64>,
}

/// What a guest writes to the boot timer when it is ready to be logged in to.
const READY: u8 = 2;

/// A boot's figures; times from the start of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    /// Instructions, as long as a mark tells where they end.
    start_instructions: Option<u64>,
    boot_instructions: Option<u64>,
    boot_ns: u64,
    ready_ns: Option<u64>,
    faults: Option<u64>,
    /// Faults on memory by kind and level, those that occurred.
    levels: BTreeMap<String, u64>,
    lines: u64,
    invalidations: u64,
    tables: Option<u64>,
    resident: u64,
    overhead: Option<u64>,
}

/// What came of each boot, `[job][kernel]`.
type Boots = Vec<Vec<Result<Row, String>>>;

/// Prints what each boot cost and leaves a page of it; a boot that failed is a failure.
///
/// # Errors
/// The table cannot be written.
pub fn judge(
    shell: Shell,
    rundir: &RunDir,
    run: Run<'_>,
    outcomes: Outcomes,
) -> Result<Verdict, LabError> {
    if shell.is_dry() {
        return Ok(Verdict::Fine);
    }
    let mut columns: Vec<_> = outcomes.into_iter().map(Vec::into_iter).collect();
    let mut boot = |job: &PlannedJob| {
        let of_kernel = columns
            .iter_mut()
            .map(|column| match column.next().flatten() {
                Some(Ok(outcome)) => row(job, &outcome).map_err(|error| chain(&error)),
                Some(Err(error)) => Err(chain(&error)),
                None => Err("not run, this kernel does not boot".to_owned()),
            });
        of_kernel.collect()
    };
    let boots: Boots = run.jobs.iter().map(&mut boot).collect();
    let (table, verdict) = table(run, &boots);
    leave(rundir, &table, &page(run, &boots))?;
    Ok(verdict)
}

/// Each boot with its kernel.
fn each<'a>(
    run: Run<'a>,
    boots: &'a Boots,
) -> impl Iterator<Item = (&'a str, &'a str, &'a Result<Row, String>)> {
    run.jobs
        .iter()
        .zip(boots)
        .flat_map(move |(job, of_kernels)| {
            let kernels = run.kernels.iter().zip(of_kernels);
            kernels.map(|(kernel, boot)| (job.name.as_str(), kernel.name.as_str(), boot))
        })
}

/// The table in Markdown, and what went wrong.
fn table(run: Run<'_>, boots: &Boots) -> (String, Verdict) {
    let mut verdict = Verdict::Fine;
    let mut table = format!(
        "| {} |\n|---|---|{}\n",
        HEADING.join(" | "),
        "--:|".repeat(HEADING.len() - 2)
    );
    let mut remarks = String::new();
    for (job, kernel, boot) in each(run, boots) {
        // Writing to a string cannot fail.
        let _ = match boot {
            Ok(row) => writeln!(table, "| {job} | {kernel} | {} |", row.cells().join(" | ")),
            Err(why) => {
                verdict = Verdict::Failed;
                writeln!(remarks, "\n{job} on {kernel}: {why}")
            }
        };
    }
    (table + &remarks, verdict)
}

/// The same as a page.
fn page(run: Run<'_>, boots: &Boots) -> String {
    let (mut costs, mut memory) = (Vec::new(), Vec::new());
    let mut remarks: Vec<Remark> = Vec::new();
    let mut all = 0;
    for (job, of_kernels) in run.jobs.iter().zip(boots) {
        let first = of_kernels.first().and_then(|boot| boot.as_ref().ok());
        for (at, (kernel, boot)) in run.kernels.iter().zip(of_kernels).enumerate() {
            all += 1;
            let names = [escaped(&job.name), escaped(&kernel.name)];
            match boot {
                Ok(row) => {
                    let [cost, rest] = row.cells_beside(first.filter(|_| at > 0));
                    costs.push([&names[..], &cost].concat());
                    memory.push([&names[..], &rest].concat());
                }
                Err(why) => {
                    remarks.push((format!("{} on {}", job.name, kernel.name), why.clone()));
                    let failed = "<span class=\"tag worse\">failed</span>".to_owned();
                    let mut cells = [&names[..], &[failed]].concat();
                    cells.resize(COSTS, String::new());
                    costs.push(cells);
                }
            }
        }
    }
    let all = counted(all, "boot");
    let (class, told) = match remarks.len() {
        0 => (
            "",
            format!("{all}, each up to a guest that works and switches itself off."),
        ),
        failed => ("worse", format!("{failed} of {all} failed.")),
    };
    let table = |name, head: Vec<&'static str>, rows| Table { name, head, rows };
    let mut more = HEADING[..2].to_vec();
    more.extend(&HEADING[COSTS..]);
    more.push("faults by level");
    let tables = [
        table("Every boot", HEADING[..COSTS].to_vec(), costs),
        table("Memory, and faults by level", more, memory),
    ];
    let chart = |title, words, figure: fn(&Row) -> Option<(f64, String)>| Chart {
        title,
        words,
        lanes: lanes(run, boots, figure),
    };
    let charts = [
        chart("Time to init", "virtual ms from the start", |row| {
            Some((row.boot_ns as f64, millions(row.boot_ns) + " ms"))
        }),
        chart("Time to login", "virtual ms from the start", |row| {
            row.ready_ns.map(|ns| (ns as f64, millions(ns) + " ms"))
        }),
        chart("Faults on memory", "of the whole run", |row| {
            row.faults.map(|faults| (faults as f64, faults.to_string()))
        }),
        chart(
            "DC CIVAC",
            "lines cleaned by host and guest together",
            |row| Some((row.lines as f64, row.lines.to_string())),
        ),
    ];
    run.guests((class, &told), &tables, &charts, &remarks)
}

/// A lane for each guest that has this figure on any kernel.
fn lanes(run: Run<'_>, boots: &Boots, figure: fn(&Row) -> Option<(f64, String)>) -> Vec<Lane> {
    let lane = |(job, of_kernels): (&PlannedJob, &Vec<Result<Row, String>>)| {
        let kernels = run.kernels.iter().zip(of_kernels);
        let bars: Vec<_> = kernels
            .filter_map(|(kernel, boot)| {
                let (value, told) = figure(boot.as_ref().ok()?)?;
                Some((value, format!("{}: {told}", kernel.name)))
            })
            .collect();
        (!bars.is_empty()).then(|| Lane {
            name: job.name.clone(),
            bars,
        })
    };
    run.jobs.iter().zip(boots).filter_map(lane).collect()
}

/// Whether an invalidation is the hypervisor's, of one stage-2 entry or of a whole guest.
fn is_of_stage2(name: &str) -> bool {
    let what = name.strip_prefix("TLBI ");
    let kinds = ["IPAS2", "RIPAS2", "VMALLS12"];
    what.is_some_and(|what| kinds.iter().any(|kind| what.starts_with(kind)))
}

const HEADING: [&str; 12] = [
    "guest",
    "kernel",
    "start M instr.",
    "to init M instr.",
    "to init ms",
    "to login ms",
    "memory faults",
    "DC CIVAC",
    "stage-2 TLBI",
    "stage-2 tables",
    "resident",
    "beyond guest memory",
];

/// How many of them stand in a page's first table.
const COSTS: usize = 9;

/// A figure that a boot may have.
type Figure = fn(&Row) -> Option<u64>;

/// Instructions in millions, or nanoseconds in milliseconds.
fn millions(count: u64) -> String {
    format!("{}.{:03}", count / 1_000_000, count / 1_000 % 1_000)
}

impl Row {
    /// Its figures, in the order of the heading.
    fn cells(&self) -> [String; 10] {
        let absent = || "–".to_owned();
        let size = |bytes: Option<u64>| bytes.map_or_else(absent, |n| Bytes(n).to_string());
        [
            self.start_instructions.map_or_else(absent, millions),
            self.boot_instructions.map_or_else(absent, millions),
            millions(self.boot_ns),
            self.ready_ns.map_or_else(absent, millions),
            self.faults.map_or_else(absent, |n| n.to_string()),
            self.lines.to_string(),
            self.invalidations.to_string(),
            size(self.tables),
            Bytes(self.resident).to_string(),
            size(self.overhead),
        ]
    }

    /// The same for a page, those of [`COSTS`] and the rest, with some of them through another
    /// kernel's.
    fn cells_beside(&self, first: Option<&Self>) -> [Vec<String>; 2] {
        let through = |figure: Figure| {
            let (own, first) = (figure(self)?, figure(first?)?);
            (first > 0).then(|| format!(" <small>×{:.3}</small>", own as f64 / first as f64))
        };
        let mut cells = self.cells();
        let beside: [(usize, Figure); 6] = [
            (0, |row| row.start_instructions),
            (1, |row| row.boot_instructions),
            (2, |row| Some(row.boot_ns)),
            (3, |row| row.ready_ns),
            (4, |row| row.faults),
            (5, |row| Some(row.lines)),
        ];
        for (at, figure) in beside {
            cells[at] += &through(figure).unwrap_or_default();
        }
        let (cost, rest) = cells.split_at(COSTS - 2);
        let levels = self
            .levels
            .iter()
            .map(|(name, n)| format!("{} {n}", escaped(name)));
        let levels = levels.collect::<Vec<_>>().join(", ");
        [cost.to_vec(), [rest, &[levels]].concat()]
    }
}

/// The figures of a boot that went well.
fn row(job: &PlannedJob, outcome: &Outcome) -> Result<Row, JobError> {
    outcome.success()?;
    let failed = |what: &str| JobError::Test(what.to_owned(), outcome.last_words());
    if !outcome.stdout.contains(guest_init::WORKS) {
        return Err(failed("does not show a guest that works"));
    }
    let vcpus = job
        .job
        .argv
        .iter()
        .skip_while(|word| *word != "--vcpus")
        .nth(1);
    let said = format!("vcpus {},", vcpus.map_or("", String::as_str));
    if !outcome.stdout.contains(&said) {
        return Err(failed(&format!("does not show a guest with {said}")));
    }
    let life: Life = serde_json::from_slice(outcome.results()).map_err(JobError::Ending)?;
    if life.ended != "off" {
        return Err(failed("does not end with the guest switching itself off"));
    }
    figures(&life, &outcome.segments).ok_or_else(|| failed("has no statistics of a boot"))
}

/// The figures of a life that has a boot in it.
fn figures(life: &Life, segments: &[Segment]) -> Option<Row> {
    let phase = |name: &str| life.phases.iter().find(|phase| phase.name == name);
    let (start, boot, last) = (phase("start")?, phase("boot")?, life.phases.last()?);
    // Each fault is of one access; accesses to devices are no faults of memory.
    let mut levels = BTreeMap::new();
    for (name, count) in life.phases.iter().flat_map(|phase| &phase.faults) {
        if !name.starts_with("by.") && *count > 0 {
            *levels.entry(name.clone()).or_default() += count;
        }
    }
    let accesses = life.phases.iter().flat_map(|phase| &phase.faults);
    let accesses = accesses.filter(|(name, _)| name.starts_with("by."));
    let (by_access, faults) = accesses.fold((false, 0), |(_, sum), (_, n)| (true, sum + n));
    let ready = life.marks.iter().find(|(mark, _)| *mark == READY);
    let ready = ready.map(|(_, ns)| *ns);
    let marks = [mark::FOREIGN, mark::GUEST, mark::GUEST_INIT];
    let whole = segments
        .iter()
        .filter(|segment| marks.contains(&segment.mark));
    let count = |belongs: fn(&str) -> bool| {
        whole
            .clone()
            .flat_map(|segment| &segment.counts)
            .filter(|(name, _)| belongs(name))
            .map(|(_, count)| count)
            .sum()
    };
    let instructions = |mark: u8, until: u8| {
        let at = segments.iter().position(|segment| segment.mark == mark)?;
        segments.get(at + 1).filter(|next| next.mark == until)?;
        segments[at].counts.get("instructions").copied()
    };
    Some(Row {
        start_instructions: instructions(mark::FOREIGN, mark::GUEST),
        boot_instructions: instructions(mark::GUEST, mark::GUEST_INIT),
        boot_ns: boot.ns,
        ready_ns: ready.map(|ns| ns.saturating_sub(start.ns)),
        faults: by_access.then_some(faults),
        lines: count(|name| name == "DC CIVAC"),
        invalidations: count(is_of_stage2),
        tables: last.stage2_tables,
        resident: last.resident.iter().flat_map(BTreeMap::values).sum(),
        overhead: last.overhead,
        levels,
    })
}

#[cfg(test)]
mod tests;
