// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule lab`.

use std::{env, num::NonZeroU32, path::PathBuf, thread::available_parallelism, time::Duration};

use clap::{ArgGroup, ValueEnum};
use granule_lab as lab;
use granule_lab::{Kernels, Matrix, Options, Places, Test, Verdict, rundir, series};
use granule_types::{backing::Backing, guest_mode::GuestMode, units::Bytes};

use super::{CommandResult, Outcome, bench::values};

/// The series that is applied where none is named and it is there.
const DEFAULT_SERIES: &str = "stage2-fault-path";

/// Options of `granule lab`.
#[derive(Debug, clap::Args)]
#[command(
    group(ArgGroup::new("what").args(["test", "selftests", "guest", "fetch"])),
    after_help = "Times are virtual: the work of all CPUs, one nanosecond an instruction. They are \
                  exact and repeatable, and no hardware's time.\n\nExit code: 0 done, 1 a job \
                  failed, a phase is slower by more than --min-effect or a selftest's verdict \
                  differs, 2 the run could not be carried out."
)]
pub struct Args {
    /// Linux version to start from: Debian's linux-source-VERSION
    #[arg(long, default_value = "5.10", value_name = "VERSION", value_parser = version)]
    base: String,
    /// Kernel source to take instead: a tree, a tarball or a Debian linux-source package
    #[arg(long, value_name = "PATH")]
    source: Option<PathBuf>,
    /// Debian suite that has the source package; found by version where not given
    #[arg(long)]
    suite: Option<String>,
    /// Series to apply, in order; without it stage2-fault-path, if the version has it
    #[arg(long, value_name = "NAME")]
    series: Vec<String>,
    /// Only the first N patches of the last series; 0 runs the plain kernel alone
    #[arg(long, value_name = "N")]
    patches: Option<usize>,
    /// Build and run a kernel for every patch, and compare each with the one before it
    #[arg(long)]
    each_patch: bool,
    /// Run this kernel image as it is instead of building; give two to compare them
    #[arg(long, value_name = "IMAGE", conflicts_with_all = ["source", "series", "patches", "each_patch"])]
    image: Vec<PathBuf>,
    /// One more configuration fragment
    #[arg(long, value_name = "FRAGMENT")]
    config: Vec<PathBuf>,
    /// Build with every checker on; any complaint of the kernel is a failure
    #[arg(long)]
    debug_kernel: bool,
    /// Run only the kernel of this name (base, or a series)
    #[arg(long, value_name = "KERNEL")]
    only: Vec<String>,

    /// What runs in the emulated host
    #[arg(long, value_enum, default_value_t = TestName::Ours)]
    test: TestName,
    /// Run the kernel tree's KVM selftests instead, for their verdict
    #[arg(long)]
    selftests: bool,
    /// Boot a Linux guest on each backing instead, by `granule run`, and show what that cost; its
    /// kernel is the host's own
    #[arg(long)]
    guest: bool,
    /// Boot the guests from this folder's vmlinuz, initrd.img and root.img, as scripts/guest makes
    /// them, up to the login prompt
    #[arg(long, value_name = "DIR", requires = "guest")]
    distribution: Option<PathBuf>,
    /// Of the selftests only this one, with other arguments if any follow its name
    #[arg(long, value_name = "NAME [ARGUMENTS]", conflicts_with_all = ["test", "guest", "fetch"])]
    selftest: Vec<String>,
    /// A tiny matrix: 4 vCPUs, 16M, 4K pages and hugetlb 2M, one seed; shows that the lab works and
    /// fails for no regression
    #[arg(long, conflicts_with_all = ["backing", "vcpus", "size", "seeds"])]
    smoke: bool,
    /// Backing of the region; without it 4K, THP, hugetlb 2M and hugetlb 1G
    #[arg(short = 's', long, value_name = "BACKING")]
    backing: Vec<Backing>,
    /// Number of vCPUs
    #[arg(short = 'v', long, value_name = "N", default_values_t = [4], value_parser = cpus())]
    vcpus: Vec<u32>,
    /// Size of the region; without it 64M, or one page where pages are larger
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = values::size)]
    size: Option<Bytes>,
    /// Guest mode, by name (P48V48_4K) or by its number in the tests of Linux 6.1 (2)
    #[arg(short = 'm', long, default_value = "2", value_parser = mode)]
    mode: String,
    /// Offset of the region in guest memory
    #[arg(short = 'p', long, value_name = "OFFSET")]
    offset: Option<Bytes>,
    /// Repeats within one boot
    #[arg(short = 'i', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,
    /// Boots of each job, each with another interleaving
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// CPU model of the emulated host
    #[arg(long, value_name = "MODEL", default_value = "neoverse-n1")]
    cpu: String,
    /// Working CPUs of the emulated host (as many are switched off); without it one for each vCPU
    #[arg(long, value_name = "N", value_parser = cpus())]
    smp: Option<u32>,
    /// Memory of the emulated host; without it what the job needs
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// One more argument for `granule bench`
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    bench_arg: Vec<String>,

    /// Run directory; without it the next free one below lab-runs
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Emulators at a time; without it one for each CPU of this machine
    #[arg(long, value_name = "N", value_parser = values::count)]
    jobs: Option<NonZeroU32>,
    /// Seconds of real time after which an emulator is ended
    #[arg(long, value_name = "SECONDS", default_value_t = 900, value_parser = clap::value_parser!(u64).range(1..))]
    deadline: u64,
    /// How many percent slower a phase must be to be a regression
    #[arg(long, value_name = "PERCENT", default_value = "3", value_parser = super::compare::percent)]
    min_effect: f64,
    /// Print as shell what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Only fetch and unpack the source, and print where its plain tree lies
    #[arg(long)]
    fetch: bool,

    /// The repository; without it the one this program was built in
    #[arg(long, value_name = "DIR", help_heading = "Places")]
    root: Option<PathBuf>,
    /// The static arm64 `granule`
    #[arg(long, value_name = "FILE", help_heading = "Places")]
    init: Option<PathBuf>,
    /// The counting plugin
    #[arg(long, value_name = "FILE", help_heading = "Places")]
    plugin: Option<PathBuf>,
    /// Sources, objects and kernels between runs; without it $XDG_CACHE_HOME/granule
    #[arg(
        long,
        value_name = "DIR",
        env = "GRANULE_CACHE",
        help_heading = "Places"
    )]
    cache: Option<PathBuf>,
}

/// What runs in the emulated host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TestName {
    /// `granule bench`
    Ours,
    /// The kernel tree's kvm_page_table_test
    Upstream,
}

/// Carries `granule lab` out.
///
/// # Errors
/// The run could not be carried out; the error says why and what to do.
pub fn run(args: Args) -> CommandResult {
    let fetch = args.fetch;
    let options = options(args)?;
    if fetch {
        lab::fetch(&options)?;
        return Ok(Outcome::Done);
    }
    Ok(match lab::run(&options)? {
        Verdict::Fine => Outcome::Done,
        Verdict::Failed => Outcome::Failed,
    })
}

/// As many CPUs as the lab's kernels have room for, half of them switched off.
fn cpus() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=128)
}

/// A version of Linux, which names folders.
fn version(text: &str) -> Result<String, String> {
    let part = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    if text.split('.').all(part) {
        Ok(text.to_owned())
    } else {
        Err("give a version, such as 5.10".to_owned())
    }
}

/// A guest mode, by number or name; both tests take the number.
fn mode(text: &str) -> Result<String, String> {
    match text.parse::<GuestMode>() {
        Ok(mode) => Ok(mode.id().to_string()),
        Err(error) => Err(error.to_string()),
    }
}

fn options(args: Args) -> Result<Options, Box<dyn std::error::Error>> {
    let cpus = available_parallelism().map_or(1, usize::from);
    let places = places(&args)?;
    let known = series::names(&places.root.join("stage2/linux"), &args.base);
    let series = if !args.series.is_empty() || !args.image.is_empty() {
        args.series
    } else {
        known.into_iter().filter(|s| s == DEFAULT_SERIES).collect()
    };
    let hugetlb = |size| Backing::AnonymousHugetlb(Some(size));
    let backings = match args.backing {
        named if !named.is_empty() => named,
        _ if args.guest && !args.smoke => vec![
            Backing::Anonymous,
            Backing::AnonymousThp,
            hugetlb(Bytes::mib(2)),
            hugetlb(Bytes::gib(1)),
            Backing::Shmem,
            Backing::SharedHugetlb,
        ],
        _ if args.smoke => vec![Backing::Anonymous, hugetlb(Bytes::mib(2))],
        _ => vec![
            Backing::Anonymous,
            Backing::AnonymousThp,
            hugetlb(Bytes::mib(2)),
            hugetlb(Bytes::gib(1)),
        ],
    };
    let test = match args.test {
        _ if args.selftests || !args.selftest.is_empty() => Test::Selftests,
        _ if args.guest => Test::Guest,
        TestName::Ours => Test::Ours,
        TestName::Upstream => Test::Upstream,
    };
    Ok(Options {
        kernels: Kernels {
            base: args.base,
            source: args.source,
            suite: args.suite,
            series,
            patches: args.patches,
            each_patch: args.each_patch,
            images: args.image,
            fragments: args.config,
            debug: args.debug_kernel,
            only: args.only,
        },
        matrix: Matrix {
            test,
            backings,
            vcpus: args.vcpus,
            memory: args
                .size
                .or((args.smoke && !args.guest).then_some(Bytes::mib(16))),
            mode: args.mode,
            offset: args.offset,
            iterations: args.iterations,
            seeds: if args.smoke { 1 } else { args.seeds },
            selftests: args.selftest,
            extra: args.bench_arg,
            distribution: args.distribution,
            cpu: args.cpu,
            cpus: args.smp,
            host_memory: args.memory,
        },
        places,
        dry_run: args.dry_run,
        parallel: args
            .jobs
            .map_or(cpus, |jobs| usize::try_from(jobs.get()).unwrap_or(cpus)),
        deadline: Duration::from_secs(args.deadline),
        min_effect_percent: args.min_effect,
        judge: !args.smoke,
    })
}

/// Where things are: named, or beside this program in the build folder of the repository.
fn places(args: &Args) -> Result<Places, Box<dyn std::error::Error>> {
    let program = env::current_exe()?;
    let built = program.parent().map(PathBuf::from).unwrap_or_default();
    let target = built.parent().map(PathBuf::from).unwrap_or_default();
    let root = match &args.root {
        Some(root) => root.clone(),
        None => env::current_dir()?
            .ancestors()
            .chain(program.ancestors())
            .find(|folder| folder.join("stage2/linux/config/lab.config").is_file())
            .ok_or("no repository found here or above: run this in it, or name it with --root")?
            .to_owned(),
    };
    let home = |variable: &str| {
        env::var_os(variable)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let cache = args
        .cache
        .clone()
        .or_else(|| Some(home("XDG_CACHE_HOME")?.join("granule")))
        .or_else(|| Some(home("HOME")?.join(".cache/granule")))
        .ok_or("no place for kernels and sources: name one with --cache")?;
    let arm64 = target.join("aarch64-unknown-linux-musl/release/granule");
    let places = Places {
        root,
        init: args.init.clone().unwrap_or(arm64),
        plugin: args
            .plugin
            .clone()
            .unwrap_or_else(|| built.join("libgranule_qemu_plugin.so")),
        cache: std::path::absolute(cache)?,
        out: args
            .out
            .clone()
            .unwrap_or_else(|| rundir::next_name(&args.base)),
    };
    Ok(Places {
        init: std::path::absolute(places.init)?,
        plugin: std::path::absolute(places.plugin)?,
        ..places
    })
}
