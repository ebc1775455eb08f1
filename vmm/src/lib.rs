// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The virtual machine: memory on any backing, KVM objects, devices, boot and the running VM.

pub mod arch;
pub mod devices;
pub mod kvm;
pub mod memory;
pub mod scoped_thread;
pub mod vm;
