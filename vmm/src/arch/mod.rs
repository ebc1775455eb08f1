// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Architecture-specific code: address widths, vCPU registers and features, interrupt controllers,
//! boot data and tracepoints.
//!
//! The module of the target architecture is re-exported, so that callers use `arch::vm`,
//! `arch::guest` and `arch::host`. Modules without ioctls build and are tested on every host.

pub mod layout;

/// arm64.
pub mod aarch64 {
    pub mod boot;
    pub mod host;
    pub mod vm;

    #[cfg(target_arch = "aarch64")]
    pub mod gic;
    #[cfg(target_arch = "aarch64")]
    pub mod guest;
    #[cfg(target_arch = "aarch64")]
    pub mod vcpu;

    /// A system register by its encoding: the operands of `MRS`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct SystemRegister {
        /// Name in the Arm manual.
        pub name: &'static str,
        /// The operands op0, op1, CRn, CRm, op2.
        pub encoding: [u8; 5],
    }
}

/// x86_64.
pub mod x86_64 {
    pub mod host;

    #[cfg(target_arch = "x86_64")]
    pub mod guest;
    #[cfg(target_arch = "x86_64")]
    pub mod vm;
}

use granule_types::units::{Bytes, GuestAddress};
use linux_loader::cmdline::Cmdline;

#[cfg(target_arch = "aarch64")]
pub use aarch64::{guest, host, vm};
#[cfg(target_arch = "x86_64")]
pub use x86_64::{guest, host, vm};

use crate::devices::MmioDeviceInfo;

/// Memory, devices and command line of a VM, from which boot data is written.
#[derive(Debug)]
pub struct VmDescription {
    /// Guest memory ranges, each `(start, size)`.
    pub memory: Vec<(GuestAddress, Bytes)>,
    /// Devices, the console first.
    pub devices: Vec<MmioDeviceInfo>,
    /// The kernel command line.
    pub command_line: Cmdline,
}
