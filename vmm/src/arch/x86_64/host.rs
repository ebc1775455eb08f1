// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What an x86_64 host needs for KVM: a CPU that virtualises and shows it, and that CPU's module,
//! which may be there and have refused to start.

use std::fs;

/// The tracepoints worth counting, all of the kernel's `kvm` group.
pub const TRACEPOINTS: &[&str] = &["kvm_page_fault", "kvm_exit", "kvm_unmap_hva_range"];

/// Calls of the kernel's that newer architectures do not have, each with a newer one beside it.
#[cfg(target_arch = "x86_64")]
pub const OLD_CALLS: &[i64] = &[
    libc::SYS_access,
    libc::SYS_dup2,
    libc::SYS_epoll_wait,
    libc::SYS_open,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_stat,
    libc::SYS_unlink,
];

/// Why KVM's driver does not run, by the CPU's flags and the modules.
pub fn why_no_kvm() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let modules: Vec<String> = fs::read_dir("/sys/module")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    reason(&cpuinfo, &modules)
}

fn reason(cpuinfo: &str, modules: &[String]) -> String {
    let flags = cpuinfo
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == "flags")
        .map_or("", |(_, flags)| flags);
    let has = |wanted| flags.split_ascii_whitespace().any(|flag| flag == wanted);
    let module = if has("vmx") {
        "kvm_intel"
    } else if has("svm") {
        "kvm_amd"
    } else if has("hypervisor") {
        return "this is a virtual machine, and nested virtualisation is off: switch it on in its \
                host (kvm_intel.nested=1 or kvm_amd.nested=1, and a CPU model that shows it)"
            .to_owned();
    } else {
        return "the CPU shows neither VMX nor SVM: switch virtualisation on in the firmware's set-up"
            .to_owned();
    };
    // A module that is built in is listed although it refused to start.
    if modules.iter().any(|name| name == module) {
        format!(
            "the CPU can, its module {module} is there and did not start: the kernel's log says why \
             (sudo dmesg | grep -i kvm)"
        )
    } else {
        format!(
            "the CPU can, its module is not loaded (sudo modprobe {module}; where that finds no \
             module, the kernel was built without KVM: install another)"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason_for(flags: &str, modules: &[&str]) -> String {
        let text = format!("processor\t: 0\nflags\t\t: {flags}\n");
        let modules: Vec<_> = modules.iter().map(|name| (*name).to_owned()).collect();
        reason(&text, &modules)
    }

    #[test]
    fn a_missing_module_is_named_by_the_cpu() {
        let intel = reason_for("fpu vmx sse", &["kvm"]);
        let amd = reason_for("fpu svm hypervisor", &["kvm", "kvm_intel"]);

        assert!(intel.contains("modprobe kvm_intel;"), "{intel}");
        assert!(amd.contains("modprobe kvm_amd;"), "{amd}");
    }

    #[test]
    fn a_module_that_did_not_start_need_not_be_loaded() {
        let hint = reason_for("fpu vmx", &["kvm", "kvm_intel"]);

        assert!(hint.contains("did not start") && !hint.contains("modprobe"));
    }

    #[test]
    fn where_the_cpu_shows_nothing_loading_does_not_help() {
        for modules in [&[][..], &["kvm", "kvm_intel"]] {
            assert!(reason_for("fpu hypervisor", modules).contains("nested"));
            assert!(reason_for("fpu", modules).contains("firmware"));
        }
        assert!(reason("", &[]).contains("firmware"));
    }
}
