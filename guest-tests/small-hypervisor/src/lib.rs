// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A small hypervisor at EL2 without an operating system, for QEMU's `virt` machine with two CPUs.
//!
//! Its guest has one vCPU on each CPU. Both write a block of memory while its mapping changes: pages
//! are mapped, write-protected, split from the block, unmapped and moved. `GuestTable` is all that it
//! knows of stage 2, so each program in `bin` runs it on another implementation, and
//! `granule lab check-image` checks that one.
#![no_std]
#![cfg(target_os = "none")]
#![allow(clippy::cast_possible_truncation, reason = "an address has 64 bits")]

mod console;
pub mod cpu;
pub mod engine;
mod guest;
pub mod guest_table;
mod hypervisor;
pub mod live_mapping;
mod lock;
pub mod once;

pub use guest_table::GuestTable;

/// Defines a program that runs the guest on a type of table.
#[macro_export]
macro_rules! program {
    ($table:ty) => {
        /// Creates the table of the guest.
        // SAFETY: no other function of a program has this name.
        #[unsafe(no_mangle)]
        fn create_guest_table() -> &'static mut dyn $crate::GuestTable {
            static TABLE: $crate::once::Once<$table> = $crate::once::Once::empty();
            TABLE.create(<$table>::create())
        }
    };
}
