// SPDX-License-Identifier: GPL-2.0-or-later
//! Hexadecimal numbers in arguments.

/// Parses a hexadecimal number, with or without `0x`.
pub fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).ok()
}
