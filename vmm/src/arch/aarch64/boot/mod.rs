// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Boot data of a Linux guest on arm64 (`Documentation/arch/arm64/booting.rst`): kernel [image],
//! [device tree](fdt), command line, and the arm64 part of the guest's
//! [address map](crate::arch).
//!
//! | from | range |
//! |---|---|
//! | `0x0800_0000` | GIC: distributor, CPU interface or ITS |
//! | `0x1000_0000` | GIC redistributors, 128K for each vCPU |
//!
//! Kernel, initramfs and device tree are at the start of memory in this order, each aligned to the
//! largest base page, so that loading them populates as few of the host's huge pages as possible.
//!
//! These modules need neither KVM nor an arm64 host, so they are tested on every host.

pub mod fdt;
pub mod image;
pub mod payload;

use std::{io, ops::Range};

use granule_types::units::{Bytes, GuestAddress};
use linux_loader::{
    cmdline::{self, Cmdline},
    loader,
};
use thiserror::Error;

use crate::{arch::MEMORY_START, kvm::KvmError};
use image::Image;

/// Registers of the GIC distributor.
pub const GIC_DISTRIBUTOR: Range<GuestAddress> =
    GuestAddress(0x0800_0000)..GuestAddress(0x0801_0000);
/// Registers of the GICv2 CPU interface.
pub const GIC_CPU_INTERFACE: Range<GuestAddress> =
    GuestAddress(0x0801_0000)..GuestAddress(0x0801_2000);
/// Registers of the GICv3 interrupt translation service.
pub const GIC_ITS: Range<GuestAddress> = GuestAddress(0x0808_0000)..GuestAddress(0x080a_0000);
/// Range of the GICv3 redistributors.
pub const GIC_REDISTRIBUTORS: Range<GuestAddress> =
    GuestAddress(0x1000_0000)..GuestAddress(0x4000_0000);
/// Size of the register range of one redistributor.
pub const GIC_REDISTRIBUTOR_SIZE: u64 = 0x2_0000;
/// Maximum size of the device tree (the arm64 kernel maps one 2M block).
pub const FDT_MAX_SIZE: Bytes = Bytes::mib(2);
/// Alignment of device tree and initramfs: the guest's largest base page, because the kernel frees
/// the pages of the initramfs and keeps the others.
const BOOT_DATA_ALIGNMENT: u64 = 64 << 10;

/// Error returned when boot data cannot be prepared.
#[derive(Debug, Error)]
pub enum BootError {
    /// Error returned for an invalid kernel image, command line or size of memory.
    #[error("{0}")]
    InvalidInput(String),
    /// Error returned when the kernel file cannot be read.
    #[error("the file cannot be read")]
    Read(#[source] io::Error),
    /// Error returned when the kernel image cannot be decompressed.
    #[error("the {compression} data cannot be decompressed")]
    Decompress {
        /// The compression format.
        compression: &'static str,
        /// The decoder's error.
        #[source]
        source: io::Error,
    },
    /// Error returned for a value that is not valid in a device tree.
    #[error("the device tree cannot be written")]
    Fdt(#[from] vm_fdt::Error),
    /// Error of a KVM call on a vCPU.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// Error returned when a decompressed kernel cannot be written to guest memory.
    #[error("the kernel cannot be copied into guest memory")]
    Write(#[source] vm_memory::GuestMemoryError),
    /// Error returned when the kernel or the device tree cannot be copied into guest memory.
    #[error("{object} cannot be copied into guest memory")]
    Load {
        /// Name of the object.
        object: &'static str,
        /// The loader's error.
        #[source]
        source: loader::Error,
    },
}

/// Guest-physical addresses of the boot data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootLayout {
    /// Address of the device tree.
    pub fdt: GuestAddress,
    /// Load address of the kernel image, which is also its entry point.
    pub kernel: GuestAddress,
    /// Range of the initramfs.
    pub initrd: Option<Range<GuestAddress>>,
}

impl BootLayout {
    /// Places the boot data in the first memory range, which has `memory` bytes.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn new(image: &Image, initrd: Option<Bytes>, memory: Bytes) -> Result<Self, BootError> {
        let initrd_size = initrd.unwrap_or(Bytes(0));
        // The image is at most 512M and the initramfs a file, so the sums do not overflow.
        let kernel = MEMORY_START.0 + image.text_offset.0;
        let initrd_start = (kernel + image.size.0).next_multiple_of(BOOT_DATA_ALIGNMENT);
        let fdt = initrd_start + initrd_size.0.next_multiple_of(BOOT_DATA_ALIGNMENT);
        let end = fdt + FDT_MAX_SIZE.0;
        if end > MEMORY_START.0 + memory.0 {
            return Err(BootError::InvalidInput(format!(
                "kernel ({}), initramfs ({initrd_size}) and device tree need {} of contiguous guest \
                 memory; the first --memory is {memory}: increase it",
                image.size,
                Bytes((end - MEMORY_START.0).next_multiple_of(1 << 20))
            )));
        }
        Ok(Self {
            fdt: GuestAddress(fdt),
            kernel: GuestAddress(kernel),
            initrd: initrd
                .map(|size| GuestAddress(initrd_start)..GuestAddress(initrd_start + size.0)),
        })
    }
}

/// Size of the kernel's command-line buffer, including the terminating NUL (`COMMAND_LINE_SIZE` in
/// `arch/arm64/include/uapi/asm/setup.h`).
const COMMAND_LINE_SIZE: usize = 2048;

/// Parses a command line.
///
/// # Errors
/// The line is too long or has characters that are not printable ASCII.
pub fn parse_command_line(text: &str) -> Result<Cmdline, BootError> {
    let parse = || {
        let mut line = Cmdline::new(COMMAND_LINE_SIZE)?;
        line.insert_str(text)?;
        Ok(line)
    };
    parse().map_err(|error| match error {
        cmdline::Error::TooLarge => BootError::InvalidInput(format!(
            "--cmdline has {} bytes; arm64 Linux reads {}: shorten it",
            text.len(),
            COMMAND_LINE_SIZE - 1
        )),
        error => command_line_error(error),
    })
}

/// Returns the error for a command line with characters other than printable ASCII.
pub fn command_line_error(error: cmdline::Error) -> BootError {
    BootError::InvalidInput(format!("--cmdline is not valid: {error} Use printable ASCII only"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{PLATFORM_DEVICES, VIRTIO_DEVICES};

    fn test_image(text_offset: u64, size: Bytes) -> Image {
        Image { payload: None, text_offset: Bytes(text_offset), size }
    }

    #[test]
    fn boot_data_is_packed_at_the_start_of_memory() {
        let initrd = GuestAddress(0x41f1_0000)..GuestAddress(0x41f1_0000 + 5_000_001);
        for (image, kernel, initrd, fdt) in [
            (test_image(0, Bytes(0x1f0_f001)), 0x4000_0000, Some(initrd), 0x423e_0000),
            // A kernel whose header has no image size is loaded at its text offset.
            (test_image(0x8_0000, Bytes::mib(8)), 0x4008_0000, None, 0x4088_0000),
        ] {
            let size = initrd.as_ref().map(|range| Bytes(range.end.0 - range.start.0));
            let layout = BootLayout::new(&image, size, Bytes::mib(128)).unwrap();

            let (kernel, fdt) = (GuestAddress(kernel), GuestAddress(fdt));
            assert_eq!(layout, BootLayout { fdt, kernel, initrd });
        }
        let large =
            BootLayout::new(&test_image(0, Bytes::mib(31)), Some(Bytes::mib(40)), Bytes::mib(64));
        let error = large.unwrap_err().to_string();
        assert!(error.contains("need 73M"), "{error}");
    }

    // The redistributor range fits 512 vCPUs, the limit of KVM, and no ranges overlap.
    const _: () = {
        assert!(
            (GIC_REDISTRIBUTORS.end.0 - GIC_REDISTRIBUTORS.start.0) / GIC_REDISTRIBUTOR_SIZE >= 512
        );
        assert!(GIC_REDISTRIBUTORS.end.0 <= MEMORY_START.0);
        assert!(GIC_ITS.end.0 <= PLATFORM_DEVICES.start.0);
        assert!(VIRTIO_DEVICES.end.0 <= GIC_REDISTRIBUTORS.start.0);
    };

    #[test]
    fn a_command_line_is_passed_unchanged_or_refused() {
        for text in ["console=ttyS0 init=\"/bin/sh -c\" -- --verbose", &"a".repeat(2047)] {
            let line = parse_command_line(text).unwrap().as_cstring().unwrap();
            assert_eq!(line.to_str(), Ok(text));
        }
        for (text, why) in [
            ("a".repeat(2048).as_str(), "2048 bytes; arm64 Linux reads 2047"),
            ("a\0b", "printable ASCII"),
            ("a\tb", "printable ASCII"),
            ("gr\u{fc}n", "printable ASCII"),
        ] {
            let error = parse_command_line(text).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
