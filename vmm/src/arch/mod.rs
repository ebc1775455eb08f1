// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Architecture-specific code: address widths, vCPU registers and features, interrupt controllers,
//! boot data and tracepoints.
//!
//! The module of the target architecture is re-exported, so that callers use `arch::vm`,
//! `arch::guest`, `arch::host` and `arch::faults`. Modules without ioctls build and are tested on
//! every host.

pub mod aarch64;
pub mod description;
pub mod layout;
pub mod x86_64;

#[cfg(target_arch = "aarch64")]
pub use aarch64::{faults, guest, host, vm};
#[cfg(target_arch = "x86_64")]
pub use x86_64::{faults, guest, host, vm};
