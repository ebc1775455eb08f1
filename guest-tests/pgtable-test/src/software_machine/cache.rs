// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cache maintenance operations (CMOs) of this CPU from user space.
//!
//! A CMO on a range completes at the next [`CacheMaintenance::wait`]. arm64: `DC CIVAC` and
//! `IC IVAU`, which Linux permits (`SCTLR_EL1.UCI`). x86_64: `CLFLUSHOPT`, or `CLFLUSH` on CPUs
//! without it; instruction caches are coherent.

use std::arch::asm;

/// Cache maintenance operations of this CPU.
#[derive(Debug, Clone, Copy)]
pub struct CacheMaintenance {
    pub data_line_size: usize,
    #[cfg(target_arch = "aarch64")]
    instruction_line_size: usize,
    /// Indicates that the CPU has `CLFLUSHOPT`.
    #[cfg(target_arch = "x86_64")]
    has_clflushopt: bool,
}

#[cfg(target_arch = "aarch64")]
impl CacheMaintenance {
    /// Reads the line sizes of this CPU.
    pub fn of_this_cpu() -> Self {
        let ctr: u64;
        // SAFETY: user space can read CTR_EL0.
        unsafe { asm!("mrs {}, ctr_el0", out(reg) ctr, options(nomem, nostack, preserves_flags)) };
        // DminLine, IminLine: log2 of the 4-byte words in the smallest line (Arm manual, D19.2).
        Self { data_line_size: 4 << (ctr >> 16 & 0xf), instruction_line_size: 4 << (ctr & 0xf) }
    }

    /// Cleans and invalidates a range to PoC, without waiting for completion.
    ///
    /// # Safety
    /// The range is mapped in this process.
    pub unsafe fn clean_invalidate(&self, start: *const u8, size: usize) {
        for line in lines(start, size, self.data_line_size) {
            // SAFETY: the caller ensures that the line is mapped; its contents do not change.
            unsafe { asm!("dc civac, {}", in(reg) line, options(nostack, preserves_flags)) };
        }
    }

    /// Waits until all earlier CMOs are complete.
    pub fn wait(&self) {
        // SAFETY: a barrier accesses no memory.
        unsafe { asm!("dsb ish", options(nostack, preserves_flags)) };
    }

    /// Invalidates a range in the instruction caches, without waiting for completion.
    ///
    /// # Safety
    /// The range is mapped in this process.
    pub unsafe fn invalidate_icache(&self, start: *const u8, size: usize) {
        for line in lines(start, size, self.instruction_line_size) {
            // SAFETY: the caller ensures that the line is mapped.
            unsafe { asm!("ic ivau, {}", in(reg) line, options(nostack, preserves_flags)) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl CacheMaintenance {
    /// Reads the features and the line size of this CPU (Intel SDM, volume 2, CPUID).
    pub fn of_this_cpu() -> Self {
        use std::arch::x86_64::__cpuid_count;
        // Leaf 7, EBX bit 23: CLFLUSHOPT.
        let max_leaf = __cpuid_count(0, 0).eax;
        let has_clflushopt = max_leaf >= 7 && __cpuid_count(7, 0).ebx >> 23 & 1 != 0;
        // Leaf 1, EBX bits 15:8: the line size of CLFLUSH, in units of 8 bytes.
        let line = (__cpuid_count(1, 0).ebx >> 8 & 0xff) * 8;
        Self { has_clflushopt, data_line_size: usize::try_from(line).unwrap_or(64).max(16) }
    }

    /// Cleans and invalidates a range, without waiting for completion.
    ///
    /// # Safety
    /// The range is mapped in this process.
    pub unsafe fn clean_invalidate(&self, start: *const u8, size: usize) {
        for line in lines(start, size, self.data_line_size) {
            if self.has_clflushopt {
                // SAFETY: the caller ensures that the range is mapped, and no line crosses a page;
                // its contents do not change.
                unsafe { asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags)) };
            } else {
                // SAFETY: as above.
                unsafe { asm!("clflush [{}]", in(reg) line, options(nostack, preserves_flags)) };
            }
        }
    }

    /// Waits until all earlier CMOs are complete.
    pub fn wait(&self) {
        // SAFETY: a fence accesses no memory.
        unsafe { asm!("mfence", options(nostack, preserves_flags)) };
    }

    /// Does nothing: instruction caches are coherent.
    ///
    /// # Safety
    /// Always safe; on arm64 the range must be mapped.
    pub unsafe fn invalidate_icache(&self, _start: *const u8, _size: usize) {}
}

/// Returns the addresses of the lines of `line_size` bytes that overlap a range.
fn lines(start: *const u8, size: usize, line_size: usize) -> impl Iterator<Item = *const u8> {
    let first = start.wrapping_sub(start.addr() % line_size);
    let end = start.wrapping_add(size);
    (0..)
        .map(move |index: usize| first.wrapping_add(index * line_size))
        .take_while(move |line| *line < end)
}
