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

use super::cpu_count_parser;

/// Jobs on each kernel.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Workload {
    /// The page-table test.
    PageTableTest(Matrix),
    /// Boots of a Linux guest.
    Guest(GuestMatrix),
    /// The kernel's KVM selftests.
    Selftests(SelftestOptions),
}

impl Workload {
    /// Reports whether the results are records, which can be compared.
    pub(crate) const fn has_records(&self) -> bool {
        matches!(self, Self::PageTableTest(_))
    }
}

/// Program of the page-table test.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum TestProgram {
    /// `granule bench`
    #[default]
    Bench,
    /// The kernel's page-table test, from Linux 6.1
    #[value(name = "kvm_page_table_test", alias = "upstream")]
    KernelPageTableTest,
}

/// Configurations of the page-table test.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Workload")]
pub struct Matrix {
    /// Program to run in the emulated host
    #[arg(long, value_enum, default_value_t)]
    pub(crate) test: TestProgram,
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
    /// Returns the matrix of `granule lab smoke`: 4 vCPUs, 16M, 4K pages and hugetlb 2M, one seed.
    pub(crate) fn smoke() -> Self {
        Self {
            test: TestProgram::Bench,
            load: Load {
                backing: vec![Backing::Anonymous, HUGETLB_2M],
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
    /// Additional argument of `granule run`
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    pub(crate) run_arg: Vec<String>,
}

/// Selection of the kernel's KVM selftests.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Workload")]
pub struct SelftestOptions {
    /// Run only this selftest; arguments after the name replace its default arguments
    #[arg(long = "test", value_name = "NAME [ARGUMENTS]")]
    pub(crate) tests: Vec<String>,
}

/// Schedules of a job, if none are set.
const DEFAULT_SEEDS: u64 = 3;
pub(crate) const HUGETLB_2M: Backing = Backing::AnonymousHugetlb(Some(Bytes::mib(2)));
const HUGETLB_1G: Backing = Backing::AnonymousHugetlb(Some(Bytes::gib(1)));

/// Backings, vCPU counts and sizes of guest memory, and schedules.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
pub struct Load {
    /// Backing of the memory [default: 4K, THP, hugetlb 2M and hugetlb 1G; for guests also shmem
    /// and shared hugetlb]
    #[arg(short = 's', long, value_name = "BACKING")]
    backing: Vec<Backing>,
    /// Number of vCPUs
    #[arg(short = 'v', long, value_name = "N", default_values_t = [4],
          value_parser = cpu_count_parser())]
    vcpus: Vec<u32>,
    /// Size of the memory [default: 64M for the test, 128M for a guest, or one page if pages are
    /// larger]
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = parse_nonzero_size)]
    pub(crate) size: Option<Bytes>,
    /// Boots of each job, each with another schedule [default: 3]
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..))]
    seeds: Option<u64>,
}

/// Backings of the page-table test, if none is set.
pub(crate) const TEST_BACKINGS: &[Backing] =
    &[Backing::Anonymous, Backing::AnonymousThp, HUGETLB_2M, HUGETLB_1G];
/// Backings of guests, if none is set.
pub(crate) const GUEST_BACKINGS: &[Backing] = &[
    Backing::Anonymous,
    Backing::AnonymousThp,
    HUGETLB_2M,
    HUGETLB_1G,
    Backing::Shmem,
    Backing::SharedHugetlb,
];

impl Load {
    /// Returns this load; unset backing and number of schedules have one value.
    pub(crate) fn with_one_job(self, backing: Backing) -> Self {
        let backing = if self.backing.is_empty() { vec![backing] } else { self.backing };
        Self { backing, seeds: self.seeds.or(Some(1)), ..self }
    }

    /// Returns a value for each combination of backing, vCPU count and seed, in this order.
    pub(crate) fn combinations<T>(
        &self,
        default_backings: &[Backing],
        value: impl Fn(Backing, u32, u64) -> T,
    ) -> Vec<T> {
        let backings = if self.backing.is_empty() { default_backings } else { &self.backing };
        let mut values = Vec::new();
        for &backing in backings {
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
