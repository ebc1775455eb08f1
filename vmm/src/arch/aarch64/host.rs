// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What an arm64 host needs for KVM.

/// The tracepoints worth counting, all of the kernel's `kvm` group: what the guest's accesses cost,
/// and what the host's memory management asks of KVM.
pub const TRACEPOINTS: &[&str] = &[
    "kvm_guest_fault",
    "kvm_access_fault",
    "kvm_exit",
    "kvm_unmap_hva_range",
    "kvm_set_spte_hva",
];

/// Why there may be no KVM: it is part of the kernel or not there, and it needs EL2.
pub fn why_no_kvm() -> String {
    "the kernel needs CONFIG_KVM, and its CPUs must have been started at EL2, which a virtual \
     machine without nested virtualisation does not have (`dmesg | grep -i kvm` says which it is)"
        .to_owned()
}

/// Calls of the kernel's that newer architectures do not have: there are none here.
pub const OLD_CALLS: &[i64] = &[];
