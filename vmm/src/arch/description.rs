// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The architecture-neutral description of a VM from which boot data is written.

use granule_types::units::{Bytes, GuestAddress};
use linux_loader::cmdline::Cmdline;

use crate::devices::MmioDeviceInfo;

/// Memory, devices and command line of a VM.
#[derive(Debug)]
pub struct VmDescription {
    /// Guest memory ranges, each `(start, size)`.
    pub memory: Vec<(GuestAddress, Bytes)>,
    /// Devices, the console first.
    pub devices: Vec<MmioDeviceInfo>,
    /// The kernel command line.
    pub command_line: Cmdline,
}
