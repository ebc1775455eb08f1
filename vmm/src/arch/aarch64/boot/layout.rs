// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What arm64 adds to the guest's [addresses](crate::vm::layout).
//!
//! | from | what |
//! |---|---|
//! | `0x0800_0000` | interrupt controller: distributor, CPU interface or ITS |
//! | `0x1000_0000` | redistributors of the vCPUs, 128K each |
//!
//! At the bottom of memory lie, each on a boundary of 2M, the device tree, the kernel and the
//! initramfs. So a guest touches as few of the host's huge pages as can be before it runs.

use std::ops::Range;

use granule_types::units::{Bytes, GuestAddress};
use thiserror::Error;

use super::image::Image;
use crate::vm::layout::MEMORY;

/// The interrupt controller's distributor.
pub const GIC_DISTRIBUTOR: u64 = 0x0800_0000;
/// A GICv2's CPU interface.
pub const GIC_CPU_INTERFACE: u64 = 0x0801_0000;
/// A GICv3's interrupt translation service.
pub const GIC_ITS: u64 = 0x0808_0000;
/// A GICv3's redistributors.
pub const GIC_REDISTRIBUTORS: Range<u64> = 0x1000_0000..0x4000_0000;
/// What the kernel maps its device tree by, and the largest it takes.
pub const FDT_MAX_SIZE: Bytes = Bytes::mib(2);
/// The boundary that kernel, device tree and initramfs lie on.
const BOUNDARY: u64 = 2 << 20;

/// The first piece of memory is too small.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "kernel ({kernel}) and initramfs ({initrd}) need {needed} of guest memory in one piece, and \
     the first is {memory}: give it more with --memory"
)]
pub struct BootLayoutError {
    /// What the kernel takes.
    pub kernel: Bytes,
    /// What the initramfs takes.
    pub initrd: Bytes,
    /// What both need with what lies before them.
    pub needed: Bytes,
    /// What there is.
    pub memory: Bytes,
}

/// Where everything lies that the guest is started with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootLayout {
    /// The device tree.
    pub tree: GuestAddress,
    /// The kernel's first byte, which is also its entry.
    pub kernel: GuestAddress,
    /// The initramfs.
    pub initrd: Option<Range<u64>>,
}

impl BootLayout {
    /// Finds places in a first piece of memory of `memory` bytes.
    ///
    /// # Errors
    /// [`BootLayoutError`].
    pub fn new(
        image: &Image,
        initrd: Option<Bytes>,
        memory: Bytes,
    ) -> Result<Self, BootLayoutError> {
        let initrd_size = initrd.unwrap_or(Bytes(0));
        // An image is at most half a gigabyte, an initramfs a file in this process: no overflow.
        let kernel = MEMORY.0 + FDT_MAX_SIZE.0 + image.text_offset.0;
        let behind = (kernel + image.size.0).next_multiple_of(BOUNDARY);
        let end = behind.saturating_add(initrd_size.0);
        if end > MEMORY.0 + memory.0 {
            return Err(BootLayoutError {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::layout::{PLATFORM_DEVICES, VIRTIO_DEVICES};

    fn image(text_offset: u64, size: Bytes) -> Image {
        Image {
            bytes: Vec::new(),
            text_offset: Bytes(text_offset),
            size,
        }
    }

    #[test]
    fn everything_lies_at_the_bottom_each_on_its_boundary() {
        let places = BootLayout::new(
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
        let places =
            BootLayout::new(&image(0x8_0000, Bytes::mib(8)), None, Bytes::mib(64)).unwrap();

        assert_eq!(places.kernel.0, 0x4028_0000);
        assert_eq!(places.initrd, None);
    }

    #[test]
    fn too_little_memory_says_how_much_is_needed() {
        let error = BootLayout::new(
            &image(0, Bytes::mib(31)),
            Some(Bytes::mib(40)),
            Bytes::mib(64),
        )
        .unwrap_err();

        assert!(error.to_string().contains("need 74M"), "{error}");
    }

    // Redistributors have room for every vCPU that KVM can give, and nothing overlaps.
    const _: () = {
        assert!((GIC_REDISTRIBUTORS.end - GIC_REDISTRIBUTORS.start) / 0x2_0000 >= 512);
        assert!(GIC_REDISTRIBUTORS.end <= MEMORY.0);
        assert!(GIC_ITS < PLATFORM_DEVICES.start);
        assert!(VIRTIO_DEVICES.end <= GIC_REDISTRIBUTORS.start);
    };
}
