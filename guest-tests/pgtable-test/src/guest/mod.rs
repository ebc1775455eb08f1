// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest of the page-table test, without an operating system.
//!
//! The host writes a task into a vCPU's [`mailbox`] and enters the guest; the guest [`program`]
//! executes it and exits through a doorbell. The host also builds the guest's stage-1 [`tables`] and
//! decides the [`layout`] of its memory before the guest runs. [`random_walk`] is the sequence of
//! pages that a guest writes in a migration. [`arch`] holds what depends on the architecture.

pub mod arch;
pub mod layout;
pub mod mailbox;
pub mod program;
pub mod random_walk;
pub mod tables;
#[cfg(test)]
mod tests;
