// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtual machine that runs Linux: building, running and controlling it.
//!
//! ```text
//! config ── open_files ── builder ── Vm ── run ─┬─ main thread: signals, requests, statistics
//!                           │                   ├─ vCPU threads ── bus ── devices
//!   device_manager, memory, arch::guest         └─ console and device threads
//! ```
//!
//! [`run`](run::run) opens all files, confines the process, builds the VM and waits until the guest
//! powers off, resets or crashes, or until a signal, the escape key or the control socket stops it.
//! After a reset it builds the VM again from the same files, in the same memory.

mod api;
pub mod api_request;
mod boot_stats;
mod builder;
mod change_log;
pub mod config;
mod console_io;
mod control;
mod device_manager;
mod dirty_logs;
mod event_loop;
mod fatal_signals;
mod fault_stalls;
mod fault_trace;
mod generation;
mod kernel_boot;
mod map_probe;
mod metrics;
mod open_files;
pub mod outcome;
pub mod privileges;
mod replaced_devices;
pub mod run;
mod sandbox;
mod save;
mod saved_memory;
mod seccomp;
mod signals;
pub mod snapshot;
mod stage2_prefault;
mod start;
mod stats;
pub mod terminal;
mod vcpu;
mod vcpu_threads;
