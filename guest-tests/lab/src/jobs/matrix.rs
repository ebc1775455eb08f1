// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Plans the jobs of a run and the resources that each requires in the emulated host. Each job is
//! one boot, so that no job depends on another's state.

use std::{collections::BTreeSet, path::Path};

use granule_types::{backing::Backing, units::Bytes};

use crate::{
    host::job::{KERNEL_TEST_PATH, RESULTS_PATH},
    jobs::{
        boot,
        guest::LinuxGuest,
        planned_job::{
            Host, HugePagePools, host_memory, memory_and_pools, run_guest, sysfs_settings,
        },
        program_run::ProgramRun,
        work::{GuestPurpose, Work},
        zap,
    },
    kernel::selftests::Invocation,
    options::{GuestMatrix, Matrix, Options, ProgramMatrix, ProgramPlace, Workload},
    values::PageSize,
};

pub use super::planned_job::{PlannedJob, machine};

const GIB: u64 = 1 << 30;
/// CPUs of the emulated host of a selftest.
const SELFTEST_CPUS: u32 = 4;
/// Size of the hugetlb pool of a selftest, rounded up to a page.
const SELFTEST_POOL: Bytes = Bytes::mib(128);
/// Backing of which a selftest has one page, if the base page size has it: sea_to_user requires it.
const GIGANTIC_PAGE: Backing = Backing::AnonymousHugetlb(Some(Bytes(GIB)));

/// Returns the jobs of a run on kernels of this page size, without repetitions: a job's name is that
/// of its directory. `tests` are the tests to run from the kernel tree.
pub fn jobs(options: &Options, page_size: PageSize, tests: &[Invocation]) -> Vec<PlannedJob> {
    let mut jobs = planned_jobs(options, page_size, tests);
    let mut names = BTreeSet::new();
    jobs.retain(|job| names.insert(job.name.clone()));
    for job in &mut jobs {
        job.machine.counts_functions = options.report.functions;
    }
    jobs
}

fn planned_jobs(options: &Options, page_size: PageSize, tests: &[Invocation]) -> Vec<PlannedJob> {
    let host = Host { options: &options.common.host, page_size };
    let backings = page_size.default_backings();
    match &options.workload {
        Workload::Selftests(_) => {
            let mut selftests: Vec<_> =
                tests.iter().map(|(path, arguments)| selftest(host, path, arguments)).collect();
            // A test that runs with several arguments has them in its name.
            let of_name =
                |name: &str| tests.iter().filter(|(path, _)| path.ends_with(name)).count();
            for (job, (_, arguments)) in selftests.iter_mut().zip(tests) {
                if of_name(&job.name) > 1 {
                    job.name = [vec![job.name.clone()], arguments.clone()]
                        .concat()
                        .join(" ")
                        .replace('/', "_");
                }
            }
            selftests
        }
        Workload::Guest(matrix) => {
            let backings = match matrix.vmm {
                None => [backings, vec![Backing::Shmem, Backing::SharedHugetlb]].concat(),
                Some(_) => vec![Backing::Anonymous],
            };
            matrix.load.combinations(backings, |backing, vcpus, seed| {
                guest_boot(host, matrix, backing, vcpus, seed)
            })
        }
        Workload::Program(matrix) if matrix.place == ProgramPlace::Guest => {
            matrix.load.combinations(backings, |backing, vcpus, seed| {
                guest_program(host, matrix, backing, vcpus, seed)
            })
        }
        Workload::Program(matrix) => {
            let unused = vec![Backing::Anonymous];
            matrix.load.combinations(unused, |_, cpus, seed| host_program(host, matrix, cpus, seed))
        }
        Workload::Boot(matrix) => boot::jobs(host, matrix),
        Workload::Zap(matrix) => zap::jobs(host, matrix),
        Workload::PageTableTest(matrix) => {
            let program = tests.first();
            matrix.load.combinations(backings, |backing, vcpus, seed| {
                page_table_test(host, matrix, program, backing, vcpus, seed)
            })
        }
    }
}

/// Returns the job that runs `granule bench` or the kernel's page-table test.
fn page_table_test(
    host: Host<'_>,
    matrix: &Matrix,
    program: Option<&Invocation>,
    backing: Backing,
    vcpus: u32,
    seed: u64,
) -> PlannedJob {
    // 64M takes seconds of emulation.
    let size = matrix.load.size.unwrap_or(Bytes::mib(64));
    let (memory, pools) = memory_and_pools(host, backing, size);
    let is_kernel_test = matrix.runs_kernel_test();
    let mut argv: Vec<String> = match program {
        Some((_, mode)) => [&[KERNEL_TEST_PATH.to_owned()], mode.as_slice()].concat(),
        None => ["/init", "bench", "-m", &matrix.mode.id.to_string()].map(str::to_owned).into(),
    };
    let mut option = |name: &str, value: String| argv.extend([name.to_owned(), value]);
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
    let work = program.map_or(Work::Bench, |(path, _)| Work::KernelTest(path.clone()));
    let mut planned = PlannedJob::new(host, name, machine, (work, argv), pools);
    planned.job.settings =
        sysfs_settings(host.page_size, backing, is_kernel_test || matrix.huge_zero_page);
    planned.job.seed = seed;
    planned
}

/// Returns the job that runs a user's program in the host.
fn host_program(host: Host<'_>, matrix: &ProgramMatrix, cpus: u32, seed: u64) -> PlannedJob {
    let run = ProgramRun::in_host(matrix, cpus, seed);
    let argv = run.argv.clone();
    let name = format!("{}-{cpus}cpu-seed{seed}", run.name());
    let memory = Bytes(GIB + run.program.initramfs_memory().0);
    let (work, pools) = (Work::Program(run), HugePagePools::new());
    let mut planned = PlannedJob::new(host, name, (cpus, memory), (work, argv), pools);
    planned.job.seed = seed;
    planned
}

/// Returns the job that runs a user's program in a guest, which has the host's kernel.
fn guest_program(
    host: Host<'_>,
    matrix: &ProgramMatrix,
    backing: Backing,
    vcpus: u32,
    seed: u64,
) -> PlannedJob {
    let guest = LinuxGuest::with_program();
    let size = matrix.load.size.unwrap_or_else(|| {
        let files = matrix.program.size * 2;
        Bytes(guest.default_memory.0 + files.next_multiple_of(Bytes::mib(64).0))
    });
    let (memory, pools) = memory_and_pools(host, backing, size);
    let run = ProgramRun::in_guest(matrix, backing, memory, vcpus, seed);
    let (name, initramfs) = (run.name(), run.program.initramfs_memory());
    let vm = (guest, GuestPurpose::Program(run));
    let mut planned = run_guest(host, vm, (backing, memory, vcpus, seed), pools, &matrix.run_arg);
    planned.name = format!("{name}-{}", planned.name);
    planned.machine.memory.0 += initramfs.0;
    planned
}

fn guest_boot(
    host: Host<'_>,
    matrix: &GuestMatrix,
    backing: Backing,
    vcpus: u32,
    seed: u64,
) -> PlannedJob {
    let files = matrix.distribution.as_deref();
    let guest = files.map_or_else(LinuxGuest::with_host_kernel, LinuxGuest::distribution);
    let size = matrix.load.size.unwrap_or(guest.default_memory);
    let (memory, pools) = memory_and_pools(host, backing, size);
    let statistics = ["--stats".to_owned(), RESULTS_PATH.to_owned()];
    let arguments = [&statistics, matrix.run_arg.as_slice()].concat();
    let purpose = match &matrix.vmm {
        Some(vmm) => GuestPurpose::UserVmm(vmm.program.clone()),
        None => GuestPurpose::Checks,
    };
    let vm = (guest, purpose);
    let mut planned = run_guest(host, vm, (backing, memory, vcpus, seed), pools, &arguments);
    if let Some(vmm) = &matrix.vmm {
        planned.job.argv =
            vmm.argv((LinuxGuest::IMAGE_PATH, LinuxGuest::INITRD_PATH), vcpus, memory);
        planned.machine.memory.0 += vmm.program.initramfs_memory().0;
    }
    planned
}

/// Returns the job that runs a selftest.
fn selftest(host: Host<'_>, program: &Path, arguments: &[String]) -> PlannedJob {
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (_, mut pools) = memory_and_pools(host, Backing::SharedHugetlb, SELFTEST_POOL);
    if host.page_size.has(GIGANTIC_PAGE) {
        pools.insert(GIB, 1);
    }
    let argv = [&[KERNEL_TEST_PATH.to_owned()], arguments].concat();
    let work = Work::KernelTest(program.to_owned());
    PlannedJob::new(host, name, (SELFTEST_CPUS, Bytes::gib(5)), (work, argv), pools)
}

#[cfg(test)]
pub mod tests {
    use clap::Parser;

    use super::*;
    use crate::options::{BootMatrix, CommonOptions, ReportOptions, ZapMatrix};

    /// Returns the options of a command line: `lab OPTIONS`, `guest OPTIONS`.
    pub fn options(line: &str) -> Options {
        parse(line).unwrap()
    }

    pub fn parse(line: &str) -> Result<Options, clap::Error> {
        #[derive(Debug, Parser)]
        struct TestArgs {
            #[command(flatten)]
            common: CommonOptions,
            #[command(flatten)]
            matrix: Matrix,
        }
        #[derive(Debug, Parser)]
        struct BootArgs {
            #[command(flatten)]
            common: CommonOptions,
            #[command(flatten)]
            matrix: BootMatrix,
        }
        #[derive(Debug, Parser)]
        struct ZapArgs {
            #[command(flatten)]
            common: CommonOptions,
            #[command(flatten)]
            matrix: ZapMatrix,
        }
        #[derive(Debug, Parser)]
        struct GuestArgs {
            #[command(flatten)]
            common: CommonOptions,
            #[command(flatten)]
            matrix: GuestMatrix,
        }
        let words = line.split_whitespace();
        if line.starts_with("guest") {
            let GuestArgs { common, matrix } = GuestArgs::try_parse_from(words)?;
            return Ok(Options::guest(common, matrix));
        }
        if line.starts_with("boot") {
            let BootArgs { common, matrix } = BootArgs::try_parse_from(words)?;
            return Ok(Options::boot(common, matrix).unwrap());
        }
        if line.starts_with("zap") {
            let ZapArgs { common, matrix } = ZapArgs::try_parse_from(words)?;
            return Ok(Options::zap(common, matrix));
        }
        let TestArgs { common, matrix } = TestArgs::try_parse_from(words)?;
        Ok(Options::page_table_test(common, matrix, ReportOptions::default()))
    }

    fn names(jobs: &[PlannedJob]) -> Vec<&str> {
        jobs.iter().map(|job| job.name.as_str()).collect()
    }

    #[test]
    fn functions_are_counted_by_blocks() {
        let mut options = options("test -s 4k -v 1");
        let option = |options: &Options| {
            let machine = &jobs(options, PageSize::Kib4, &[])[0].machine;
            machine.plugin_option(Path::new("p"), Path::new("c"))
        };

        assert!(!option(&options).contains("blocks=on"));
        options.report.functions = true;
        assert!(option(&options).contains(",blocks=on"));
    }

    #[test]
    fn each_combination_is_one_boot_with_a_pool_as_large_as_the_region() {
        let jobs = jobs(&options("lab -s 4k -s 2m -s 1g --seeds 2"), PageSize::Kib4, &[]);

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
    fn regions_and_pools_are_as_large_as_the_pages_of_the_host() {
        for (page_size, name, pools, memory) in [
            (PageSize::Kib4, "anonymous_hugetlb_2mb-16M-4v-seed0", (2 << 20, 8), Bytes::gib(2)),
            (PageSize::Kib16, "anonymous_hugetlb_32mb-32M-4v-seed0", (32 << 20, 1), Bytes::gib(2)),
            (
                PageSize::Kib64,
                "anonymous_hugetlb_512mb-512M-4v-seed0",
                (512 << 20, 1),
                Bytes::gib(3),
            ),
        ] {
            let jobs = jobs(&options("lab -b 16M --seeds 1"), page_size, &[]);

            let block = &jobs[2];
            assert_eq!(block.name, name);
            assert_eq!(block.job.pools, [pools].into());
            assert_eq!(block.machine.memory, memory);
            assert_eq!(block.kernel_parameters, "", "the page allocator has these pages");
        }
        let gigantic = jobs(&options("lab -s 1g --seeds 1"), PageSize::Kib16, &[]);
        let expected = "default_hugepagesz=32M hugepagesz=1G hugepages=1";
        assert_eq!(gigantic[0].kernel_parameters, expected);
    }

    #[test]
    fn a_backing_that_the_page_size_lacks_is_refused_with_the_list() {
        let options = options("lab -s 4k -s 1g");

        let error = options.workload.check(PageSize::Kib64).unwrap_err().to_string();

        assert!(options.workload.check(PageSize::Kib4).is_ok());
        assert!(error.contains("64K") && error.contains("-s anonymous_hugetlb_1gb"), "{error}");
        assert!(error.contains("anonymous_hugetlb_512mb"), "{error}");
    }

    #[test]
    fn pid_1_alone_applies_the_seed_of_a_kernel_test() {
        let options = options("lab --test kvm_page_table_test");

        let jobs = jobs(&options, PageSize::Kib4, &[("/x/kvm_page_table_test".into(), Vec::new())]);

        assert_eq!(jobs[1].job.argv[0], KERNEL_TEST_PATH);
        assert!(!jobs[1].job.argv.contains(&"--seed".to_owned()));
        assert_eq!(jobs[1].job.seed, 1);
        assert_eq!(jobs[1].work, Work::KernelTest("/x/kvm_page_table_test".into()));
    }

    #[test]
    fn options_of_the_bench_are_refused_with_a_kernel_test() {
        for option in ["-i 2", "--huge-zero-page", "--bench-arg=--prefault"] {
            let check = |line: String| options(&line).workload.check(PageSize::Kib4);

            let error = check(format!("lab --test kvm_page_table_test {option}")).unwrap_err();

            let name = option.split([' ', '=']).next().unwrap();
            let reason = format!("{name} has no effect on kvm_page_table_test");
            assert!(error.to_string().contains(&reason), "{error}");
            check(format!("lab {option}")).unwrap();
        }
    }

    #[test]
    fn each_guest_boot_has_a_pool_for_the_rounded_memory() {
        let jobs = jobs(&options("guest -s 4k -s thp -s 1g -v 2 --seeds 1"), PageSize::Kib4, &[]);

        let expected = [
            "guest-anonymous-128M-2v-seed0",
            "guest-anonymous_thp-128M-2v-seed0",
            "guest-anonymous_hugetlb_1gb-1G-2v-seed0",
        ];
        assert_eq!(names(&jobs), expected);
        assert_eq!(jobs[2].job.pools, [(1 << 30, 1)].into());
        assert!(jobs[2].job.argv.contains(&"1G,backing=anonymous_hugetlb_1gb".to_owned()));
        let guest = LinuxGuest::with_host_kernel();
        assert!(jobs.iter().all(|job| job.work.guest().unwrap().guest == guest));
    }

    #[test]
    fn appended_kernel_parameters_are_part_of_the_machine() {
        let describe = |line: &str| jobs(&options(line), PageSize::Kib4, &[])[0].machine.describe();

        let with = describe("lab -s 4k --append kvm-arm.mode=nvhe");

        assert_eq!(with, format!("{}, kvm-arm.mode=nvhe", describe("lab -s 4k")));
    }
}
