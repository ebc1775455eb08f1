// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Events of a machine that runs any hypervisor, and their text: one event per line.
//!
//! ```text
//! granule-machine-trace 1
//! # CPU event arguments
//! 0 id ctr_el0 84448004
//! 0 stack 0 ffff800010073a2c ffff80001007403c
//! 0 vtcr 80023558
//! 0 vttbr 1000041180000 @0
//! 0 table 41180000 1 - 0=41181003
//! 0 table 41181000 2 0
//! 0 store 41181010 0 40000041a007fd release @0
//! 0 dsb ishst
//! 0 tlbi ipas2e1is 8000000000041a00 @0
//! 0 dc civac 41a00000 200000 @0
//! 0 thread ffff000003f68e80
//! 0 enter 3 ffff00000340a000 41a00 0 0
//! 0 leave 3 0
//! 0 free 41180000
//! 0 ktcr 32b5503510
//! 0 ktable 41e0c000 0 - 100=41e0d003
//! 0 kroot 2 41e0c000 @0
//! 0 ktlbi vaale1is ffff800010000 @0
//! ```
//!
//! | event | arguments |
//! |---|---|
//! | `stack` | number, return addresses from the innermost function on; defines a call stack |
//! | `id` | name of an identification register in lower case, its value on all CPUs |
//! | `vtcr` `hcr` | new value of the register |
//! | `vttbr` | new value of VTTBR_EL2 |
//! | `table` | address of a page that becomes a table, its level, the CPU whose stores to the page no `DSB` or `DMB` has ordered yet or `-`, its entries that are not zero as index`=`value |
//! | `store` | address of the entry, value before, value after, `plain` `release` `swap` or `relaxed-swap` |
//! | `dsb` | `sy` `st` `ld` `ish` `ishst` `ishld` `nsh` `nshst` `nshld` `osh` `oshst` `oshld`; `dmb` likewise; `isb` has none. A `dsb` may also be `synxs` `ishnxs` `nshnxs` `oshnxs` |
//! | `tlbi` | name of the operation, operand |
//! | `dc` | name of the operation, physical address, bytes; operations on adjacent lines are one event |
//! | `ic` | `ivau`, physical address, bytes; or `ialluis`, `iallu` |
//! | `write` | physical page that the host writes for the first time since the last `dc` on it |
//! | `word` | address of a watched word, value before, value after |
//! | `thread` | number of the hypervisor's thread that the CPU executes from here on |
//! | `enter` | number of a function, its first four arguments |
//! | `leave` | number of a function, its result |
//! | `kroot` | exception level of the kernel that runs on the CPU, new root of TTBR1 |
//! | `ktcr` `kmair` | new value of TCR and MAIR of the kernel's regime |
//! | `ktable` | as `table`, for a table of the kernel's own |
//! | `ktlbi` | as `tlbi`, for one that applies to the kernel's regime and an upper address |
//! | `free` | address of the first root table of a tree, which the machine is about to free |
//!
//! Numbers are hexadecimal without a prefix, except those of CPUs, levels, stacks and functions.
//! `@` and a number name the call stack of an event. Empty lines and text after `#` are ignored.
//!
//! # Order of a table and its link
//!
//! A walker reads a table by the address in the entry that links it, so it observes the contents of the
//! table if the CPU has ordered them before the link: by a release, or by a `DSB` or `DMB` of stores
//! for the Inner Shareable domain between both (Arm ARM: ordered-before). Only a `DSB` completes a
//! store, as a TLB invalidation requires: an earlier one may be followed by a walk that reads the old
//! entry.

pub(super) mod barrier;
mod text;

use alloc::{string::String, vec::Vec};

use crate::{
    address::{EntryAddress, PhysAddr, TableAddress},
    check::{Cause, StoreKind},
    geometry::Level,
};

pub use self::{
    barrier::{Domain, OrderedAccesses},
    text::ParseMachineEventError,
};

/// First line of a trace.
pub const HEADER: &str = "granule-machine-trace 1";

/// A step of a CPU, and the call stack in which it happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineEvent {
    /// The CPU, counted from 0.
    pub cpu: u8,
    /// The step.
    pub action: MachineAction,
    /// The number of a call stack, which an earlier [`MachineAction::Stack`] defines.
    pub stack: Option<u32>,
}

impl MachineEvent {
    /// Returns the event as the cause of violations.
    pub(super) const fn cause(&self) -> Cause {
        Cause { cpu: self.cpu, stack: self.stack }
    }
}

/// A step of a machine. Addresses are physical, sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MachineAction {
    /// Defines a call stack: its number, and return addresses from the innermost function on.
    Stack(u32, Vec<u64>),
    /// The value of an identification register on all CPUs: its name in lower case.
    Identify(String, u64),
    /// Writes VTCR_EL2.
    SetVtcr(u64),
    /// Writes VTTBR_EL2.
    SetVttbr(u64),
    /// Writes HCR_EL2.
    SetHcr(u64),
    /// A page becomes a table, because an entry or VTTBR_EL2 points at it.
    Table {
        /// The first byte of the page.
        table: TableAddress,
        /// The level of the table.
        level: Level,
        /// The CPU that has written the page since its last `DSB`, if any.
        unordered_writer: Option<u8>,
        /// Indices and values of the entries that are not zero.
        entries: Vec<(u16, u64)>,
    },
    /// Changes an entry of a table.
    Store {
        /// The address of the entry.
        entry: EntryAddress,
        /// The value before.
        old: u64,
        /// The value after.
        new: u64,
        /// The instruction.
        kind: StoreKind,
    },
    /// A data synchronisation barrier.
    Dsb(OrderedAccesses, Domain),
    /// A data memory barrier.
    Dmb(OrderedAccesses, Domain),
    /// An instruction synchronisation barrier.
    Isb,
    /// A TLB invalidation: its name in lower case, and its operand.
    Tlbi(String, u64),
    /// A data cache operation on a range: its name in lower case.
    Dc(String, PhysAddr, u64),
    /// An invalidation of instructions: of a range, of all CPUs, or of this CPU.
    Ic(IcScope),
    /// The host writes a page for the first time since the last data cache operation on it.
    HostWrite(PhysAddr),
    /// Changes a watched word.
    Word {
        /// The address of the word.
        word: PhysAddr,
        /// The value before.
        old: u64,
        /// The value after.
        new: u64,
    },
    /// The CPU executes this thread of the hypervisor from here on.
    Thread(u64),
    /// Enters a function: its number, and its first arguments.
    Enter(u16, [u64; 4]),
    /// Leaves a function: its number, and its result.
    Leave(u16, u64),
    /// Writes TTBR1 of the running kernel, whose exception level it names: the root table.
    SetKernelRoot(u8, TableAddress),
    /// Writes TCR of the running kernel.
    SetKernelTcr(u64),
    /// Writes MAIR of the running kernel.
    SetKernelMair(u64),
    /// A page becomes a table of the kernel, because an entry or TTBR1 points at it.
    KernelTable {
        /// The first byte of the page.
        table: TableAddress,
        /// The level of the table.
        level: Level,
        /// The CPU that has written the page since its last barrier of stores, if any.
        unordered_writer: Option<u8>,
        /// Indices and values of the entries that are not zero.
        entries: Vec<(u16, u64)>,
    },
    /// A TLB invalidation of the kernel's regime: its name in lower case, and its operand.
    KernelTlbi(String, u64),
    /// Starts to free a tree; its pages are no longer tables. The address of its first root table.
    Free(TableAddress),
}

/// Instructions that an `IC` invalidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IcScope {
    /// Those of a range (`IVAU`).
    Range(PhysAddr, u64),
    /// Instructions in the caches of all CPUs (`IALLUIS`).
    AllCpus,
    /// Instructions in the caches of this CPU (`IALLU`).
    ThisCpu,
}
