// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! x86_64.

pub mod address_width;
pub mod faults;
pub mod host;

#[cfg(target_arch = "x86_64")]
pub mod guest;
#[cfg(target_arch = "x86_64")]
pub mod vm;
