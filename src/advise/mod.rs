// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule advise`: measures the backings and modes of dirty logging that this host offers to a VM,
//! and ranks them.
//!
//! ```text
//! candidates ─ sweep ─ rank ─ render
//! ```
//!
//! Each run is a run of `granule bench --migrate`, so results can be repeated with that command.

mod candidates;
mod rank;
mod render;
mod sweep;

use std::{
    error::Error,
    fs::{self, OpenOptions},
    io::{self, Write as _},
    num::NonZeroU32,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use granule_report::results::RecordWriter;
use granule_types::{
    cpu_list::CpuList,
    units::{Bytes, parse_nonzero_size, pluralize},
};
use granule_vmm::{
    arch::{host::explain_missing_driver, vm::host_limits},
    kvm::{self, KvmError},
    memory::{HostPages, MemoryError, kib_field},
};
use indicatif::{ProgressBar, ProgressStyle};

use super::{CommandOutcome, CommandResult, bench::values::parse_count, own_digest, write_stdout};
use candidates::{
    Candidate, LeftOut, candidates, eager_split_chunk, offered_backings, offered_modes, probe_mode,
};
use rank::{Ranking, rank};
use sweep::{SweepLimits, SweepResult, sweep};

/// Rounds of the migration in each run.
const MIGRATION_ROUNDS: u32 = 4;

/// Options of `granule advise`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The total of a configuration is the time to populate its memory, to touch it \
                  first, and to write every page once under dirty logging. Other load on the \
                  machine limits its precision.\n\nExit code: 0 done, 2 nothing could be measured."
)]
pub struct Args {
    /// Number of vCPUs
    #[arg(short = 'v', long, value_name = "VCPUS", default_value = "2", value_parser = parse_count)]
    vcpus: NonZeroU32,
    /// Size of the memory under test, rounded up to a page of the backing
    #[arg(short = 'b', long = "size", alias = "memory", value_name = "SIZE", default_value = "64M",
          value_parser = parse_nonzero_size)]
    memory: Bytes,
    /// Memory of the VM, which a hugetlb pool must be able to hold
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_nonzero_size)]
    vm_size: Bytes,
    /// Maximum number of passes over all configurations
    #[arg(short = 'i', long, value_name = "N", default_value = "5", value_parser = parse_count)]
    iterations: NonZeroU32,
    /// Time in seconds after which no run starts
    #[arg(long, value_name = "SECONDS", default_value = "100", value_parser = parse_count)]
    time_limit: NonZeroU32,
    /// Pin the vCPUs to these CPUs (0-3,8), in turn if there are fewer than vCPUs
    #[arg(long, value_name = "CPULIST")]
    pin: Option<CpuList>,
    /// Write one JSON object for each phase of each run to this file, for granule compare; - is
    /// standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Error returned when this machine cannot be measured.
#[derive(Debug, thiserror::Error)]
enum AdviseError {
    #[error("granule advise measures this machine; granule lab counts faults on any machine")]
    NoKvm(#[source] KvmError),
    #[error(
        "-b {size}: guest memory and a copy of it need {needed} MiB, and {available} MiB are \
         available: use a smaller size"
    )]
    TooLarge { size: Bytes, needed: u64, available: u64 },
    #[error("--json {path}: the file cannot be written", path = path.display())]
    Output { path: PathBuf, source: io::Error },
    #[error("the page sizes of this host cannot be read")]
    HostPages(#[from] MemoryError),
}

/// Runs `granule advise`.
pub fn run(args: Args) -> CommandResult {
    let kvm = kvm::open(explain_missing_driver).map_err(AdviseError::NoKvm)?;
    kvm::check_vcpu_count(&kvm, args.vcpus.get())?;
    check_memory(args.memory, &fs::read_to_string("/proc/meminfo").unwrap_or_default())?;
    let pages = HostPages::of_this_host().map_err(AdviseError::HostPages)?;
    let (backings, mut left_out) = offered_backings(&pages, args.vm_size.max(args.memory));
    let block_sizes = host_limits(&kvm).map_or_else(|_| Vec::new(), |limits| limits.block_sizes);
    let (modes, refused) = offered_modes(eager_split_chunk(&block_sizes), probe_mode);
    left_out.extend(refused);
    let candidates = candidates(&backings, &modes);
    let common = args.bench_arguments();

    if let Some(path) = &args.json {
        check_output(path)?;
    }
    let start = Instant::now();
    let mut result = args.sweep(&candidates, &common)?;
    left_out.append(&mut result.left_out);
    let ranking = rank(&result.measurements, pages.base_page_size);
    let text = args.report(&ranking, &result, start.elapsed(), &left_out);
    // The results are kept if the reader of the text has gone.
    if let Some(path) = &args.json {
        let mut writer = RecordWriter::create(path, result.records.len() as u64)?;
        let programs = own_digest::programs();
        for record in &mut result.records {
            record.programs.clone_from(&programs);
            writer.write(record)?;
        }
    }
    if args.json.as_deref() == Some(Path::new("-")) {
        io::stderr().write_all(text.as_bytes())?;
    } else {
        write_stdout(&text)?;
    }
    Ok(CommandOutcome::Done)
}

/// Checks that guest memory and the migration's destination fit into the available memory.
fn check_memory(size: Bytes, meminfo: &str) -> Result<(), AdviseError> {
    let needed = size.0.saturating_mul(2);
    match kib_field(meminfo, "MemAvailable") {
        Some(Bytes(available)) if available < needed => {
            Err(AdviseError::TooLarge { size, needed: needed >> 20, available: available >> 20 })
        }
        _ => Ok(()),
    }
}

/// Checks before the measurement that a file can be written, and keeps its contents.
fn check_output(path: &Path) -> Result<(), AdviseError> {
    if path == Path::new("-") {
        return Ok(());
    }
    let open = OpenOptions::new().append(true).create(true).open(path);
    let failed = |source| AdviseError::Output { path: path.to_owned(), source };
    open.map(drop).map_err(failed)
}

impl Args {
    /// Returns the arguments of `granule bench` that all runs share.
    fn bench_arguments(&self) -> Vec<String> {
        let Self { vcpus, memory, pin, .. } = self;
        let mut arguments = format!(
            "-b {memory} -v {vcpus} --migrate {MIGRATION_ROUNDS} --events off --accept-fallback"
        );
        if let Some(cpus) = pin {
            arguments += &format!(" --pin {cpus}");
        }
        arguments.split(' ').map(str::to_owned).collect()
    }

    fn sweep(
        &self,
        candidates: &[Candidate],
        common: &[String],
    ) -> Result<SweepResult, Box<dyn Error>> {
        let passes = self.iterations.get();
        let time = Duration::from_secs(self.time_limit.get().into());
        // The bar is hidden unless standard error is a terminal.
        let bar = ProgressBar::new(candidates.len() as u64 * u64::from(passes));
        let style = "{pos}/{len} runs [{elapsed}, about {eta} more] {bar:20} {msg}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        let result = sweep(candidates, common, SweepLimits { passes, time }, |pass, candidate| {
            bar.set_message(format!("pass {}: {candidate}", pass + 1));
            bar.inc(1);
        });
        bar.finish_and_clear();
        result
    }

    fn report(
        &self,
        ranking: &Ranking,
        result: &SweepResult,
        elapsed: Duration,
        left_out: &[LeftOut],
    ) -> String {
        let host = result.records.first().map(|record| &record.host);
        let host = host.map_or_else(String::new, |host| {
            let cpu = host.cpu.as_deref().unwrap_or("unknown CPU");
            format!("{cpu}, {}, Linux {}", host.arch, host.kernel)
        });
        let mut text = format!(
            "{host}\nA VM of {} with {}; {} under test, {} in {} s\n\n{}\n",
            self.vm_size.max(self.memory),
            pluralize(self.vcpus.get(), "vCPU"),
            self.memory,
            if result.passes == 1 {
                "1 pass".to_owned()
            } else {
                format!("{} passes", result.passes)
            },
            elapsed.as_secs(),
            render::ranking_table(ranking)
        );
        if let Some(modes) = render::modes_table(ranking) {
            text += &format!("{modes}\n");
        }
        for reason in render::reasons(ranking) {
            text += &format!("{reason}\n");
        }
        if let Some(first) = ranking.rows.first() {
            let arguments = first.candidate().bench_arguments(&self.bench_arguments());
            text += &format!("To repeat rank 1: granule bench {}\n", arguments.join(" "));
        }
        text += "\nLeft out:\n";
        for line in render::left_out_lines(left_out) {
            text += &format!("  {line}\n");
        }
        text += &format!(
            "\nFigures are medians, ± half the distance between the quartiles. total = populate + \
             first touch + one logged write of every page. tables = page tables of the process, and \
             of stage 2 if the kernel counts them.\n{}",
            load_line()
        );
        if let Some(warning) = &result.warning {
            text += &format!("Warning: {warning}.\n");
        }
        text
    }
}

/// Returns a line about the load of this machine, which limits the precision.
fn load_line() -> String {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or("unknown");
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    format!(
        "Load average {load} on {}: other processes and VMs of the host limit the precision.\n",
        pluralize(cpus as u64, "CPU")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_for_guest_and_copy_must_be_available() {
        let meminfo = "MemAvailable:     1048576 kB\n";

        assert!(check_memory(Bytes::mib(512), meminfo).is_ok());
        assert!(check_memory(Bytes::gib(8), "").is_ok(), "an unknown amount is not refused");
        let error = check_memory(Bytes::mib(513), meminfo).unwrap_err().to_string();
        assert!(error.contains("-b 513M") && error.contains("1026 MiB"), "{error}");
    }

    #[test]
    fn an_output_file_is_checked_and_keeps_its_contents() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.jsonl");
        fs::write(&path, "earlier").unwrap();

        check_output(&path).unwrap();
        let error = check_output(Path::new("/nowhere/results.jsonl")).unwrap_err();

        assert_eq!(fs::read_to_string(&path).unwrap(), "earlier");
        assert!(error.to_string().contains("--json /nowhere/results.jsonl"));
    }
}
