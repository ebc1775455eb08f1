// SPDX-License-Identifier: GPL-2.0-or-later
//! Call stacks of the kernel, from its chain of frame records (AAPCS64).
//!
//! `X29` points at the innermost record: the address of the caller's record and a return address. A
//! function without a record is between the innermost record and `X30`, so the stack starts with
//! the program counter and `X30`. In other functions `X30` may be an address in the same function.

use std::collections::HashMap;

use granule_stage2::PhysAddr;

use super::{machine::Machine, pages::PAGE_SIZE};

/// Maximum number of addresses of a stack.
const MAX_DEPTH: usize = 16;

const FRAME_POINTER: u8 = 29;
const LINK_REGISTER: u8 = 30;

/// Numbers of call stacks.
#[derive(Debug, Default)]
pub struct CallStacks(HashMap<Vec<u64>, u32>);

impl CallStacks {
    /// Returns the number of a stack, and whether it is new.
    pub fn number(&mut self, stack: &[u64]) -> (u32, bool) {
        if let Some(number) = self.0.get(stack) {
            return (*number, false);
        }
        let number = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        self.0.insert(stack.to_vec(), number);
        (number, true)
    }
}

/// Returns the call stack of the running CPU, which executes the instruction at `address`.
pub fn walk(machine: &dyn Machine, address: u64) -> Vec<u64> {
    let link = machine.register(LINK_REGISTER);
    let mut stack = vec![address];
    let mut frame = machine.register(FRAME_POINTER);
    let mut reader = FrameReader { machine, page: None };
    while stack.len() < MAX_DEPTH
        && let Some((next, caller)) = reader.read(frame)
    {
        if stack.len() == 1 && caller != link {
            stack.push(link);
        }
        if caller == 0 {
            break;
        }
        stack.push(caller);
        if next <= frame {
            break;
        }
        frame = next;
    }
    stack
}

/// Reads frame records; most are in the same page as the previous one.
struct FrameReader<'a> {
    machine: &'a dyn Machine,
    /// Virtual and physical address of the last page.
    page: Option<(u64, PhysAddr)>,
}

impl FrameReader<'_> {
    /// Returns the two words of a record.
    fn read(&mut self, frame: u64) -> Option<(u64, u64)> {
        let page = frame & !(PAGE_SIZE - 1);
        if frame == 0 || !frame.is_multiple_of(16) {
            return None;
        }
        let phys = match self.page {
            Some((known, phys)) if known == page => phys,
            _ => self.machine.translate(page)?,
        };
        self.page = Some((page, phys));
        let mut record = [0; 16];
        let is_memory = self.machine.read(phys + frame % PAGE_SIZE, &mut record);
        let value = u128::from_le_bytes(record);
        let words = [value, value >> 64].map(|word| word & u128::from(u64::MAX));
        let [next, caller] = words.map(|word| u64::try_from(word).unwrap_or(0));
        is_memory.then_some((next, caller))
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::machine::fake::{FakeMachine, LINEAR, MEMORY},
        *,
    };

    #[test]
    fn the_stack_follows_the_frame_records() {
        let machine = FakeMachine::new(2);
        let records = [(0xff0, 0x1000, 0xa1), (0x1000, 0x1010, 0xa2), (0x1010, 0x1800, 0xa3)];
        for (offset, next, caller) in records {
            machine.write(MEMORY + offset, LINEAR + MEMORY + next);
            machine.write(MEMORY + offset + 8, caller);
        }
        machine.set_register(29, LINEAR + MEMORY + 0xff0);

        machine.set_register(30, 0xa1);
        assert_eq!(walk(&machine, 0xa0), [0xa0, 0xa1, 0xa2, 0xa3]);
        machine.set_register(30, 0xb1);
        assert_eq!(walk(&machine, 0xa0), [0xa0, 0xb1, 0xa1, 0xa2, 0xa3]);
    }

    #[test]
    fn a_cyclic_or_unreadable_chain_ends() {
        let machine = FakeMachine::new(1);
        machine.set_register(30, 0xa1);
        for frame in [0, 8, LINEAR + MEMORY + 8, LINEAR + MEMORY + 0x1000] {
            machine.set_register(29, frame);
            assert_eq!(walk(&machine, 0xa0), [0xa0], "{frame:#x}");
        }
        machine.write(MEMORY, LINEAR + MEMORY);
        machine.write(MEMORY + 8, 0xa1);
        machine.set_register(29, LINEAR + MEMORY);

        assert_eq!(walk(&machine, 0xa0), [0xa0, 0xa1]);
    }

    #[test]
    fn equal_stacks_have_one_number() {
        let mut stacks = CallStacks::default();

        let numbers = [&[1, 2][..], &[1], &[1, 2]].map(|stack| stacks.number(stack));

        assert_eq!(numbers, [(0, true), (1, true), (0, false)]);
    }
}
