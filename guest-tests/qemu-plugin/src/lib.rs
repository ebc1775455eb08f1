// SPDX-License-Identifier: GPL-2.0-or-later
//! A QEMU plugin that counts cache and TLB maintenance instructions of an arm64 machine by name,
//! for each emulated CPU, and calls of kernel functions.
//!
//! When QEMU translates code, every instruction is [decoded](decode) once; counted instructions get
//! a callback, others cost nothing. A `HINT` in the range `#0x60..=#0x7f`, which no architecture
//! version defines, is a *mark*: it ends the current segment and starts the next one. Each
//! [segment](segments) is a line of JSON in the output file, in the order of execution. An end
//! line, with the number of segments, shows that QEMU exited normally and the file is complete.
//!
//! Arguments:
//!
//! * `out=FILE` (required): the output file.
//! * `at=NAME:HEXADDRESS`, repeatable: counts executions of the instruction at this virtual address
//!   as `NAME`; the address is the entry of a kernel function in `System.map`.
//! * `instructions=on`: counts all instructions, by blocks of code. A block that an exception
//!   leaves early counts as a whole, and again when it is entered again.
//! * `span=NAME:HEXADDRESS`: makes each call of the function at this virtual address a
//!   [segment](span) of its own.
//! * `interval=NAME:HEXSTART:HEXEND:HEXCANCEL[:cpu]`: counts the [intervals](interval) between the
//!   functions at these virtual addresses as `NAME`, and their instructions as `NAME_ns`: those of all
//!   CPUs, or with `:cpu` of each CPU on its own.
//! * `stores=on`, `barriers=on`: counts store instructions as `stores`, and each `DSB` and `ISB` by
//!   its assembler name.
//! * `blocks=on`: counts the executions of each [block of code](blocks) and of its instructions.
//! * `quantum=NANOSECONDS`: measures the [elapsed time](clock) of CPUs in parallel, in quanta of
//!   virtual time. It needs `-icount`.
//! * `cost=CLASS:PICOSECONDS`, repeatable: the [cost](costs) of a class of instructions in elapsed
//!   time.
//! * `tlb=FIRST:WAYSxSETS`, `grain=BYTES`, `linear=HEXSTART:HEXEND`, `guest=HEXENTRY:HEXEXIT`: counts
//!   the walks of a [model of TLBs](tlb), for each size of the leaves that map the linear map.
//! * `trace=FILE`: writes a [trace](observe) of what the machine does to stage-2 tables.
//!
//! Counting takes no virtual time. Counts are exact under `-icount`, where one thread runs all
//! CPUs. With one thread for each CPU no count is lost, but instructions that run concurrently with
//! a mark may belong to either segment.
//!
//! One binary supports all QEMU versions: see [`interface`].

pub mod arguments;
pub mod blocks;
pub mod clock;
pub mod costs;
pub mod decode;
#[cfg(not(test))]
pub mod glib;
mod hexadecimal;
#[cfg(not(test))]
pub mod interface;
pub mod interval;
pub mod observe;
#[cfg(not(test))] // A test program cannot link the functions of QEMU.
pub mod qemu;
#[cfg(not(test))]
pub mod registers;
#[cfg(not(test))]
pub mod running_cpu;
pub mod segments;
pub mod span;
pub mod stores;
pub mod tlb;
pub mod tlb_counts;
