// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtual machine that runs Linux, from its configuration to the guest's power-off.
//!
//! ```text
//! config ── open_files ── builder ── Vm ── run ─┬─ main thread: signals, control socket, statistics
//!                           │                   ├─ vCPU threads ── bus ── devices
//!   device_manager, memory, arch::guest         └─ console and device threads
//! ```
//!
//! [`run`](run::run) opens all files, confines the process, builds the VM and waits until the guest
//! powers off, resets or crashes, or until a signal, the escape key or the [control socket](api) ends
//! it. After a reset it builds the VM again from the same files.

pub mod api;
pub mod api_request;
pub mod boot_stats;
pub mod builder;
pub mod config;
pub mod console_io;
mod control;
pub mod device_manager;
mod event_loop;
#[cfg(test)]
mod killed;
pub mod open_files;
pub mod outcome;
pub mod privileges;
pub mod run;
pub mod sandbox;
pub mod seccomp;
pub mod signals;
pub mod stats;
pub mod terminal;
pub mod vcpu;
pub mod vcpu_threads;
