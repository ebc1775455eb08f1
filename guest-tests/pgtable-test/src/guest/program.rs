// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest program of the host's architecture, assembled by `payload` of [`super::arch`] between
//! three symbols.

unsafe extern "C" {
    static granule_guest_start: u8;
    static granule_guest_entry: u8;
    static granule_guest_end: u8;
}

/// Returns the program's bytes, to be copied into guest memory.
pub fn program() -> &'static [u8] {
    let start = &raw const granule_guest_start;
    let end = &raw const granule_guest_end;
    let len = end.addr() - start.addr();
    // SAFETY: the two symbols enclose one piece of read-only data, assembled by `payload`.
    unsafe { std::slice::from_raw_parts(start, len) }
}

/// Returns the offset of the first instruction in the program.
pub fn entry() -> u64 {
    let start = &raw const granule_guest_start;
    let entry = &raw const granule_guest_entry;
    (entry.addr() - start.addr()) as u64
}
