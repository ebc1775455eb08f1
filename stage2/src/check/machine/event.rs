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

use alloc::{string::String, vec::Vec};
use core::{fmt, str::SplitWhitespace};

use thiserror::Error;

use crate::{address::PhysAddr, check::StoreKind, geometry::Level};

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

/// The accesses that a barrier orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrderedAccesses {
    /// Loads and stores.
    All,
    /// Stores.
    Stores,
    /// Loads, before loads and stores.
    Loads,
    /// Loads and stores of memory without the XS attribute (FEAT_XS): a `DSB nXS`.
    NonXs,
}

/// The observers for which a barrier orders accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Domain {
    /// This CPU.
    NonShareable,
    /// CPUs of the Inner Shareable domain.
    InnerShareable,
    /// CPUs and devices of the Outer Shareable domain.
    OuterShareable,
    /// The full system.
    FullSystem,
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
        table: PhysAddr,
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
        entry: PhysAddr,
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
    SetKernelRoot(u8, PhysAddr),
    /// Writes TCR of the running kernel.
    SetKernelTcr(u64),
    /// Writes MAIR of the running kernel.
    SetKernelMair(u64),
    /// A page becomes a table of the kernel, because an entry or TTBR1 points at it.
    KernelTable {
        /// The first byte of the page.
        table: PhysAddr,
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
    Free(PhysAddr),
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

/// Error returned for a line that is no event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct ParseMachineEventError(&'static str);

type ParseResult<T> = Result<T, ParseMachineEventError>;

const MISSING: ParseMachineEventError = ParseMachineEventError("an argument is missing");
const NO_NUMBER: ParseMachineEventError = ParseMachineEventError("expected a number in range");
const UNKNOWN: ParseMachineEventError = ParseMachineEventError("unknown word");

const BARRIERS: [(&str, OrderedAccesses, Domain); 16] = [
    ("sy", OrderedAccesses::All, Domain::FullSystem),
    ("st", OrderedAccesses::Stores, Domain::FullSystem),
    ("ld", OrderedAccesses::Loads, Domain::FullSystem),
    ("ish", OrderedAccesses::All, Domain::InnerShareable),
    ("ishst", OrderedAccesses::Stores, Domain::InnerShareable),
    ("ishld", OrderedAccesses::Loads, Domain::InnerShareable),
    ("nsh", OrderedAccesses::All, Domain::NonShareable),
    ("nshst", OrderedAccesses::Stores, Domain::NonShareable),
    ("nshld", OrderedAccesses::Loads, Domain::NonShareable),
    ("osh", OrderedAccesses::All, Domain::OuterShareable),
    ("oshst", OrderedAccesses::Stores, Domain::OuterShareable),
    ("oshld", OrderedAccesses::Loads, Domain::OuterShareable),
    ("synxs", OrderedAccesses::NonXs, Domain::FullSystem),
    ("ishnxs", OrderedAccesses::NonXs, Domain::InnerShareable),
    ("nshnxs", OrderedAccesses::NonXs, Domain::NonShareable),
    ("oshnxs", OrderedAccesses::NonXs, Domain::OuterShareable),
];

const STORE_KINDS: [(&str, StoreKind); 4] = [
    ("plain", StoreKind::Plain),
    ("release", StoreKind::Release),
    ("swap", StoreKind::Swap),
    ("relaxed-swap", StoreKind::RelaxedSwap),
];

fn hex(word: &str) -> ParseResult<u64> {
    u64::from_str_radix(word, 16).map_err(|_| NO_NUMBER)
}

fn decimal<T: core::str::FromStr>(word: &str) -> ParseResult<T> {
    word.parse().map_err(|_| NO_NUMBER)
}

/// The words of a line that are not yet parsed.
struct Words<'a>(SplitWhitespace<'a>);

impl<'a> Words<'a> {
    fn word(&mut self) -> ParseResult<&'a str> {
        self.0.next().ok_or(MISSING)
    }

    fn hex(&mut self) -> ParseResult<u64> {
        self.word().and_then(hex)
    }

    fn decimal<T: core::str::FromStr>(&mut self) -> ParseResult<T> {
        self.word().and_then(decimal)
    }

    /// Parses a physical address, or a number of bytes: at most 52 bits.
    fn phys(&mut self) -> ParseResult<PhysAddr> {
        let phys = self.hex()?;
        if phys >> 52 == 0 { Ok(PhysAddr(phys)) } else { Err(NO_NUMBER) }
    }

    fn size(&mut self) -> ParseResult<u64> {
        self.phys().map(|size| size.0)
    }

    fn barrier(&mut self) -> ParseResult<(OrderedAccesses, Domain)> {
        let word = self.word()?;
        let row = BARRIERS.iter().find(|(name, ..)| *name == word).ok_or(UNKNOWN)?;
        Ok((row.1, row.2))
    }

    fn table(&mut self, is_kernel: bool) -> ParseResult<MachineAction> {
        let table = self.phys()?;
        let level = Level::new(self.decimal()?).ok_or(NO_NUMBER)?;
        let unordered_writer = match self.word()? {
            "-" => None,
            cpu => Some(decimal(cpu)?),
        };
        let entry = |word: &str| {
            let (index, value) = word.split_once('=').ok_or(UNKNOWN)?;
            Ok((u16::from_str_radix(index, 16).map_err(|_| NO_NUMBER)?, hex(value)?))
        };
        let entries = self.0.by_ref().map(entry).collect::<ParseResult<_>>()?;
        Ok(match is_kernel {
            true => MachineAction::KernelTable { table, level, unordered_writer, entries },
            false => MachineAction::Table { table, level, unordered_writer, entries },
        })
    }

    fn store(&mut self) -> ParseResult<MachineAction> {
        let (entry, old, new) = (self.phys()?, self.hex()?, self.hex()?);
        let word = self.word()?;
        let (_, kind) = *STORE_KINDS.iter().find(|(name, _)| *name == word).ok_or(UNKNOWN)?;
        Ok(MachineAction::Store { entry, old, new, kind })
    }

    fn ic(&mut self) -> ParseResult<MachineAction> {
        Ok(MachineAction::Ic(match self.word()? {
            "ivau" => IcScope::Range(self.phys()?, self.size()?),
            "ialluis" => IcScope::AllCpus,
            "iallu" => IcScope::ThisCpu,
            _ => return Err(UNKNOWN),
        }))
    }

    fn action(&mut self) -> ParseResult<MachineAction> {
        Ok(match self.word()? {
            "stack" => {
                let number = self.decimal()?;
                MachineAction::Stack(number, self.0.by_ref().map(hex).collect::<ParseResult<_>>()?)
            }
            "id" => MachineAction::Identify(self.word()?.into(), self.hex()?),
            "vtcr" => MachineAction::SetVtcr(self.hex()?),
            "vttbr" => MachineAction::SetVttbr(self.hex()?),
            "hcr" => MachineAction::SetHcr(self.hex()?),
            "table" => self.table(false)?,
            "ktable" => self.table(true)?,
            "kroot" => MachineAction::SetKernelRoot(self.decimal()?, self.phys()?),
            "ktcr" => MachineAction::SetKernelTcr(self.hex()?),
            "kmair" => MachineAction::SetKernelMair(self.hex()?),
            "ktlbi" => MachineAction::KernelTlbi(self.word()?.into(), self.hex()?),
            "store" => self.store()?,
            "dsb" => {
                let (accesses, domain) = self.barrier()?;
                MachineAction::Dsb(accesses, domain)
            }
            "dmb" => {
                let (accesses, domain) = self.barrier()?;
                if accesses == OrderedAccesses::NonXs {
                    return Err(UNKNOWN);
                }
                MachineAction::Dmb(accesses, domain)
            }
            "isb" => MachineAction::Isb,
            "tlbi" => MachineAction::Tlbi(self.word()?.into(), self.hex()?),
            "dc" => MachineAction::Dc(self.word()?.into(), self.phys()?, self.size()?),
            "ic" => self.ic()?,
            "write" => MachineAction::HostWrite(self.phys()?),
            "word" => {
                MachineAction::Word { word: self.phys()?, old: self.hex()?, new: self.hex()? }
            }
            "thread" => MachineAction::Thread(self.hex()?),
            "enter" => {
                let number = self.decimal()?;
                let arguments = [self.hex()?, self.hex()?, self.hex()?, self.hex()?];
                MachineAction::Enter(number, arguments)
            }
            "leave" => MachineAction::Leave(self.decimal()?, self.hex()?),
            "free" => MachineAction::Free(self.phys()?),
            _ => return Err(UNKNOWN),
        })
    }
}

impl core::str::FromStr for MachineEvent {
    type Err = ParseMachineEventError;

    fn from_str(line: &str) -> ParseResult<Self> {
        let (line, stack) = match line.rsplit_once(" @") {
            Some((line, stack)) => (line, Some(decimal(stack)?)),
            None => (line, None),
        };
        let mut words = Words(line.split_whitespace());
        let (cpu, action) = (words.decimal()?, words.action()?);
        match words.0.next() {
            None => Ok(Self { cpu, action, stack }),
            Some(_) => Err(ParseMachineEventError("too many arguments")),
        }
    }
}

impl fmt::Display for MachineEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.cpu, self.action)?;
        self.stack.map_or(Ok(()), |stack| write!(f, " @{stack}"))
    }
}

impl fmt::Display for MachineAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let barrier = |accesses: &OrderedAccesses, domain: &Domain| {
            let row = BARRIERS.iter().find(|row| row.1 == *accesses && row.2 == *domain);
            row.map_or("sy", |(name, ..)| name)
        };
        match self {
            Self::Stack(number, addresses) => {
                write!(f, "stack {number}")?;
                addresses.iter().try_for_each(|address| write!(f, " {address:x}"))
            }
            Self::Identify(name, value) => write!(f, "id {name} {value:x}"),
            Self::SetVtcr(value) => write!(f, "vtcr {value:x}"),
            Self::SetVttbr(value) => write!(f, "vttbr {value:x}"),
            Self::SetHcr(value) => write!(f, "hcr {value:x}"),
            Self::SetKernelRoot(level, root) => write!(f, "kroot {level} {:x}", root.0),
            Self::SetKernelTcr(value) => write!(f, "ktcr {value:x}"),
            Self::SetKernelMair(value) => write!(f, "kmair {value:x}"),
            Self::KernelTlbi(name, operand) => write!(f, "ktlbi {name} {operand:x}"),
            Self::Table { table, level, unordered_writer, entries }
            | Self::KernelTable { table, level, unordered_writer, entries } => {
                let kind = if matches!(self, Self::Table { .. }) { "table" } else { "ktable" };
                write!(f, "{kind} {:x} {level} ", table.0)?;
                match unordered_writer {
                    Some(cpu) => write!(f, "{cpu}")?,
                    None => f.write_str("-")?,
                }
                entries.iter().try_for_each(|(index, value)| write!(f, " {index:x}={value:x}"))
            }
            Self::Store { entry, old, new, kind } => {
                let name = STORE_KINDS.iter().find(|row| row.1 == *kind).map_or("", |row| row.0);
                write!(f, "store {:x} {old:x} {new:x} {name}", entry.0)
            }
            Self::Dsb(accesses, domain) => write!(f, "dsb {}", barrier(accesses, domain)),
            Self::Dmb(accesses, domain) => write!(f, "dmb {}", barrier(accesses, domain)),
            Self::Isb => f.write_str("isb"),
            Self::Tlbi(name, operand) => write!(f, "tlbi {name} {operand:x}"),
            Self::Dc(name, phys, size) => write!(f, "dc {name} {:x} {size:x}", phys.0),
            Self::Ic(IcScope::Range(phys, size)) => write!(f, "ic ivau {:x} {size:x}", phys.0),
            Self::Ic(IcScope::AllCpus) => f.write_str("ic ialluis"),
            Self::Ic(IcScope::ThisCpu) => f.write_str("ic iallu"),
            Self::HostWrite(page) => write!(f, "write {:x}", page.0),
            Self::Word { word, old, new } => write!(f, "word {:x} {old:x} {new:x}", word.0),
            Self::Thread(thread) => write!(f, "thread {thread:x}"),
            Self::Enter(number, [a, b, c, d]) => {
                write!(f, "enter {number} {a:x} {b:x} {c:x} {d:x}")
            }
            Self::Leave(number, result) => write!(f, "leave {number} {result:x}"),
            Self::Free(root) => write!(f, "free {:x}", root.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn the_lines_of_the_documentation_are_events_with_the_same_text() {
        let source = include_str!("event.rs");
        let example = source.split("```").nth(1).unwrap_or_default();
        let lines = example.lines().map(|line| line.trim_start_matches("//!").trim());
        let lines: Vec<_> =
            lines.filter(|line| line.starts_with(|c: char| c.is_ascii_digit())).collect();

        let texts: Vec<_> =
            lines.iter().map(|line| line.parse::<MachineEvent>().unwrap().to_string()).collect();

        assert_eq!(lines.len(), 18);
        assert_eq!(texts, lines);
    }

    #[test]
    fn a_line_that_is_no_event_is_refused_with_the_reason() {
        for (line, reason) in [
            ("0", "an argument is missing"),
            ("0 store 1000 0 1", "an argument is missing"),
            ("0 dsb x", "unknown word"),
            ("0 dmb ishnxs", "unknown word"),
            ("0 isb 1", "too many arguments"),
            ("0 table 1000 4 -", "expected a number in range"),
            ("0 write 10000000000000", "expected a number in range"),
            ("0 dc civac 0 ffffffffffffffff", "expected a number in range"),
        ] {
            assert_eq!(line.parse::<MachineEvent>().unwrap_err().to_string(), reason, "{line}");
        }
    }
}
