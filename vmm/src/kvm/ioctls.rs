// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VM ioctls that `kvm-ioctls` 0.25 lacks on some architecture, and the names of exit reasons.

#![allow(missing_docs, reason = "the ioctl macros define undocumented functions")]

use std::os::fd::{AsRawFd as _, BorrowedFd};

use kvm_bindings::{KVMIO, kvm_clear_dirty_log, kvm_clear_dirty_log__bindgen_ty_1, kvm_enable_cap};
use kvm_ioctls::VmFd;
use vmm_sys_util::{
    errno,
    ioctl::{ioctl, ioctl_with_mut_ref, ioctl_with_ref},
    ioctl_io_nr, ioctl_iow_nr, ioctl_iowr_nr,
};

ioctl_iow_nr!(KVM_ENABLE_CAP, KVMIO, 0xa3, kvm_enable_cap);
ioctl_iowr_nr!(KVM_CLEAR_DIRTY_LOG, KVMIO, 0xc0, kvm_clear_dirty_log);

ioctl_io_nr!(KVM_RESET_DIRTY_RINGS, KVMIO, 0xc7);

/// Write-protects the pages of all harvested entries of a VM's dirty rings and returns the entries
/// to the kernel (`KVM_RESET_DIRTY_RINGS`).
///
/// # Errors
/// KVM refuses the call.
pub fn reset_dirty_rings(vm: BorrowedFd<'_>) -> errno::Result<()> {
    // SAFETY: the call takes no argument.
    match unsafe { ioctl(&vm.as_raw_fd(), KVM_RESET_DIRTY_RINGS()) } {
        0.. => Ok(()),
        _ => Err(errno::Error::last()),
    }
}

/// Enables a capability of a VM with its first argument (`KVM_ENABLE_CAP`).
///
/// # Errors
/// KVM does not have the capability or refuses the argument.
pub fn enable_capability(vm: &VmFd, cap: u32, argument: u64) -> errno::Result<()> {
    let args = [argument, 0, 0, 0];
    let cap = kvm_enable_cap { cap, args, ..kvm_enable_cap::default() };
    // SAFETY: the descriptor is a VM's and the kernel reads exactly this struct.
    match unsafe { ioctl_with_ref(vm, KVM_ENABLE_CAP(), &cap) } {
        0 => Ok(()),
        _ => Err(errno::Error::last()),
    }
}

/// Clears the pages set in `bitmap` from the dirty log of a memslot and write-protects them
/// (`KVM_CLEAR_DIRTY_LOG`). Bit 0 is page `first_page` of the memslot. `first_page` and `num_pages`
/// are multiples of 64, unless the range ends with the memslot.
///
/// # Errors
/// The kernel's error; `EINVAL` if the bitmap is shorter than `num_pages`.
pub fn clear_dirty_log(
    vm: &VmFd,
    slot: u32,
    first_page: u64,
    num_pages: u32,
    bitmap: &mut [u64],
) -> errno::Result<()> {
    if bitmap.len() as u64 * 64 < u64::from(num_pages) {
        return Err(errno::Error::new(libc::EINVAL));
    }
    let mut log = kvm_clear_dirty_log {
        slot,
        num_pages,
        first_page,
        __bindgen_anon_1: kvm_clear_dirty_log__bindgen_ty_1 {
            dirty_bitmap: bitmap.as_mut_ptr().cast(),
        },
    };
    // SAFETY: the descriptor is a VM's; the bitmap has a bit for each page, as checked above.
    match unsafe { ioctl_with_mut_ref(vm, KVM_CLEAR_DIRTY_LOG(), &mut log) } {
        0 => Ok(()),
        _ => Err(errno::Error::last()),
    }
}

/// Names of exit reasons by number (`KVM_EXIT_*` in `linux/kvm.h`).
const EXIT_REASONS: [&str; 31] = [
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
pub fn exit_name(reason: u32) -> String {
    usize::try_from(reason)
        .ok()
        .and_then(|index| EXIT_REASONS.get(index))
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

        assert_eq!(exit_name(KVM_EXIT_MMIO), "KVM_EXIT_MMIO");
        assert_eq!(exit_name(KVM_EXIT_FAIL_ENTRY), "KVM_EXIT_FAIL_ENTRY");
        assert_eq!(exit_name(KVM_EXIT_INTERNAL_ERROR), "KVM_EXIT_INTERNAL_ERROR");
        assert_eq!(exit_name(KVM_EXIT_SYSTEM_EVENT), "KVM_EXIT_SYSTEM_EVENT");
        assert_eq!(exit_name(KVM_EXIT_ARM_NISV), "KVM_EXIT_ARM_NISV");
        assert_eq!(exit_name(KVM_EXIT_X86_WRMSR), "KVM_EXIT_X86_WRMSR");
        assert_eq!(exit_name(999), "KVM exit reason 999");
    }
}
