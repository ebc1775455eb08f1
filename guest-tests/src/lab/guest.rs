// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Boots of a Linux guest in the emulated host, one for each backing, and what they cost.
//!
//! The guest is either of our own making: the host's image as its kernel, this program as its
//! initramfs ([`guest_init`]), so nothing has to be fetched; or a distribution with its stock kernel
//! and a disk, which is logged in to and switched off on its console. `granule run` writes its
//! statistics where other tests write results; a boot counts from the start of `granule run` to the
//! guest's init.

use std::{collections::BTreeMap, fmt::Write, path::PathBuf};

use serde::Deserialize;

use super::{
    LabError, Verdict,
    dialogue::Turn,
    emulator::Hardware,
    execute::{JobError, Outcome},
    guest_init,
    job::{Job, RESULTS_PATH},
    kernel::Kernel,
    matrix::{self, PlannedJob},
    options::Matrix,
    pool::Outcomes,
    print,
    rundir::{RunDir, chain},
    step::Shell,
};
use crate::{config::Backing, mark, units::Bytes};

/// Where the guest's kernel lies in the initramfs.
pub const IMAGE: &str = "/guest.image";
/// Where the guest's initramfs lies in the initramfs.
pub const INITRD: &str = "/guest.cpio";
/// Where the guest's disk lies in the initramfs, if it has one.
pub const DISK: &str = "/guest.disk";

/// What a guest boots from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Guest {
    /// The host's own kernel, and this program as its init.
    Own,
    /// A distribution's `vmlinuz`, `initrd.img` and `root.img` in this folder.
    Distribution(PathBuf),
}

impl Guest {
    /// The files of a distribution, and where they lie in the initramfs.
    pub fn files(&self) -> Vec<(PathBuf, &'static str)> {
        match self {
            Self::Own => Vec::new(),
            Self::Distribution(folder) => vec![
                (folder.join("vmlinuz"), IMAGE),
                (folder.join("initrd.img"), INITRD),
                (folder.join("root.img"), DISK),
            ],
        }
    }

    /// A guest's memory where none is asked for.
    const fn memory(&self) -> Bytes {
        match self {
            Self::Own => Bytes::mib(128),
            Self::Distribution(_) => Bytes::mib(256),
        }
    }

    /// What the emulated host needs beyond the guest's memory: the files, once in the initramfs and
    /// once unpacked, to a file system that takes half of the memory at most.
    fn host_memory(&self) -> Bytes {
        let size = |(path, _): &(PathBuf, _)| std::fs::metadata(path).map_or(0, |file| file.len());
        let files: u64 = self.files().iter().map(size).sum();
        Bytes((2 * files).next_multiple_of(1 << 30))
    }

    /// What `granule run` is told of it.
    fn arguments(&self) -> &'static [&'static str] {
        match self {
            Self::Own => &[
                "--serial",
                "pl011",
                "--cmdline",
                "console=ttyAMA0 quiet nokaslr norandmaps panic=-1",
                "--init-text",
                guest_init::INIT,
            ],
            Self::Distribution(_) => &[
                "--disk",
                DISK,
                "--cmdline",
                "console=ttyS0 root=/dev/vda rw nokaslr norandmaps panic=-1",
            ],
        }
    }

    /// What is typed on its console. Our own guest does what it does by itself.
    fn dialogue(&self) -> Vec<Turn> {
        let works = guest_init::WORKS;
        match self {
            Self::Own => Vec::new(),
            // What is typed is echoed: it must not look like its answer.
            Self::Distribution(_) => vec![
                Turn::new("login: ", "root"),
                Turn::new("~# ", &format!("echo '{works},' vcpus $(nproc),")),
                Turn::new(&format!("{works}, vcpus"), "poweroff"),
            ],
        }
    }
}

/// A boot for each backing, number of vCPUs and seed.
pub fn jobs(matrix: &Matrix) -> Vec<PlannedJob> {
    let mut jobs = Vec::new();
    for &backing in &matrix.backings {
        for &vcpus in &matrix.vcpus {
            for seed in 0..matrix.seeds {
                jobs.push(job(matrix, backing, vcpus, seed));
            }
        }
    }
    jobs
}

fn job(matrix: &Matrix, backing: Backing, vcpus: u32, seed: u64) -> PlannedJob {
    let guest = match &matrix.distribution {
        None => Guest::Own,
        Some(folder) => Guest::Distribution(folder.clone()),
    };
    let page = matrix::page_of(backing);
    let memory = matrix.memory.unwrap_or(guest.memory());
    let memory = page.map_or(memory, |page| Bytes(memory.0.next_multiple_of(page)));
    let pools: BTreeMap<u64, u64> = page
        .map(|page| (page, memory.0.div_ceil(page)))
        .into_iter()
        .collect();
    let vcpus_text = vcpus.to_string();
    let memory_text = format!("{memory},backing={backing}");
    let files = ["--kernel", IMAGE, "--initrd", INITRD];
    // A guest that dies and resets itself must not start again and again.
    let argv = ["/init", "run", "--no-reboot"]
        .into_iter()
        .chain(files)
        .chain(guest.arguments().iter().copied())
        .chain([
            "--memory",
            &memory_text,
            "--vcpus",
            &vcpus_text,
            "--stats",
            RESULTS_PATH,
        ]);
    let extra = matrix.extra.iter().cloned();
    PlannedJob {
        name: format!("guest-{backing}-{memory}-{vcpus}v-seed{seed}"),
        hardware: Hardware {
            cpu: matrix.cpu.clone(),
            cpus: matrix.cpus.unwrap_or(vcpus.max(2)),
            memory: matrix.host_memory.unwrap_or_else(|| {
                Bytes(matrix::host_memory(memory, &pools).0 + guest.host_memory().0)
            }),
        },
        append: matrix::append(&pools),
        job: Job {
            argv: argv.map(str::to_owned).chain(extra).collect(),
            pools,
            settings: matrix::settings(backing, false),
            seed,
            foreign: true,
            dialogue: guest.dialogue(),
            deadline_seconds: matrix::DEADLINE_SECONDS,
        },
        seed,
        foreign: None,
        guest: Some(guest),
    }
}

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

/// A boot's figures.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    start_ns: u64,
    boot_ns: u64,
    ready_ns: Option<u64>,
    faults: Option<u64>,
    lines: u64,
    invalidations: u64,
    tables: Option<u64>,
    resident: u64,
    overhead: Option<u64>,
}

/// Prints what each boot cost; a boot that failed is a failure.
///
/// # Errors
/// The table cannot be written.
pub fn judge(
    shell: Shell,
    rundir: &RunDir,
    kernels: &[Kernel],
    jobs: &[PlannedJob],
    outcomes: Outcomes,
) -> Result<Verdict, LabError> {
    if shell.is_dry() {
        return Ok(Verdict::Fine);
    }
    let mut verdict = Verdict::Fine;
    let mut table = String::from(HEADING);
    let mut remarks = String::new();
    let mut columns: Vec<_> = outcomes.into_iter().map(Vec::into_iter).collect();
    for job in jobs {
        for (kernel, column) in kernels.iter().zip(&mut columns) {
            let row = match column.next().flatten() {
                Some(Ok(outcome)) => row(job, &outcome).map_err(|error| chain(&error)),
                Some(Err(error)) => Err(chain(&error)),
                None => Err("not run, this kernel does not boot".to_owned()),
            };
            // Writing to a string cannot fail.
            let _ = match row {
                Ok(row) => writeln!(table, "| {} | {} | {row} |", job.name, kernel.name),
                Err(why) => {
                    verdict = Verdict::Failed;
                    writeln!(remarks, "\n{} on {}: {why}", job.name, kernel.name)
                }
            };
        }
    }
    table.push_str(&remarks);
    rundir.write_report(&table)?;
    print(&table)?;
    Ok(verdict)
}

/// Whether an invalidation is the hypervisor's, of one stage-2 entry or of a whole guest.
fn is_of_stage2(name: &str) -> bool {
    let what = name.strip_prefix("TLBI ");
    let kinds = ["IPAS2", "RIPAS2", "VMALLS12"];
    what.is_some_and(|what| kinds.iter().any(|kind| what.starts_with(kind)))
}

const HEADING: &str = "\
| guest | kernel | start ms | to init ms | to login ms | memory faults | DC CIVAC | stage-2 TLBI | stage-2 tables | resident | beyond guest memory |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|
";

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let absent = || "–".to_owned();
        let milliseconds = |ns: u64| format!("{}.{:03}", ns / 1_000_000, ns / 1_000 % 1_000);
        let size = |bytes: Option<u64>| bytes.map_or_else(absent, |n| Bytes(n).to_string());
        write!(
            f,
            "{} | {} | {} | {} | {} | {} | {} | {} | {}",
            milliseconds(self.start_ns),
            milliseconds(self.boot_ns),
            self.ready_ns.map_or_else(absent, milliseconds),
            self.faults.map_or_else(absent, |n| n.to_string()),
            self.lines,
            self.invalidations,
            size(self.tables),
            Bytes(self.resident),
            size(self.overhead),
        )
    }
}

/// The figures of a boot that went well. Faults and instructions are those of the whole run, the
/// latter host and guest together.
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
    let phase = |name: &str| life.phases.iter().find(|phase| phase.name == name);
    let (Some(start), Some(boot), Some(last)) = (phase("start"), phase("boot"), life.phases.last())
    else {
        return Err(failed("has no statistics of a boot"));
    };
    // Each fault is of one access; accesses to devices are no faults of memory.
    let accesses = life.phases.iter().flat_map(|phase| &phase.faults);
    let accesses = accesses.filter(|(name, _)| name.starts_with("by."));
    let (by_access, faults) = accesses.fold((false, 0), |(_, sum), (_, n)| (true, sum + n));
    let ready = life.marks.iter().find(|(mark, _)| *mark == READY);
    let ready = ready.map(|(_, ns)| *ns);
    let counted = outcome
        .segments
        .iter()
        .filter(|segment| segment.mark == mark::FOREIGN);
    let count = |belongs: fn(&str) -> bool| {
        counted
            .clone()
            .flat_map(|segment| &segment.counts)
            .filter(|(name, _)| belongs(name))
            .map(|(_, count)| count)
            .sum()
    };
    Ok(Row {
        start_ns: start.ns,
        boot_ns: boot.ns,
        ready_ns: ready.map(|ns| ns.saturating_sub(start.ns)),
        faults: by_access.then_some(faults),
        lines: count(|name| name == "DC CIVAC"),
        invalidations: count(is_of_stage2),
        tables: last.stage2_tables,
        resident: last.resident.iter().flat_map(BTreeMap::values).sum(),
        overhead: last.overhead,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::options::Test;

    fn matrix() -> Matrix {
        Matrix {
            test: Test::Guest,
            backings: vec![
                Backing::Anonymous,
                Backing::AnonymousThp,
                Backing::AnonymousHugetlb(Some(Bytes::gib(1))),
            ],
            vcpus: vec![2],
            seeds: 1,
            ..matrix::tests::matrix()
        }
    }

    #[test]
    fn each_backing_is_a_boot_with_memory_in_whole_pages_and_a_pool_for_it() {
        let jobs = jobs(&matrix());

        let names: Vec<_> = jobs.iter().map(|job| job.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "guest-anonymous-128M-2v-seed0",
                "guest-anonymous_thp-128M-2v-seed0",
                "guest-anonymous_hugetlb_1gb-1G-2v-seed0",
            ]
        );
        assert_eq!(jobs[2].job.pools, [(1 << 30, 1)].into());
        assert!(
            jobs[2]
                .job
                .argv
                .contains(&"1G,backing=anonymous_hugetlb_1gb".to_owned())
        );
        assert!(jobs.iter().all(|job| job.guest == Some(Guest::Own)));
    }

    #[test]
    fn what_the_host_does_not_tell_is_shown_as_absent() {
        let row = Row {
            start_ns: 1_234_567,
            boot_ns: 512_000_999,
            ready_ns: Some(2_512_000_999),
            faults: None,
            lines: 7,
            invalidations: 8,
            tables: Some(4 << 10),
            resident: 3 << 20,
            overhead: Some(4_096),
        };

        assert_eq!(
            row.to_string(),
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

    #[test]
    fn what_is_typed_does_not_look_like_its_answer() {
        let turns = Guest::Distribution(PathBuf::new()).dialogue();

        for pair in turns.windows(2) {
            assert!(!pair[0].send.contains(&pair[1].expect));
        }
    }
}
