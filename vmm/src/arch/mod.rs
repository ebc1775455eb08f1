// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What differs from one host architecture to the next: a VM's addresses, a vCPU's registers, and how
//! a guest's exits are read. The arithmetic of each builds and is tested on every host.

pub mod aarch64;
pub mod x86_64;

#[cfg(target_arch = "aarch64")]
pub use aarch64::{faults, host, linux, vm};
#[cfg(target_arch = "x86_64")]
pub use x86_64::{faults, host, linux, vm};
