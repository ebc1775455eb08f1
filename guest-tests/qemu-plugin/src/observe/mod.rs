// SPDX-License-Identifier: GPL-2.0-or-later
//! A trace of what the machine does to stage-2 tables and, with `stage1=on`, to the kernel's own:
//! stores, barriers, TLB and cache maintenance, in the text of [`granule_stage2::check::machine::event`].
//!
//! ```text
//! hooks ── observer ─┬─ instruction: decodes                    ─┐
//!   │                ├─ pages, tables, functions: state         ─┼─ machine
//!   │                └─ trace: barrier, cache_operations,       ─┘
//! qemu (a machine)             call_stack, writer
//! ```
//!
//! The trace needs QEMU 9.1 or later and `-icount`, where one thread runs all CPUs, so that the
//! events are in the order of execution. It takes no virtual time, and equal runs have equal traces.
//!
//! Not seen: the hardware's updates of access flags and dirty state; what a guest does.

pub mod arguments;
mod barrier;
mod cache_operations;
mod call_stack;
mod callbacks;
mod functions;
#[cfg(not(test))]
pub mod hooks;
mod instruction;
mod kernel;
mod machine;
mod observer;
mod pages;
#[cfg(not(test))]
mod qemu;
mod shape;
mod system_registers;
mod tables;
#[cfg(test)]
mod tests;
mod trace;
mod writer;
