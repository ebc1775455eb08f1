// SPDX-License-Identifier: GPL-2.0-or-later
//! Counts of each block of code: how often it was executed, and its instructions.
//!
//! QEMU translates code by blocks, which end with a branch or at the end of a page. So a block belongs
//! to one function, unless this one runs into the next. The address of the first instruction
//! identifies a block. Many address spaces share the addresses below 2^63, of programs and of guests,
//! so their blocks have one count, at address 0.
//!
//! Like all counts by block, these include the instructions after an exception that leaves a block early.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde::Serialize;

/// Executions of a block and of its instructions; the output has them as a list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct BlockCounts(pub u64, pub u64);

/// Counts of all blocks.
#[derive(Debug, Default)]
pub struct Blocks(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    slots: HashMap<u64, usize>,
    counts: Vec<BlockCounts>,
}

impl Blocks {
    /// Returns the slot of the block at a virtual address; assigns one to a new block.
    pub fn slot(&self, address: u64) -> usize {
        let address = if address >> 63 == 1 { address } else { 0 };
        let table = &mut *self.lock();
        let next = table.counts.len();
        let slot = *table.slots.entry(address).or_insert(next);
        table.counts.resize(table.slots.len(), BlockCounts::default());
        slot
    }

    /// Counts an execution of a block with this number of instructions.
    pub fn count(&self, slot: usize, instructions: u64) {
        if let Some(BlockCounts(executions, executed)) = self.lock().counts.get_mut(slot) {
            *executions += 1;
            *executed += instructions;
        }
    }

    /// Returns the counts of the executed blocks by their hexadecimal addresses, and resets them.
    pub fn take(&self) -> BTreeMap<String, BlockCounts> {
        let table = &mut *self.lock();
        let mut taken = BTreeMap::new();
        for (address, slot) in &table.slots {
            let counts = std::mem::take(&mut table.counts[*slot]);
            if counts != BlockCounts::default() {
                taken.insert(format!("{address:x}"), counts);
            }
        }
        taken
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A block that is executed: its slot, and the number of its instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExecutedBlock {
    /// Slot of the block.
    pub slot: usize,
    /// Number of its instructions, at most 512.
    pub instructions: usize,
}

impl ExecutedBlock {
    /// Limit of QEMU for the instructions of a block.
    const MAX_INSTRUCTIONS: usize = 512;

    /// Packs the block into the data of a callback.
    pub const fn pack(self) -> usize {
        self.slot * (Self::MAX_INSTRUCTIONS + 1) + self.instructions
    }

    /// Returns the block of the data of a callback.
    pub const fn unpack(data: usize) -> Self {
        let size = Self::MAX_INSTRUCTIONS + 1;
        Self { slot: data / size, instructions: data % size }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: u64 = 0xffff_8000_1000_0000;

    #[test]
    fn executions_are_counted_by_address_until_they_are_taken() {
        let blocks = Blocks::default();
        let (first, second) = (blocks.slot(KERNEL), blocks.slot(KERNEL + 8));

        blocks.count(first, 2);
        blocks.count(blocks.slot(KERNEL), 5);
        blocks.count(second, 1);

        let address = |offset: u64| format!("{:x}", KERNEL + offset);
        let expected = [(address(0), BlockCounts(2, 7)), (address(8), BlockCounts(1, 1))];
        assert_eq!(blocks.take(), expected.into());
        assert_eq!(blocks.take(), BTreeMap::new());
    }

    #[test]
    fn addresses_that_address_spaces_share_have_one_count() {
        let blocks = Blocks::default();

        assert_eq!(blocks.slot(0x40_0000), blocks.slot(0xffff_f7ff_0000));
        blocks.count(blocks.slot(0x40_0000), 3);

        assert_eq!(blocks.take(), [("0".to_owned(), BlockCounts(1, 3))].into());
    }

    #[test]
    fn a_block_fits_in_the_data_of_a_callback() {
        for (slot, instructions) in [(0, 1), (7, 512), (1_000_000, 0)] {
            let block = ExecutedBlock { slot, instructions };

            assert_eq!(ExecutedBlock::unpack(block.pack()), block);
        }
    }
}
