// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Architecture-specific code: address widths, vCPU registers and features, interrupt controllers,
//! boot data and tracepoints.
//!
//! The module of the target architecture is re-exported, so that callers use `arch::vm`,
//! `arch::guest` and `arch::host`. Modules without ioctls build and are tested on every host.
//!
//! All architectures share this guest-physical address map:
//!
//! | from | range |
//! |---|---|
//! | 0 | architecture-specific: interrupt controller |
//! | `0x0900_0000` | platform devices, 64K each |
//! | `0x0a00_0000` | virtio devices, 4K each |
//! | `0x1000_0000` | architecture-specific |
//! | `0x4000_0000` | memory |
//!
//! All devices are in the first gigabyte, so memory has no hole, starts at a multiple of the
//! largest block size (1G, and 512M for 64K pages), and ends at the lowest possible address. With
//! 4K pages, guests of up to 15G need only two levels of stage-2 tables.

/// arm64.
pub mod aarch64 {
    pub mod boot;
    pub mod gic_registers;
    pub mod host;
    pub mod state;
    pub mod vm;

    #[cfg(target_arch = "aarch64")]
    pub mod gic;
    #[cfg(target_arch = "aarch64")]
    mod gic_access;
    #[cfg(target_arch = "aarch64")]
    pub mod guest;
    #[cfg(target_arch = "aarch64")]
    pub mod save;
    #[cfg(target_arch = "aarch64")]
    pub mod save_gic;
    #[cfg(target_arch = "aarch64")]
    pub mod vcpu;
}

/// x86_64.
pub mod x86_64 {
    pub mod host;

    #[cfg(target_arch = "x86_64")]
    pub mod guest;
    #[cfg(target_arch = "x86_64")]
    pub mod vm;
}

use std::ops::Range;

use granule_types::units::{Bytes, GuestAddress};
use linux_loader::cmdline::Cmdline;

pub use aarch64::state::MachineState;
#[cfg(target_arch = "aarch64")]
pub use aarch64::{guest, host, vm};
#[cfg(target_arch = "x86_64")]
pub use x86_64::{guest, host, vm};

use crate::devices::MmioDeviceInfo;

/// Limits of this host's KVM that depend on the architecture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostLimits {
    /// Maximum width of guest-physical addresses, in bits.
    pub ipa_bits: u8,
    /// Block sizes of stage 2, smallest first; empty if KVM does not report them.
    pub block_sizes: Vec<Bytes>,
    /// Version of the interrupt controller that a guest of `granule run` uses, 2 or 3; `None` if
    /// KVM has none, or on another architecture.
    pub gic_version: Option<u8>,
}

/// Memory, devices and command line of a VM, which its boot data describe.
#[derive(Debug)]
pub struct VmDescription {
    /// Guest memory ranges, each `(start, size)`.
    pub memory: Vec<(GuestAddress, Bytes)>,
    /// Devices, the console first.
    pub devices: Vec<MmioDeviceInfo>,
    /// Kernel command line.
    pub command_line: Cmdline,
}

/// Range of the platform devices.
pub const PLATFORM_DEVICES: Range<GuestAddress> =
    GuestAddress(0x0900_0000)..GuestAddress(0x0a00_0000);
/// Distance between platform devices.
pub const PLATFORM_DEVICE_STEP: u64 = 0x1_0000;
/// Range of the virtio devices.
pub const VIRTIO_DEVICES: Range<GuestAddress> =
    GuestAddress(0x0a00_0000)..GuestAddress(0x0b00_0000);
/// Start of guest memory.
pub const MEMORY_START: GuestAddress = GuestAddress(0x4000_0000);

/// Returns the start of each memory range, in order; `ranges` holds `(size, alignment)`. Returns
/// `None` if guest memory exceeds the address space.
pub fn place_memory(ranges: impl IntoIterator<Item = (Bytes, Bytes)>) -> Option<Vec<GuestAddress>> {
    let mut end = MEMORY_START.0;
    ranges
        .into_iter()
        .map(|(size, align)| {
            let start = end.checked_next_multiple_of(align.0.max(1))?;
            end = start.checked_add(size.0)?;
            Some(GuestAddress(start))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_ranges_are_consecutive_and_aligned() {
        let starts = place_memory([
            (Bytes::mib(128), Bytes::kib(4)),
            (Bytes::gib(2), Bytes::gib(1)),
            (Bytes::mib(64), Bytes::mib(2)),
        ])
        .unwrap();

        assert_eq!(starts, [0x4000_0000, 0x8000_0000, 0x1_0000_0000].map(GuestAddress));
        assert_eq!(place_memory([(Bytes(u64::MAX), Bytes(1))]), None);
    }
}
