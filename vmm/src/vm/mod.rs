// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtual machine that runs Linux, from its start to its end.
//!
//! ```text
//! config ─ memory ─┐                       ┌─ vcpu (a thread each) ─ bus ─ devices
//!  boot (images) ──┼─ build ─ Machine ─ run┤
//!  platform ───────┘                       └─ the main thread: signals, ends
//! ```
//!
//! The main thread builds the machine and then waits: for the guest to end (power off, reset,
//! crash), for a signal, for the console's escape key, or for the [control socket](api). A reset
//! builds a new machine from the same configuration.

pub mod api;
pub mod attach;
pub mod config;
pub mod console;
pub mod faults;
pub mod memory;
pub mod platform;
pub mod sandbox;
pub mod signals;
pub mod stats;
pub mod vcpu;
pub mod watch;

#[cfg(target_arch = "aarch64")]
mod build;
#[cfg(target_arch = "aarch64")]
mod control;
#[cfg(target_arch = "aarch64")]
pub mod run;
