// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Copies of large amounts of memory, by architecture.

/// Bytes of one turn of the loop.
#[cfg(target_arch = "aarch64")]
const TURN: usize = 256;

/// Copies bytes by vector registers: ten instructions for 256 bytes, where `memcpy` of musl takes
/// over 40.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
#[cfg(target_arch = "aarch64")]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    use std::{arch::asm, ptr};

    let turns = length / TURN;
    let (mut from, mut to) = (from, to);
    if turns > 0 {
        // SAFETY: each turn reads and writes 256 bytes, `turns * 256` in all, which the caller vouches
        // for. Vector registers and flags are declared.
        unsafe {
            asm!(
                "2:",
                "ld1 {{v0.16b, v1.16b, v2.16b, v3.16b}}, [{from}], #64",
                "ld1 {{v4.16b, v5.16b, v6.16b, v7.16b}}, [{from}], #64",
                "ld1 {{v16.16b, v17.16b, v18.16b, v19.16b}}, [{from}], #64",
                "ld1 {{v20.16b, v21.16b, v22.16b, v23.16b}}, [{from}], #64",
                "st1 {{v0.16b, v1.16b, v2.16b, v3.16b}}, [{to}], #64",
                "st1 {{v4.16b, v5.16b, v6.16b, v7.16b}}, [{to}], #64",
                "st1 {{v16.16b, v17.16b, v18.16b, v19.16b}}, [{to}], #64",
                "st1 {{v20.16b, v21.16b, v22.16b, v23.16b}}, [{to}], #64",
                "subs {turns}, {turns}, #1",
                "b.ne 2b",
                from = inout(reg) from,
                to = inout(reg) to,
                turns = inout(reg) turns => _,
                out("v0") _, out("v1") _, out("v2") _, out("v3") _,
                out("v4") _, out("v5") _, out("v6") _, out("v7") _,
                out("v16") _, out("v17") _, out("v18") _, out("v19") _,
                out("v20") _, out("v21") _, out("v22") _, out("v23") _,
                options(nostack),
            );
        }
    }
    // SAFETY: the rest of the same ranges.
    unsafe { ptr::copy_nonoverlapping(from, to, length % TURN) };
}

/// Copies bytes; `memcpy` uses what the CPU has for it.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
#[cfg(not(target_arch = "aarch64"))]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the caller vouches for the ranges.
    unsafe { std::ptr::copy_nonoverlapping(from, to, length) };
}
