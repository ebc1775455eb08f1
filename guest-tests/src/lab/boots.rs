// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What boots of guests cost: a table, and a page of it.
//!
//! `granule run` writes its statistics where other tests write results; a boot counts from the start
//! of `granule run` to the guest's init, and to its login prompt where it has one. Faults and
//! instructions are those of the whole run, the latter host and guest together.

use std::{collections::BTreeMap, fmt::Write};

use serde::Deserialize;

use super::{
    LabError, Verdict,
    counts::Segment,
    execute::{JobError, Outcome},
    guest_init,
    matrix::PlannedJob,
    page::{Chart, Remark, Run, Table},
    pool::Outcomes,
    print,
    rundir::{RunDir, chain},
    step::Shell,
};
use crate::{
    compare::render::{Lane, page::escaped},
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
    start_ns: u64,
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
    rundir.write_report(&table)?;
    print(&table)?;
    rundir.tell_page(None, &page(run, &boots))?;
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
            Some((row.boot_ns as f64, milliseconds(row.boot_ns) + " ms"))
        }),
        chart("Time to login", "virtual ms from the start", |row| {
            row.ready_ns.map(|ns| (ns as f64, milliseconds(ns) + " ms"))
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

const HEADING: [&str; 11] = [
    "guest",
    "kernel",
    "start ms",
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
const COSTS: usize = 8;

/// A figure that a boot may have.
type Figure = fn(&Row) -> Option<u64>;

fn milliseconds(ns: u64) -> String {
    format!("{}.{:03}", ns / 1_000_000, ns / 1_000 % 1_000)
}

impl Row {
    /// Its figures, in the order of the heading.
    fn cells(&self) -> [String; 9] {
        let absent = || "–".to_owned();
        let size = |bytes: Option<u64>| bytes.map_or_else(absent, |n| Bytes(n).to_string());
        [
            milliseconds(self.start_ns),
            milliseconds(self.boot_ns),
            self.ready_ns.map_or_else(absent, milliseconds),
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
        let beside: [(usize, Figure); 4] = [
            (1, |row| Some(row.boot_ns)),
            (2, |row| row.ready_ns),
            (3, |row| row.faults),
            (4, |row| Some(row.lines)),
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
    let whole = segments
        .iter()
        .filter(|segment| segment.mark == mark::FOREIGN);
    let count = |belongs: fn(&str) -> bool| {
        whole
            .clone()
            .flat_map(|segment| &segment.counts)
            .filter(|(name, _)| belongs(name))
            .map(|(_, count)| count)
            .sum()
    };
    Some(Row {
        start_ns: start.ns,
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
mod tests {
    use super::*;
    use crate::compare::render::look_at;
    use crate::lab::{
        guest,
        kernel::Kernel,
        matrix,
        options::{Matrix, Test},
    };

    #[test]
    fn what_the_host_does_not_tell_is_shown_as_absent() {
        let row = Row {
            start_ns: 1_234_567,
            boot_ns: 512_000_999,
            ready_ns: Some(2_512_000_999),
            faults: None,
            levels: BTreeMap::new(),
            lines: 7,
            invalidations: 8,
            tables: Some(4 << 10),
            resident: 3 << 20,
            overhead: Some(4_096),
        };

        assert_eq!(
            row.cells().join(" | "),
            "1.234 | 512.000 | 2512.000 | – | 7 | 8 | 4K | 3M | 4K"
        );
    }

    #[test]
    fn invalidations_of_stage_1_are_the_guests_own() {
        assert!(is_of_stage2("TLBI IPAS2E1IS"));
        assert!(is_of_stage2("TLBI VMALLS12E1IS"));
        assert!(!is_of_stage2("TLBI VAALE1IS"));
        assert!(!is_of_stage2("DC CIVAC"));
    }

    /// What a job leaves in its folder: `raw.jsonl` and `counts.jsonl`, with this many faults.
    fn left_behind(faults: u64) -> Row {
        let life = format!(
            r#"{{"schema":"granule.run/1","ended":"off","marks":[[1,336209056],[2,900000000]],"phases":[
            {{"name":"start","ns":30106304,"faults":{{"by.read":0,"translation.level3":0}},"resident":[]}},
            {{"name":"boot","ns":306102752,"faults":{{"by.read":{faults},"by.write":7,
              "translation.level2":14,"translation.level3":{faults}}},"resident":[{{"4096":26107904}}]}},
            {{"name":"first-minute","ns":93224384,"faults":{{"by.write":1,"translation.level3":1}},
              "resident":[{{"4096":36966400}}],"stage2_tables":81920,"overhead":3411968}}]}}"#
        );
        let counts = format!(
            "{{\"seq\":0,\"mark\":{},\"counts\":{{\"DC CIVAC\":912156,\"TLBI IPAS2E1IS\":305,\"TLBI VAE1\":9}}}}\n\
             {{\"end\":true,\"segments\":1}}\n",
            mark::FOREIGN
        );
        let life: Life = serde_json::from_str(&life).unwrap();
        figures(&life, &crate::lab::counts::read_segments(&counts).unwrap()).unwrap()
    }

    #[test]
    fn a_boots_figures_are_those_of_its_whole_run() {
        let row = left_behind(100);

        assert_eq!(
            row.cells().join(" | "),
            "30.106 | 306.102 | 869.893 | 108 | 912156 | 305 | 80K | 36100K | 3332K"
        );
        let levels = [("translation.level2", 14), ("translation.level3", 101)];
        assert_eq!(
            row.levels,
            levels.map(|(name, n)| (name.to_owned(), n)).into()
        );
    }

    /// Text and page of two guests on two kernels, one boot of which failed.
    fn sample() -> (String, Verdict, String) {
        let matrix = Matrix {
            test: Test::Guest,
            vcpus: vec![1],
            seeds: 1,
            ..matrix::tests::matrix()
        };
        let jobs = &guest::jobs(&matrix)[..2];
        let kernels =
            ["base", "series"].map(|name| Kernel::planned(name.to_owned(), "Image".into(), None));
        let run = Run {
            kernels: &kernels,
            jobs,
            emulator: "QEMU 7.2",
        };
        let lost = Err("the guest died\n  | <oops>".to_owned());
        let boots = vec![
            vec![Ok(left_behind(100)), Ok(left_behind(46))],
            vec![Ok(left_behind(100)), lost],
        ];

        let (text, verdict) = table(run, &boots);
        (text, verdict, page(run, &boots))
    }

    #[test]
    #[ignore = "takes Chromium; scripts/test runs it where that is installed"]
    fn in_chromium_the_page_of_boots_is_legible() {
        look_at(&sample().2, 4);
    }

    #[test]
    fn the_page_has_every_boot_with_what_it_cost() {
        let (text, verdict, page) = sample();

        for wanted in [
            "Boots of a guest: series against base",
            "<p class=\"verdict worse\">1 of 4 boots failed.</p>",
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
        assert_eq!(verdict, Verdict::Failed);
        assert_eq!(
            text.lines()
                .filter(|line| line.starts_with("| guest-"))
                .count(),
            3,
            "{text}"
        );
        assert!(text.starts_with("| guest | kernel | start ms |"));
    }
}
