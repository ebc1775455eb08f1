// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's physical addresses.
//!
//! | from | what |
//! |---|---|
//! | 0 | the architecture's: interrupt controllers ([`crate::arch`] has where) |
//! | `0x0900_0000` | platform devices, a 64K page each |
//! | `0x0a00_0000` | virtio devices, a 4K page each |
//! | `0x1000_0000` | the architecture's again |
//! | `0x4000_0000` | memory, in one piece however much there is |
//!
//! All devices lie in the first gigabyte, so memory has no hole, begins on a boundary of the
//! largest block (1G, and 512M for 64K pages), and its last address is as low as it can be: with
//! 4K pages, guests of up to 15G do with stage-2 tables of two levels.

use std::ops::Range;

use granule_types::units::{Bytes, GuestAddress};
use thiserror::Error;

/// The platform's devices.
pub const PLATFORM_DEVICES: Range<u64> = 0x0900_0000..0x0a00_0000;
/// From one platform device to the next.
pub const PLATFORM_DEVICE_STEP: u64 = 0x1_0000;
/// The virtio devices.
pub const VIRTIO_DEVICES: Range<u64> = 0x0a00_0000..0x0b00_0000;
/// From one virtio device to the next.
pub const VIRTIO_DEVICE_STEP: u64 = 0x1000;
/// The first byte of memory.
pub const MEMORY: GuestAddress = GuestAddress(0x4000_0000);

/// There are no addresses left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("guest memory would end beyond 64 bits of addresses")]
pub struct NoAddresses;

/// Puts pieces of memory behind one another, each `(size, alignment)`.
///
/// # Errors
/// [`NoAddresses`].
pub fn place_memory(
    pieces: impl IntoIterator<Item = (Bytes, Bytes)>,
) -> Result<Vec<GuestAddress>, NoAddresses> {
    let mut end = MEMORY.0;
    pieces
        .into_iter()
        .map(|(size, align)| {
            let start = end
                .checked_next_multiple_of(align.0.max(1))
                .ok_or(NoAddresses)?;
            end = start.checked_add(size.0).ok_or(NoAddresses)?;
            Ok(GuestAddress(start))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_pieces_follow_one_another_on_their_boundaries() {
        let places = place_memory([
            (Bytes::mib(128), Bytes::kib(4)),
            (Bytes::gib(2), Bytes::gib(1)),
            (Bytes::mib(64), Bytes::mib(2)),
        ])
        .unwrap();

        assert_eq!(
            places,
            [0x4000_0000, 0x8000_0000, 0x1_0000_0000].map(GuestAddress)
        );
        assert_eq!(
            place_memory([(Bytes(u64::MAX), Bytes(1))]),
            Err(NoAddresses)
        );
    }
}
