// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Code of a kernel's functions: finds the instructions that access a word of a structure (Arm ARM
//! C6.2: LDR and STR with unsigned offset, ADD with immediate).

use super::symbols::SymbolTable;

/// Instructions between the addition of an increment and its store.
const INCREMENT_LENGTH: usize = 5;

/// Symbols and image of a kernel.
#[derive(Debug, Clone, Copy)]
pub struct Code<'a> {
    pub symbols: &'a SymbolTable,
    /// The image, whose first byte is at `_text`.
    pub image: &'a [u8],
}

/// An instruction that increments a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Increment {
    /// Address of the store.
    pub address: u64,
    /// Bytes from the start of the structure to the word.
    pub offset: u64,
}

/// A 64-bit load or store with unsigned offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Access {
    data: u32,
    base: u32,
    offset: u64,
}

impl Access {
    fn decode(word: u32, top: u32) -> Option<Self> {
        let offset = u64::from(word >> 10 & 0xfff) * 8;
        (word >> 22 == top).then_some(Self { data: word & 31, base: word >> 5 & 31, offset })
    }

    fn load(word: u32) -> Option<Self> {
        Self::decode(word, 0b11_1110_0101)
    }

    fn store(word: u32) -> Option<Self> {
        Self::decode(word, 0b11_1110_0100)
    }
}

impl Code<'_> {
    /// Returns the instructions of a function with their addresses.
    fn instructions(&self, function: &str) -> Vec<(u64, u32)> {
        let range = || {
            let text = self.symbols.range("_text")?.start;
            let range = self.symbols.range(function)?;
            let offset = |address: u64| usize::try_from(address.checked_sub(text)?).ok();
            let bytes = self.image.get(offset(range.start)?..offset(range.end)?)?;
            let words = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
            Some((range.start..).step_by(4).zip(words).collect())
        };
        range().unwrap_or_default()
    }

    /// Returns the first increment of a 64-bit word in a function: a load, an addition of 1 and a
    /// store to the same place.
    pub fn first_increment(&self, function: &str) -> Option<Increment> {
        let instructions = self.instructions(function);
        let mut loads: Vec<Access> = Vec::new();
        for (index, (_, word)) in instructions.iter().enumerate() {
            if let Some(load) = Access::load(*word) {
                loads.retain(|other| other.data != load.data);
                loads.push(load);
            }
            // ADD Xd, Xn, #1
            if word & 0xffff_fc00 != 0x9100_0400 {
                continue;
            }
            let (sum, loaded) = (word & 31, word >> 5 & 31);
            let Some(load) = loads.iter().find(|load| load.data == loaded) else { continue };
            let after = instructions.iter().skip(index + 1).take(INCREMENT_LENGTH);
            let stored = Access { data: sum, ..*load };
            for (address, word) in after {
                if Access::store(*word) == Some(stored) {
                    return Some(Increment { address: *address, offset: load.offset });
                }
            }
        }
        None
    }

    /// Returns the addresses of loads from a word of a structure that is not on the stack.
    pub fn loads(&self, function: &str, offset: u64) -> Vec<u64> {
        const STACK_POINTER: u32 = 31;
        let is_load = |word: u32| {
            Access::load(word)
                .is_some_and(|load| load.offset == offset && load.base != STACK_POINTER)
        };
        let found = self.instructions(function).into_iter().filter(|(_, word)| is_load(*word));
        found.map(|(address, _)| address).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "ffff800010000000 T _text\nffff800010000008 t end\nffff80001000001c t fault\n\
                       ffff800010000024 t next\n";

    fn image() -> Vec<u8> {
        let words: [u32; 9] = [
            0,
            0,
            0xf941_0660, // ldr x0, [x19, #520]
            0xf940_0a61, // ldr x1, [x19, #16]
            0x9100_0400, // add x0, x0, #1
            0xd100_0421, // sub x1, x1, #1
            0xf901_0660, // str x0, [x19, #520]
            0xf941_06a2, // ldr x2, [x21, #520]
            0xf941_07e2, // ldr x2, [sp, #520]
        ];
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn accesses_of_a_word_are_found() {
        let (symbols, image) = (SymbolTable::parse(MAP), image());
        let code = Code { symbols: &symbols, image: &image };

        let increment = code.first_increment("end");

        let expected = Increment { address: 0xffff_8000_1000_0018, offset: 520 };
        assert_eq!(increment, Some(expected));
        assert_eq!(code.loads("fault", 520), [0xffff_8000_1000_001c]);
        assert!(code.loads("fault", 16).is_empty());
        assert_eq!((code.first_increment("fault"), code.first_increment("none")), (None, None));
    }
}
