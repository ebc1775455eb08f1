// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of a run: the arguments of `granule lab`.

use std::{
    env,
    path::{Path, PathBuf, absolute},
    thread::available_parallelism,
};

use clap::{ValueEnum, builder::RangedI64ValueParser, value_parser};
use granule_types::{
    backing::Backing,
    guest_mode::GuestMode,
    units::{Bytes, parse_nonzero_size, parse_percentage},
};

use crate::{
    LabError,
    host::costs::CostTable,
    values::{BuildSetting, LinuxVersion, MakeVariable, PageSize, Revisions, parse_variant},
};

/// Options of a run.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub(crate) kernels: KernelOptions,
    #[command(flatten)]
    pub(crate) matrix: Matrix,
    #[command(flatten)]
    pub(crate) host: HostOptions,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

/// Kernels under test.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Kernel")]
pub struct KernelOptions {
    /// Linux version of the base: Debian's linux-source-VERSION [default: 5.10]
    #[arg(long, value_name = "VERSION")]
    pub(crate) base: Option<LinuxVersion>,
    /// Kernel source that replaces Debian's: a directory with all its changes, a tarball or a Debian
    /// linux-source package
    #[arg(long, value_name = "PATH", conflicts_with = "suite")]
    pub(crate) source: Option<PathBuf>,
    /// Git repository of the kernels, which is only read: compare BEFORE with AFTER
    #[arg(long, value_name = "TREE", conflicts_with_all = ["base", "source", "suite"])]
    pub(crate) git: Option<PathBuf>,
    /// Revisions for --git: BEFORE..AFTER, or one as the base of --patches, --series or --variant
    #[arg(value_name = "BEFORE..AFTER", requires = "git")]
    pub(crate) revisions: Option<Revisions>,
    /// Patches to apply: an mbox file (b4 am), or a directory of git format-patch. With --git, the
    /// base is the revision, or the commit in the line base-commit
    #[arg(long, value_name = "MBOX|DIR", conflicts_with_all = ["series", "first"])]
    pub(crate) patches: Option<PathBuf>,
    /// Build and run a kernel for every commit or patch, and compare each with the one before it
    #[arg(long)]
    pub(crate) each: bool,
    /// Build the last kernel also with this setting, and compare: VARIABLE=VALUE of make (LLVM=1),
    /// or CONFIG_SYMBOL=VALUE
    #[arg(long = "variant", value_name = "SETTING", value_parser = parse_variant)]
    pub(crate) variants: Vec<(String, BuildSetting)>,
    /// Debian suite of the source package [default: that of the version]
    #[arg(long)]
    pub(crate) suite: Option<String>,
    /// Series of this repository to apply, in order [default: stage2-fault-path, if the version has
    /// it]
    #[arg(long, value_name = "NAME")]
    pub(crate) series: Vec<String>,
    /// Apply only the first N patches of the last series; 0 runs the base alone
    #[arg(long, value_name = "N")]
    pub(crate) first: Option<usize>,
    /// Run this kernel image instead of building one; repeat the option to compare two
    #[arg(long = "image", value_name = "IMAGE",
          conflicts_with_all = ["source", "git", "series", "patches", "each", "variants"])]
    pub(crate) images: Vec<PathBuf>,
    /// Additional configuration fragment
    #[arg(long = "config", value_name = "FRAGMENT")]
    pub(crate) fragments: Vec<PathBuf>,
    /// Variable of make for all kernels, such as LLVM=1 or KCFLAGS=-fno-inline
    #[arg(long = "make", value_name = "VARIABLE=VALUE")]
    pub(crate) variables: Vec<MakeVariable>,
    /// Base page size of the host
    #[arg(long, value_enum, default_value_t)]
    pub(crate) page_size: PageSize,
    /// Build with all debug checkers; any kernel splat is a failure
    #[arg(long)]
    pub(crate) debug_kernel: bool,
    /// Run only the kernel of this name (base, or a series; before, after)
    #[arg(long = "only", value_name = "KERNEL")]
    pub(crate) only_kernels: Vec<String>,
    /// Only fetch and unpack the source, and print the path of its tree
    #[arg(long)]
    pub(crate) fetch: bool,
    #[command(flatten)]
    pub(crate) locations: Locations,
}

impl KernelOptions {
    /// Base if neither `--base` nor a source sets one.
    pub(crate) const DEFAULT_BASE: LinuxVersion = LinuxVersion { major: 5, minor: 10 };

    /// Returns the start of the name of a run directory.
    fn run_name(&self) -> String {
        let of_path = |path: &PathBuf| {
            let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.clone());
            path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
        };
        match (&self.patches, &self.git, &self.source, self.base) {
            (Some(path), ..) | (_, Some(path), ..) => of_path(path),
            (.., Some(base)) => base.to_string(),
            (.., Some(path), None) => of_path(path),
            _ => Self::DEFAULT_BASE.to_string(),
        }
    }
}

/// Program to run in the emulated host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum TestProgram {
    /// `granule bench`
    #[default]
    Bench,
    /// The kernel's page-table test, from Linux 6.1
    #[value(name = "kvm_page_table_test", alias = "upstream")]
    KernelPageTableTest,
    /// The kernel's KVM selftests.
    #[value(skip)]
    Selftests,
    /// `granule run` with a Linux guest.
    #[value(skip)]
    Guest,
}

/// Jobs on each kernel.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Workload")]
pub struct Matrix {
    /// Program to run in the emulated host
    #[arg(long, value_enum, default_value_t)]
    test: TestProgram,
    /// Run the kernel's KVM selftests instead, and compare their verdicts
    #[arg(long)]
    selftests: bool,
    /// Run only this selftest; arguments after the name replace its default arguments
    #[arg(long, value_name = "NAME [ARGUMENTS]", conflicts_with_all = ["test", "guest", "fetch"])]
    pub(crate) selftest: Vec<String>,
    /// Boot a Linux guest on each backing with `granule run` instead, with the kernel of the host,
    /// and report stage-2 aborts, CMOs, TLBIs and time of the boot
    #[arg(long)]
    guest: bool,
    /// Boot the guests from vmlinuz, initrd.img and root.img in this directory (see scripts/guest),
    /// up to the login prompt
    #[arg(long, value_name = "DIR", requires = "guest")]
    pub(crate) distribution: Option<PathBuf>,
    /// Run a tiny matrix: 4 vCPUs, 16M, 4K pages and hugetlb 2M, one seed; a regression is not a
    /// failure
    #[arg(long, conflicts_with_all = ["backing", "vcpus", "size", "seeds"])]
    pub(crate) smoke: bool,
    /// Backing of the region [default: 4K, THP, hugetlb 2M and hugetlb 1G]
    #[arg(short = 's', long, value_name = "BACKING")]
    backing: Vec<Backing>,
    /// Number of vCPUs
    #[arg(short = 'v', long, value_name = "N", default_values_t = [4],
          value_parser = cpu_count_parser())]
    pub(crate) vcpus: Vec<u32>,
    /// Size of the region [default: 64M, or one page if pages are larger]
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = parse_nonzero_size)]
    size: Option<Bytes>,
    /// Guest mode, by name (P48V48_4K) or by its number in the tests of Linux 6.1 (2)
    #[arg(short = 'm', long, default_value = "2")]
    pub(crate) mode: GuestMode,
    /// Offset of the region in guest memory
    #[arg(short = 'p', long, value_name = "OFFSET")]
    pub(crate) offset: Option<Bytes>,
    /// Iterations in one boot
    #[arg(short = 'i', long, value_name = "N", default_value_t = 1,
          value_parser = value_parser!(u32).range(1..))]
    pub(crate) iterations: u32,
    /// Boots of each job, each with another schedule
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = value_parser!(u64).range(1..))]
    seeds: u64,
    /// Let the first read of a huge page map the huge zero page, as Linux does by default; the
    /// first write then allocates small pages (add --bench-arg=--accept-fallback)
    #[arg(long)]
    pub(crate) huge_zero_page: bool,
    /// Additional argument of `granule bench`
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    pub(crate) bench_arg: Vec<String>,
}

impl Matrix {
    pub(crate) fn test(&self) -> TestProgram {
        match self {
            _ if self.selftests || !self.selftest.is_empty() => TestProgram::Selftests,
            _ if self.guest => TestProgram::Guest,
            _ => self.test,
        }
    }

    /// Returns the size of the region or of a guest's memory; `None` selects the job's default.
    pub(crate) fn memory_size(&self) -> Option<Bytes> {
        self.size.or((self.smoke && !self.guest).then_some(Bytes::mib(16)))
    }

    /// Returns a value for each combination of backing, vCPU count and seed, in this order.
    pub(crate) fn combinations<T>(&self, value: impl Fn(Backing, u32, u64) -> T) -> Vec<T> {
        let seeds = if self.smoke { 1 } else { self.seeds };
        let mut values = Vec::new();
        for backing in self.backings() {
            for &vcpus in &self.vcpus {
                values.extend((0..seeds).map(|seed| value(backing, vcpus, seed)));
            }
        }
        values
    }

    fn backings(&self) -> Vec<Backing> {
        let hugetlb = |size| Backing::AnonymousHugetlb(Some(size));
        let (small, thp) = (Backing::Anonymous, Backing::AnonymousThp);
        let (mib, gib) = (hugetlb(Bytes::mib(2)), hugetlb(Bytes::gib(1)));
        match self {
            _ if !self.backing.is_empty() => self.backing.clone(),
            _ if self.smoke => vec![small, mib],
            _ if self.guest => {
                vec![small, thp, mib, gib, Backing::Shmem, Backing::SharedHugetlb]
            }
            _ => vec![small, thp, mib, gib],
        }
    }
}

/// The emulated host.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Host")]
pub struct HostOptions {
    /// CPU model of the emulated host
    #[arg(long, value_name = "MODEL", default_value = "neoverse-n1")]
    pub(crate) cpu: String,
    /// CPUs of the emulated host [default: one for each vCPU]
    #[arg(long, value_name = "N", value_parser = cpu_count_parser())]
    pub(crate) smp: Option<u32>,
    /// Length of a CPU's turn in nanoseconds of virtual time; it should be shorter than the
    /// critical sections of contended locks
    #[arg(long, value_name = "NANOSECONDS", default_value_t = 100,
          value_parser = value_parser!(u64).range(20..=1_000_000))]
    pub(crate) quantum: u64,
    /// Costs of instructions in elapsed time: neoverse-n1, kunpeng920 or a TOML file
    /// [default: one nanosecond each]
    #[arg(long, value_name = "TABLE")]
    pub(crate) costs: Option<CostTable>,
    /// Memory of the emulated host [default: the requirement of the job]
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<Bytes>,
    /// Number of parallel emulators [default: one for each CPU of this machine]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    jobs: Option<u32>,
    /// Seconds of real time after which an emulator is terminated
    #[arg(long, value_name = "SECONDS", default_value_t = 900,
          value_parser = value_parser!(u64).range(1..))]
    pub(crate) deadline: u64,
    /// QEMU's program for arm64
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-aarch64")]
    pub(crate) qemu: PathBuf,
    /// The static arm64 `granule` [default: beside this program]
    #[arg(long, value_name = "FILE")]
    init: Option<PathBuf>,
    /// The counting plugin [default: beside this program]
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
}

impl HostOptions {
    /// Returns the number of emulators that run in parallel.
    pub(crate) fn emulator_count(&self) -> usize {
        let jobs = self.jobs.and_then(|jobs| usize::try_from(jobs).ok());
        jobs.unwrap_or_else(|| available_parallelism().map_or(1, usize::from))
    }
}

/// Output of a run.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Output")]
pub struct OutputOptions {
    /// Run directory [default: the next unused one below lab-runs]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Smallest slowdown of a phase that is a regression
    #[arg(long, value_name = "PERCENT", default_value = "3", value_parser = parse_percentage)]
    pub(crate) min_effect: f64,
    /// Print the run as shell and execute nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// The repository and the cache.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Locations {
    /// Repository [default: the one that contains the current directory or this program]
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Directory for sources, objects and kernels [default: $XDG_CACHE_HOME/granule]
    #[arg(long, value_name = "DIR", env = "GRANULE_CACHE")]
    cache: Option<PathBuf>,
}

impl Locations {
    /// Returns `stage2/linux` of the repository.
    ///
    /// # Errors
    /// No repository is found.
    pub fn linux(&self) -> Result<PathBuf, LabError> {
        if let Some(root) = &self.root {
            return Ok(absolute(root.join("stage2/linux"))?);
        }
        env::current_dir()?
            .ancestors()
            .chain(env::current_exe()?.ancestors())
            .map(|directory| directory.join("stage2/linux"))
            .find(|linux| linux.join("config/lab.config").is_file())
            .ok_or_else(|| LabError::Unusable("no repository found: set it with --root".into()))
    }

    /// Returns the path of the cache.
    ///
    /// # Errors
    /// Neither `--cache` nor the environment sets a directory.
    pub fn cache(&self) -> Result<PathBuf, LabError> {
        let home = |variable: &str| {
            env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
        };
        let cache = (self.cache.clone())
            .or_else(|| Some(home("XDG_CACHE_HOME")?.join("granule")))
            .or_else(|| Some(home("HOME")?.join(".cache/granule")));
        match cache {
            Some(cache) => Ok(absolute(cache)?),
            None => {
                let reason = "no cache directory found: set it with --cache";
                Err(LabError::Unusable(reason.to_owned()))
            }
        }
    }
}

/// Paths of a run.
#[derive(Debug)]
pub(crate) struct Paths {
    /// Directory of the repository's series and configuration fragments.
    pub linux: PathBuf,
    pub init: PathBuf,
    pub plugin: PathBuf,
    /// Cache of sources, objects and kernels.
    pub cache: PathBuf,
    pub out: PathBuf,
}

impl Paths {
    /// Returns the paths of a run. By default, `init` and plugin are beside this program.
    pub fn new(options: &Options) -> Result<Self, LabError> {
        let Options { kernels, host, output, .. } = options;
        let program = env::current_exe()?;
        let built = program.parent().unwrap_or(Path::new(""));
        let target = built.parent().unwrap_or(Path::new(""));
        let or =
            |path: &Option<PathBuf>, default: PathBuf| absolute(path.clone().unwrap_or(default));
        let next = || {
            (1..)
                .map(|number| PathBuf::from(format!("lab-runs/{}-{number:03}", kernels.run_name())))
                .find(|path| !path.exists())
        };
        Ok(Self {
            linux: kernels.locations.linux()?,
            init: or(&host.init, target.join("aarch64-unknown-linux-musl/release/granule"))?,
            plugin: or(&host.plugin, built.join("libgranule_qemu_plugin.so"))?,
            cache: kernels.locations.cache()?,
            out: output.out.clone().or_else(next).unwrap_or_else(|| "lab-runs".into()),
        })
    }
}

/// Returns the parser of a CPU count, up to the maximum of the lab's kernels.
fn cpu_count_parser() -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(1..=256)
}
