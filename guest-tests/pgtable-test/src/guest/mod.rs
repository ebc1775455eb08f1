// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest of the page-table test, without an operating system.
//!
//! Before the guest runs, the host decides the [`layout`] of guest memory and builds the stage-1
//! [`tables`]. Then it writes a task into a vCPU's [`mailbox`] and enters the guest; the guest
//! program executes the task and exits through a doorbell. [`arch`] defines stage-1 entries,
//! registers and exceptions of all architectures, compiled and tested on every host. The guest
//! program is assembled only for the host's architecture.

pub mod layout;
pub mod mailbox;
pub mod tables;
#[cfg(test)]
mod tests;

pub mod arch {
    //! The guest's architectures.

    #[cfg_attr(not(any(test, target_arch = "aarch64")), expect(dead_code, reason = "only tested"))]
    pub mod aarch64;
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only tested"))]
    pub mod x86_64;
}

use crate::task::TaskAccess;
use mailbox::{Doorbell, Mailbox};

/// Assembles the guest program in a file of `payload`, with the constants that all guest programs
/// use and those listed.
macro_rules! assemble {
    ($file:literal, $first_doorbell:expr, $($constant:ident = $field:ident),*; $($more:tt)*) => {
        std::arch::global_asm!(
            include_str!(concat!("../../payload/", $file)),
            ACCESS = const std::mem::offset_of!(Mailbox, access),
            COUNT = const std::mem::offset_of!(Mailbox, count),
            READ_OFFSET = const std::mem::offset_of!(Mailbox, read_offset),
            READ_STRIDE = const std::mem::offset_of!(Mailbox, read_stride),
            MISMATCH_ADDRESS = const std::mem::offset_of!(Mailbox, mismatch_address),
            VECTOR = const std::mem::offset_of!(Mailbox, vector),
            READ = const TaskAccess::Read as u64,
            WRITE = const TaskAccess::Write as u64,
            WRITE_THEN_READ = const TaskAccess::WriteThenRead as u64,
            INSTALL_RETURN = const TaskAccess::InstallReturn as u64,
            EXECUTE = const TaskAccess::Execute as u64,
            VERIFY = const TaskAccess::Verify as u64,
            WRITE_AT_RANDOM = const TaskAccess::WriteAtRandom as u64,
            STOP = const mailbox::STOP_OFFSET,
            WRITES = const mailbox::WRITES_OFFSET,
            RETURN_OFFSET = const mailbox::RETURN_OFFSET,
            DONE_DOORBELL = const $first_doorbell + Doorbell::Done as u64,
            MISMATCH_DOORBELL = const $first_doorbell + Doorbell::Mismatch as u64,
            FATAL_DOORBELL = const $first_doorbell + Doorbell::Fatal as u64,
            $($constant = const std::mem::offset_of!(Mailbox, $field),)*
            $($more)*
        );
    };
}

// The program begins with the exception vectors, so its guest address must be aligned to 2 KiB.
#[cfg(target_arch = "aarch64")]
assemble!("aarch64.S", 0, ELR = pc, DOORBELL = first_doorbell;);

// The program begins with the entry points of the exceptions.
#[cfg(target_arch = "x86_64")]
assemble!(
    "x86_64.S", arch::x86_64::FIRST_DOORBELL as u64,
    START = start, STRIDE = stride, READ_COUNT = read_count, SEED = seed,
    MISMATCH_VALUE = mismatch_value, SYNDROME = syndrome, PC = pc, FAULT_ADDRESS = fault_address;
    EXCEPTION_ENTRY_SIZE = const arch::x86_64::EXCEPTION_ENTRY_SIZE,
);

unsafe extern "C" {
    static granule_guest_start: u8;
    static granule_guest_entry: u8;
    static granule_guest_end: u8;
}

/// Returns the guest program, to be copied into guest memory.
pub fn program() -> &'static [u8] {
    let start = &raw const granule_guest_start;
    let end = &raw const granule_guest_end;
    let len = end.addr() - start.addr();
    // SAFETY: the two symbols enclose read-only data, assembled above.
    unsafe { std::slice::from_raw_parts(start, len) }
}

/// Returns the offset of the program's first instruction to execute.
pub fn entry_offset() -> u64 {
    let start = &raw const granule_guest_start;
    let entry = &raw const granule_guest_entry;
    (entry.addr() - start.addr()) as u64
}
