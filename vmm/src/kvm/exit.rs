// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Names of exit reasons (`KVM_EXIT_*` in `linux/kvm.h`).

/// Names by number.
const NAMES: [&str; 31] = [
    "KVM_EXIT_UNKNOWN",
    "KVM_EXIT_EXCEPTION",
    "KVM_EXIT_IO",
    "KVM_EXIT_HYPERCALL",
    "KVM_EXIT_DEBUG",
    "KVM_EXIT_HLT",
    "KVM_EXIT_MMIO",
    "KVM_EXIT_IRQ_WINDOW_OPEN",
    "KVM_EXIT_SHUTDOWN",
    "KVM_EXIT_FAIL_ENTRY",
    "KVM_EXIT_INTR",
    "KVM_EXIT_SET_TPR",
    "KVM_EXIT_TPR_ACCESS",
    "KVM_EXIT_S390_SIEIC",
    "KVM_EXIT_S390_RESET",
    "KVM_EXIT_DCR",
    "KVM_EXIT_NMI",
    "KVM_EXIT_INTERNAL_ERROR",
    "KVM_EXIT_OSI",
    "KVM_EXIT_PAPR_HCALL",
    "KVM_EXIT_S390_UCONTROL",
    "KVM_EXIT_WATCHDOG",
    "KVM_EXIT_S390_TSCH",
    "KVM_EXIT_EPR",
    "KVM_EXIT_SYSTEM_EVENT",
    "KVM_EXIT_S390_STSI",
    "KVM_EXIT_IOAPIC_EOI",
    "KVM_EXIT_HYPERV",
    "KVM_EXIT_ARM_NISV",
    "KVM_EXIT_X86_RDMSR",
    "KVM_EXIT_X86_WRMSR",
];

/// Returns the name of an exit reason, or its number if it has no name here.
pub fn name(reason: u32) -> String {
    usize::try_from(reason)
        .ok()
        .and_then(|index| NAMES.get(index))
        .map_or_else(|| format!("KVM exit reason {reason}"), |name| (*name).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_the_numbers_of_the_bindings() {
        use kvm_bindings::{
            KVM_EXIT_ARM_NISV, KVM_EXIT_FAIL_ENTRY, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_MMIO,
            KVM_EXIT_SYSTEM_EVENT, KVM_EXIT_X86_WRMSR,
        };

        assert_eq!(name(KVM_EXIT_MMIO), "KVM_EXIT_MMIO");
        assert_eq!(name(KVM_EXIT_FAIL_ENTRY), "KVM_EXIT_FAIL_ENTRY");
        assert_eq!(name(KVM_EXIT_INTERNAL_ERROR), "KVM_EXIT_INTERNAL_ERROR");
        assert_eq!(name(KVM_EXIT_SYSTEM_EVENT), "KVM_EXIT_SYSTEM_EVENT");
        assert_eq!(name(KVM_EXIT_ARM_NISV), "KVM_EXIT_ARM_NISV");
        assert_eq!(name(KVM_EXIT_X86_WRMSR), "KVM_EXIT_X86_WRMSR");
        assert_eq!(name(999), "KVM exit reason 999");
    }
}
