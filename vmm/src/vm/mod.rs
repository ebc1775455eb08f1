// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtual machine that runs Linux, from its start to its end.
//!
//! ```text
//! config ─ memory ─┐                       ┌─ vcpu (a thread each) ─ bus ─ devices
//!   arch::linux ───┼─ build ─ Machine ─ run┤
//!  platform ───────┘                       └─ the main thread: signals, ends
//! ```
//!
//! The main thread builds the machine and then waits: for the guest to end (power off, reset,
//! crash), for a signal, for the console's escape key, or for the [control socket](api). A reset
//! builds a new machine from the same configuration.

pub mod api;
pub mod attach;
pub mod build;
pub mod config;
pub mod console;
mod control;
pub mod files;
pub mod layout;
pub mod memory;
pub mod platform;
pub mod privileges;
mod report;
pub mod run;
pub mod sandbox;
pub mod signals;
pub mod socket;
pub mod stats;
pub mod talk;
pub mod vcpu;
pub mod watch;
