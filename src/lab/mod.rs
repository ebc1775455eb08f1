// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule lab`.

mod options;
mod tools;

use std::{num::NonZeroU32, path::PathBuf};

use clap::{ArgGroup, ValueEnum};
use granule_lab::{self as lab, RunStatus};
use granule_types::{backing::Backing, guest_mode::GuestMode, units::Bytes};

use super::{CommandResult, Outcome, bench::values};

/// Options of `granule lab`.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    group(ArgGroup::new("program").args(["test", "selftests", "guest", "fetch"])),
    after_help = "Times are virtual: one nanosecond an instruction, summed over all CPUs. They are \
                  exact and repeatable, and not hardware time.\n\nExit code: 0 done; 1 a job \
                  failed, a phase is slower by more than --min-effect or selftest results differ; 2 \
                  the run could not be completed."
)]
pub struct Args {
    #[command(subcommand)]
    tool: Option<tools::Tool>,

    /// Linux version of the base: Debian's linux-source-VERSION
    #[arg(long, default_value = "5.10", value_name = "VERSION", value_parser = version, help_heading = "Kernel")]
    base: String,
    /// Kernel source that replaces Debian's: a tree, a tarball or a Debian linux-source package
    #[arg(long, value_name = "PATH", help_heading = "Kernel")]
    source: Option<PathBuf>,
    /// Debian suite of the source package [default: by version]
    #[arg(long, help_heading = "Kernel")]
    suite: Option<String>,
    /// Series to apply, in order [default: stage2-fault-path, if the version has it]
    #[arg(long, value_name = "NAME", help_heading = "Kernel")]
    series: Vec<String>,
    /// Apply only the first N patches of the last series; 0 runs the base alone
    #[arg(long, value_name = "N", help_heading = "Kernel")]
    patches: Option<usize>,
    /// Build and run a kernel for every patch, and compare each with the one before it
    #[arg(long, help_heading = "Kernel")]
    each_patch: bool,
    /// Run this kernel image instead of building one; repeat the option to compare two
    #[arg(long, value_name = "IMAGE", help_heading = "Kernel",
          conflicts_with_all = ["source", "series", "patches", "each_patch"])]
    image: Vec<PathBuf>,
    /// Additional configuration fragment
    #[arg(long, value_name = "FRAGMENT", help_heading = "Kernel")]
    config: Vec<PathBuf>,
    /// Build with all debug checkers; any kernel splat is a failure
    #[arg(long, help_heading = "Kernel")]
    debug_kernel: bool,
    /// Run only the kernel of this name (base, or a series)
    #[arg(long, value_name = "KERNEL", help_heading = "Kernel")]
    only: Vec<String>,
    /// Only fetch and unpack the source, and print the path of its tree
    #[arg(long, help_heading = "Kernel")]
    fetch: bool,
    /// Repository [default: the one of the current directory, or of this program]
    #[arg(long, value_name = "DIR", help_heading = "Kernel")]
    root: Option<PathBuf>,
    /// Directory for sources, objects and kernels [default: $XDG_CACHE_HOME/granule]
    #[arg(long, value_name = "DIR", env = "GRANULE_CACHE", help_heading = "Kernel")]
    cache: Option<PathBuf>,

    /// Program to run in the emulated host
    #[arg(long, value_enum, default_value_t = TestName::Bench, help_heading = "Workload")]
    test: TestName,
    /// Run the kernel's KVM selftests instead, and compare their verdicts
    #[arg(long, help_heading = "Workload")]
    selftests: bool,
    /// Run only this selftest; arguments after the name replace its own
    #[arg(long, value_name = "NAME [ARGUMENTS]", help_heading = "Workload",
          conflicts_with_all = ["test", "guest", "fetch"])]
    selftest: Vec<String>,
    /// Boot a Linux guest on each backing with `granule run` instead, with the kernel of the host,
    /// and report faults, maintenance and time of the boot
    #[arg(long, help_heading = "Workload")]
    guest: bool,
    /// Boot the guests from vmlinuz, initrd.img and root.img in this directory (see scripts/guest),
    /// up to the login prompt
    #[arg(long, value_name = "DIR", requires = "guest", help_heading = "Workload")]
    distribution: Option<PathBuf>,
    /// Run a tiny matrix: 4 vCPUs, 16M, 4K pages and hugetlb 2M, one seed; a regression is not a
    /// failure
    #[arg(long, help_heading = "Workload",
          conflicts_with_all = ["backing", "vcpus", "size", "seeds"])]
    smoke: bool,
    /// Backing of the region [default: 4K, THP, hugetlb 2M and hugetlb 1G]
    #[arg(short = 's', long, value_name = "BACKING", help_heading = "Workload")]
    backing: Vec<Backing>,
    /// Number of vCPUs
    #[arg(short = 'v', long, value_name = "N", default_values_t = [4], value_parser = cpus(), help_heading = "Workload")]
    vcpus: Vec<u32>,
    /// Size of the region [default: 64M, or one page if pages are larger]
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = values::size, help_heading = "Workload")]
    size: Option<Bytes>,
    /// Guest mode, by name (P48V48_4K) or by its number in the tests of Linux 6.1 (2)
    #[arg(short = 'm', long, default_value = "2", value_parser = mode, help_heading = "Workload")]
    mode: String,
    /// Offset of the region in guest memory
    #[arg(short = 'p', long, value_name = "OFFSET", help_heading = "Workload")]
    offset: Option<Bytes>,
    /// Iterations in one boot
    #[arg(short = 'i', long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..), help_heading = "Workload")]
    iterations: u32,
    /// Boots of each job, each with another schedule
    #[arg(long, value_name = "N", default_value_t = 3,
          value_parser = clap::value_parser!(u64).range(1..), help_heading = "Workload")]
    seeds: u64,
    /// Additional argument of `granule bench`
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true, help_heading = "Workload")]
    bench_arg: Vec<String>,

    /// CPU model of the emulated host
    #[arg(long, value_name = "MODEL", default_value = "neoverse-n1", help_heading = "Host")]
    cpu: String,
    /// Online CPUs of the emulated host; as many more are offline [default: one for each vCPU]
    #[arg(long, value_name = "N", value_parser = cpus(), help_heading = "Host")]
    smp: Option<u32>,
    /// Memory of the emulated host [default: by job]
    #[arg(long, value_name = "SIZE", help_heading = "Host")]
    memory: Option<Bytes>,
    /// Emulators at a time [default: one for each CPU of this machine]
    #[arg(long, value_name = "N", value_parser = values::count, help_heading = "Host")]
    jobs: Option<NonZeroU32>,
    /// Seconds of real time after which an emulator is terminated
    #[arg(long, value_name = "SECONDS", default_value_t = 900,
          value_parser = clap::value_parser!(u64).range(1..), help_heading = "Host")]
    deadline: u64,
    /// The static arm64 `granule` [default: beside this program]
    #[arg(long, value_name = "FILE", help_heading = "Host")]
    init: Option<PathBuf>,
    /// The counting plugin [default: beside this program]
    #[arg(long, value_name = "FILE", help_heading = "Host")]
    plugin: Option<PathBuf>,

    /// Run directory [default: the next unused one below lab-runs]
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    out: Option<PathBuf>,
    /// Smallest slowdown of a phase that is a regression
    #[arg(long, value_name = "PERCENT", default_value = "3",
          value_parser = super::compare::percent, help_heading = "Output")]
    min_effect: f64,
    /// Print the run as shell and execute nothing
    #[arg(long, help_heading = "Output")]
    dry_run: bool,
}

/// Program to run in the emulated host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TestName {
    /// `granule bench`
    Bench,
    /// The kernel's page-table test, from Linux 6.1
    #[value(name = "kvm_page_table_test", alias = "upstream")]
    KvmPageTableTest,
}

/// Runs `granule lab`.
///
/// # Errors
/// The run could not be completed.
pub fn run(mut args: Args) -> CommandResult {
    if let Some(tool) = args.tool.take() {
        return tools::run(tool);
    }
    let fetch = args.fetch;
    let options = options::options(args)?;
    if fetch {
        lab::fetch(&options)?;
        return Ok(Outcome::Done);
    }
    Ok(match lab::run(&options)? {
        RunStatus::Passed => Outcome::Done,
        RunStatus::Failed => Outcome::Failed,
    })
}

/// Parses a number of CPUs; the lab's kernels support twice as many, half of them offline.
fn cpus() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=128)
}

/// Parses a Linux version, which is also the name of a directory.
fn version(text: &str) -> Result<String, String> {
    let part = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    if text.split('.').all(part) {
        Ok(text.to_owned())
    } else {
        Err("expected a version, such as 5.10".to_owned())
    }
}

/// Parses a guest mode; both tests expect its number.
fn mode(text: &str) -> Result<String, String> {
    match text.parse::<GuestMode>() {
        Ok(mode) => Ok(mode.id().to_string()),
        Err(error) => Err(error.to_string()),
    }
}
