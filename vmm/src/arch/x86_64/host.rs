// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What an x86_64 host needs for KVM.

use std::fs;

/// Why there may be no KVM, by the CPU's flags.
pub fn why_no_kvm() -> String {
    reason(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()).to_owned()
}

fn reason(cpuinfo: &str) -> &'static str {
    let flags = cpuinfo
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == "flags")
        .map_or("", |(_, flags)| flags);
    let has = |wanted| flags.split_ascii_whitespace().any(|flag| flag == wanted);
    if has("vmx") {
        "the CPU can, the module is missing (sudo modprobe kvm_intel)"
    } else if has("svm") {
        "the CPU can, the module is missing (sudo modprobe kvm_amd)"
    } else if has("hypervisor") {
        "this is a virtual machine, and nested virtualisation is off: switch it on in its host \
         (kvm_intel.nested=1 or kvm_amd.nested=1, and a CPU model that shows it)"
    } else {
        "the CPU shows neither VMX nor SVM: switch virtualisation on in the firmware's set-up"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_follows_the_cpus_flags() {
        for (flags, word) in [
            ("fpu vmx sse", "kvm_intel)"),
            ("fpu svm", "kvm_amd)"),
            ("fpu hypervisor", "nested"),
            ("fpu", "firmware"),
        ] {
            let text = format!("processor\t: 0\nflags\t\t: {flags}\n");
            assert!(reason(&text).contains(word), "{flags}");
        }
        assert!(reason("").contains("firmware"));
    }
}
