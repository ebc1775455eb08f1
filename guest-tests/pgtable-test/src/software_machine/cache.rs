// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cache maintenance by instructions of this CPU from user space.
//!
//! Maintenance of a range is issued line by line and completes at the next
//! [`CacheMaintenance::wait`]. arm64: `DC CIVAC` and `IC IVAU`, which Linux permits
//! (`SCTLR_EL1.UCI`). x86_64: `CLFLUSHOPT`, or `CLFLUSH` on CPUs without it; instruction caches are
//! coherent.

use std::arch::asm;

/// Cache maintenance by this CPU.
#[derive(Debug, Clone, Copy)]
pub struct CacheMaintenance {
    /// Size of a line of the data cache, in bytes.
    pub data_line: usize,
    #[cfg(target_arch = "aarch64")]
    instruction_line: usize,
    /// `true` if the CPU has `CLFLUSHOPT`.
    #[cfg(target_arch = "x86_64")]
    unordered: bool,
}

#[cfg(target_arch = "aarch64")]
impl CacheMaintenance {
    /// Reads the line sizes of this CPU.
    pub fn of_this_cpu() -> Self {
        let ctr: u64;
        // SAFETY: CTR_EL0 can be read by user space.
        unsafe { asm!("mrs {}, ctr_el0", out(reg) ctr, options(nomem, nostack, preserves_flags)) };
        // Log2 of the words in the smallest line (Arm manual D19.2, CTR_EL0: DminLine, IminLine).
        Self { data_line: 4 << (ctr >> 16 & 0xf), instruction_line: 4 << (ctr & 0xf) }
    }

    /// Cleans and invalidates a range to PoC, without waiting for completion.
    ///
    /// # Safety
    /// The range is mapped in this process.
    pub unsafe fn clean_invalidate(&self, start: *const u8, size: usize) {
        for at in lines(start, size, self.data_line) {
            // SAFETY: the caller promises that the line is mapped; its contents stay.
            unsafe { asm!("dc civac, {}", in(reg) at, options(nostack, preserves_flags)) };
        }
    }

    /// Waits until all earlier maintenance is complete.
    pub fn wait(&self) {
        // SAFETY: a barrier accesses no memory.
        unsafe { asm!("dsb ish", options(nostack, preserves_flags)) };
    }

    /// Invalidates a range in the instruction caches, without waiting for completion.
    ///
    /// # Safety
    /// The range is mapped in this process.
    pub unsafe fn invalidate_instructions(&self, start: *const u8, size: usize) {
        for at in lines(start, size, self.instruction_line) {
            // SAFETY: the caller promises that the line is mapped.
            unsafe { asm!("ic ivau, {}", in(reg) at, options(nostack, preserves_flags)) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl CacheMaintenance {
    /// Reads the features and the line size of this CPU (Intel SDM, volume 2, CPUID).
    pub fn of_this_cpu() -> Self {
        use std::arch::x86_64::__cpuid_count;
        // Leaf 7, EBX bit 23: CLFLUSHOPT.
        let most = __cpuid_count(0, 0).eax;
        let unordered = most >= 7 && __cpuid_count(7, 0).ebx >> 23 & 1 != 0;
        // Leaf 1, EBX bits 15:8: the line size of CLFLUSH, in units of 8 bytes.
        let line = (__cpuid_count(1, 0).ebx >> 8 & 0xff) * 8;
        Self { unordered, data_line: usize::try_from(line).unwrap_or(64).max(16) }
    }

    /// Cleans and invalidates a range, without waiting for completion.
    ///
    /// # Safety
    /// The range is mapped in this process.
    pub unsafe fn clean_invalidate(&self, start: *const u8, size: usize) {
        for at in lines(start, size, self.data_line) {
            if self.unordered {
                // SAFETY: the caller promises that the range is mapped, and no line crosses a page;
                // the line's contents stay.
                unsafe { asm!("clflushopt [{}]", in(reg) at, options(nostack, preserves_flags)) };
            } else {
                // SAFETY: as above.
                unsafe { asm!("clflush [{}]", in(reg) at, options(nostack, preserves_flags)) };
            }
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

/// Returns the lines of a range.
fn lines(start: *const u8, size: usize, line: usize) -> impl Iterator<Item = *const u8> {
    let first = start.wrapping_sub(start.addr() % line);
    let end = start.wrapping_add(size);
    (0..).map(move |index: usize| first.wrapping_add(index * line)).take_while(move |at| *at < end)
}
