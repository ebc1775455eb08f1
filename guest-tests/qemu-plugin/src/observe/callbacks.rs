// SPDX-License-Identifier: GPL-2.0-or-later
//! Instructions that have a callback when they are executed.

use std::{collections::HashMap, ops::Range};

use super::{
    arguments::TraceArguments,
    functions::Function,
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
    /// Numbers of the callbacks of an instruction, by its address and word. A barrier in no observed
    /// function has the address 0, as its event has no call stack.
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
        let is_hooked =
            |function: &Function| function.start == address || function.returns_at(address, word);
        let is_hooked = arguments.functions.iter().any(is_hooked)
            || arguments.frees.iter().any(|call| call.address == address);
        let observed = decode(word);
        // Programs and guests have barriers at any number of addresses.
        let is_barrier = matches!(observed, Some(Observed::Barrier(_) | Observed::IcAll(_)));
        let address = if is_barrier && !is_hooked { 0 } else { address };
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
        self.list.extend(observed.map(|observed| (address, Callback::Instruction(observed))));
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

    #[test]
    fn a_barrier_has_one_callback_at_all_addresses() {
        const DSB_ISH: u32 = 0xd503_3b9f;
        const DC_CIVAC_X0: u32 = 0xd50b_7e20;
        let arguments = TraceArguments::default();
        let mut callbacks = Callbacks::default();

        for address in [0x1000, 0x2000, 0x3000] {
            assert_eq!(callbacks.of_instruction(address, DSB_ISH, &arguments), 0..1);
        }
        let lines =
            [0x1000, 0x2000].map(|at| callbacks.of_instruction(at, DC_CIVAC_X0, &arguments));

        assert_eq!(lines, [1..2, 2..3]);
    }
}
