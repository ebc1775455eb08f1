// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! arm64.

pub mod boot;
pub mod eager_split;
pub mod faults;
pub mod host;
pub mod ipa;
pub mod system_register;

#[cfg(target_arch = "aarch64")]
pub mod gic;
#[cfg(target_arch = "aarch64")]
pub mod guest;
#[cfg(target_arch = "aarch64")]
pub mod registers;
#[cfg(target_arch = "aarch64")]
pub mod vcpu;
#[cfg(target_arch = "aarch64")]
pub mod vm;
