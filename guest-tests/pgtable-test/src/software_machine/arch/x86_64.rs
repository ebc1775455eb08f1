// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cache maintenance from user space: `CLFLUSHOPT`, or `CLFLUSH` on CPUs without it. Instruction
//! caches are coherent on this architecture.

use std::arch::{asm, x86_64::__cpuid_count};

/// Bit 23 of EBX of CPUID leaf 7: `CLFLUSHOPT` (Intel SDM, volume 2, CPUID).
const CLFLUSHOPT: u32 = 1 << 23;

/// The "return" instruction that [`Access::Plant`](crate::task::Access::Plant) writes.
pub const RETURN: u64 = 0xc3;

/// Cache maintenance of this CPU.
#[derive(Debug, Clone, Copy)]
pub struct CacheMaintenance {
    /// `true` if the CPU has `CLFLUSHOPT`.
    unordered: bool,
    line: usize,
}

impl CacheMaintenance {
    /// Reads the features and the line size of this CPU.
    pub fn of_this_cpu() -> Self {
        let most = __cpuid_count(0, 0).eax;
        let unordered = most >= 7 && __cpuid_count(7, 0).ebx & CLFLUSHOPT != 0;
        // The line size of CLFLUSH, in units of 8 bytes.
        let line = (__cpuid_count(1, 0).ebx >> 8 & 0xff) * 8;
        Self { unordered, line: usize::try_from(line).unwrap_or(64).max(16) }
    }

    /// Returns the size of a cache line, in bytes.
    pub const fn line(&self) -> usize {
        self.line
    }

    /// Cleans and invalidates a range, without waiting for completion.
    ///
    /// # Safety
    /// The range is mapped in this process.
    pub unsafe fn clean_invalidate(&self, start: *const u8, size: usize) {
        let skew = start.addr() % self.line;
        let mut at = start.wrapping_sub(skew);
        let end = start.wrapping_add(size);
        while at < end {
            if self.unordered {
                // SAFETY: the caller promises that the range is mapped, and no line crosses a page;
                // the line's contents stay.
                unsafe { asm!("clflushopt [{}]", in(reg) at, options(nostack, preserves_flags)) };
            } else {
                // SAFETY: as above.
                unsafe { asm!("clflush [{}]", in(reg) at, options(nostack, preserves_flags)) };
            }
            at = at.wrapping_add(self.line);
        }
    }

    /// Waits until all earlier maintenance is complete.
    pub fn wait(&self) {
        // SAFETY: a fence accesses no memory.
        unsafe { asm!("mfence", options(nostack, preserves_flags)) };
    }

    /// Does nothing: instruction caches are coherent.
    ///
    /// # Safety
    /// None here; on other architectures the range must be mapped.
    pub unsafe fn invalidate_instructions(&self, _start: *const u8, _size: usize) {}
}
