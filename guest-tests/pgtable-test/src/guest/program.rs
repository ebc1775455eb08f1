// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest program of this architecture, which its `payload` assembles between two symbols.

unsafe extern "C" {
    static granule_guest_start: u8;
    static granule_guest_entry: u8;
    static granule_guest_end: u8;
}

/// The program, to be copied into the guest.
pub fn program() -> &'static [u8] {
    let start = &raw const granule_guest_start;
    let end = &raw const granule_guest_end;
    let len = end.addr() - start.addr();
    // SAFETY: the two symbols enclose one piece of read-only data, assembled by `payload`.
    unsafe { std::slice::from_raw_parts(start, len) }
}

/// From the program's first byte to its first instruction.
pub fn entry() -> u64 {
    let start = &raw const granule_guest_start;
    let entry = &raw const granule_guest_entry;
    (entry.addr() - start.addr()) as u64
}
