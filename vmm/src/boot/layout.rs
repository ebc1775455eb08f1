// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's physical addresses.
//!
//! | from | what |
//! |---|---|
//! | `0x0800_0000` | interrupt controller: distributor, CPU interface or ITS |
//! | `0x0900_0000` | platform devices, a 64K page each |
//! | `0x0a00_0000` | virtio devices, a 4K page each |
//! | `0x1000_0000` | redistributors of the vCPUs, 128K each |
//! | `0x4000_0000` | memory, in one piece however much there is |
//!
//! All devices lie in the first gigabyte, so memory has no hole, begins on a boundary of the
//! largest block (1G, and 512M for 64K pages), and its last address is as low as it can be: with
//! 4K pages, guests of up to 15G do with stage-2 tables of two levels.
//!
//! At the bottom of memory lie, each on a boundary of 2M, the device tree, the kernel and the
//! initramfs. So a guest touches as few of the host's huge pages as can be before it runs.

use std::ops::Range;

use granule_guest_tests::units::{Bytes, GuestAddress};
use thiserror::Error;

use super::image::Image;

/// The interrupt controller's distributor.
pub const GIC_DISTRIBUTOR: u64 = 0x0800_0000;
/// A GICv2's CPU interface.
pub const GIC_CPU_INTERFACE: u64 = 0x0801_0000;
/// A GICv3's interrupt translation service.
pub const GIC_ITS: u64 = 0x0808_0000;
/// A GICv3's redistributors.
pub const GIC_REDISTRIBUTORS: Range<u64> = 0x1000_0000..0x4000_0000;
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

/// What the kernel maps its device tree by, and the largest it takes.
pub const TREE_ROOM: Bytes = Bytes::mib(2);
/// The boundary that kernel, device tree and initramfs lie on.
const BOUNDARY: u64 = 2 << 20;

/// Why something has no place in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// The first piece of memory is too small.
    #[error(
        "kernel ({kernel}) and initramfs ({initrd}) need {needed} of guest memory in one piece, and \
         the first is {memory}: give it more with --memory"
    )]
    Room {
        /// What the kernel takes.
        kernel: Bytes,
        /// What the initramfs takes.
        initrd: Bytes,
        /// What both need with what lies before them.
        needed: Bytes,
        /// What there is.
        memory: Bytes,
    },
    /// There are no addresses left.
    #[error("guest memory would end beyond 64 bits of addresses")]
    Addresses,
}

/// Where everything lies that the guest is started with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// The device tree.
    pub tree: GuestAddress,
    /// The kernel's first byte, which is also its entry.
    pub kernel: GuestAddress,
    /// The initramfs.
    pub initrd: Option<Range<u64>>,
}

impl Places {
    /// Finds places in a first piece of memory of `memory` bytes.
    ///
    /// # Errors
    /// [`LayoutError::Room`].
    pub fn new(image: &Image, initrd: Option<Bytes>, memory: Bytes) -> Result<Self, LayoutError> {
        let initrd_size = initrd.unwrap_or(Bytes(0));
        // An image is at most half a gigabyte, an initramfs a file in this process: no overflow.
        let kernel = MEMORY.0 + TREE_ROOM.0 + image.text_offset.0;
        let behind = (kernel + image.size.0).next_multiple_of(BOUNDARY);
        let end = behind.saturating_add(initrd_size.0);
        if end > MEMORY.0 + memory.0 {
            return Err(LayoutError::Room {
                kernel: image.size,
                initrd: initrd_size,
                needed: Bytes((end - MEMORY.0).next_multiple_of(BOUNDARY)),
                memory,
            });
        }
        Ok(Self {
            tree: MEMORY,
            kernel: GuestAddress(kernel),
            initrd: initrd.map(|size| behind..behind + size.0),
        })
    }
}

/// Puts pieces of memory behind one another, each `(size, alignment)`.
///
/// # Errors
/// [`LayoutError::Addresses`].
pub fn place_memory(
    pieces: impl IntoIterator<Item = (Bytes, Bytes)>,
) -> Result<Vec<GuestAddress>, LayoutError> {
    let mut end = MEMORY.0;
    pieces
        .into_iter()
        .map(|(size, align)| {
            let start = end
                .checked_next_multiple_of(align.0.max(1))
                .ok_or(LayoutError::Addresses)?;
            end = start.checked_add(size.0).ok_or(LayoutError::Addresses)?;
            Ok(GuestAddress(start))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(text_offset: u64, size: Bytes) -> Image {
        Image {
            bytes: Vec::new(),
            text_offset: Bytes(text_offset),
            size,
        }
    }

    #[test]
    fn everything_lies_at_the_bottom_each_on_its_boundary() {
        let places = Places::new(
            &image(0, Bytes::mib(31)),
            Some(Bytes(5_000_001)),
            Bytes::mib(128),
        )
        .unwrap();

        assert_eq!(places.tree.0, 0x4000_0000);
        assert_eq!(places.kernel.0, 0x4020_0000);
        assert_eq!(places.initrd, Some(0x4220_0000..0x4220_0000 + 5_000_001));
    }

    #[test]
    fn an_old_kernel_lies_at_its_offset() {
        let places = Places::new(&image(0x8_0000, Bytes::mib(8)), None, Bytes::mib(64)).unwrap();

        assert_eq!(places.kernel.0, 0x4028_0000);
        assert_eq!(places.initrd, None);
    }

    #[test]
    fn too_little_memory_says_how_much_is_needed() {
        let error = Places::new(
            &image(0, Bytes::mib(31)),
            Some(Bytes::mib(40)),
            Bytes::mib(64),
        )
        .unwrap_err();

        assert!(error.to_string().contains("need 74M"), "{error}");
    }

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
            Err(LayoutError::Addresses)
        );
    }

    // Redistributors have room for every vCPU that KVM can give, and nothing overlaps.
    const _: () = {
        assert!((GIC_REDISTRIBUTORS.end - GIC_REDISTRIBUTORS.start) / 0x2_0000 >= 512);
        assert!(GIC_REDISTRIBUTORS.end <= MEMORY.0);
        assert!(VIRTIO_DEVICES.end <= GIC_REDISTRIBUTORS.start);
    };
}
