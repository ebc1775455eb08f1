// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Byte layouts of the block device.

use super::{HEADER, MAX_RANGES, MAX_SECTORS, MAX_SEGMENTS};

/// Returns the contents of `struct virtio_blk_config` (section 5.2.4).
pub fn config_bytes(sectors: u64) -> Vec<u8> {
    let mut config = vec![0; 60];
    let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &sectors.to_le_bytes());
    put(12, &MAX_SEGMENTS.to_le_bytes());
    put(20, &512_u32.to_le_bytes());
    put(36, &MAX_SECTORS.to_le_bytes());
    put(40, &MAX_RANGES.to_le_bytes());
    // Discard alignment of 8 sectors: less than a file system block frees nothing.
    put(44, &8_u32.to_le_bytes());
    put(48, &MAX_SECTORS.to_le_bytes());
    put(52, &MAX_RANGES.to_le_bytes());
    put(56, &[1]);
    config
}

/// Returns the four little-endian words of a header or range.
pub fn words(bytes: &[u8; HEADER]) -> [u32; 4] {
    let (words, _) = bytes.as_chunks::<4>();
    [0, 1, 2, 3].map(|index| u32::from_le_bytes(words[index]))
}
