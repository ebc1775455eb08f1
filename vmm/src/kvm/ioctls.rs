// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ioctls that `kvm-ioctls` 0.25 lacks on some architectures, and the names of exit reasons.

#![allow(missing_docs, reason = "the ioctl macros define undocumented functions")]

use std::os::fd::{AsRawFd as _, BorrowedFd};

use kvm_bindings::{
    KVMIO, kvm_clear_dirty_log, kvm_clear_dirty_log__bindgen_ty_1, kvm_enable_cap,
    kvm_pre_fault_memory,
};
#[cfg(target_arch = "aarch64")]
use kvm_ioctls::VcpuFd;
use kvm_ioctls::VmFd;
#[cfg(target_arch = "aarch64")]
use vmm_sys_util::ioctl::ioctl_with_mut_ptr;
use vmm_sys_util::{
    errno,
    ioctl::{ioctl, ioctl_with_mut_ref, ioctl_with_ref},
    ioctl_io_nr, ioctl_iow_nr, ioctl_iowr_nr,
};

ioctl_iow_nr!(KVM_ENABLE_CAP, KVMIO, 0xa3, kvm_enable_cap);
ioctl_iowr_nr!(KVM_CLEAR_DIRTY_LOG, KVMIO, 0xc0, kvm_clear_dirty_log);
ioctl_io_nr!(KVM_RESET_DIRTY_RINGS, KVMIO, 0xc7);
#[cfg(target_arch = "aarch64")]
ioctl_iowr_nr!(KVM_GET_REG_LIST, KVMIO, 0xb0, kvm_bindings::kvm_reg_list);
ioctl_iowr_nr!(KVM_PRE_FAULT_MEMORY, KVMIO, 0xd5, kvm_pre_fault_memory);

/// Write-protects all pages harvested from the dirty rings and returns their entries to the kernel
/// (`KVM_RESET_DIRTY_RINGS`), until a signal is pending. Returns the number of entries.
pub fn reset_dirty_rings(vm: BorrowedFd<'_>) -> errno::Result<usize> {
    // SAFETY: the call takes no argument.
    let result = unsafe { ioctl(&vm.as_raw_fd(), KVM_RESET_DIRTY_RINGS()) };
    usize::try_from(result).map_err(|_| errno::Error::last())
}

/// Populates stage 2 for a range of guest memory through a vCPU (`KVM_PRE_FAULT_MEMORY`), which must
/// not run at the same time. On success, the kernel has advanced `range` to the part that remains,
/// which is not empty after a signal.
pub fn pre_fault_memory(
    vcpu: BorrowedFd<'_>,
    range: &mut kvm_pre_fault_memory,
) -> errno::Result<()> {
    // SAFETY: the kernel reads and writes exactly this struct.
    match unsafe { ioctl_with_mut_ref(&vcpu.as_raw_fd(), KVM_PRE_FAULT_MEMORY(), range) } {
        0 => Ok(()),
        _ => Err(errno::Error::last()),
    }
}

/// Returns the IDs of all registers of a vCPU (`KVM_GET_REG_LIST`). `kvm-ioctls` has this call, but
/// limits the list to 500 registers.
#[cfg(target_arch = "aarch64")]
pub fn register_list(vcpu: &VcpuFd) -> errno::Result<Vec<u64>> {
    // `kvm_reg_list` is the number of IDs, then the IDs. A call without space returns the number.
    let mut list = vec![0_u64];
    loop {
        // SAFETY: the kernel writes at most the number of IDs in the first element.
        match unsafe { ioctl_with_mut_ptr(vcpu, KVM_GET_REG_LIST(), list.as_mut_ptr()) } {
            0 => return Ok(list.split_off(1)),
            _ => match errno::Error::last() {
                error if error.errno() == libc::E2BIG => {}
                error => return Err(error),
            },
        }
        let count = list.first().copied().unwrap_or(0);
        list.resize(usize::try_from(count).unwrap_or(0) + 1, 0);
    }
}

/// Enables capability `cap` of `vm`, with `argument` as `args[0]` of `KVM_ENABLE_CAP`.
pub fn enable_capability(vm: &VmFd, cap: u32, argument: u64) -> errno::Result<()> {
    let args = [argument, 0, 0, 0];
    let cap = kvm_enable_cap { cap, args, ..kvm_enable_cap::default() };
    // SAFETY: `vm` is a VM's file descriptor, and the kernel reads exactly this struct.
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
/// The kernel refuses the call, or the bitmap is shorter than `num_pages` (`EINVAL`).
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
    // SAFETY: `vm` is a VM's file descriptor, and the bitmap has a bit for each page (see above).
    match unsafe { ioctl_with_mut_ref(vm, KVM_CLEAR_DIRTY_LOG(), &mut log) } {
        0 => Ok(()),
        _ => Err(errno::Error::last()),
    }
}

/// Names of exit reasons, indexed by number (`KVM_EXIT_*` in `linux/kvm.h`).
const EXIT_REASONS: &str = "UNKNOWN EXCEPTION IO HYPERCALL DEBUG HLT MMIO IRQ_WINDOW_OPEN SHUTDOWN \
     FAIL_ENTRY INTR SET_TPR TPR_ACCESS S390_SIEIC S390_RESET DCR NMI INTERNAL_ERROR OSI \
     PAPR_HCALL S390_UCONTROL WATCHDOG S390_TSCH EPR SYSTEM_EVENT S390_STSI IOAPIC_EOI HYPERV \
     ARM_NISV X86_RDMSR X86_WRMSR";

/// Returns the name of an exit reason, or its number if the name is unknown.
pub fn exit_name(reason: u32) -> String {
    let index = usize::try_from(reason).unwrap_or(usize::MAX);
    match EXIT_REASONS.split(' ').nth(index) {
        Some(name) => format!("KVM_EXIT_{name}"),
        None => format!("KVM exit reason {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use kvm_bindings::{KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_MMIO, KVM_EXIT_X86_WRMSR};

    use super::*;

    #[test]
    fn exit_names_match_the_numbers_of_kvm_bindings() {
        for (reason, name) in [
            (KVM_EXIT_MMIO, "KVM_EXIT_MMIO"),
            (KVM_EXIT_INTERNAL_ERROR, "KVM_EXIT_INTERNAL_ERROR"),
            (KVM_EXIT_X86_WRMSR, "KVM_EXIT_X86_WRMSR"),
            (999, "KVM exit reason 999"),
        ] {
            assert_eq!(exit_name(reason), name);
        }
    }
}
