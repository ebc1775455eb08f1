// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Jobs of `granule lab boot`: one boot of a kernel with one size of memory and one value of
//! `rodata`, in the host or in a guest.

use std::{collections::BTreeSet, ops::Range};

use granule_types::{backing::Backing, cpu_list::CpuList};

use crate::{
    command::CommandError,
    jobs::{
        guest::LinuxGuest,
        planned_job::{Host, HugePagePools, PlannedJob, memory_and_pools, run_guest},
        work::{GuestPurpose, MeasuredBoot, Work},
    },
    kernel::{Kernel, image::PAGING_FUNCTION},
    options::BootMatrix,
};

/// Function of `KVM_RUN`, whose first call ends the start of a VMM.
const FIRST_RUN_FUNCTION: &str = "kvm_arch_vcpu_ioctl_run";

/// Functions between which a fault of the guest lasts: the handler of its trace, that of the trace of the
/// next entry, and the emulation of a device, whose access is no fault of memory.
const FAULT_FUNCTIONS: [&str; 3] =
    ["perf_trace_kvm_guest_fault", "perf_trace_kvm_entry", "io_mem_abort"];

/// Count of faults of the guest, if they are timed.
pub const FAULT_STALLS: &str = "fault_stalls";
/// Count of the instructions of these faults.
pub const FAULT_STALLS_NS: &str = "fault_stalls_ns";

/// Functions of the host between which a vCPU runs, on CPUs with VHE.
const GUEST_FUNCTIONS: [&str; 2] = ["__guest_enter", "__guest_exit"];
/// Count of entries into the guest, if the time in it is measured.
pub const GUEST_ENTRIES: &str = "guest_entries";
/// Count of the instructions of the vCPUs' CPUs in the guest.
pub const GUEST_ENTRIES_NS: &str = "guest_entries_ns";

/// Returns a job for each size of memory and each value of `rodata`.
pub fn jobs(host: Host<'_>, matrix: &BootMatrix) -> Vec<PlannedJob> {
    let mut jobs = Vec::new();
    for &rodata in &matrix.rodata {
        for &memory in &matrix.memory {
            let memory = matrix.round_memory(host.page_size, memory);
            let measured = MeasuredBoot { memory, rodata };
            let mut job = match matrix.guest {
                None => boot(host, measured, matrix.tlb.is_some()),
                Some(backing) => guest_boot(host, backing, measured),
            };
            job.machine.omit_turns_of_one_cpu();
            job.kernel_parameters = format!("{} {}", rodata.parameters(), job.kernel_parameters);
            job.machine.tlb = matrix.tlb_model();
            if job.machine.tlb.is_some() {
                // The guest is a load; without one, PID 1 has loads.
                job.job.has_unmarked_program = matrix.guest.is_some();
            }
            jobs.push(job);
        }
    }
    jobs
}

fn boot(host: Host<'_>, boot: MeasuredBoot, loads_page_cache: bool) -> PlannedJob {
    let MeasuredBoot { memory, rodata } = boot;
    let name = format!("boot-{memory}-rodata-{rodata}");
    let work = (Work::Boot { boot, loads_page_cache }, Vec::new());
    let mut planned = PlannedJob::new(host, name, (1, memory), work, HugePagePools::new());
    planned.machine.is_sparse = true;
    planned
}

/// Returns the job that boots a guest on a host with one CPU, so that no other CPU adds to the
/// counts.
fn guest_boot(host: Host<'_>, backing: Backing, boot: MeasuredBoot) -> PlannedJob {
    let MeasuredBoot { memory, rodata } = boot;
    let vm = (LinuxGuest::with_kernel_tables(rodata), GuestPurpose::KernelTables(boot));
    let (memory, pools) = memory_and_pools(host, backing, memory);
    let mut planned = run_guest(host, vm, (backing, memory, 1, 0), pools, &[]);
    planned.name = format!("guest-{backing}-{memory}-rodata-{rodata}");
    if host.options.smp.is_none() {
        planned.machine.cpus = 1;
    }
    planned
}

/// Returns the arguments of the plugin with addresses of a kernel whose boot is measured, each after
/// a comma; empty for most other jobs. A guest with a kernel of its own is measured by that kernel's
/// address, the start of a user's VMM by the address of the host's `KVM_RUN`.
///
/// # Errors
/// The kernel has no `System.map`, or lacks a function, except for a user's VMM.
pub fn address_arguments(kernel: &Kernel, job: &PlannedJob) -> Result<String, CommandError> {
    if job.work.vmm().is_some() {
        // A kernel without a `System.map` leaves the column empty.
        let entry = kernel.required_function(FIRST_RUN_FUNCTION);
        let span = entry.map_or_else(|_| String::new(), |at| format!(",span=KVM_RUN:{at:x}"));
        return Ok(span + &interval(kernel, job));
    }
    let vm = job.work.guest();
    if job.work.measured_boot().is_none() {
        let of_guest = vm.and_then(|vm| vm.guest.paging_function);
        let span = |address| format!(",span={PAGING_FUNCTION}:{address:x}");
        return Ok(of_guest.map_or_else(String::new, span) + &interval(kernel, job));
    }
    let mut arguments =
        format!(",span={PAGING_FUNCTION}:{:x}", kernel.required_function(PAGING_FUNCTION)?);
    if job.machine.tlb.is_some() {
        let Range { start, end } = kernel.linear_map()?;
        arguments += &format!(",linear={start:x}:{end:x}");
    }
    if job.machine.tlb.is_some() && vm.is_some() {
        let [entry, exit] = GUEST_FUNCTIONS.map(|name| kernel.required_function(name));
        arguments += &format!(",guest={:x}:{:x}", entry?, exit?);
    }
    Ok(arguments)
}

/// Returns the argument that times the faults of a guest with one vCPU, or with vCPUs that each have a CPU,
/// if `granule run` measures them too, and otherwise the time of all vCPUs in the guest, if its boot is
/// measured. A kernel without a `System.map` leaves it out.
fn interval(kernel: &Kernel, job: &PlannedJob) -> String {
    let detail = option_value(&job.job.argv, "--fault-stalls");
    let measures_faults = detail.is_some_and(|detail| detail != "off");
    let (name, functions, scope) = match job.work.guest() {
        None => return String::new(),
        // `granule run` measures the time of a fault, which passes on all CPUs.
        Some(vm) if measures_faults && vm.vcpus == 1 => (FAULT_STALLS, FAULT_FUNCTIONS, ""),
        Some(vm) if measures_faults && has_cpu_for_each_vcpu(&job.job.argv, vm.vcpus) => {
            (FAULT_STALLS, FAULT_FUNCTIONS, ":pinned")
        }
        Some(vm) if !matches!(vm.purpose, GuestPurpose::Program(_)) => {
            // An entry into the guest is not cancelled, and the thread does not change its CPU until the exit.
            // Those of the VMM run on other CPUs meanwhile.
            let [entry, exit] = GUEST_FUNCTIONS;
            (GUEST_ENTRIES, [entry, exit, exit], ":cpu")
        }
        _ => return String::new(),
    };
    match functions.map(|name| kernel.required_function(name)) {
        [Ok(start), Ok(end), Ok(cancel)] => {
            format!(",interval={name}:{start:x}:{end:x}:{cancel:x}{scope}")
        }
        _ => String::new(),
    }
}

/// Returns the value of an option of a command, `--option VALUE` or `--option=VALUE`.
fn option_value<'a>(command: &'a [String], option: &str) -> Option<&'a str> {
    let separate = command.iter().position(|word| word == option);
    let separate = separate.and_then(|at| command.get(at + 1)).map(String::as_str);
    let joined = |word: &'a String| word.strip_prefix(option)?.strip_prefix('=');
    separate.or_else(|| command.iter().find_map(joined))
}

/// Returns whether the command of a VM runs each vCPU on a CPU that no other vCPU uses.
fn has_cpu_for_each_vcpu(command: &[String], vcpus: u32) -> bool {
    let list = option_value(command, "--pin").and_then(|list| list.parse::<CpuList>().ok());
    list.is_some_and(|list| {
        let cpus: BTreeSet<_> = list.for_vcpus(vcpus).into_iter().collect();
        cpus.len() == vcpus as usize
    })
}

#[cfg(test)]
mod tests {
    use granule_types::units::Bytes;

    use super::*;
    use crate::{
        host::job::OwnWork,
        jobs::matrix::{self, tests::options},
        values::PageSize,
    };

    #[test]
    fn each_size_and_value_is_one_boot_on_one_cpu_without_a_clock() {
        let options = options("boot --memory 4G,256G --rodata full,on");

        let jobs = matrix::jobs(&options, PageSize::Kib4, &[]);

        let names: Vec<_> = jobs.iter().map(|job| job.name.as_str()).collect();
        let expected = [
            "boot-4G-rodata-full",
            "boot-256G-rodata-full",
            "boot-4G-rodata-on",
            "boot-256G-rodata-on",
        ];
        assert_eq!(names, expected);
        let last = &jobs[3];
        assert_eq!((last.machine.cpus, last.machine.memory), (1, Bytes::gib(256)));
        assert_eq!(last.machine.quantum, None);
        assert!(last.machine.process_memory() < Bytes::gib(16));
        assert!(last.kernel_parameters.contains("rodata=on"));
        let work = OwnWork::ReportTables { loads_page_cache: false };
        assert_eq!((&last.job.own_work, last.work.guest()), (&Some(work), None));
    }

    #[test]
    fn repeated_values_are_one_boot() {
        let options = options("boot --memory 4G,4G --rodata full,full");

        let jobs = matrix::jobs(&options, PageSize::Kib4, &[]);

        assert_eq!(jobs.len(), 1);
    }

    #[test]
    fn with_a_model_of_tlbs_the_page_cache_or_the_guest_is_the_load() {
        for (line, loads) in
            [("boot --tlb 48:4x320", true), ("boot --tlb 48:4x320 --guest 4k", false)]
        {
            let jobs = matrix::jobs(&options(line), PageSize::Kib4, &[]);

            let job = &jobs[0].job;
            let work = loads.then_some(OwnWork::ReportTables { loads_page_cache: true });
            assert_eq!((&job.own_work, job.has_unmarked_program), (&work, !loads), "{line}");
            let model = jobs[0].machine.tlb.as_ref().unwrap();
            assert_eq!(model.grains, [Bytes::kib(4), Bytes::kib(64), Bytes::mib(2)]);
        }
    }

    #[test]
    fn a_guest_has_the_memory_and_the_host_one_cpu() {
        let options = options("boot --memory 1G --guest 2m");

        let job = matrix::jobs(&options, PageSize::Kib4, &[]).remove(0);

        assert_eq!(job.name, "guest-anonymous_hugetlb_2mb-1G-rodata-full");
        assert_eq!(job.machine.cpus, 1);
        assert_eq!(job.job.pools, [(2 << 20, 512)].into());
        assert!(
            job.job
                .argv
                .iter()
                .any(|word| word.contains("nokaslr") && word.contains("rodata=full"))
        );
        assert_eq!(job.job.own_work, None);
    }

    #[test]
    fn the_time_in_a_guest_is_that_of_its_cpus_and_the_time_of_a_fault_that_of_all() {
        let map = tempfile::NamedTempFile::new().unwrap();
        let functions = FAULT_FUNCTIONS.iter().chain(&GUEST_FUNCTIONS).zip(1..);
        let lines: String =
            functions.map(|(name, at)| format!("ffff80001000{at}000 T {name}\n")).collect();
        std::fs::write(map.path(), lines).unwrap();
        let kernel = Kernel {
            system_map: Some(map.path().to_owned()),
            ..Kernel::placeholder("base".to_owned(), "Image".into())
        };
        let argument = |line: &str| {
            let job = matrix::jobs(&options(line), PageSize::Kib4, &[]).remove(0);
            address_arguments(&kernel, &job).unwrap()
        };

        let of_guest = argument("guest -s 4k -v 1");
        let of_faults = argument("guest -s 4k -v 1 --run-arg=--fault-stalls --run-arg=on");

        let enter = "interval=guest_entries:ffff800010004000:ffff800010005000:ffff800010005000:cpu";
        assert!(of_guest.ends_with(enter), "{of_guest}");
        assert!(argument("guest -s 4k -v 4").ends_with(enter));
        assert!(of_faults.contains("interval=fault_stalls:"), "{of_faults}");
        assert!(!of_faults.ends_with(":cpu"), "{of_faults}");
        for (pin, scope) in [("0-1", ":pinned"), ("1", ":cpu"), ("0-1,0", ":pinned")] {
            let line = "guest -s 4k -v 2 --run-arg=--fault-stalls --run-arg=on";
            for option in
                [format!("--run-arg=--pin --run-arg={pin}"), format!("--run-arg=--pin={pin}")]
            {
                let argument = argument(&format!("{line} {option}"));
                assert!(argument.ends_with(scope), "{argument}");
            }
        }
    }

    #[test]
    fn the_memory_of_a_guest_is_a_multiple_of_the_pages_of_its_backing() {
        let options = options("boot --memory 512M --guest 1g");

        let job = matrix::jobs(&options, PageSize::Kib4, &[]).remove(0);

        assert_eq!(job.work.measured_boot().unwrap().memory, Bytes::gib(1));
        assert!(job.name.contains("-1G-"), "{}", job.name);
    }

    #[test]
    fn sizes_that_are_rounded_to_the_same_one_are_refused() {
        let check = |line: &str| options(line).workload.check(PageSize::Kib4);

        let error = check("boot --memory 512M,768M,2G --guest 1g").unwrap_err().to_string();

        assert!(error.contains("--memory 512M,768M") && error.contains("up to 1G"), "{error}");
        check("boot --memory 512M,768M,768M --guest 2m").unwrap();
        check("boot --memory 512M,768M").unwrap();
    }
}
