// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The emulated host: the emulator's command line outside; initramfs, PID 1 and its job inside.

pub mod costs;
pub mod emulator;
pub mod expect;
pub mod guest_init;
pub mod hold;
pub mod init;
pub mod initramfs;
pub mod job;
pub mod kernel_tables;
pub mod page_cache_load;
pub mod program;
pub mod tlb;
pub mod vmm;
pub mod zap;
