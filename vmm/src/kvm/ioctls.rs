// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VM calls that `kvm-ioctls` 0.25 does not offer on every architecture, as a trait on its `VmFd`, in
//! its style, so that they can go there.

#![allow(
    missing_docs,
    reason = "the request macros make undocumented functions"
)]

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

/// Write-protects the pages of all harvested entries of a VM's dirty rings again and gives the entries
/// back to the kernel (`KVM_RESET_DIRTY_RINGS`).
///
/// # Errors
/// The kernel's answer.
pub fn reset_dirty_rings(vm: BorrowedFd<'_>) -> errno::Result<()> {
    // SAFETY: the call takes no argument.
    match unsafe { ioctl(&vm.as_raw_fd(), KVM_RESET_DIRTY_RINGS()) } {
        0.. => Ok(()),
        _ => Err(errno::Error::last()),
    }
}

/// The calls.
pub trait VmExt {
    /// Enables a capability of the VM (`KVM_ENABLE_CAP`).
    ///
    /// # Errors
    /// The kernel's answer.
    fn enable_capability(&self, cap: &kvm_enable_cap) -> errno::Result<()>;

    /// Clears pages in the dirty log and write-protects them again (`KVM_CLEAR_DIRTY_LOG`): those
    /// whose bit is set in `bitmap`, whose first bit is page `first_page` of the slot. `first_page`
    /// and `num_pages` are multiples of 64, unless the range ends with the slot.
    ///
    /// # Errors
    /// The kernel's answer; `EINVAL` if the bitmap is shorter than `num_pages`.
    fn clear_dirty_log(
        &self,
        slot: u32,
        first_page: u64,
        num_pages: u32,
        bitmap: &mut [u64],
    ) -> errno::Result<()>;
}

impl VmExt for VmFd {
    fn enable_capability(&self, cap: &kvm_enable_cap) -> errno::Result<()> {
        // SAFETY: the descriptor is a VM's and the kernel reads exactly this struct.
        match unsafe { ioctl_with_ref(self, KVM_ENABLE_CAP(), cap) } {
            0 => Ok(()),
            _ => Err(errno::Error::last()),
        }
    }

    fn clear_dirty_log(
        &self,
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
        match unsafe { ioctl_with_mut_ref(self, KVM_CLEAR_DIRTY_LOG(), &mut log) } {
            0 => Ok(()),
            _ => Err(errno::Error::last()),
        }
    }
}
