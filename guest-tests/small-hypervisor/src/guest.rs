// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest: its program, its memory and its calls.

use core::{arch::global_asm, ptr, slice};

use granule_stage2::{Ipa, PhysAddr};

use crate::guest_table::{BLOCK, Memory, PAGE, Use};

global_asm!(include_str!("guest.S"));

/// First address of the program.
pub const CODE: Memory =
    Memory { ipa: Ipa(0x8000_0000), phys: PhysAddr(0x4400_0000), size: BLOCK, used_for: Use::Code };
/// The block that both vCPUs write.
pub const DATA: Memory =
    Memory { ipa: Ipa(0x8020_0000), phys: PhysAddr(0x4420_0000), size: BLOCK, used_for: Use::Data };
/// The memory to which the block is moved.
pub const MOVED_TO: PhysAddr = PhysAddr(0x4440_0000);
/// The page in which the vCPUs wait for each other.
pub const MEETING: Memory =
    Memory { ipa: Ipa(0x8040_0000), phys: PhysAddr(0x4460_0000), size: PAGE, used_for: Use::Data };

/// Bytes from one written page of a vCPU to the next one.
const STRIDE: u64 = 16 * PAGE;
/// Bytes from the start of a page to the written word.
const OFFSET: u64 = 8;

/// A call of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// The vCPU has ended.
    End,
    /// Write-protect a range.
    WriteProtect,
    /// Unmap a range.
    Unmap,
    /// Recover a block.
    RecoverBlock,
    /// Move a block to other memory.
    Move,
}

impl Call {
    /// Returns a call by its number.
    pub const fn new(number: u64) -> Option<Self> {
        Some(match number {
            0 => Self::End,
            1 => Self::WriteProtect,
            2 => Self::Unmap,
            3 => Self::RecoverBlock,
            4 => Self::Move,
            _ => return None,
        })
    }
}

/// Writes the program to its memory.
pub fn load() {
    unsafe extern "C" {
        static guest_start: u8;
        static guest_end: u8;
    }
    let (start, end) = (&raw const guest_start, &raw const guest_end);
    // SAFETY: both symbols are the bounds of one section.
    let size = unsafe { end.offset_from_unsigned(start) };
    // SAFETY: the section is in the image.
    let program = unsafe { slice::from_raw_parts(start, size) };
    // SAFETY: the memory is the guest's, which does not run yet, and outside the image.
    unsafe { ptr::copy_nonoverlapping(program.as_ptr(), CODE.phys.0 as *mut u8, size) };
}

/// Copies the block to other memory, while neither is mapped.
pub fn copy_block(from: PhysAddr, to: PhysAddr) {
    let size = usize::try_from(BLOCK).unwrap_or_default();
    // SAFETY: both blocks are memory of the guest, which has no access, and do not overlap.
    unsafe { ptr::copy_nonoverlapping(from.0 as *const u8, to.0 as *mut u8, size) };
}

/// Returns how many pages of a block, which is not mapped, hold another round than the last one.
pub fn count_wrong_pages(block: PhysAddr, round: u64) -> u64 {
    let pages = (0..2).flat_map(|vcpu| (vcpu * PAGE..BLOCK).step_by(STRIDE as usize));
    let is_wrong = |page: &u64| {
        let word = (block.0 + page + OFFSET) as *const u64;
        // SAFETY: the word is memory of the guest, which has no access.
        unsafe { word.read_volatile() != round }
    };
    pages.filter(is_wrong).count() as u64
}
