// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! KVM on an arm64 host: tracepoints, and why the driver may be missing.

/// The tracepoints to count, of the kernel's `kvm` group: guest aborts and exits, and the
/// mmu_notifier calls of the host's memory management.
pub const TRACEPOINTS: &[&str] =
    &["kvm_guest_fault", "kvm_access_fault", "kvm_exit", "kvm_unmap_hva_range", "kvm_set_spte_hva"];

/// Returns why the KVM driver may be missing.
pub fn explain_missing_driver() -> String {
    "the kernel needs CONFIG_KVM and must be booted at EL2, which a virtual machine without nested \
     virtualisation does not provide (`dmesg | grep -i kvm` reports which)"
        .to_owned()
}

/// System calls that newer architectures replaced; arm64 has none of them.
pub const LEGACY_SYSCALLS: &[i64] = &[];
