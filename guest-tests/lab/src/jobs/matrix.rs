// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Plans the jobs of a run and the resources that each requires in the emulated host. Each job is
//! one boot, so that no job depends on another's state.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use granule_types::{
    backing::Backing,
    units::{Bytes, Nanoseconds},
};

use crate::{
    host::{
        emulator::EmulatedMachine,
        job::{Job, KERNEL_TEST_PATH, RESULTS_PATH},
    },
    jobs::guest::LinuxGuest,
    kernel::selftests::Invocation,
    options::{
        GUEST_BACKINGS, GuestMatrix, HostOptions, Matrix, Options, TEST_BACKINGS, TestProgram,
        Workload,
    },
};

/// Smallest page size that must be reserved at boot.
const GIGANTIC_PAGE: u64 = 1 << 30;
/// Default huge page size of Debian's and the lab's kernels.
const DEFAULT_HUGE_PAGE: u64 = 2 << 20;
/// Virtual seconds after which a test is killed. They pass immediately while all CPUs are idle.
const DEADLINE_SECONDS: u64 = 3600;
/// CPUs of the emulated host of a selftest.
const SELFTEST_CPUS: u32 = 4;

/// One boot and its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedJob {
    /// Name of the job's directory.
    pub name: String,
    pub machine: EmulatedMachine,
    /// Additional kernel parameters.
    pub kernel_parameters: String,
    pub job: Job,
    /// Program of the kernel tree to add to the initramfs.
    pub kernel_test: Option<PathBuf>,
    /// Guest to add to the initramfs.
    pub guest: Option<LinuxGuest>,
}

/// Number of huge pages to reserve, by page size in bytes.
type HugePagePools = BTreeMap<u64, u64>;

/// Returns the jobs of a run. `tests` are the tests to run from the kernel tree.
pub fn jobs(options: &Options, tests: &[Invocation]) -> Vec<PlannedJob> {
    let host = &options.common.host;
    match &options.workload {
        Workload::Selftests(_) => {
            tests.iter().map(|(path, arguments)| selftest(host, path, arguments)).collect()
        }
        Workload::Guest(matrix) => {
            matrix.load.combinations(GUEST_BACKINGS, |backing, vcpus, seed| {
                guest_boot(host, matrix, backing, vcpus, seed)
            })
        }
        Workload::PageTableTest(matrix) => {
            let program = tests.first().map(|(path, _)| path);
            matrix.load.combinations(TEST_BACKINGS, |backing, vcpus, seed| {
                page_table_test(host, matrix, program, backing, vcpus, seed)
            })
        }
    }
}

impl PlannedJob {
    /// Returns the name that jobs of similar duration share: all but the seed.
    pub fn cost_class(&self) -> &str {
        self.name.rsplit_once("-seed").map_or(&self.name, |(class, _)| class)
    }

    /// Returns a job without settings. `cpus` and `memory` apply unless `host` sets them.
    fn new(
        host: &HostOptions,
        name: String,
        (cpus, memory): (u32, Bytes),
        argv: Vec<String>,
        pools: HugePagePools,
    ) -> Self {
        Self {
            name,
            machine: machine(host, host.smp.unwrap_or(cpus), host.memory.unwrap_or(memory)),
            kernel_parameters: kernel_parameters(&pools),
            job: Job {
                argv,
                pools,
                settings: BTreeMap::new(),
                seed: 0,
                has_unmarked_program: true,
                expect: Vec::new(),
                deadline_seconds: DEADLINE_SECONDS,
            },
            kernel_test: None,
            guest: None,
        }
    }
}

/// Returns the emulated machine of `host` with these CPUs and this memory.
pub fn machine(host: &HostOptions, cpus: u32, memory: Bytes) -> EmulatedMachine {
    EmulatedMachine {
        cpu: host.cpu.clone(),
        cpus,
        memory,
        quantum: Nanoseconds(host.quantum),
        costs: host.costs.clone(),
    }
}

/// Returns the job that runs `granule bench` or the kernel's page-table test.
fn page_table_test(
    host: &HostOptions,
    matrix: &Matrix,
    program: Option<&PathBuf>,
    backing: Backing,
    vcpus: u32,
    seed: u64,
) -> PlannedJob {
    // 64M takes seconds of emulation.
    let default = Bytes(hugetlb_page_size(backing).unwrap_or(0).max(Bytes::mib(64).0));
    let memory = matrix.load.size.unwrap_or(default);
    let pools = huge_page_pools(backing, memory);
    let is_kernel_test = matrix.test != TestProgram::Bench;
    let mut argv: Vec<String> = if is_kernel_test {
        vec![KERNEL_TEST_PATH.to_owned()]
    } else {
        vec!["/init".to_owned(), "bench".to_owned()]
    };
    let mut option = |name: &str, value: String| argv.extend([name.to_owned(), value]);
    option("-m", matrix.mode.id.to_string());
    option("-s", backing.to_string());
    option("-b", memory.to_string());
    option("-v", vcpus.to_string());
    if let Some(offset) = matrix.offset {
        option("-p", offset.0.to_string());
    }
    if !is_kernel_test {
        option("-i", matrix.iterations.to_string());
        option("--seed", seed.to_string());
        option("--json", RESULTS_PATH.to_owned());
        argv.extend(matrix.bench_arg.iter().cloned());
    }
    let name = format!("{backing}-{memory}-{vcpus}v-seed{seed}");
    let machine = (vcpus.max(2), host_memory(memory, &pools));
    let mut planned = PlannedJob::new(host, name, machine, argv, pools);
    planned.job.settings = sysfs_settings(backing, is_kernel_test || matrix.huge_zero_page);
    planned.job.seed = seed;
    planned.job.has_unmarked_program = is_kernel_test;
    planned.kernel_test = program.filter(|_| is_kernel_test).cloned();
    planned
}

fn guest_boot(
    host: &HostOptions,
    matrix: &GuestMatrix,
    backing: Backing,
    vcpus: u32,
    seed: u64,
) -> PlannedJob {
    let files = matrix.distribution.as_deref();
    let guest = files.map_or_else(LinuxGuest::with_host_kernel, LinuxGuest::distribution);
    let memory = matrix.load.size.unwrap_or(guest.default_memory);
    let memory =
        hugetlb_page_size(backing).map_or(memory, |page| Bytes(memory.0.next_multiple_of(page)));
    let pools = huge_page_pools(backing, memory);
    // --no-reboot: the guest must not boot again after a panic.
    let argv = ["/init", "run", "--no-reboot"]
        .into_iter()
        .chain(["--kernel", LinuxGuest::IMAGE_PATH, "--initrd", LinuxGuest::INITRD_PATH])
        .chain(guest.arguments.iter().copied())
        .map(str::to_owned)
        .chain(["--memory".to_owned(), format!("{memory},backing={backing}")])
        .chain(["--vcpus".to_owned(), vcpus.to_string()])
        .chain(["--stats".to_owned(), RESULTS_PATH.to_owned()])
        .chain(matrix.run_arg.iter().cloned());
    let name = format!("guest-{backing}-{memory}-{vcpus}v-seed{seed}");
    let host_memory = Bytes(host_memory(memory, &pools).0 + guest.memory_of_files().0);
    let machine = (vcpus.max(2), host_memory);
    let mut planned = PlannedJob::new(host, name, machine, argv.collect(), pools);
    planned.job.settings = sysfs_settings(backing, false);
    planned.job.seed = seed;
    planned.job.expect = guest.script.clone();
    planned.guest = Some(guest);
    planned
}

/// Returns the job that runs a selftest.
pub fn selftest(host: &HostOptions, program: &Path, arguments: &[String]) -> PlannedJob {
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let pools = HugePagePools::from([(DEFAULT_HUGE_PAGE, 64)]);
    let argv = [&[KERNEL_TEST_PATH.to_owned()], arguments].concat();
    let mut planned = PlannedJob::new(host, name, (SELFTEST_CPUS, Bytes::gib(4)), argv, pools);
    planned.kernel_test = Some(program.to_owned());
    planned
}

fn hugetlb_page_size(backing: Backing) -> Option<u64> {
    match backing {
        Backing::AnonymousHugetlb(Some(size)) => Some(size.0),
        Backing::AnonymousHugetlb(None) | Backing::SharedHugetlb => Some(DEFAULT_HUGE_PAGE),
        Backing::Anonymous | Backing::AnonymousThp | Backing::Shmem => None,
    }
}

/// Returns the hugetlb pool for a region of this size.
fn huge_page_pools(backing: Backing, memory: Bytes) -> HugePagePools {
    hugetlb_page_size(backing).map(|page| (page, memory.0.div_ceil(page))).into_iter().collect()
}

/// Returns the sysfs settings for a backing. Unless `zero_page`, disables the huge zero page: if a
/// read maps it, the first write allocates small pages.
fn sysfs_settings(backing: Backing, zero_page: bool) -> BTreeMap<String, String> {
    match (backing, zero_page) {
        (Backing::AnonymousThp, false) => {
            let file = "/sys/kernel/mm/transparent_hugepage/use_zero_page";
            [(file.to_owned(), "0".to_owned())].into()
        }
        _ => BTreeMap::new(),
    }
}

/// Returns the host memory for a region and its pools: one additional gigabyte, and another one for
/// gigantic pages, because the kernel uses memory at both ends.
fn host_memory(region: Bytes, pools: &HugePagePools) -> Bytes {
    let pooled: u64 = pools.iter().map(|(page, count)| page * count).sum();
    let gigantic = pools.keys().any(|page| *page >= GIGANTIC_PAGE);
    let whole_gigabytes = region.0.max(pooled).next_multiple_of(GIGANTIC_PAGE);
    Bytes(whole_gigabytes + if gigantic { 2 } else { 1 } * GIGANTIC_PAGE)
}

/// Returns the kernel parameters that reserve gigantic pages.
fn kernel_parameters(pools: &HugePagePools) -> String {
    let gigantic = pools.iter().filter(|(page, _)| **page >= GIGANTIC_PAGE);
    gigantic
        .map(|(page, count)| {
            let page = Bytes(*page);
            format!("default_hugepagesz=2M hugepagesz={page} hugepages={count}")
        })
        .collect()
}

#[cfg(test)]
pub mod tests {
    use clap::Parser;

    use super::*;
    use crate::options::{CommonOptions, ReportOptions};

    /// Returns the options of a command line: `lab OPTIONS`, `guest OPTIONS`.
    pub fn options(line: &str) -> Options {
        #[derive(Debug, Parser)]
        struct TestArgs {
            #[command(flatten)]
            common: CommonOptions,
            #[command(flatten)]
            matrix: Matrix,
        }
        #[derive(Debug, Parser)]
        struct GuestArgs {
            #[command(flatten)]
            common: CommonOptions,
            #[command(flatten)]
            matrix: GuestMatrix,
        }
        let words = || line.split_whitespace();
        if line.starts_with("guest") {
            let GuestArgs { common, matrix } = GuestArgs::parse_from(words());
            return Options::guest(common, matrix);
        }
        let TestArgs { common, matrix } = TestArgs::parse_from(words());
        Options::page_table_test(common, matrix, ReportOptions::default())
    }

    fn names(jobs: &[PlannedJob]) -> Vec<&str> {
        jobs.iter().map(|job| job.name.as_str()).collect()
    }

    #[test]
    fn each_combination_is_one_boot_with_a_pool_as_large_as_the_region() {
        let jobs = jobs(&options("lab -s 4k -s 2m -s 1g --seeds 2"), &[]);

        let expected = [
            "anonymous-64M-4v-seed0",
            "anonymous-64M-4v-seed1",
            "anonymous_hugetlb_2mb-64M-4v-seed0",
            "anonymous_hugetlb_2mb-64M-4v-seed1",
            "anonymous_hugetlb_1gb-1G-4v-seed0",
            "anonymous_hugetlb_1gb-1G-4v-seed1",
        ];
        assert_eq!(names(&jobs), expected);
        assert!(jobs[0].job.pools.is_empty());
        assert_eq!(jobs[2].job.pools, [(2 << 20, 32)].into());
        assert_eq!(jobs[4].job.pools, [(1 << 30, 1)].into());
        assert!(jobs[4].kernel_parameters.contains("hugepagesz=1G hugepages=1"));
        assert_eq!(jobs[4].machine.memory, Bytes::gib(3));
    }

    #[test]
    fn pid_1_alone_applies_the_seed_of_a_kernel_test() {
        let options = options("lab --test kvm_page_table_test");

        let jobs = jobs(&options, &[("/x/kvm_page_table_test".into(), Vec::new())]);

        assert_eq!(jobs[1].job.argv[0], KERNEL_TEST_PATH);
        assert!(!jobs[1].job.argv.contains(&"--seed".to_owned()));
        assert_eq!(jobs[1].job.seed, 1);
        assert!(jobs[1].kernel_test.is_some());
    }

    #[test]
    fn each_guest_boot_has_a_pool_for_the_rounded_memory() {
        let jobs = jobs(&options("guest -s 4k -s thp -s 1g -v 2 --seeds 1"), &[]);

        let expected = [
            "guest-anonymous-128M-2v-seed0",
            "guest-anonymous_thp-128M-2v-seed0",
            "guest-anonymous_hugetlb_1gb-1G-2v-seed0",
        ];
        assert_eq!(names(&jobs), expected);
        assert_eq!(jobs[2].job.pools, [(1 << 30, 1)].into());
        assert!(jobs[2].job.argv.contains(&"1G,backing=anonymous_hugetlb_1gb".to_owned()));
        assert!(jobs.iter().all(|job| job.guest == Some(LinuxGuest::with_host_kernel())));
    }
}
