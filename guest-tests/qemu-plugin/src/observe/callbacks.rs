// SPDX-License-Identifier: GPL-2.0-or-later
//! Instructions that have a callback when they are executed.

use std::{collections::HashMap, ops::Range};

use super::{
    arguments::TraceArguments,
    instruction::{Observed, decode},
};

/// Subject of a callback. Indices are those of the arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Callback {
    /// The instruction itself.
    Instruction(Observed),
    /// The entry of a function.
    Enter(usize),
    /// The return from a function.
    Leave(usize),
    /// A call that frees tables.
    Free(usize),
}

/// Callbacks of the machine, numbered in the order of their translation.
#[derive(Debug, Default)]
pub struct Callbacks {
    /// Address and callback.
    list: Vec<(u64, Callback)>,
    /// Numbers of the callbacks of an instruction, by its address and word.
    numbers: HashMap<(u64, u32), Range<usize>>,
}

impl Callbacks {
    /// Returns the numbers of an instruction's callbacks.
    pub fn of_instruction(
        &mut self,
        address: u64,
        word: u32,
        arguments: &TraceArguments,
    ) -> Range<usize> {
        if let Some(numbers) = self.numbers.get(&(address, word)) {
            return numbers.clone();
        }
        let first = self.list.len();
        for (index, function) in arguments.functions.iter().enumerate() {
            if function.start == address {
                self.list.push((address, Callback::Enter(index)));
            }
            if function.returns_at(address, word) {
                self.list.push((address, Callback::Leave(index)));
            }
        }
        let frees = arguments.frees.iter().enumerate();
        let frees = frees.filter(|(_, call)| call.address == address);
        self.list.extend(frees.map(|(index, _)| (address, Callback::Free(index))));
        self.list.extend(decode(word).map(|observed| (address, Callback::Instruction(observed))));
        let numbers = first..self.list.len();
        if !numbers.is_empty() {
            self.numbers.insert((address, word), numbers.clone());
        }
        numbers
    }

    /// Returns the address and the callback with a number.
    pub fn get(&self, number: usize) -> Option<(u64, Callback)> {
        self.list.get(number).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_keeps_its_callbacks() {
        const RET: u32 = 0xd65f_03c0;
        const ISB: u32 = 0xd503_3fdf;
        const NOP: u32 = 0xd503_201f;
        let mut arguments = TraceArguments::default();
        for (key, value) in
            [("function", "1:100:108"), ("function", "2:104:108"), ("free", "104:0")]
        {
            arguments.set(key, value).unwrap();
        }
        let mut callbacks = Callbacks::default();
        let mut find = |address, word| -> Vec<_> {
            let numbers = callbacks.of_instruction(address, word, &arguments);
            numbers.map(|number| callbacks.get(number).unwrap()).collect()
        };

        assert!(matches!(
            find(0x100, ISB)[..],
            [(_, Callback::Enter(0)), (_, Callback::Instruction(_))]
        ));
        let last = [Callback::Leave(0), Callback::Enter(1), Callback::Leave(1), Callback::Free(0)];
        assert_eq!(find(0x104, RET), last.map(|callback| (0x104, callback)));
        assert_eq!(find(0x104, RET), last.map(|callback| (0x104, callback)));
        assert!(find(0x108, RET).is_empty() && find(0x108, NOP).is_empty());
        assert_eq!(callbacks.list.len(), 6);
    }
}
