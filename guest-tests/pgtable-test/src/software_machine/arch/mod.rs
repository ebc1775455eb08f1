// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cache maintenance by instructions of this host's CPU.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(super) use aarch64::{CacheMaintenance, RETURN};
#[cfg(target_arch = "x86_64")]
pub(super) use x86_64::{CacheMaintenance, RETURN};
