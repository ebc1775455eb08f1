// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Traces as text, version 1: one event per line, so that other programs can write them.
//!
//! ```text
//! granule-trace 1 granule=0x1000 ipa-bits=40 vmid=1 root=0x80000000 cpus=2 fwb=0 dic=0 tlbrange=0 bbm=0
//! # CPU event arguments
//! 0 add-memory 0x0 0x100000000 0x200000
//! 0 lock exclusive
//! 0 store 0x80000000 0x0 0x80002003 release
//! 0 dsb ishst
//! 0 tlbi ipas2e1is 0x0 ttl=2
//! 0 unlock
//! ```
//!
//! | event | arguments |
//! |---|---|
//! | `store` | address of the entry, value before, value after, `plain` `release` `swap` or `relaxed-swap` |
//! | `dsb` | `nshst` `nsh` `ishst` `ish`; `isb` has none |
//! | `tlbi` | `ipas2e1[is]` `ipas2le1[is]` address \[`ttl=`n\], `ripas2e1[is]` address bytes \[`ttl=`n\], `vmalle1[is]`, `vmalls12e1[is]` |
//! | `vmid` | number |
//! | `dc` | host address, bytes (`DC CIVAC` over them) |
//! | `ic` | host address, bytes (`IC IVAU`), or nothing (`IC IALLUIS`) |
//! | `allocate` `free` | table |
//! | `ref` | table, change |
//! | `walk` | `begin` or `end` |
//! | `lock` | `exclusive` or `shared`; `unlock` has none |
//! | `top-up` `empty` `look-up` `sequence` | – |
//! | `mark-dirty` `read-log` `remove-memory` | guest address, bytes |
//! | `logging` | guest address, bytes, `on` or `off` |
//! | `write` | host address, bytes |
//! | `add-memory` | guest address, host address, bytes \[`device`\] |
//! | `resume` | guest address, `read` `write` or `fetch`, `translation` `access-flag` or `permission`, level |
//!
//! Numbers are decimal, or hexadecimal with `0x`. Empty lines and text after `#` are ignored.

use alloc::{string::String, vec::Vec};
use core::{fmt, str::SplitWhitespace};

use thiserror::Error;

use super::event::{Action, Event, MAX_CPUS, Setup, StoreKind};
use crate::{
    address::{EntryAddress, Ipa, PhysAddr, TableAddress},
    descriptor::Descriptor,
    engine::{Access, BbmLevel, FaultStatus, Features},
    geometry::{Geometry, Granule, Level},
    operations::{Dsb, Note, Scope, Tlbi, Vmid},
};

/// A recorded run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// The configuration of the run.
    pub setup: Setup,
    /// The events in order.
    pub events: Vec<Event>,
}

/// Error returned for a text that is not a valid trace.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("line {line}: '{text}': {defect}")]
pub struct ParseTraceError {
    /// The line, counted from 1.
    pub line: usize,
    /// The contents of the line.
    pub text: String,
    /// The defect.
    pub defect: &'static str,
}

/// A parsed value, or the defect of the line.
type ParseResult<T> = Result<T, &'static str>;

/// The words of a line that are not yet parsed.
type Words<'a> = SplitWhitespace<'a>;

/// Text form of an argument. The writer adds a space before each word.
trait TextForm<T> {
    fn parse(&self, words: &mut Words<'_>) -> ParseResult<T>;
    fn write(&self, value: T, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

/// Defines the parser and the writer of events. A row contains the event's name, its arguments with
/// their text forms, and the event as a Rust expression.
macro_rules! grammar {
    ($($name:literal [$($value:ident: $form:expr),*] => { $($event:tt)+ })*) => {
        fn parse_action(words: &mut Words<'_>) -> ParseResult<Action> {
            match words.next().ok_or(MISSING_ARGUMENT)? {
                $($name => {
                    $(let $value = $form.parse(words)?;)*
                    Ok($($event)+)
                })*
                _ => Err("unknown event"),
            }
        }

        impl fmt::Display for Event {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} ", self.cpu)?;
                match self.action {
                    $($($event)+ => {
                        f.write_str($name)?;
                        $($form.write($value, f)?;)*
                    })*
                }
                Ok(())
            }
        }
    };
}

grammar! {
    "store" [entry: ADDRESS, old: HEX, new: HEX, kind: STORE_KINDS] => {
        Action::Store {
            entry: EntryAddress(entry), old: Descriptor(old), new: Descriptor(new), kind
        }
    }
    "dsb" [kind: DSB_KINDS] => { Action::Dsb(kind) }
    "isb" [] => { Action::Isb }
    "tlbi" [kind: TlbiForm] => { Action::Tlbi(kind) }
    "vmid" [vmid: DECIMAL] => { Action::SwitchVmid(Vmid(vmid)) }
    "dc" [phys: ADDRESS, size: ADDRESS] => { Action::CleanInvalidate { phys: PhysAddr(phys), size } }
    "ic" [range: RangeForm] => { Action::InvalidateICache(range) }
    "allocate" [table: ADDRESS] => { Action::Allocate(TableAddress(table)) }
    "free" [table: ADDRESS] => { Action::Free(TableAddress(table)) }
    "walk" [begins: BEGIN_OR_END] => { Action::Walk { begins } }
    "ref" [table: ADDRESS, change: DECIMAL] => { Action::ChangeReferences(TableAddress(table), change) }
    "lock" [is_exclusive: LOCK_MODES] => { Action::Note(Note::Lock { is_exclusive }) }
    "unlock" [] => { Action::Note(Note::Unlock) }
    "top-up" [] => { Action::Note(Note::TopUp) }
    "empty" [] => { Action::Note(Note::EmptyMemcache) }
    "look-up" [] => { Action::Note(Note::LookUp) }
    "sequence" [] => { Action::Note(Note::InvalidationSequence) }
    "mark-dirty" [ipa: ADDRESS, size: ADDRESS] => { Action::Note(Note::MarkDirty { ipa: Ipa(ipa), size }) }
    "write" [phys: ADDRESS, size: ADDRESS] => { Action::HostWrite { phys: PhysAddr(phys), size } }
    "add-memory" [ipa: ADDRESS, phys: ADDRESS, size: ADDRESS, is_device: DEVICE] => {
        Action::AddMemory { ipa: Ipa(ipa), phys: PhysAddr(phys), size, is_device }
    }
    "remove-memory" [ipa: ADDRESS, size: ADDRESS] => { Action::RemoveMemory { ipa: Ipa(ipa), size } }
    "logging" [ipa: ADDRESS, size: ADDRESS, is_enabled: ON_OFF] => {
        Action::SetLogging { ipa: Ipa(ipa), size, is_enabled }
    }
    "read-log" [ipa: ADDRESS, size: ADDRESS] => { Action::ReadLog { ipa: Ipa(ipa), size } }
    "resume" [ipa: ADDRESS, access: ACCESSES, status: STATUSES, level: DECIMAL] => {
        Action::Resume { ipa: Ipa(ipa), access, status, level }
    }
}

/// Keywords of an argument. The empty keyword matches the end of a line.
struct Keywords<T: 'static>(&'static [(&'static str, T)]);

const DSB_KINDS: Keywords<Dsb> =
    Keywords(&[("nshst", Dsb::NshSt), ("nsh", Dsb::Nsh), ("ishst", Dsb::IshSt), ("ish", Dsb::Ish)]);
const STORE_KINDS: Keywords<StoreKind> = Keywords(&[
    ("plain", StoreKind::Plain),
    ("release", StoreKind::Release),
    ("swap", StoreKind::Swap),
    ("relaxed-swap", StoreKind::RelaxedSwap),
]);
const DEVICE: Keywords<bool> = Keywords(&[("", false), ("device", true)]);
const BEGIN_OR_END: Keywords<bool> = Keywords(&[("begin", true), ("end", false)]);
const LOCK_MODES: Keywords<bool> = Keywords(&[("exclusive", true), ("shared", false)]);
const ON_OFF: Keywords<bool> = Keywords(&[("on", true), ("off", false)]);
const ACCESSES: Keywords<Access> =
    Keywords(&[("read", Access::Read), ("write", Access::Write), ("fetch", Access::Fetch)]);
const STATUSES: Keywords<FaultStatus> = Keywords(&[
    ("translation", FaultStatus::Translation),
    ("access-flag", FaultStatus::AccessFlag),
    ("permission", FaultStatus::Permission),
]);

impl<T: Copy + PartialEq> TextForm<T> for Keywords<T> {
    fn parse(&self, words: &mut Words<'_>) -> ParseResult<T> {
        let word = words.next();
        let found = self.0.iter().find(|(name, _)| *name == word.unwrap_or_default());
        let error = if word.is_none() { MISSING_ARGUMENT } else { "unknown word" };
        found.map(|(_, value)| *value).ok_or(error)
    }

    fn write(&self, value: T, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.iter().find(|(_, other)| *other == value) {
            Some((word, _)) if !word.is_empty() => write!(f, " {word}"),
            _ => Ok(()),
        }
    }
}

const MISSING_ARGUMENT: &str = "an argument is missing";
const OUT_OF_RANGE: &str = "expected a number in range";

fn parse_number<T: TryFrom<i128>>(word: &str) -> ParseResult<T> {
    let number = match word.strip_prefix("0x") {
        Some(hex) => i128::from_str_radix(hex, 16),
        None => word.parse(),
    };
    number.ok().and_then(|number| number.try_into().ok()).ok_or(OUT_OF_RANGE)
}

/// A number, written in hexadecimal or decimal.
struct NumberForm {
    is_hex: bool,
    /// Limit of the number, which it is below.
    limit: i128,
}

const HEX: NumberForm = NumberForm { is_hex: true, limit: 1 << 64 };
const DECIMAL: NumberForm = NumberForm { is_hex: false, limit: 1 << 64 };
/// An address or a number of bytes: the end of a range is a number, too.
const ADDRESS: NumberForm = NumberForm { is_hex: true, limit: 1 << 52 };

impl<T: TryFrom<i128> + Into<i128>> TextForm<T> for NumberForm {
    fn parse(&self, words: &mut Words<'_>) -> ParseResult<T> {
        let number: i128 = parse_number(words.next().ok_or(MISSING_ARGUMENT)?)?;
        let below = number < self.limit;
        below.then(|| number.try_into().ok()).flatten().ok_or(OUT_OF_RANGE)
    }

    fn write(&self, value: T, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = value.into();
        if self.is_hex { write!(f, " {value:#x}") } else { write!(f, " {value}") }
    }
}

impl TryFrom<i128> for Level {
    type Error = ();

    fn try_from(number: i128) -> Result<Self, ()> {
        u8::try_from(number).ok().and_then(Self::new).ok_or(())
    }
}

impl From<Level> for i128 {
    fn from(level: Level) -> Self {
        level.number().into()
    }
}

/// `ttl=` and a level, or no text.
struct TtlForm;

impl TextForm<Option<Level>> for TtlForm {
    fn parse(&self, words: &mut Words<'_>) -> ParseResult<Option<Level>> {
        let Some(word) = words.next() else { return Ok(None) };
        let hint = word.strip_prefix("ttl=").ok_or("expected 'ttl='")?;
        parse_number(hint).map(Some)
    }

    fn write(&self, ttl: Option<Level>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        ttl.map_or(Ok(()), |level| write!(f, " ttl={level}"))
    }
}

/// Host address and size in bytes, or no text.
struct RangeForm;

impl TextForm<Option<(PhysAddr, u64)>> for RangeForm {
    fn parse(&self, words: &mut Words<'_>) -> ParseResult<Option<(PhysAddr, u64)>> {
        let Some(word) = words.next() else { return Ok(None) };
        let phys: u64 = ADDRESS.parse(&mut word.split_whitespace())?;
        Ok(Some((PhysAddr(phys), ADDRESS.parse(words)?)))
    }

    fn write(&self, range: Option<(PhysAddr, u64)>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        range.map_or(Ok(()), |(phys, size)| write!(f, " {phys:#x} {size:#x}"))
    }
}

/// A TLB invalidation and its operands.
struct TlbiForm;

impl TextForm<Tlbi> for TlbiForm {
    fn parse(&self, words: &mut Words<'_>) -> ParseResult<Tlbi> {
        let word = words.next().ok_or(MISSING_ARGUMENT)?;
        let (name, scope) = match word.strip_suffix("is") {
            Some(name) => (name, Scope::Broadcast),
            None => (word, Scope::Local),
        };
        let leaf_only = name.ends_with("le1");
        let mut address = || ADDRESS.parse(words).map(Ipa);
        match name {
            "ipas2e1" | "ipas2le1" => {
                Ok(Tlbi::Ipa { ipa: address()?, leaf_only, ttl: TtlForm.parse(words)?, scope })
            }
            "ripas2e1" | "ripas2le1" => {
                let (ipa, size) = (address()?, ADDRESS.parse(words)?);
                Ok(Tlbi::Range { ipa, size, ttl: TtlForm.parse(words)?, leaf_only, scope })
            }
            "vmalle1" => Ok(Tlbi::Stage1 { scope }),
            "vmalls12e1" => Ok(Tlbi::All { scope }),
            _ => Err("unknown TLB invalidation"),
        }
    }

    fn write(&self, kind: Tlbi, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is = if kind.scope() == Scope::Broadcast { "is" } else { "" };
        write!(f, " {}{is}", mnemonic(kind))?;
        match kind {
            Tlbi::Ipa { ipa, ttl, .. } => {
                HEX.write(ipa.0, f)?;
                TtlForm.write(ttl, f)
            }
            Tlbi::Range { ipa, size, ttl, .. } => {
                HEX.write(ipa.0, f)?;
                HEX.write(size, f)?;
                TtlForm.write(ttl, f)
            }
            Tlbi::Stage1 { .. } | Tlbi::All { .. } => Ok(()),
        }
    }
}

/// Returns the name of a TLBI instruction, without `IS`.
const fn mnemonic(kind: Tlbi) -> &'static str {
    match kind {
        Tlbi::Ipa { leaf_only: false, .. } => "ipas2e1",
        Tlbi::Ipa { leaf_only: true, .. } => "ipas2le1",
        Tlbi::Range { leaf_only: false, .. } => "ripas2e1",
        Tlbi::Range { leaf_only: true, .. } => "ripas2le1",
        Tlbi::Stage1 { .. } => "vmalle1",
        Tlbi::All { .. } => "vmalls12e1",
    }
}

fn parse_event(line: &str) -> ParseResult<Event> {
    let mut words = line.split_whitespace();
    let cpu = DECIMAL.parse(&mut words)?;
    let action = parse_action(&mut words)?;
    match words.next() {
        None => Ok(Event { cpu, action }),
        Some(_) => Err("too many arguments"),
    }
}

fn parse_setup(line: &str) -> ParseResult<Setup> {
    fn field<T: TryFrom<i128>>(line: &str, name: &str) -> ParseResult<T> {
        let mut fields = line.split_whitespace().filter_map(|word| word.split_once('='));
        let (_, value) = fields.find(|(key, _)| *key == name).ok_or("a field is missing")?;
        parse_number(value)
    }
    let rest =
        line.strip_prefix("granule-trace 1 ").ok_or("expected 'granule-trace 1' and the setup")?;
    let flag = |name| field::<u64>(rest, name).map(|value| value != 0);
    let granule = Granule::from_size(field(rest, "granule")?).ok_or("expected a granule size")?;
    let geometry = Geometry::new(granule, field(rest, "ipa-bits")?);
    let cpus = field(rest, "cpus")?;
    if !(1..=MAX_CPUS).contains(&cpus) {
        return Err("expected 1 to 64 CPUs");
    }
    Ok(Setup {
        geometry: geometry.map_err(|_| "the IPA width is invalid")?,
        features: Features {
            fwb: flag("fwb")?,
            dic: flag("dic")?,
            tlb_range: flag("tlbrange")?,
            bbm: BbmLevel::new(field(rest, "bbm")?).ok_or("bbm: expected 0 to 3")?,
        },
        vmid: Vmid(field(rest, "vmid")?),
        root: TableAddress(field(rest, "root")?),
        cpus,
    })
}

impl core::str::FromStr for Trace {
    type Err = ParseTraceError;

    fn from_str(text: &str) -> Result<Self, ParseTraceError> {
        let mut setup = None;
        let mut events = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let content = line.split('#').next().unwrap_or_default().trim();
            if content.is_empty() {
                continue;
            }
            let error = |defect| ParseTraceError { line: index + 1, text: line.into(), defect };
            match setup {
                None => setup = Some(parse_setup(content).map_err(error)?),
                Some(_) => events.push(parse_event(content).map_err(error)?),
            }
        }
        let setup = setup.ok_or(ParseTraceError {
            line: 1,
            text: String::new(),
            defect: "the first line is missing",
        })?;
        Ok(Self { setup, events })
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setup { geometry: g, features: x, vmid, root, cpus } = &self.setup;
        writeln!(
            f,
            "granule-trace 1 granule={:#x} ipa-bits={} vmid={} root={:#x} cpus={cpus} fwb={} \
             dic={} tlbrange={} bbm={}",
            g.granule().size(),
            g.ipa_bits(),
            vmid.0,
            root.0,
            u8::from(x.fwb),
            u8::from(x.dic),
            u8::from(x.tlb_range),
            x.bbm.number()
        )?;
        self.events.iter().try_for_each(|event| writeln!(f, "{event}"))
    }
}
