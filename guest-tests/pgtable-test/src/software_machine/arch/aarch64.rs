// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cache maintenance from user space: `DC CIVAC` and `IC IVAU`, which Linux permits
//! (`SCTLR_EL1.UCI`).

use std::arch::asm;

/// The "return" instruction (`RET`) that [`Access::Plant`](crate::task::Access::Plant) writes.
pub const RETURN: u64 = 0xd65f_03c0;

/// Cache maintenance of this CPU.
#[derive(Debug, Clone, Copy)]
pub struct CacheMaintenance {
    data_line: usize,
    instruction_line: usize,
}

impl CacheMaintenance {
    /// Reads the line sizes of this CPU.
    pub fn of_this_cpu() -> Self {
        let ctr: u64;
        // SAFETY: CTR_EL0 can be read by user space.
        unsafe { asm!("mrs {}, ctr_el0", out(reg) ctr, options(nomem, nostack, preserves_flags)) };
        // Log2 of the words in the smallest line (Arm manual D19.2, CTR_EL0: DminLine, IminLine).
        Self { data_line: 4 << (ctr >> 16 & 0xf), instruction_line: 4 << (ctr & 0xf) }
    }

    /// Returns the size of a data cache line, in bytes.
    pub const fn line(&self) -> usize {
        self.data_line
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

fn lines(start: *const u8, size: usize, line: usize) -> impl Iterator<Item = *const u8> {
    let first = start.wrapping_sub(start.addr() % line);
    let end = start.wrapping_add(size);
    (0..).map(move |index: usize| first.wrapping_add(index * line)).take_while(move |at| *at < end)
}
