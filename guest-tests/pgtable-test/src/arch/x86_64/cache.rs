// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cleaning memory out of this CPU's caches from user space: `CLFLUSHOPT`, or `CLFLUSH` on CPUs that
//! lack it. Instruction caches keep themselves coherent here.

use std::arch::{asm, x86_64::__cpuid_count};

/// Bit 23 of EBX of CPUID leaf 7: `CLFLUSHOPT` (Intel SDM, volume 2, CPUID).
const CLFLUSHOPT: u32 = 1 << 23;

/// A "return" instruction, as planted for execution.
pub const RETURN: u64 = 0xc3;

/// How this CPU cleans lines.
#[derive(Debug, Clone, Copy)]
pub struct Cleaner {
    unordered: bool,
    line: usize,
}

impl Cleaner {
    /// Finds out what this CPU can.
    pub fn of_this_cpu() -> Self {
        let most = __cpuid_count(0, 0).eax;
        let unordered = most >= 7 && __cpuid_count(7, 0).ebx & CLFLUSHOPT != 0;
        // The line that CLFLUSH takes, in units of 8 bytes.
        let line = (__cpuid_count(1, 0).ebx >> 8 & 0xff) * 8;
        Self {
            unordered,
            line: usize::try_from(line).unwrap_or(64).max(16),
        }
    }

    /// The instruction's name.
    pub const fn name(&self) -> &'static str {
        if self.unordered {
            "clflushopt"
        } else {
            "clflush"
        }
    }

    /// Bytes in a line.
    pub const fn line(&self) -> usize {
        self.line
    }

    /// Cleans and invalidates the lines of a range, without waiting.
    ///
    /// # Safety
    /// The range is mapped in this process.
    pub unsafe fn clean(&self, start: *const u8, size: usize) {
        let skew = start.addr() % self.line;
        let mut at = start.wrapping_sub(skew);
        let end = start.wrapping_add(size);
        while at < end {
            if self.unordered {
                // SAFETY: the line is mapped (the caller's promise, as no line crosses a page), and
                // its contents stay.
                unsafe { asm!("clflushopt [{}]", in(reg) at, options(nostack, preserves_flags)) };
            } else {
                // SAFETY: as above.
                unsafe { asm!("clflush [{}]", in(reg) at, options(nostack, preserves_flags)) };
            }
            at = at.wrapping_add(self.line);
        }
    }

    /// Waits until all cleaning so far is done.
    pub fn wait(&self) {
        // SAFETY: a fence touches nothing.
        unsafe { asm!("mfence", options(nostack, preserves_flags)) };
    }

    /// Nothing.
    ///
    /// # Safety
    /// None here; on other architectures the range must be mapped.
    pub unsafe fn invalidate_instructions(&self, _start: *const u8, _size: usize) {}
}
