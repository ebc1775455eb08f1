// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! KVM on an x86_64 host: tracepoints, and the cause of a missing driver.

use std::{ffi::CStr, fs};

/// Tracepoints to count, in the kernel's `kvm` group.
pub const TRACEPOINTS: &[&str] = &["kvm_page_fault", "kvm_exit", "kvm_unmap_hva_range"];

/// Tracepoint of guest page faults.
pub const FAULT_TRACEPOINT: &str = "kvm_page_fault";

/// Event filters for guest page faults: none, because the error code does not encode the level, and
/// `granule run` does not support x86_64 guests.
pub const FAULT_FILTERS: &[(&str, &CStr)] = &[];

/// Start of the names of faults by access: of none, as in [`FAULT_FILTERS`].
pub const ACCESS_PREFIX: &str = "by.";

/// Field of [`FAULT_TRACEPOINT`] with the level of a fault: none, as in [`FAULT_FILTERS`].
pub const FAULT_SYNDROME: Option<(&str, &str)> = None;

/// Function that maps the memory of a fault, and the register with the size: not used, as in
/// [`FAULT_FILTERS`].
pub const MAP_FUNCTION: Option<(&str, &str)> = None;

/// Event filter for faults on memory: all of them.
pub const MEMORY_FILTER: &CStr = c"";

/// Returns the name of a fault by its level: none, as in [`FAULT_FILTERS`].
#[must_use]
pub const fn fault_name(_: u64) -> Option<&'static str> {
    None
}

/// Returns the names of faults by level: none, as in [`FAULT_FILTERS`].
pub fn fault_names() -> impl Iterator<Item = &'static str> {
    std::iter::empty()
}

/// Event filters that count faults by type: none, as in [`FAULT_FILTERS`].
pub const FAULT_TYPE_FILTERS: &[(&str, &CStr)] = &[];

/// Returns the frequency of the generic timer, which this architecture does not have.
#[cfg(target_arch = "x86_64")]
#[must_use]
pub const fn counter_frequency() -> u64 {
    0
}

/// Legacy system calls, which newer architectures lack; the C library may use them.
#[cfg(target_arch = "x86_64")]
pub const LEGACY_SYSCALLS: &[i64] = &[
    libc::SYS_access,
    libc::SYS_dup2,
    libc::SYS_open,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_stat,
    libc::SYS_unlink,
];

/// Returns the cause of a missing KVM driver, from the CPU's flags and the loaded modules.
pub fn explain_missing_driver() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let modules: Vec<String> = fs::read_dir("/sys/module")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    missing_driver_cause(&cpuinfo, &modules)
}

fn missing_driver_cause(cpuinfo: &str, modules: &[String]) -> String {
    let flags = cpuinfo
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == "flags")
        .map_or("", |(_, flags)| flags);
    let has = |name| flags.split_ascii_whitespace().any(|flag| flag == name);
    let module = if has("vmx") {
        "kvm_intel"
    } else if has("svm") {
        "kvm_amd"
    } else if has("hypervisor") {
        return "this is a virtual machine without nested virtualisation: enable it on its host \
                (kvm_intel.nested=1 or kvm_amd.nested=1, and a CPU model that has it)"
            .to_owned();
    } else {
        return "the CPU reports neither VMX nor SVM: enable virtualisation in the firmware settings"
            .to_owned();
    };
    // A built-in module is listed even if its initialisation failed.
    if modules.iter().any(|name| name == module) {
        format!(
            "the CPU supports KVM, but module {module} did not start: read the reason in the \
             kernel's log (sudo dmesg | grep -i kvm)"
        )
    } else {
        format!(
            "the CPU supports KVM, but its module is not loaded (sudo modprobe {module}; if there \
             is no such module, the kernel was built without KVM: install another)"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_flags_and_modules_explain_a_missing_driver() {
        for (flags, modules, cause) in [
            ("fpu vmx sse", &["kvm"][..], "modprobe kvm_intel;"),
            ("fpu svm hypervisor", &["kvm", "kvm_intel"], "modprobe kvm_amd;"),
            ("fpu vmx", &["kvm", "kvm_intel"], "module kvm_intel did not start"),
            ("fpu hypervisor", &[], "nested"),
            ("fpu hypervisor", &["kvm", "kvm_intel"], "nested"),
            ("fpu", &[], "firmware"),
            ("fpu", &["kvm", "kvm_intel"], "firmware"),
        ] {
            let text = format!("processor\t: 0\nflags\t\t: {flags}\n");
            let modules: Vec<_> = modules.iter().map(|name| (*name).to_owned()).collect();
            let hint = missing_driver_cause(&text, &modules);
            assert!(hint.contains(cause), "{flags}: {hint}");
            assert_eq!(hint.contains("modprobe"), cause.contains("modprobe"), "{flags}: {hint}");
        }
        assert!(missing_driver_cause("", &[]).contains("firmware"));
    }
}
