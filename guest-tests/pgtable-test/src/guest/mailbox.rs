// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The protocol between host and guest: one mailbox for each vCPU, and three doorbells.
//!
//! The host writes a task into the mailbox while the vCPU is not in the guest, then enters the
//! guest. The guest replies through a doorbell: a store to a guest-physical address without memory,
//! or to a port. KVM exits to user space (`KVM_EXIT_MMIO`, `KVM_EXIT_IO`), which orders all earlier
//! accesses. Only one side accesses the mailbox at a time, so plain loads and stores suffice.
//!
//! Two words after the mailbox are shared while the guest runs, each with one writer: the host's
//! request to stop at [`STOP_OFFSET`] and the guest's count of writes at [`WRITES_OFFSET`].

use vm_memory::ByteValued;

use super::tables::GuestVirtAddr;
use crate::task::{Task, TaskAccess, first_state};

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mailbox {
    // The task: fields of [`Task`], with a guest-virtual address and distances in bytes.
    pub access: u64,
    pub start: u64,
    pub count: u64,
    pub stride: u64,
    pub inner_first: u64,
    pub inner_count: u64,
    pub inner_stride: u64,
    /// A written value is `seed ^ guest-virtual address`; [`TaskAccess::WriteAtRandom`] uses the
    /// seed as the first state of its random walk.
    pub seed: u64,
    // The reply: the guest-virtual address of the first difference and the value there.
    pub differs_at: u64,
    pub differs_found: u64,
    // The reply: vector and syndrome or error code of an exception, and its addresses.
    pub vector: u64,
    pub syndrome: u64,
    pub pc: u64,
    pub fault_address: u64,
    /// The doorbells' guest-virtual address or first port.
    pub doorbell: u64,
}

// SAFETY: fifteen u64 in C layout: no padding, no invalid values.
unsafe impl ByteValued for Mailbox {}

/// Offset from a mailbox of the word whose non-zero value ends [`TaskAccess::WriteAtRandom`].
pub const STOP_OFFSET: u64 = 256;
/// Offset from a mailbox of the count of writes of [`TaskAccess::WriteAtRandom`].
pub const WRITES_OFFSET: u64 = 320;

// After the mailbox, each in a cache line of its own.
const _: () =
    assert!(STOP_OFFSET >= size_of::<Mailbox>() as u64 && WRITES_OFFSET >= STOP_OFFSET + 64);

/// Distance from a visited address to the planted instruction, after the 8 verified bytes.
pub const PLANT_OFFSET: u64 = 8;

/// A doorbell, as its offset from the first one, in bytes or ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doorbell {
    Done = 0,
    /// A verified value differs.
    Differs = 8,
    /// The guest took an exception.
    Fatal = 16,
}

impl Doorbell {
    /// Returns the doorbell at an address or port; `first` is the address or port of the first
    /// doorbell.
    pub fn at(first: u64, address: u64) -> Option<Self> {
        [Self::Done, Self::Differs, Self::Fatal]
            .into_iter()
            .find(|doorbell| first + *doorbell as u64 == address)
    }
}

#[derive(Debug)]
pub struct GuestException {
    /// `true` if the exception has a fault address.
    pub has_address: bool,
    pub detail: String,
}

impl Mailbox {
    /// Returns a mailbox that holds `task`, whose first address is `virtual_start` for the guest.
    ///
    /// Guest-virtual and guest-physical addresses share their low bits (see
    /// [`Layout::virtual_of`](super::layout::Layout::virtual_of)). The seed compensates for the
    /// bits that differ, so that values derive from the physical address.
    pub fn of_task(task: &Task, virtual_start: GuestVirtAddr, doorbell: u64) -> Self {
        Self {
            access: task.access as u64,
            start: virtual_start.0,
            count: if task.access == TaskAccess::Nothing { 0 } else { task.count },
            stride: task.stride.0,
            inner_first: task.inner_first.0,
            inner_count: task.inner_count,
            inner_stride: task.inner_stride.0,
            seed: match task.access {
                TaskAccess::WriteAtRandom => first_state(task.seed),
                _ => task.seed ^ task.start.0 ^ virtual_start.0,
            },
            doorbell,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use granule_types::units::{Bytes, GuestAddress};

    fn task(start: u64) -> Task {
        Task { seed: 0x5eed, ..Task::new(TaskAccess::Write, GuestAddress(start), 3, Bytes::kib(4)) }
    }

    #[test]
    fn values_derive_from_the_physical_address() {
        let physical = 0xf_ffff_0000_0000;
        let virtual_start = 0xffff_0000_0000;

        let mailbox = Mailbox::of_task(&task(physical), GuestVirtAddr(virtual_start), 0);

        for offset in [0, 0x1000, 0x2000] {
            assert_eq!(
                mailbox.seed ^ (virtual_start + offset),
                Task::value_at(0x5eed, GuestAddress(physical + offset))
            );
        }
    }

    #[test]
    fn a_task_without_access_visits_no_address() {
        let nothing = Task { access: TaskAccess::Nothing, ..task(0) };

        assert_eq!(Mailbox::of_task(&nothing, GuestVirtAddr(0), 0).count, 0);
    }

    #[test]
    fn each_doorbell_is_identified_by_its_address() {
        for doorbell in [Doorbell::Done, Doorbell::Differs, Doorbell::Fatal] {
            let address = 0x8000 + doorbell as u64;
            assert_eq!(Doorbell::at(0x8000, address), Some(doorbell));
        }
        assert_eq!(Doorbell::at(0x8000, 0x8004), None);
    }

    #[test]
    fn pairs_of_mailbox_words_are_aligned_for_paired_loads() {
        use std::mem::offset_of;
        assert_eq!(size_of::<Mailbox>(), 15 * 8);
        let loads = [offset_of!(Mailbox, access), offset_of!(Mailbox, count)];
        let inner = [offset_of!(Mailbox, inner_first), offset_of!(Mailbox, inner_stride)];
        let differs = offset_of!(Mailbox, differs_at);
        let stores = [differs, offset_of!(Mailbox, vector), offset_of!(Mailbox, pc)];
        assert!([&loads[..], &inner, &stores].concat().iter().all(|pair| pair % 16 == 0));
    }
}
