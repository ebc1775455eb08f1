// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks for `granule run`, `granule bench` and `granule advise`: KVM, huge pages, tracepoints.

use std::{fs, path::Path};

use granule_pgtable_test::pgtable_vm::{CountedEvents, KvmConfig, KvmMachine};
use granule_types::{backing::Backing, error_text, units::Bytes};
use granule_vmm::{
    arch::{
        HostLimits,
        host::{TRACEPOINTS, explain_missing_driver},
        vm::host_limits,
    },
    kvm::{self, tracepoints::check_tracepoint},
    memory::{HostPages, HugetlbPool, MemoryError},
};

use super::check::{Check, Group, Status};

/// Memory of the guest for which the remedies reserve hugetlb pages.
const EXAMPLE_GUEST: Bytes = Bytes::gib(1);

pub fn checks() -> Vec<Check> {
    let mut checks = device_checks();
    match HostPages::of_this_host() {
        Ok(pages) => {
            let pools =
                pages.hugetlb.iter().map(|&page| hugetlb_check(page, pages.hugetlb_pool(page)));
            checks.extend(pools);
            checks.push(thp_check(&pages.transparent, Path::new("/sys")));
        }
        Err(error) => checks.push(check("huge pages", Status::Warn, error_text(&error))),
    }
    let refused =
        TRACEPOINTS.iter().filter_map(|name| Some(check_tracepoint(name).err()?.to_string()));
    checks.push(tracepoint_check(TRACEPOINTS.len(), &refused.collect::<Vec<_>>()));
    checks
}

fn check(name: impl Into<String>, status: Status, found: impl Into<String>) -> Check {
    Check::new(Group::Kvm, name, status, found)
}

/// Checks `/dev/kvm` and starts a guest of one vCPU.
fn device_checks() -> Vec<Check> {
    let device = "/dev/kvm";
    let kvm = match kvm::open(explain_missing_driver) {
        Ok(kvm) => kvm,
        Err(error) => return vec![check(device, Status::Missing, error_text(&error))],
    };
    let found = format!(
        "API version {}, {} vCPUs recommended, {} at most",
        kvm.get_api_version(),
        kvm.get_nr_vcpus(),
        kvm.get_max_vcpus()
    );
    let mut checks = vec![check(device, Status::Ok, found)];
    match host_limits(&kvm) {
        Ok(limits) => checks.extend(limit_checks(&limits, cfg!(target_arch = "aarch64"))),
        Err(error) => checks.push(check("stage 2", Status::Warn, error_text(&error))),
    }
    let config = KvmConfig {
        events: CountedEvents::None,
        ..KvmConfig::new(Backing::Anonymous, Bytes::kib(4), 1)
    };
    checks.push(match KvmMachine::new(config) {
        Ok(machine) => match machine.emulation_warning() {
            None => check("guest", Status::Ok, "a guest of one vCPU runs"),
            Some(warning) => check("guest", Status::Warn, warning)
                .with_remedy("use the order of times, not their ratios, or another machine"),
        },
        Err(error) => check("guest", Status::Missing, error_text(&error)),
    });
    checks
}

fn limit_checks(limits: &HostLimits, is_arm64: bool) -> Vec<Check> {
    let mut stage2 = format!("guest-physical addresses of {} bits", limits.ipa_bits);
    if !limits.block_sizes.is_empty() {
        let sizes: Vec<_> = limits.block_sizes.iter().map(Bytes::to_string).collect();
        stage2 += &format!(", blocks of {}", sizes.join(", "));
    }
    let controller = "interrupt controller";
    vec![
        check("stage 2", Status::Ok, stage2),
        match (is_arm64, limits.gic_version) {
            (true, Some(version)) => check(controller, Status::Ok, format!("GICv{version}")),
            (true, None) => check(controller, Status::Warn, "KVM has no GIC")
                .with_remedy("granule run cannot boot guests here; granule bench works"),
            (false, _) => check("granule run", Status::Warn, "this machine is not arm64")
                .with_remedy("use granule bench here; scripts/lab guest boots guests anywhere"),
        },
    ]
}

fn hugetlb_check(page: Bytes, pool: Result<HugetlbPool, MemoryError>) -> Check {
    let name = format!("hugetlb {page}");
    match pool {
        Ok(HugetlbPool { configured, free, available }) => {
            let found = format!("{configured} pages reserved, {free} free");
            if available > 0 {
                return check(name, Status::Ok, found);
            }
            let pages = EXAMPLE_GUEST.0.div_ceil(page.0);
            check(name, Status::Warn, found).with_remedy(format!(
                "for a guest of {EXAMPLE_GUEST}, as root: echo {} > \
                 /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages",
                configured + pages,
                page.0 >> 10
            ))
        }
        Err(error) => check(name, Status::Warn, error_text(&error)),
    }
}

fn thp_check(sizes: &[Bytes], sysfs: &Path) -> Check {
    let folder = sysfs.join("kernel/mm/transparent_hugepage");
    let mode = |file: &str| {
        let text = fs::read_to_string(folder.join(file)).unwrap_or_default();
        selected_word(&text).unwrap_or("unknown").to_owned()
    };
    let found = format!("{}, defrag {}", mode("enabled"), mode("defrag"));
    match sizes {
        [_, ..] => {
            let sizes: Vec<_> = sizes.iter().map(Bytes::to_string).collect();
            check("THP", Status::Ok, format!("pages of {}, {found}", sizes.join(" and ")))
        }
        [] => check("THP", Status::Warn, found).with_remedy(
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (a kernel without \
             the file lacks CONFIG_TRANSPARENT_HUGEPAGE)",
        ),
    }
}

/// Returns the word in brackets of a sysfs setting such as `always [madvise] never`.
fn selected_word(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

/// Checks the tracepoints; `refused` holds the reason of each that cannot be counted. A kernel may
/// lack some of them.
fn tracepoint_check(all: usize, refused: &[String]) -> Check {
    let counted = all - refused.len();
    let found = format!("{counted} of {all} KVM tracepoints can be counted");
    match refused.first() {
        Some(reason) if counted == 0 => check(
            "fault counts",
            Status::Warn,
            format!("{found}: {reason}"),
        )
        .with_remedy(
            "run as root with tracefs mounted (mount -t tracefs tracefs /sys/kernel/tracing) on \
                 a kernel with CONFIG_KVM and CONFIG_FTRACE; times do not need it",
        ),
        Some(reason) => check("fault counts", Status::Ok, format!("{found}; not {reason}")),
        None => check("fault counts", Status::Ok, found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_pool_is_a_warning_with_the_command_that_fills_it() {
        let pool = |configured, free, available| Ok(HugetlbPool { configured, free, available });

        let filled = hugetlb_check(Bytes::mib(2), pool(40, 40, 40));
        let empty = hugetlb_check(Bytes::mib(2), pool(3, 0, 0));
        let gigabyte = hugetlb_check(Bytes::gib(1), pool(0, 0, 0));

        assert_eq!(filled.status, Status::Ok);
        assert_eq!(empty.status, Status::Warn);
        assert!(
            empty.remedy.unwrap().contains("echo 515 > /sys/kernel/mm/hugepages/hugepages-2048kB")
        );
        assert!(gigabyte.remedy.unwrap().contains("echo 1 > "));
    }

    #[test]
    fn the_selected_mode_of_thp_is_reported() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("kernel/mm/transparent_hugepage");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("enabled"), "always madvise [never]\n").unwrap();

        let off = thp_check(&[], root.path());
        let on = thp_check(&[Bytes::mib(2)], root.path());

        assert_eq!((off.status, off.found.as_str()), (Status::Warn, "never, defrag unknown"));
        assert_eq!(on.found, "pages of 2M, never, defrag unknown");
    }

    #[test]
    fn a_missing_interrupt_controller_and_another_architecture_are_warnings() {
        let limits = |gic_version| HostLimits {
            ipa_bits: 48,
            block_sizes: vec![Bytes::mib(2), Bytes::gib(1)],
            gic_version,
        };
        let arm64 = limit_checks(&limits(Some(3)), true);

        assert_eq!(arm64[0].found, "guest-physical addresses of 48 bits, blocks of 2M, 1G");
        assert_eq!((arm64[1].status, arm64[1].found.as_str()), (Status::Ok, "GICv3"));
        assert_eq!(limit_checks(&limits(None), true)[1].status, Status::Warn);
        assert_eq!(limit_checks(&limits(None), false)[1].status, Status::Warn);
    }

    #[test]
    fn tracepoints_of_which_none_can_be_counted_are_a_warning_with_the_reason() {
        let denied = || "perf_event_open: denied".to_owned();
        let none = tracepoint_check(2, &[denied(), denied()]);

        assert_eq!(tracepoint_check(2, &[]).status, Status::Ok);
        assert_eq!(tracepoint_check(2, &[denied()]).status, Status::Ok);
        assert_eq!(none.status, Status::Warn);
        assert_eq!(none.found, "0 of 2 KVM tracepoints can be counted: perf_event_open: denied");
    }
}
