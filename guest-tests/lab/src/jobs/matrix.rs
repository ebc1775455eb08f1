// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Jobs of a run, one boot each, so that no job depends on another's state; and the resources that
//! a backing requires in the emulated host.

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
        emulator::Hardware,
        job::{FOREIGN_PATH, Job, RESULTS_PATH},
    },
    jobs::guest::Guest,
    kernel::selftests::Invocation,
    options::{HostOptions, Options, Test},
};

/// Pages of at least this size can only be reserved at boot.
const GIGANTIC: u64 = 1 << 30;
/// Default huge page size of Debian's and the lab's kernels.
const DEFAULT_HUGE: u64 = 2 << 20;
/// Virtual seconds after which a test is killed. A test that only sleeps reaches it immediately.
const DEADLINE_SECONDS: u64 = 3600;

/// One boot and its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedJob {
    /// Name of the job's directory.
    pub name: String,
    pub hardware: Hardware,
    /// Additional kernel parameters.
    pub append: String,
    pub job: Job,
    /// Program of the kernel tree to add to the initramfs.
    pub foreign: Option<PathBuf>,
    /// Guest to add to the initramfs.
    pub guest: Option<Guest>,
}

/// Number of huge pages to reserve, by page size in bytes.
type Pools = BTreeMap<u64, u64>;

/// Returns the jobs of a run. `tests` are the selftests to run, from the kernel tree.
pub fn jobs(options: &Options, tests: &[Invocation]) -> Vec<PlannedJob> {
    let matrix = &options.matrix;
    match matrix.test() {
        Test::Selftests => {
            tests.iter().map(|(path, arguments)| selftest(options, path, arguments)).collect()
        }
        Test::Guest => {
            matrix.combinations(|backing, vcpus, seed| guest_boot(options, backing, vcpus, seed))
        }
        Test::Bench | Test::KernelPageTableTest => matrix.combinations(|backing, vcpus, seed| {
            let foreign = tests.first().map(|(path, _)| path.clone());
            page_table_test(options, foreign, backing, vcpus, seed)
        }),
    }
}

impl PlannedJob {
    /// Returns the job of a program from the kernel tree, without settings. `cpus` and `memory`
    /// are the default hardware.
    fn new(
        host: &HostOptions,
        name: String,
        (cpus, memory): (u32, Bytes),
        argv: Vec<String>,
        pools: Pools,
    ) -> Self {
        Self {
            name,
            hardware: Hardware {
                cpu: host.cpu.clone(),
                cpus: host.smp.unwrap_or(cpus),
                memory: host.memory.unwrap_or(memory),
                quantum: Nanoseconds(host.quantum),
                costs: host.costs.clone(),
            },
            append: append(&pools),
            job: Job {
                argv,
                pools,
                settings: BTreeMap::new(),
                seed: 0,
                foreign: true,
                expect: Vec::new(),
                deadline_seconds: DEADLINE_SECONDS,
            },
            foreign: None,
            guest: None,
        }
    }
}

/// Returns a job of `granule bench`, or of the kernel's page-table test.
fn page_table_test(
    Options { matrix, host, .. }: &Options,
    program: Option<PathBuf>,
    backing: Backing,
    vcpus: u32,
    seed: u64,
) -> PlannedJob {
    // At least one page, and otherwise a size that takes seconds of emulation.
    let default = Bytes(page_of(backing).unwrap_or(0).max(Bytes::mib(64).0));
    let memory = matrix.memory().unwrap_or(default);
    let pools = pools(backing, memory);
    let foreign = matrix.test() != Test::Bench;
    let mut argv: Vec<String> = if foreign {
        vec![FOREIGN_PATH.to_owned()]
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
    if !foreign {
        option("-i", matrix.iterations.to_string());
        option("--seed", seed.to_string());
        option("--json", RESULTS_PATH.to_owned());
        argv.extend(matrix.bench_arg.iter().cloned());
    }
    let name = format!("{backing}-{memory}-{vcpus}v-seed{seed}");
    let hardware = (vcpus.max(2), host_memory(memory, &pools));
    let mut planned = PlannedJob::new(host, name, hardware, argv, pools);
    planned.job.settings = settings(backing, foreign || matrix.huge_zero_page);
    planned.job.seed = seed;
    planned.job.foreign = foreign;
    planned.foreign = program.filter(|_| foreign);
    planned
}

/// Returns the job that boots a Linux guest with `granule run`.
fn guest_boot(
    Options { matrix, host, .. }: &Options,
    backing: Backing,
    vcpus: u32,
    seed: u64,
) -> PlannedJob {
    let guest = matrix.distribution.as_deref().map_or_else(Guest::own, Guest::distribution);
    let memory = matrix.memory().unwrap_or(guest.default_memory);
    let memory = page_of(backing).map_or(memory, |page| Bytes(memory.0.next_multiple_of(page)));
    let pools = pools(backing, memory);
    // --no-reboot: the guest must not boot again after a panic.
    let argv = ["/init", "run", "--no-reboot"]
        .into_iter()
        .chain(["--kernel", Guest::IMAGE, "--initrd", Guest::INITRD])
        .chain(guest.arguments.iter().copied())
        .map(str::to_owned)
        .chain(["--memory".to_owned(), format!("{memory},backing={backing}")])
        .chain(["--vcpus".to_owned(), vcpus.to_string()])
        .chain(["--stats".to_owned(), RESULTS_PATH.to_owned()])
        .chain(matrix.bench_arg.iter().cloned());
    let name = format!("guest-{backing}-{memory}-{vcpus}v-seed{seed}");
    let host_memory = Bytes(host_memory(memory, &pools).0 + guest.memory_of_files().0);
    let hardware = (vcpus.max(2), host_memory);
    let mut planned = PlannedJob::new(host, name, hardware, argv.collect(), pools);
    planned.job.settings = settings(backing, false);
    planned.job.seed = seed;
    planned.job.expect = guest.script.clone();
    planned.guest = Some(guest);
    planned
}

/// Returns the job of a selftest, which has its own hardware defaults.
fn selftest(options: &Options, program: &Path, arguments: &[String]) -> PlannedJob {
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let vcpus = options.matrix.vcpus.first().copied().unwrap_or(4);
    let pools = Pools::from([(DEFAULT_HUGE, 64)]);
    let argv = [&[FOREIGN_PATH.to_owned()], arguments].concat();
    let mut planned = PlannedJob::new(&options.host, name, (vcpus, Bytes::gib(4)), argv, pools);
    planned.foreign = Some(program.to_owned());
    planned
}

/// Returns the hugetlb page size of a backing.
fn page_of(backing: Backing) -> Option<u64> {
    match backing {
        Backing::AnonymousHugetlb(Some(size)) => Some(size.0),
        Backing::AnonymousHugetlb(None) | Backing::SharedHugetlb => Some(DEFAULT_HUGE),
        Backing::Anonymous | Backing::AnonymousThp | Backing::Shmem => None,
    }
}

/// Returns the pool of huge pages that holds this much memory.
fn pools(backing: Backing, memory: Bytes) -> Pools {
    page_of(backing).map(|page| (page, memory.0.div_ceil(page))).into_iter().collect()
}

/// Returns the settings of a backing. `granule bench` requires huge pages: if a read maps the huge
/// zero page, the first write allocates small pages. The kernel's test uses the default settings,
/// which enable the huge zero page.
fn settings(backing: Backing, zero_page: bool) -> BTreeMap<String, String> {
    match (backing, zero_page) {
        (Backing::AnonymousThp, false) => {
            let file = "/sys/kernel/mm/transparent_hugepage/use_zero_page";
            [(file.to_owned(), "0".to_owned())].into()
        }
        _ => BTreeMap::new(),
    }
}

/// Returns the host memory for a region and its pools: one additional gigabyte, and another for
/// gigantic pages, whose alignment excludes the ends of memory that the kernel uses.
fn host_memory(region: Bytes, pools: &Pools) -> Bytes {
    let pooled: u64 = pools.iter().map(|(page, count)| page * count).sum();
    let gigantic = pools.keys().any(|page| *page >= GIGANTIC);
    let whole_gigabytes = region.0.max(pooled).next_multiple_of(GIGANTIC);
    Bytes(whole_gigabytes + if gigantic { 2 } else { 1 } * GIGANTIC)
}

/// Returns the kernel parameters that reserve gigantic pages.
fn append(pools: &Pools) -> String {
    let gigantic = pools.iter().filter(|(page, _)| **page >= GIGANTIC);
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

    pub fn options(line: &str) -> Options {
        #[derive(Debug, Parser)]
        struct Cli {
            #[command(flatten)]
            options: Options,
        }
        Cli::parse_from(line.split_whitespace()).options
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
        assert!(jobs[4].append.contains("hugepagesz=1G hugepages=1"));
        assert_eq!(jobs[4].hardware.memory, Bytes::gib(3));
    }

    #[test]
    fn the_seed_of_a_foreign_test_is_applied_by_pid_1_only() {
        let options = options("lab --test kvm_page_table_test");

        let jobs = jobs(&options, &[("/x/kvm_page_table_test".into(), Vec::new())]);

        assert_eq!(jobs[1].job.argv[0], FOREIGN_PATH);
        assert!(!jobs[1].job.argv.contains(&"--seed".to_owned()));
        assert_eq!(jobs[1].job.seed, 1);
        assert!(jobs[1].foreign.is_some());
    }

    #[test]
    fn each_guest_boot_has_a_pool_for_the_rounded_memory() {
        let jobs = jobs(&options("lab --guest -s 4k -s thp -s 1g -v 2 --seeds 1"), &[]);

        let expected = [
            "guest-anonymous-128M-2v-seed0",
            "guest-anonymous_thp-128M-2v-seed0",
            "guest-anonymous_hugetlb_1gb-1G-2v-seed0",
        ];
        assert_eq!(names(&jobs), expected);
        assert_eq!(jobs[2].job.pools, [(1 << 30, 1)].into());
        assert!(jobs[2].job.argv.contains(&"1G,backing=anonymous_hugetlb_1gb".to_owned()));
        assert!(jobs.iter().all(|job| job.guest == Some(Guest::own())));
    }
}
