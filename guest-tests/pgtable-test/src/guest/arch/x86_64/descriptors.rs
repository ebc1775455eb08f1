// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's descriptor tables: three segments, and a gate for each exception (Intel SDM volume 3,
//! 3.4.5 and 7.14.1).

/// Selector of the code segment.
pub const CODE: u16 = 1 << 3;
/// Selector of the data segment.
pub const DATA: u16 = 2 << 3;
/// Number of exceptions.
pub const EXCEPTIONS: u16 = 32;
/// Distance between the entry points of two exceptions in the program.
pub const ENTRY_SIZE: u64 = 16;

/// The segments: null, 64-bit code and data, at privilege level 0.
pub const SEGMENTS: [u64; 3] = [0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];

/// Returns interrupt gates to the entry points at `entries`, two words each, through [`CODE`] and on
/// the current stack.
pub fn gates(entries: u64) -> Vec<u64> {
    (0..u64::from(EXCEPTIONS))
        .flat_map(|number| {
            let at = entries + number * ENTRY_SIZE;
            let low =
                at & 0xffff | u64::from(CODE) << 16 | 0x8e << 40 | ((at >> 16) & 0xffff) << 48;
            [low, at >> 32]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_holds_its_entry_point() {
        let gates = gates(0x0012_3456_789a_bc00);

        assert_eq!(gates.len(), 64);
        let at = (gates[28] & 0xffff) | (gates[28] >> 32 & 0xffff_0000) | gates[29] << 32;
        assert_eq!(at, 0x0012_3456_789a_bc00 + 14 * 16);
        assert_eq!(gates[28] >> 40 & 0xff, 0x8e);
        assert_eq!(gates[28] >> 16 & 0xffff, 8);
    }
}
