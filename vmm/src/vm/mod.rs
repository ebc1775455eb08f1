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
pub mod console_io;
mod control;
pub mod layout;
pub mod memory_zones;
pub mod open_files;
pub mod pattern_match;
pub mod platform;
pub mod privileges;
pub mod run;
pub mod sandbox;
pub mod signals;
pub mod socket;
pub mod stats;
mod stats_file;
pub mod terminal;
pub mod vcpu;
