// SPDX-License-Identifier: GPL-2.0-or-later
//! Calls of a function as segments of their own, from the function's first instruction to its last.
//!
//! A call returns to the instruction behind its `BL`, also from a function that ends with a branch to
//! another one. The plugin finds these instructions when QEMU translates the `BL`, which is before
//! the call. Entry and return are the first instructions of their translated blocks, because a `BL`
//! ends a block; so the counts of whole blocks belong to either side.
//!
//! A call inside the function, on any CPU, does not start another span: the first return ends it.
//! Calls by `BLR` have no end.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

/// Returns the target of a `BL` at an address.
const fn call_target(word: u32, address: u64) -> Option<u64> {
    if word >> 26 != 0b10_0101 {
        return None;
    }
    // The immediate has 26 bits and counts instructions.
    let offset = ((word << 6).cast_signed() >> 4) as i64;
    Some(address.wrapping_add_signed(offset))
}

/// Begin or end of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Boundary {
    /// First instruction of the function.
    Entry,
    /// Instruction behind a call.
    Return,
}

/// Function whose calls are spans.
#[derive(Debug)]
pub struct Span {
    /// Name in the output.
    pub name: String,
    entry: u64,
    /// Addresses behind the calls that are translated.
    returns: Mutex<BTreeSet<u64>>,
}

impl Span {
    /// Returns the spans of the function at a virtual address.
    pub fn new(name: String, entry: u64) -> Self {
        Self { name, entry, returns: Mutex::default() }
    }

    /// Takes note of an instruction that is translated. Returns the boundary before it, if any.
    pub fn observe(&self, address: u64, word: u32) -> Option<Boundary> {
        let mut returns = self.returns.lock().unwrap_or_else(PoisonError::into_inner);
        if call_target(word, address) == Some(self.entry) {
            returns.insert(address.wrapping_add(4));
        }
        if address == self.entry {
            return Some(Boundary::Entry);
        }
        returns.contains(&address).then_some(Boundary::Return)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOP: u32 = 0xd503_201f;

    #[test]
    fn a_span_ends_behind_each_call() {
        let span = Span::new("f".to_owned(), 0x1000);
        let call = |from: u32| 0x9400_0000 | (0x1000_u32.wrapping_sub(from) >> 2 & 0x03ff_ffff);

        assert_eq!(span.observe(0x2004, NOP), None);
        assert_eq!(span.observe(0x2000, call(0x2000)), None);
        assert_eq!(span.observe(0x0800, call(0x0800)), None);

        assert_eq!(span.observe(0x1000, NOP), Some(Boundary::Entry));
        assert_eq!(span.observe(0x1004, NOP), None);
        assert_eq!(span.observe(0x2004, NOP), Some(Boundary::Return));
        assert_eq!(span.observe(0x0804, NOP), Some(Boundary::Return));
    }

    #[test]
    fn a_call_has_a_target_before_or_behind_it() {
        let address = 0xffff_8000_1000_0000;

        assert_eq!(call_target(0x9400_0002, address), Some(address + 8));
        assert_eq!(call_target(0x97ff_ffff, address), Some(address - 4));
        assert_eq!(call_target(0x1400_0002, address), None, "b is no call");
    }
}
