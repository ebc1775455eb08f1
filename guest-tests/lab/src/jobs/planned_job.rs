// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A job: one boot, and the resources that it requires in the emulated host.

use std::collections::BTreeMap;

use granule_types::{
    backing::Backing,
    units::{Bytes, Nanoseconds},
};

use crate::{
    host::{emulator::EmulatedMachine, job::Job},
    jobs::{
        guest::LinuxGuest,
        work::{GuestPurpose, GuestVm, Work},
    },
    options::HostOptions,
    values::PageSize,
};

const GIB: u64 = 1 << 30;
/// Virtual seconds after which a test is killed. They pass immediately while all CPUs are idle.
const DEADLINE_SECONDS: u64 = 3600;

/// One boot and its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedJob {
    /// Name of the job's directory.
    pub name: String,
    pub machine: EmulatedMachine,
    /// Additional kernel parameters.
    pub kernel_parameters: String,
    pub job: Job,
    pub work: Work,
}

/// Number of huge pages to reserve, by page size in bytes.
pub type HugePagePools = BTreeMap<u64, u64>;

/// Emulated host without CPUs and memory: its options and its base page size.
#[derive(Debug, Clone, Copy)]
pub struct Host<'a> {
    pub options: &'a HostOptions,
    pub page_size: PageSize,
}

impl PlannedJob {
    /// Returns the name that jobs of similar duration share: all but the seed.
    pub fn cost_class(&self) -> &str {
        self.name.rsplit_once("-seed").map_or(&self.name, |(class, _)| class)
    }

    /// Returns a job without settings. `cpus` and `memory` apply unless `host` sets them.
    pub fn new(
        host: Host<'_>,
        name: String,
        (cpus, memory): (u32, Bytes),
        (work, argv): (Work, Vec<String>),
        pools: HugePagePools,
    ) -> Self {
        Self {
            name,
            machine: machine(
                host.options,
                host.options.smp.unwrap_or(cpus),
                host.options.host_memory.unwrap_or(memory),
            ),
            kernel_parameters: kernel_parameters(host, &pools),
            job: Job {
                argv,
                pools,
                settings: BTreeMap::new(),
                seed: 0,
                has_unmarked_program: work.has_unmarked_program(),
                own_work: work.own_work(),
                expect: Vec::new(),
                deadline_seconds: DEADLINE_SECONDS,
            },
            work,
        }
    }
}

/// Returns the emulated machine of `host` with these CPUs and this memory.
pub fn machine(host: &HostOptions, cpus: u32, memory: Bytes) -> EmulatedMachine {
    EmulatedMachine {
        cpu: host.cpu.clone(),
        cpus,
        memory,
        is_sparse: false,
        quantum: Some(Nanoseconds(host.quantum)),
        costs: host.costs.clone(),
        tlb: None,
        counts_functions: false,
        hold: host.hold.clone(),
        appended: host.append.clone(),
    }
}

/// Returns the job that boots a guest with `granule run`.
pub fn run_guest(
    host: Host<'_>,
    (guest, purpose): (LinuxGuest, GuestPurpose),
    (backing, memory, vcpus, seed): (Backing, Bytes, u32, u64),
    pools: HugePagePools,
    arguments: &[String],
) -> PlannedJob {
    // --no-reboot: the guest must not boot again after a panic.
    let argv = ["/init", "run", "--no-reboot"]
        .into_iter()
        .chain(["--kernel", LinuxGuest::IMAGE_PATH, "--initrd", LinuxGuest::INITRD_PATH])
        .map(str::to_owned)
        .chain(guest.arguments.iter().cloned())
        .chain(["--memory".to_owned(), format!("{memory},backing={backing}")])
        .chain(["--vcpus".to_owned(), vcpus.to_string()])
        .chain(arguments.iter().cloned());
    let name = format!("guest-{backing}-{memory}-{vcpus}v-seed{seed}");
    let host_memory = Bytes(host_memory(memory, &pools).0 + guest.memory_of_files().0);
    let machine = (vcpus.max(2), host_memory);
    let (argv, script) = (argv.collect(), guest.script.clone());
    let work = Work::Guest(GuestVm { guest, vcpus, backing, purpose });
    let mut planned = PlannedJob::new(host, name, machine, (work, argv), pools);
    planned.job.settings = sysfs_settings(host.page_size, backing, false);
    planned.job.seed = seed;
    planned.job.expect = script;
    planned
}

/// Returns the memory of a job, a multiple of the backing's pages, and its hugetlb pool.
pub fn memory_and_pools(host: Host<'_>, backing: Backing, size: Bytes) -> (Bytes, HugePagePools) {
    let page = host.page_size.of_backing(backing).0;
    let memory = Bytes(size.0.next_multiple_of(page));
    let is_hugetlb = matches!(backing, Backing::AnonymousHugetlb(_) | Backing::SharedHugetlb);
    (memory, is_hugetlb.then_some((page, memory.0 / page)).into_iter().collect())
}

/// Returns the sysfs settings for a backing. Unless `zero_page`, disables the huge zero page: if a
/// read maps it, the first write allocates small pages.
pub fn sysfs_settings(
    page_size: PageSize,
    backing: Backing,
    zero_page: bool,
) -> BTreeMap<String, String> {
    let folder = "/sys/kernel/mm/transparent_hugepage";
    let mode_of = |size: Bytes| format!("{folder}/hugepages-{}kB/enabled", size.0 >> 10);
    let mut settings = BTreeMap::new();
    if let Backing::AnonymousMthp(size) = backing {
        settings.insert(mode_of(size), "madvise".to_owned());
        settings.insert(mode_of(page_size.huge_page()), "never".to_owned());
    }
    if matches!(backing, Backing::AnonymousThp | Backing::AnonymousMthp(_)) && !zero_page {
        settings.insert(format!("{folder}/use_zero_page"), "0".to_owned());
    }
    settings
}

/// Returns the host memory for a region and its pools: one additional gigabyte, and another one for
/// pages of 512M and more, because the kernel uses memory at both ends.
pub fn host_memory(region: Bytes, pools: &HugePagePools) -> Bytes {
    let pooled: u64 = pools.iter().map(|(page, count)| page * count).sum();
    let spare = if pools.keys().any(|page| *page >= GIB / 2) { 2 } else { 1 };
    Bytes(region.0.max(pooled).next_multiple_of(GIB) + spare * GIB)
}

/// Returns the pools of gigantic pages. The page allocator has only pages up to a block, so larger
/// ones are reserved at boot.
fn gigantic(host: Host<'_>, pools: &HugePagePools) -> impl Iterator<Item = (Bytes, u64)> {
    let pools = pools.iter().map(|(page, count)| (Bytes(*page), *count));
    pools.filter(move |(page, _)| *page > host.page_size.huge_page())
}

/// Returns the kernel parameters that reserve gigantic pages, and those of the options.
fn kernel_parameters(host: Host<'_>, pools: &HugePagePools) -> String {
    let default = host.page_size.huge_page();
    let reserves = gigantic(host, pools).map(|(page, count)| {
        format!("default_hugepagesz={default} hugepagesz={page} hugepages={count}")
    });
    reserves.chain(host.options.append.clone()).collect::<Vec<_>>().join(" ")
}
