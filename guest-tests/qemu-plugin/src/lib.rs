// SPDX-License-Identifier: GPL-2.0-or-later
//! A QEMU plugin that counts cache and TLB maintenance instructions of an arm64 machine by name,
//! for each emulated CPU, and the entries of chosen functions.
//!
//! While QEMU translates code, every instruction is [decoded](decode) once; those of interest get
//! a callback, all others cost nothing. A `HINT` in the range `#0x60..=#0x7f`, which no
//! architecture version gives a meaning, is a *mark*: it ends the segment that was being counted
//! and begins the next one. Each [segment](segments) becomes one line of JSON in the output file,
//! in the order of execution; a last line says that QEMU ended in an orderly way and how many
//! segments there were, so that a reader notices a file cut short.
//!
//! Arguments: `out=FILE` (required); any number of `at=NAME:HEXADDRESS`, which counts under `NAME`
//! how often the instruction at that virtual address is executed: the entry of a kernel function,
//! taken from the kernel's `System.map`; and `instructions=on`, which counts all instructions, by
//! whole blocks of code: one that an exception leaves early counts whole, and again when it is
//! entered again. Counting takes no virtual time.
//!
//! One binary serves every QEMU: see [`qemu`] on interface versions. Counts are exact under
//! `-icount`, where one thread runs all CPUs; with a thread for each CPU no count is lost, but what
//! runs while a mark is executed may land on either side of it.

pub mod arguments;
pub mod decode;
#[cfg(not(test))] // Its functions live in QEMU: a test program could not be linked with it.
pub mod qemu;
pub mod segments;
