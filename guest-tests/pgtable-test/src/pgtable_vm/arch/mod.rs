// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The parts of the machine on KVM that depend on the architecture: guest mode, vCPU registers,
//! exits.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(super) use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub(super) use x86_64::*;
