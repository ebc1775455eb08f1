// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Describes the places of instructions in a kernel.

use super::symbols::SymbolTable;

/// Bytes of an instruction.
const INSTRUCTION: u64 = 4;

/// Symbols of a kernel.
#[derive(Debug, Default)]
pub struct Places {
    symbols: SymbolTable,
}

impl Places {
    /// Returns the symbols of a `System.map`.
    pub fn of_system_map(text: &str) -> Self {
        Self { symbols: SymbolTable::parse(text) }
    }

    pub const fn symbols(&self) -> &SymbolTable {
        &self.symbols
    }

    /// Describes the place of an instruction. A call may be the last instruction of its function, so
    /// a return address is the place of the call.
    pub fn describe(&self, address: u64, is_return_address: bool) -> Option<String> {
        let call = if is_return_address { address.wrapping_sub(INSTRUCTION) } else { address };
        let place = self.symbols.place(call)?;
        Some(format!("{}+{:#x}", place.function, place.offset + (address - call)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_return_address_behind_a_function_belongs_to_it() {
        let places = Places::of_system_map("ffff800010001000 t caller\nffff800010001010 t next\n");

        let describe = |is_return| places.describe(0xffff_8000_1000_1010, is_return).unwrap();

        assert_eq!(describe(true), "caller+0x10");
        assert_eq!(describe(false), "next+0x0");
    }
}
