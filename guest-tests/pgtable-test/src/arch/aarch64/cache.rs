// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Maintaining this CPU's caches from user space: `DC CIVAC` and `IC IVAU`, which Linux permits
//! (SCTLR_EL1.UCI).

use std::arch::asm;

/// A "return" instruction (`RET`), as planted for execution.
pub const RETURN: u64 = 0xd65f_03c0;

/// How this CPU cleans lines.
#[derive(Debug, Clone, Copy)]
pub struct Cleaner {
    data_line: usize,
    instruction_line: usize,
}

impl Cleaner {
    /// Finds out what this CPU can.
    pub fn of_this_cpu() -> Self {
        let ctr: u64;
        // SAFETY: CTR_EL0 can be read by user space.
        unsafe { asm!("mrs {}, ctr_el0", out(reg) ctr, options(nomem, nostack, preserves_flags)) };
        // Log2 of the words in the smallest line (Arm ARM D19.2, CTR_EL0: DminLine, IminLine).
        Self {
            data_line: 4 << (ctr >> 16 & 0xf),
            instruction_line: 4 << (ctr & 0xf),
        }
    }

    /// The instruction's name.
    pub const fn name(&self) -> &'static str {
        "dc civac"
    }

    /// Bytes in a line.
    pub const fn line(&self) -> usize {
        self.data_line
    }

    /// Cleans and invalidates the lines of a range, without waiting.
    ///
    /// # Safety
    /// The range is mapped in this process.
    pub unsafe fn clean(&self, start: *const u8, size: usize) {
        for at in lines(start, size, self.data_line) {
            // SAFETY: the line is mapped (the caller's promise), and its contents stay.
            unsafe { asm!("dc civac, {}", in(reg) at, options(nostack, preserves_flags)) };
        }
    }

    /// Waits until all maintenance so far is done.
    pub fn wait(&self) {
        // SAFETY: a barrier touches nothing.
        unsafe { asm!("dsb ish", options(nostack, preserves_flags)) };
    }

    /// Invalidates the instruction cache's lines of a range, without waiting.
    ///
    /// # Safety
    /// The range is mapped in this process.
    pub unsafe fn invalidate_instructions(&self, start: *const u8, size: usize) {
        for at in lines(start, size, self.instruction_line) {
            // SAFETY: the line is mapped (the caller's promise).
            unsafe { asm!("ic ivau, {}", in(reg) at, options(nostack, preserves_flags)) };
        }
    }
}

fn lines(start: *const u8, size: usize, line: usize) -> impl Iterator<Item = *const u8> {
    let first = start.wrapping_sub(start.addr() % line);
    let end = start.wrapping_add(size);
    (0..)
        .map(move |index: usize| first.wrapping_add(index * line))
        .take_while(move |at| *at < end)
}
