// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The text of an event: words that [`FromStr`] parses and [`fmt::Display`] prints.

use core::{
    fmt,
    str::{FromStr, SplitWhitespace},
};

use thiserror::Error;

use super::{Domain, IcScope, MachineAction, MachineEvent, OrderedAccesses, barrier};
use crate::{
    address::{EntryAddress, PhysAddr, TableAddress},
    check::StoreKind,
    geometry::Level,
};

/// Error returned for a line that is no event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct ParseMachineEventError(&'static str);

type ParseResult<T> = Result<T, ParseMachineEventError>;

const MISSING: ParseMachineEventError = ParseMachineEventError("an argument is missing");
const NO_NUMBER: ParseMachineEventError = ParseMachineEventError("expected a number in range");
const UNKNOWN: ParseMachineEventError = ParseMachineEventError("unknown word");

const STORE_KINDS: [(&str, StoreKind); 4] = [
    ("plain", StoreKind::Plain),
    ("release", StoreKind::Release),
    ("swap", StoreKind::Swap),
    ("relaxed-swap", StoreKind::RelaxedSwap),
];

fn hex(word: &str) -> ParseResult<u64> {
    u64::from_str_radix(word, 16).map_err(|_| NO_NUMBER)
}

fn decimal<T: FromStr>(word: &str) -> ParseResult<T> {
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

    fn decimal<T: FromStr>(&mut self) -> ParseResult<T> {
        self.word().and_then(decimal)
    }

    /// Parses a physical address, or a number of bytes: at most 52 bits.
    fn phys(&mut self) -> ParseResult<PhysAddr> {
        let phys = self.hex()?;
        if phys >> 52 == 0 { Ok(PhysAddr(phys)) } else { Err(NO_NUMBER) }
    }

    fn table_address(&mut self) -> ParseResult<TableAddress> {
        self.phys().map(|phys| TableAddress(phys.0))
    }

    fn size(&mut self) -> ParseResult<u64> {
        self.phys().map(|size| size.0)
    }

    fn barrier(&mut self) -> ParseResult<(OrderedAccesses, Domain)> {
        self.word().and_then(|word| barrier::by_name(word).ok_or(UNKNOWN))
    }

    fn table(&mut self, is_kernel: bool) -> ParseResult<MachineAction> {
        let table = self.table_address()?;
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
        let entry = self.phys().map(|phys| EntryAddress(phys.0))?;
        let (old, new) = (self.hex()?, self.hex()?);
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
            "kroot" => MachineAction::SetKernelRoot(self.decimal()?, self.table_address()?),
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
            "free" => MachineAction::Free(self.table_address()?),
            _ => return Err(UNKNOWN),
        })
    }
}

impl FromStr for MachineEvent {
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
            Self::Dsb(accesses, domain) => write!(f, "dsb {}", barrier::name(*accesses, *domain)),
            Self::Dmb(accesses, domain) => write!(f, "dmb {}", barrier::name(*accesses, *domain)),
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
    use alloc::{string::ToString, vec::Vec};

    use super::*;

    #[test]
    fn the_lines_of_the_documentation_are_events_with_the_same_text() {
        let source = include_str!("mod.rs");
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
