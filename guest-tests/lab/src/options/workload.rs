// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options that select the jobs on each kernel.

use std::path::PathBuf;

use clap::{ValueEnum, value_parser};
use granule_types::{
    backing::Backing,
    guest_mode::GuestMode,
    units::{Bytes, parse_nonzero_size},
};
use serde::{Deserialize, Serialize};

use super::{BootMatrix, ZapMatrix, cpu_count_parser};
use crate::{
    error::LabError,
    host::{
        program::{Program, check_static_arm64},
        vmm::Vmm,
    },
    values::{LinuxVersion, PageSize},
};

/// Jobs on each kernel.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workload {
    /// The page-table test.
    PageTableTest(Matrix),
    /// Boots of a Linux guest.
    Guest(GuestMatrix),
    /// The kernel's KVM selftests.
    Selftests(SelftestOptions),
    /// A user's program.
    Program(ProgramMatrix),
    /// Boots of the kernel itself, whose page tables are measured.
    Boot(BootMatrix),
    /// Removals of memory from the page tables of a process.
    Zap(ZapMatrix),
}

impl Workload {
    /// Reports whether the results are records, which can be compared.
    pub(crate) const fn has_records(&self) -> bool {
        matches!(self, Self::PageTableTest(_) | Self::Program(_))
    }

    /// Refuses a backing that a host with this page size lacks, a program that it cannot run, and options
    /// without effect.
    pub(crate) fn check(&self, page_size: PageSize) -> Result<(), LabError> {
        match self {
            Self::PageTableTest(matrix) => matrix.check(page_size),
            Self::Program(matrix) => matrix.load.check(page_size),
            Self::Guest(matrix) => matrix.load.check(page_size),
            Self::Boot(matrix) => matrix.check(page_size),
            Self::Selftests(_) | Self::Zap(_) => Ok(()),
        }
    }
}

/// Program of the page-table test.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TestProgram {
    /// `granule bench`
    #[default]
    Bench,
    /// The kernel's page-table test, of Debian's Linux 6.1; of the last kernel's tree if that
    /// package is not available
    #[value(name = "kvm_page_table_test", alias = "upstream")]
    #[serde(rename = "kvm_page_table_test")]
    KernelPageTableTest,
}

/// Configurations of the page-table test.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Workload")]
pub struct Matrix {
    /// Program to run in the emulated host
    #[arg(long, value_enum, default_value_t)]
    pub(crate) test: TestProgram,
    /// Run this static arm64 kvm_page_table_test, of any version, in the emulated host
    #[arg(long, value_name = "FILE", conflicts_with = "test")]
    pub(crate) test_binary: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) load: Load,
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
    /// Let the first read of a huge page map the huge zero page, as Linux does by default; the
    /// first write then allocates small pages (add --bench-arg=--accept-fallback)
    #[arg(long)]
    pub(crate) huge_zero_page: bool,
    /// Additional argument of `granule bench`
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    pub(crate) bench_arg: Vec<String>,
}

impl Matrix {
    /// Reports whether the program is a `kvm_page_table_test`.
    pub(crate) fn runs_kernel_test(&self) -> bool {
        self.test == TestProgram::KernelPageTableTest || self.test_binary.is_some()
    }

    /// Refuses what [`Workload::check`] refuses.
    fn check(&self, page_size: PageSize) -> Result<(), LabError> {
        self.test_binary.as_deref().map_or(Ok(()), check_static_arm64)?;
        let of_bench = [
            ("-i", self.iterations > 1),
            ("--huge-zero-page", self.huge_zero_page),
            ("--bench-arg", !self.bench_arg.is_empty()),
        ];
        match of_bench.iter().find(|(_, is_set)| *is_set) {
            Some((option, _)) if self.runs_kernel_test() => Err(LabError::Unusable(format!(
                "{option} has no effect on kvm_page_table_test: omit it, or --test and --test-binary"
            ))),
            _ => self.load.check(page_size),
        }
    }

    /// Returns the matrix of `granule lab smoke`: 4 vCPUs, 16M, base pages and hugetlb pages of a
    /// block, one seed.
    pub(crate) fn smoke(page_size: PageSize) -> Self {
        let block = Backing::AnonymousHugetlb(Some(page_size.huge_page()));
        Self {
            test: TestProgram::Bench,
            test_binary: None,
            load: Load {
                backing: vec![Backing::Anonymous, block],
                vcpus: vec![4],
                size: Some(Bytes::mib(16)),
                seeds: Some(1),
            },
            mode: GuestMode::P48V48_4K,
            offset: None,
            iterations: 1,
            huge_zero_page: false,
            bench_arg: Vec::new(),
        }
    }
}

/// Boots of a Linux guest.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Workload")]
pub struct GuestMatrix {
    /// Boot the guests from vmlinuz, initrd.img and root.img in this directory (see scripts/guest),
    /// up to the login prompt [default: the kernel of the host, with a small PID 1]
    #[arg(long, value_name = "DIR")]
    pub(crate) distribution: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) load: Load,
    /// Boot the guests with this VMM in place of `granule run`: a static arm64 program, or a directory
    /// with a program `run` and its data, and its arguments, in which {kernel}, {initrd}, {vcpus} and
    /// {mebibytes} are replaced; /workload/FILE is a file of the directory. It selects the backing itself: -s reserves the pages [default: base
    /// pages]
    #[arg(long, value_name = "COMMAND", value_parser = Vmm::parse,
          conflicts_with_all = ["distribution", "run_arg"])]
    pub(crate) vmm: Option<Vmm>,
    /// Additional argument of `granule run`
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    pub(crate) run_arg: Vec<String>,
}

/// Options of `granule lab workload`.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Workload")]
pub struct ProgramOptions {
    /// Static arm64 program, or a directory with a program `run` and its data
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// Machine that runs the program
    #[arg(long = "in", value_enum, default_value_t)]
    place: ProgramPlace,
    #[command(flatten)]
    load: Load,
    /// Additional argument of `granule run`
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    run_arg: Vec<String>,
}

impl ProgramOptions {
    /// Opens the program, which runs with these arguments.
    pub(super) fn open(self, arguments: Vec<String>) -> Result<ProgramMatrix, LabError> {
        let Self { path, place, load, run_arg } = self;
        if place == ProgramPlace::Host
            && (!load.backing.is_empty() || load.size.is_some() || !run_arg.is_empty())
        {
            return Err(LabError::Unusable(
                "-s, -b and --run-arg configure a guest: they require --in guest".to_owned(),
            ));
        }
        Ok(ProgramMatrix { program: Program::open(&path)?, place, load, run_arg, arguments })
    }
}

/// Machine that runs a user's program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProgramPlace {
    /// The emulated host; -v sets its CPUs
    #[default]
    Host,
    /// A Linux guest that `granule run` boots in the host, with the host's kernel
    Guest,
}

/// Runs of a user's program.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProgramMatrix {
    pub(crate) program: Program,
    pub(crate) place: ProgramPlace,
    pub(crate) load: Load,
    pub(crate) run_arg: Vec<String>,
    pub(crate) arguments: Vec<String>,
}

/// Selection of the kernel's KVM selftests.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Workload")]
pub struct SelftestOptions {
    /// Run only this selftest; arguments after the name replace its default arguments
    #[arg(long = "test", value_name = "NAME [ARGUMENTS]")]
    pub(crate) tests: Vec<String>,
    /// Run the tests of Debian's linux-source-VERSION [default: those of the last kernel's tree; for
    /// images 6.1]
    #[arg(long, value_name = "VERSION")]
    pub(crate) tests_of: Option<LinuxVersion>,
}

/// Number of vCPUs, if none is set.
const DEFAULT_VCPUS: u32 = 4;
/// Schedules of a job, if none are set.
const DEFAULT_SEEDS: u64 = 3;

/// Backings, vCPU counts and sizes of guest memory, and schedules.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
pub struct Load {
    /// Backing of the memory [default: base pages, THP, hugetlb 2M (32M with base pages of 16K, 512M
    /// with 64K) and hugetlb 1G (not with 64K); for guests also shmem and shared hugetlb]
    #[arg(short = 's', long, value_name = "BACKING")]
    backing: Vec<Backing>,
    /// Number of vCPUs
    #[arg(short = 'v', long, value_name = "N", default_values_t = [DEFAULT_VCPUS],
          value_parser = cpu_count_parser())]
    vcpus: Vec<u32>,
    /// Size of the memory, rounded up to the backing's pages [default: 64M for the test, 128M for a
    /// guest]
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = parse_nonzero_size)]
    pub(crate) size: Option<Bytes>,
    /// Boots of each job, each with another schedule [default: 3]
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..))]
    seeds: Option<u64>,
}

impl Load {
    /// Returns this load; unset backing and number of schedules have one value.
    pub(crate) fn with_one_job(self, backing: Backing) -> Self {
        let backing = if self.backing.is_empty() { vec![backing] } else { self.backing };
        Self { backing, seeds: self.seeds.or(Some(1)), ..self }
    }

    /// Returns the names of the options that are set to another value than their default.
    pub(super) fn set_options(&self) -> impl Iterator<Item = &'static str> {
        let options = [
            ("-s", !self.backing.is_empty()),
            ("-v", self.vcpus != [DEFAULT_VCPUS]),
            ("-b", self.size.is_some()),
            ("--seeds", self.seeds.is_some()),
        ];
        options.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| name)
    }

    /// Returns the largest number of vCPUs.
    pub(crate) fn most_vcpus(&self) -> u32 {
        self.vcpus.iter().copied().max().unwrap_or(0)
    }

    /// Returns this load with the default size.
    pub(crate) fn without_size(self) -> Self {
        Self { size: None, ..self }
    }

    /// Returns this load; unset values are those of `other`.
    pub(crate) fn or(self, other: Self) -> Self {
        let backing = if self.backing.is_empty() { other.backing } else { self.backing };
        let (size, seeds) = (self.size.or(other.size), self.seeds.or(other.seeds));
        Self { backing, vcpus: self.vcpus, size, seeds }
    }

    /// Refuses a backing that a host with this page size lacks.
    fn check(&self, page_size: PageSize) -> Result<(), LabError> {
        self.backing.iter().try_for_each(|backing| page_size.check(*backing, "-s"))
    }

    /// Returns a value for each combination of backing, vCPU count and seed, in this order.
    pub(crate) fn combinations<T>(
        &self,
        default_backings: Vec<Backing>,
        value: impl Fn(Backing, u32, u64) -> T,
    ) -> Vec<T> {
        let backings = match self.backing.as_slice() {
            [] => default_backings,
            backings => backings.to_vec(),
        };
        let mut values = Vec::new();
        for backing in backings {
            for &vcpus in &self.vcpus {
                values.extend(
                    (0..self.seeds.unwrap_or(DEFAULT_SEEDS))
                        .map(|seed| value(backing, vcpus, seed)),
                );
            }
        }
        values
    }
}
