// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#![doc = include_str!("../README.md")]

pub mod affinity;
pub mod arch;
pub mod devices;
mod folder;
pub mod kvm;
pub mod memory;
mod random;
pub mod scoped_thread;
pub mod stalls;
pub mod vm;
