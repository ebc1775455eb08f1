// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest of the page-table test, without an operating system.
//!
//! The host writes a task into a vCPU's [`mailbox`] and enters the guest; the guest program executes
//! it and exits through a doorbell. The host also builds the guest's stage-1 [`tables`] and decides
//! the [`layout`] of its memory before the guest runs. [`arch`] holds what depends on the
//! architecture: program, stage-1 entries, registers and exceptions. Both architectures build and are
//! tested on every host, except the programs, which need an assembler of their own architecture.

pub mod layout;
pub mod mailbox;
mod program;
pub mod tables;
#[cfg(test)]
mod tests;

pub use program::{entry, program};

pub mod arch {
    //! The guest's architectures.

    pub mod aarch64;
    pub mod x86_64;
}
