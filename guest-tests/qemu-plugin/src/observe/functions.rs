// SPDX-License-Identifier: GPL-2.0-or-later
//! Functions of the kernel whose calls are reported, and words that they make watched.

use std::{collections::HashMap, ops::Range};

use granule_stage2::PhysAddr;

use super::machine::Machine;

/// A function of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// Number in the trace.
    pub number: u16,
    /// Virtual address of the first instruction.
    pub start: u64,
    /// Virtual address behind the last instruction.
    pub end: u64,
    /// Parts that the compiler has split off, as unlikely to be executed.
    pub cold: Vec<Range<u64>>,
}

impl Function {
    /// Returns whether the instruction at an address is in the function and returns from it: `RET`,
    /// or a branch out of it and its cold parts.
    pub fn returns_at(&self, address: u64, word: u32) -> bool {
        let is_return = word & 0xffff_fc1f == 0xd65f_0000 // RET
            || word & 0xffff_fbff == 0xd65f_0bff; // RETAA, RETAB
        let branch = (word >> 26 == 0b101).then(|| {
            // An immediate of 26 bits, in words, with its sign.
            let offset = (word << 6).cast_signed() >> 4;
            address.wrapping_add_signed(i64::from(offset))
        });
        let leaves = is_return || branch.is_some_and(|target| !self.contains(target));
        self.contains(address) && leaves
    }

    fn contains(&self, address: u64) -> bool {
        let in_cold_part = self.cold.iter().any(|part| part.contains(&address));
        (self.start..self.end).contains(&address) || in_cold_part
    }
}

/// A lock: from a call of a function on, a word behind its first argument is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lock {
    /// Number of the function.
    pub function: u16,
    /// Bytes from the first argument to the word.
    pub offset: u64,
}

/// Words of four bytes that are watched, and their values.
#[derive(Debug, Default)]
pub struct WatchedWords(HashMap<u64, u32>);

/// A change of a watched word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WordChange {
    /// Address.
    pub word: PhysAddr,
    /// Value before.
    pub old: u32,
    /// Value after.
    pub new: u32,
}

impl WatchedWords {
    /// Watches a word; returns whether it is not yet watched.
    pub fn watch(&mut self, machine: &dyn Machine, word: PhysAddr) -> bool {
        let value = read(machine, word);
        !self.0.contains_key(&word.0)
            && value.is_some_and(|value| {
                self.0.insert(word.0, value);
                true
            })
    }

    /// Returns the changes by a store of `size` bytes.
    pub fn store(&mut self, machine: &dyn Machine, phys: PhysAddr, size: u64) -> Vec<WordChange> {
        let mut changes = Vec::new();
        let mut word = phys.align_down(4);
        while word < phys + size {
            if let (Some(value), Some(new)) = (self.0.get_mut(&word.0), read(machine, word)) {
                let old = std::mem::replace(value, new);
                if old != new {
                    changes.push(WordChange { word, old, new });
                }
            }
            word += 4;
        }
        changes
    }
}

fn read(machine: &dyn Machine, word: PhysAddr) -> Option<u32> {
    let mut bytes = [0; 4];
    machine.read(word, &mut bytes).then(|| u32::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::{
        super::machine::fake::{FakeMachine, MEMORY},
        *,
    };

    #[test]
    fn a_function_returns_at_ret_and_at_a_branch_out_of_it() {
        let function = Function { number: 1, start: 0x1000, end: 0x1100, cold: Vec::new() };
        for (address, word, expected, text) in [
            (0x1010, 0xd65f_03c0, true, "ret"),
            (0x1010, 0xd65f_0bff, true, "retaa"),
            (0x1010, 0xd65f_0fff, true, "retab"),
            (0x1100, 0xd65f_03c0, false, "ret of the next function"),
            (0x1010, 0x1400_003c, true, "b 0x1100"),
            (0x1010, 0x1400_003b, false, "b 0x10fc"),
            (0x1010, 0x17ff_fffc, false, "b 0x1000"),
            (0x1010, 0x17ff_fffb, true, "b 0xffc"),
            (0x1010, 0x9400_0100, false, "bl"),
            (0x1010, 0xd503_201f, false, "nop"),
        ] {
            assert_eq!(function.returns_at(address, word), expected, "{text}");
        }
    }

    #[test]
    fn a_branch_to_a_cold_part_is_no_return() {
        const RET: u32 = 0xd65f_03c0;
        const B_0X2000: u32 = 0x1400_03fc;
        let function = Function { number: 1, start: 0x1000, end: 0x1100, cold: Vec::new() };
        let mut split = function.clone();
        split.cold.push(0x2000..0x2010);

        assert!(function.returns_at(0x1010, B_0X2000) && !split.returns_at(0x1010, B_0X2000));
        assert!(!function.returns_at(0x2004, RET) && split.returns_at(0x2004, RET));
        assert!(!split.returns_at(0x2010, RET));
    }

    #[test]
    fn changes_of_watched_words_are_reported() {
        let machine = FakeMachine::new(1);
        let mut words = WatchedWords::default();
        machine.write(MEMORY + 8, 7 << 32);

        assert!(words.watch(&machine, PhysAddr(MEMORY + 12)));
        assert!(!words.watch(&machine, PhysAddr(MEMORY + 12)));
        assert!(!words.watch(&machine, PhysAddr(0)));
        machine.write(MEMORY + 8, 1);
        let changes = words.store(&machine, PhysAddr(MEMORY + 8), 8);

        assert_eq!(changes, [WordChange { word: PhysAddr(MEMORY + 12), old: 7, new: 0 }]);
        assert!(words.store(&machine, PhysAddr(MEMORY + 8), 8).is_empty());
    }
}
