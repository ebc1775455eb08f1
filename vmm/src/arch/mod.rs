// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What differs from one host architecture to the next: how a machine for the page-table test is
//! built and its vCPUs are run. The arithmetic of each builds and is tested on every host.

pub mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::machine::build;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::build;
