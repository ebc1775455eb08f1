// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Mailboxes and doorbells: the protocol between host and guest.
//!
//! The host writes a task into the vCPU's mailbox and enters the guest. The guest writes its reply
//! and accesses a doorbell, a guest-physical address without memory or a port. KVM then exits to
//! user space (`KVM_EXIT_MMIO`, `KVM_EXIT_IO`), which orders all earlier accesses. Only one side
//! accesses the mailbox at a time, so plain loads and stores suffice.
//!
//! Two words after the mailbox are shared while the guest runs, each with one writer: the host's
//! stop request at [`STOP_OFFSET`] and the guest's write count at [`WRITES_OFFSET`].

use vm_memory::ByteValued;

use super::tables::GuestVirtAddr;
use crate::task::{Task, TaskAccess, initial_state};

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mailbox {
    // The task: fields of `Task`, with a guest-virtual start address.
    pub access: u64,
    pub start: u64,
    pub count: u64,
    pub stride: u64,
    pub read_offset: u64,
    pub read_count: u64,
    pub read_stride: u64,
    /// Seed of written values, each `seed ^ guest-virtual address`. For
    /// [`TaskAccess::WriteAtRandom`], the initial state of the random walk.
    pub seed: u64,
    // The reply to a mismatch: guest-virtual address and value that the guest read.
    pub mismatch_address: u64,
    pub mismatch_value: u64,
    // The reply to an exception.
    pub vector: u64,
    /// Syndrome or error code.
    pub syndrome: u64,
    pub pc: u64,
    pub fault_address: u64,
    /// Guest-virtual address or port of the first doorbell.
    pub first_doorbell: u64,
}

// SAFETY: fifteen u64 in C layout: no padding, no invalid values.
unsafe impl ByteValued for Mailbox {}

/// Offset of the stop request: a word whose non-zero value ends [`TaskAccess::WriteAtRandom`].
pub const STOP_OFFSET: u64 = 256;
/// Offset of the write count of [`TaskAccess::WriteAtRandom`].
pub const WRITES_OFFSET: u64 = 320;

// Both words are after the mailbox, in different cache lines.
const _: () =
    assert!(STOP_OFFSET >= size_of::<Mailbox>() as u64 && WRITES_OFFSET >= STOP_OFFSET + 64);

/// Offset of the installed instruction from an address of the task, after the 8 verified bytes.
pub const RETURN_OFFSET: u64 = 8;

/// A doorbell; its value is the offset from the first doorbell, in bytes or ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doorbell {
    Done = 0,
    /// Difference between a verified value and its expectation.
    Mismatch = 8,
    /// Exception taken by the guest.
    Fatal = 16,
}

impl Doorbell {
    /// Returns the doorbell at an address or port; `first` is that of the first doorbell.
    pub fn from_address(first: u64, address: u64) -> Option<Self> {
        [Self::Done, Self::Mismatch, Self::Fatal]
            .into_iter()
            .find(|doorbell| first + *doorbell as u64 == address)
    }
}

#[derive(Debug)]
pub struct GuestException {
    /// Indicates that the exception has a fault address.
    pub has_address: bool,
    pub detail: String,
}

impl Mailbox {
    /// Returns a mailbox with `task`, whose guest-virtual start address is `virtual_start`.
    ///
    /// Guest-virtual and guest-physical addresses differ only in high bits (see
    /// [`Layout::virtual_address`](super::layout::Layout::virtual_address)). The seed
    /// compensates for these bits, so that values derive from the physical address.
    pub fn of_task(task: &Task, virtual_start: GuestVirtAddr, first_doorbell: u64) -> Self {
        Self {
            access: task.access as u64,
            start: virtual_start.0,
            count: if task.access == TaskAccess::Nothing { 0 } else { task.count },
            stride: task.stride.0,
            read_offset: task.read_offset.0,
            read_count: task.read_count,
            read_stride: task.read_stride.0,
            seed: match task.access {
                TaskAccess::WriteAtRandom => initial_state(task.seed),
                _ => task.seed ^ task.start.0 ^ virtual_start.0,
            },
            first_doorbell,
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
        for doorbell in [Doorbell::Done, Doorbell::Mismatch, Doorbell::Fatal] {
            let address = 0x8000 + doorbell as u64;
            assert_eq!(Doorbell::from_address(0x8000, address), Some(doorbell));
        }
        assert_eq!(Doorbell::from_address(0x8000, 0x8004), None);
    }

    #[test]
    fn pairs_of_mailbox_words_are_aligned_for_paired_loads() {
        use std::mem::offset_of;
        assert_eq!(size_of::<Mailbox>(), 15 * 8);
        let loads = [offset_of!(Mailbox, access), offset_of!(Mailbox, count)];
        let reads = [offset_of!(Mailbox, read_offset), offset_of!(Mailbox, read_stride)];
        let mismatch = offset_of!(Mailbox, mismatch_address);
        let stores = [mismatch, offset_of!(Mailbox, vector), offset_of!(Mailbox, pc)];
        assert!([&loads[..], &reads, &stores].concat().iter().all(|pair| pair % 16 == 0));
    }
}
