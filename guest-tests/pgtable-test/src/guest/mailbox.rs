// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How host and guest talk: one mailbox for each vCPU, and three bells.
//!
//! The host writes a task while the vCPU stands still, then enters the guest. The guest answers by
//! ringing a bell: a store to a guest-physical address without memory, or to a port, whichever the
//! architecture has. KVM leaves the guest for it (`KVM_EXIT_MMIO`, `KVM_EXIT_IO`), which orders
//! everything before it. Nobody ever writes the mailbox while the other side runs, so plain loads
//! and stores do.
//!
//! Behind the mailbox lie two words that are for while the guest runs: at [`STOP_OFFSET`] the host says
//! whether to stop, at [`WRITES_OFFSET`] the guest counts what it wrote. Each has one writer.

use vm_memory::ByteValued;

use super::random_walk;
use crate::machine::{Access, Task};

/// One vCPU's mailbox, as it lies in guest memory.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mailbox {
    /// What to do: a `*_CODE`.
    pub access: u64,
    /// The first place's guest-virtual address.
    pub start: u64,
    /// How many places.
    pub count: u64,
    /// From one place to the next, in bytes.
    pub stride: u64,
    /// From a place to the first read behind it, in bytes.
    pub inner_first: u64,
    /// How many reads behind each place.
    pub inner_count: u64,
    /// From one of these reads to the next, in bytes.
    pub inner_stride: u64,
    /// What values derive from: the value at a place is `seed ^ guest-virtual address`; what
    /// [`Access::WriteAtRandom`] begins its choice of places with.
    pub seed: u64,
    /// Answer: the guest-virtual address of the first place that differs.
    pub differs_at: u64,
    /// Answer: what that place holds.
    pub differs_found: u64,
    /// Answer: the number of the exception vector taken.
    pub vector: u64,
    /// Answer: what the CPU says of the exception (syndrome, error code).
    pub syndrome: u64,
    /// Answer: the instruction that did not complete.
    pub pc: u64,
    /// Answer: the guest-virtual address at fault.
    pub fault_address: u64,
    /// Where the bells are: guest-virtual, or a port.
    pub doorbell: u64,
}

// SAFETY: fifteen u64 in C layout: no padding, no invalid values.
unsafe impl ByteValued for Mailbox {}

/// [`Access::Nothing`].
pub const NOTHING_CODE: u64 = 0;
/// [`Access::Read`].
pub const READ_CODE: u64 = 1;
/// [`Access::Write`].
pub const WRITE_CODE: u64 = 2;
/// [`Access::WriteThenRead`].
pub const WRITE_THEN_READ_CODE: u64 = 3;
/// [`Access::Plant`].
pub const PLANT_CODE: u64 = 4;
/// [`Access::Execute`].
pub const EXECUTE_CODE: u64 = 5;
/// [`Access::Verify`].
pub const VERIFY_CODE: u64 = 6;
/// [`Access::WriteAtRandom`].
pub const WRITE_AT_RANDOM_CODE: u64 = 7;

/// From a mailbox to the word that is not 0 while [`Access::WriteAtRandom`] shall stop.
pub const STOP_OFFSET: u64 = 256;
/// From a mailbox to the word that counts the writes of [`Access::WriteAtRandom`].
pub const WRITES_OFFSET: u64 = 320;

// Behind the mailbox, and each in a cache line of its own.
const _: () =
    assert!(STOP_OFFSET >= size_of::<Mailbox>() as u64 && WRITES_OFFSET >= STOP_OFFSET + 64);

/// From a place to the instruction planted there: behind the 8 bytes that are written and verified.
pub const PLANT_OFFSET: u64 = 8;

/// A bell: its distance from the doorbell's address or port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bell {
    /// The task is done.
    Done,
    /// A place does not hold what it should.
    Differs,
    /// The guest took an exception.
    Fatal,
}

impl Bell {
    /// Its distance from the doorbell in bytes or ports.
    pub const fn offset(self) -> u64 {
        match self {
            Self::Done => 0,
            Self::Differs => 8,
            Self::Fatal => 16,
        }
    }

    /// The bell rung by a store at an address or port, if it is one.
    pub fn at(doorbell: u64, address: u64) -> Option<Self> {
        [Self::Done, Self::Differs, Self::Fatal]
            .into_iter()
            .find(|bell| doorbell + bell.offset() == address)
    }
}

impl Mailbox {
    /// A mailbox holding `task`, its place translated by `virtual_of`.
    ///
    /// Guest-virtual and guest-physical addresses share their low bits (see
    /// [`Layout::virtual_of`](super::layout::Layout::virtual_of)); the bits that differ go into
    /// the seed, so that values still derive from the physical address.
    pub fn of_task(task: &Task, virtual_start: u64, doorbell: u64) -> Self {
        let access = match task.access {
            Access::Nothing => NOTHING_CODE,
            Access::Read => READ_CODE,
            Access::Write => WRITE_CODE,
            Access::WriteThenRead => WRITE_THEN_READ_CODE,
            Access::Plant => PLANT_CODE,
            Access::Execute => EXECUTE_CODE,
            Access::Verify => VERIFY_CODE,
            Access::WriteAtRandom => WRITE_AT_RANDOM_CODE,
        };
        Self {
            access,
            start: virtual_start,
            count: if task.access == Access::Nothing {
                0
            } else {
                task.count
            },
            stride: task.stride.0,
            inner_first: task.inner_first.0,
            inner_count: task.inner_count,
            inner_stride: task.inner_stride.0,
            seed: match task.access {
                Access::WriteAtRandom => random_walk::first_state(task.seed),
                _ => task.seed ^ task.start.0 ^ virtual_start,
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
        Task {
            access: Access::Write,
            start: GuestAddress(start),
            count: 3,
            stride: Bytes::kib(4),
            inner_first: Bytes(0),
            inner_count: 0,
            inner_stride: Bytes(0),
            seed: 0x5eed,
        }
    }

    #[test]
    fn values_derive_from_the_physical_address_whatever_the_virtual_one_is() {
        let physical = 0xf_ffff_0000_0000;
        let virtual_start = 0xffff_0000_0000;

        let mailbox = Mailbox::of_task(&task(physical), virtual_start, 0);

        for offset in [0, 0x1000, 0x2000] {
            assert_eq!(
                mailbox.seed ^ (virtual_start + offset),
                Task::value_at(0x5eed, GuestAddress(physical + offset))
            );
        }
    }

    #[test]
    fn a_task_to_do_nothing_visits_no_place() {
        let nothing = Task {
            access: Access::Nothing,
            ..task(0)
        };

        assert_eq!(Mailbox::of_task(&nothing, 0, 0).count, 0);
    }

    #[test]
    fn each_bell_is_known_by_its_address() {
        let doorbell = 0x8000;
        for bell in [Bell::Done, Bell::Differs, Bell::Fatal] {
            assert_eq!(Bell::at(doorbell, 0x8000 + bell.offset()), Some(bell));
        }
        assert_eq!(Bell::at(doorbell, 0x8004), None);
    }

    #[test]
    fn a_mailbox_is_fifteen_words_and_pairs_lie_side_by_side() {
        assert_eq!(size_of::<Mailbox>(), 15 * 8);
        for pair in [
            std::mem::offset_of!(Mailbox, access),
            std::mem::offset_of!(Mailbox, count),
            std::mem::offset_of!(Mailbox, inner_first),
            std::mem::offset_of!(Mailbox, inner_stride),
            std::mem::offset_of!(Mailbox, differs_at),
            std::mem::offset_of!(Mailbox, vector),
            std::mem::offset_of!(Mailbox, pc),
        ] {
            assert_eq!(pair % 16, 0);
        }
    }
}
