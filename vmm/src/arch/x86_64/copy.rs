// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Copies of large amounts of memory.

/// Copies bytes; `memcpy` uses what the CPU has for it.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
pub unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the caller vouches for the ranges.
    unsafe { std::ptr::copy_nonoverlapping(from, to, length) };
}
