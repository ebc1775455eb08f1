// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest of the page-table test, without an operating system.
//!
//! The host writes a task into a vCPU's [`mailbox`] and enters the guest; the guest program
//! executes the task and exits through a doorbell. The host also builds the guest's stage-1
//! [`tables`] and decides the [`layout`] of its memory before the guest runs. [`arch`] defines
//! stage-1 entries, registers and exceptions of all architectures, built and tested on every host.
//! The guest program is assembled for the host's architecture only.

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

/// Assembles a guest program from a file in `payload` between three symbols, with the constants of
/// both programs and those listed.
macro_rules! assemble {
    ($file:literal, $first_doorbell:expr, $($field:ident = $of:ident),*; $($more:tt)*) => {
        std::arch::global_asm!(
            include_str!(concat!("../../payload/", $file)),
            ACCESS = const std::mem::offset_of!(Mailbox, access),
            COUNT = const std::mem::offset_of!(Mailbox, count),
            INNER_FIRST = const std::mem::offset_of!(Mailbox, inner_first),
            INNER_STRIDE = const std::mem::offset_of!(Mailbox, inner_stride),
            DIFFERS_AT = const std::mem::offset_of!(Mailbox, differs_at),
            VECTOR = const std::mem::offset_of!(Mailbox, vector),
            READ = const TaskAccess::Read as u64,
            WRITE = const TaskAccess::Write as u64,
            WRITE_THEN_READ = const TaskAccess::WriteThenRead as u64,
            PLANT = const TaskAccess::Plant as u64,
            EXECUTE = const TaskAccess::Execute as u64,
            VERIFY = const TaskAccess::Verify as u64,
            WRITE_AT_RANDOM = const TaskAccess::WriteAtRandom as u64,
            STOP = const mailbox::STOP_OFFSET,
            WRITES = const mailbox::WRITES_OFFSET,
            PLANT_OFFSET = const mailbox::PLANT_OFFSET,
            DONE_DOORBELL = const $first_doorbell + Doorbell::Done as u64,
            DIFFERS_DOORBELL = const $first_doorbell + Doorbell::Differs as u64,
            FATAL_DOORBELL = const $first_doorbell + Doorbell::Fatal as u64,
            $($field = const std::mem::offset_of!(Mailbox, $of),)*
            $($more)*
        );
    };
}

// The exception vectors come first, so the guest address of the program must be aligned to 2 KiB.
#[cfg(target_arch = "aarch64")]
assemble!("aarch64.S", 0, ELR = pc, DOORBELL = doorbell;);

// The entry points of the exceptions come first.
#[cfg(target_arch = "x86_64")]
assemble!(
    "x86_64.S", arch::x86_64::DOORBELL as u64,
    START = start, STRIDE = stride, INNER_COUNT = inner_count, SEED = seed,
    DIFFERS_FOUND = differs_found, SYNDROME = syndrome, PC = pc, FAULT_ADDRESS = fault_address;
    ENTRY_SIZE = const arch::x86_64::ENTRY_SIZE,
);

unsafe extern "C" {
    static granule_guest_start: u8;
    static granule_guest_entry: u8;
    static granule_guest_end: u8;
}

/// Returns the bytes of the guest program, to be copied into guest memory.
pub fn program() -> &'static [u8] {
    let start = &raw const granule_guest_start;
    let end = &raw const granule_guest_end;
    let len = end.addr() - start.addr();
    // SAFETY: the two symbols enclose one piece of read-only data, assembled above.
    unsafe { std::slice::from_raw_parts(start, len) }
}

/// Returns the offset of the first instruction in the program.
pub fn entry() -> u64 {
    let start = &raw const granule_guest_start;
    let entry = &raw const granule_guest_entry;
    (entry.addr() - start.addr()) as u64
}
