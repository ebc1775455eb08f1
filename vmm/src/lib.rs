// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The virtual machine: memory on any backing, vCPU threads, and the `granule` command's parts.

pub mod arch;
pub mod cli;
pub mod companion;
pub mod devices;
pub mod kvm;
pub mod machine;
pub mod memory;
pub mod vm;
