// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Traces as text, version 1: one event a line, so that other sources can write them.
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
//! | `store` | entry, old value, new value, `plain` `release` or `swap` |
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
//! | `access` | guest address, `read` `write` or `fetch`, `cached` or `uncached` |
//! | `resume` | guest address, `read` `write` or `fetch`, `translation` `access-flag` or `permission`, level |
//!
//! Numbers are decimal or hexadecimal with `0x`. Empty lines and what follows `#` are ignored.

use alloc::{string::String, vec::Vec};
use core::fmt::{self, Write as _};

use thiserror::Error;

use super::event::{Action, Event, Setup, StoreKind};
use crate::{
    address::{EntryAddress, Ipa, PhysAddr, TableAddress},
    descriptor::Descriptor,
    engine::{Access, FaultStatus, Features},
    geometry::{Geometry, Granule, Level},
    operations::{Dsb, Note, Scope, Tlbi, Vmid},
};

/// A recorded run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// What was fixed.
    pub setup: Setup,
    /// What happened.
    pub events: Vec<Event>,
}

/// Why a text is no trace.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("line {line}: '{text}' is {what}")]
pub struct ParseTraceError {
    /// Counted from 1.
    pub line: usize,
    /// The line.
    pub text: String,
    /// What is wrong with it.
    pub what: &'static str,
}

const DSBS: [(&str, Dsb); 4] = [
    ("nshst", Dsb::NshSt),
    ("nsh", Dsb::Nsh),
    ("ishst", Dsb::IshSt),
    ("ish", Dsb::Ish),
];
const STORE_KINDS: [(&str, StoreKind); 3] = [
    ("plain", StoreKind::Plain),
    ("release", StoreKind::Release),
    ("swap", StoreKind::Swap),
];
const CACHING: [(&str, bool); 2] = [("cached", false), ("uncached", true)];
const ACCESSES: [(&str, Access); 3] = [
    ("read", Access::Read),
    ("write", Access::Write),
    ("fetch", Access::Fetch),
];
const STATUSES: [(&str, FaultStatus); 3] = [
    ("translation", FaultStatus::Translation),
    ("access-flag", FaultStatus::AccessFlag),
    ("permission", FaultStatus::Permission),
];

fn name<T: PartialEq + Copy>(names: &[(&'static str, T)], value: T) -> &'static str {
    let found = names.iter().find(|(_, other)| *other == value);
    found.map_or("?", |(name, _)| name)
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setup {
            geometry: g,
            features: x,
            vmid,
            root,
            cpus,
        } = &self.setup;
        writeln!(
            f,
            "granule-trace 1 granule={:#x} ipa-bits={} vmid={} root={:#x} cpus={cpus} fwb={} dic={} \
             tlbrange={} bbm={}",
            g.granule().size(),
            g.ipa_bits(),
            vmid.0,
            root.0,
            u8::from(x.fwb),
            u8::from(x.dic),
            u8::from(x.tlb_range),
            x.bbm
        )?;
        self.events
            .iter()
            .try_for_each(|event| writeln!(f, "{event}"))
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.cpu)?;
        match self.action {
            Action::Store {
                entry,
                old,
                new,
                kind,
            } => {
                write!(
                    f,
                    "store {:#x} {:#x} {:#x} {}",
                    entry.0,
                    old.0,
                    new.0,
                    name(&STORE_KINDS, kind)
                )
            }
            Action::Dsb(kind) => write!(f, "dsb {}", name(&DSBS, kind)),
            Action::Isb => f.write_str("isb"),
            Action::Tlbi(kind) => write_tlbi(f, kind),
            Action::Vmid(vmid) => write!(f, "vmid {}", vmid.0),
            Action::Clean { phys, size } => write!(f, "dc {phys:#x} {size:#x}"),
            Action::Instructions(Some((phys, size))) => write!(f, "ic {phys:#x} {size:#x}"),
            Action::Instructions(None) => f.write_str("ic"),
            Action::Allocate(table) => write!(f, "allocate {:#x}", table.0),
            Action::Free(table) => write!(f, "free {:#x}", table.0),
            Action::BeginWalk => f.write_str("walk begin"),
            Action::EndWalk => f.write_str("walk end"),
            Action::References(table, change) => write!(f, "ref {:#x} {change}", table.0),
            Action::Note(note) => write_note(f, note),
            Action::HostWrite { phys, size } => write!(f, "write {phys:#x} {size:#x}"),
            Action::AddMemory {
                ipa,
                phys,
                size,
                device,
            } => {
                let device = if device { " device" } else { "" };
                write!(f, "add-memory {ipa:#x} {phys:#x} {size:#x}{device}")
            }
            Action::RemoveMemory { ipa, size } => write!(f, "remove-memory {ipa:#x} {size:#x}"),
            Action::Logging { ipa, size, on } => {
                write!(
                    f,
                    "logging {ipa:#x} {size:#x} {}",
                    if on { "on" } else { "off" }
                )
            }
            Action::ReadLog { ipa, size } => write!(f, "read-log {ipa:#x} {size:#x}"),
            Action::Access {
                ipa,
                access,
                uncached,
            } => {
                let how = name(&CACHING, uncached);
                write!(f, "access {ipa:#x} {} {how}", name(&ACCESSES, access))
            }
            Action::Resume {
                ipa,
                access,
                status,
                level,
            } => write!(
                f,
                "resume {ipa:#x} {} {} {level}",
                name(&ACCESSES, access),
                name(&STATUSES, status)
            ),
        }
    }
}

fn write_tlbi(f: &mut fmt::Formatter<'_>, kind: Tlbi) -> fmt::Result {
    let mut text = String::from("tlbi ");
    let (scope, hint) = match kind {
        Tlbi::Ipa {
            leaf_only,
            scope,
            ttl,
            ..
        } => {
            text += if leaf_only { "ipas2le1" } else { "ipas2e1" };
            (scope, ttl)
        }
        Tlbi::Range { scope, ttl, .. } => {
            text += "ripas2e1";
            (scope, ttl)
        }
        Tlbi::Stage1 { scope } => {
            text += "vmalle1";
            (scope, None)
        }
        Tlbi::All { scope } => {
            text += "vmalls12e1";
            (scope, None)
        }
    };
    if scope == Scope::Broadcast {
        text += "is";
    }
    match kind {
        Tlbi::Ipa { ipa, .. } => write!(text, " {ipa:#x}")?,
        Tlbi::Range { ipa, size, .. } => write!(text, " {ipa:#x} {size:#x}")?,
        _ => {}
    }
    if let Some(level) = hint {
        write!(text, " ttl={level}")?;
    }
    f.write_str(&text)
}

fn write_note(f: &mut fmt::Formatter<'_>, note: Note) -> fmt::Result {
    match note {
        Note::Lock { exclusive: true } => f.write_str("lock exclusive"),
        Note::Lock { exclusive: false } => f.write_str("lock shared"),
        Note::Unlock => f.write_str("unlock"),
        Note::TopUp => f.write_str("top-up"),
        Note::Empty => f.write_str("empty"),
        Note::MarkDirty { ipa, size } => write!(f, "mark-dirty {ipa:#x} {size:#x}"),
        Note::LookUp => f.write_str("look-up"),
        Note::Sequence => f.write_str("sequence"),
    }
}

/// A line's words, taken one by one.
struct Words<'a>(core::str::SplitWhitespace<'a>);

impl<'a> Words<'a> {
    fn word(&mut self) -> Result<&'a str, &'static str> {
        self.0.next().ok_or("too short")
    }

    fn number(&mut self) -> Result<u64, &'static str> {
        number(self.word()?)
    }

    fn one_of<T: Copy>(&mut self, names: &[(&'static str, T)]) -> Result<T, &'static str> {
        let word = self.word()?;
        let found = names.iter().find(|(name, _)| *name == word);
        found
            .map(|(_, value)| *value)
            .ok_or("using an unknown word")
    }

    fn hint(&mut self) -> Result<Option<Level>, &'static str> {
        let Some(word) = self.0.next() else {
            return Ok(None);
        };
        let level = word.strip_prefix("ttl=").ok_or("using an unknown word")?;
        let level = number(level)?.try_into().ok().and_then(Level::new);
        level.map(Some).ok_or("naming no level")
    }
}

fn number(word: &str) -> Result<u64, &'static str> {
    match word.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => word.parse(),
    }
    .map_err(|_| "using no number where one is needed")
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
            let wrong = |what| ParseTraceError {
                line: index + 1,
                text: line.into(),
                what,
            };
            match setup {
                None => setup = Some(parse_setup(content).map_err(wrong)?),
                Some(_) => events.push(parse_event(content).map_err(wrong)?),
            }
        }
        let setup = setup.ok_or(ParseTraceError {
            line: 1,
            text: String::new(),
            what: "no trace: it has no first line",
        })?;
        Ok(Self { setup, events })
    }
}

fn parse_setup(line: &str) -> Result<Setup, &'static str> {
    let rest = line
        .strip_prefix("granule-trace 1 ")
        .ok_or("no first line of a trace of version 1")?;
    let field = |name: &str| -> Result<u64, &'static str> {
        let found = rest.split_whitespace().find_map(|word| {
            let (key, value) = word.split_once('=')?;
            (key == name).then_some(value)
        });
        number(found.ok_or("lacking a field")?)
    };
    let small = |name: &str| u8::try_from(field(name)?).map_err(|_| "using too large a number");
    let granule = Granule::of_size(field("granule")?).ok_or("naming no granule")?;
    let bits = small("ipa-bits")?;
    Ok(Setup {
        geometry: Geometry::new(granule, bits.into()).map_err(|_| "naming no IPA width")?,
        features: Features {
            fwb: field("fwb")? != 0,
            dic: field("dic")? != 0,
            tlb_range: field("tlbrange")? != 0,
            bbm: small("bbm")?,
        },
        vmid: Vmid(
            field("vmid")?
                .try_into()
                .map_err(|_| "using too large a number")?,
        ),
        root: TableAddress(field("root")?),
        cpus: small("cpus")?,
    })
}

fn parse_event(line: &str) -> Result<Event, &'static str> {
    let mut w = Words(line.split_whitespace());
    let cpu = w.number()?.try_into().map_err(|_| "naming no CPU")?;
    let action = match w.word()? {
        "store" => Action::Store {
            entry: EntryAddress(w.number()?),
            old: Descriptor(w.number()?),
            new: Descriptor(w.number()?),
            kind: w.one_of(&STORE_KINDS)?,
        },
        "dsb" => Action::Dsb(w.one_of(&DSBS)?),
        "isb" => Action::Isb,
        "tlbi" => Action::Tlbi(parse_tlbi(&mut w)?),
        "vmid" => Action::Vmid(Vmid(w.number()?.try_into().map_err(|_| "naming no VMID")?)),
        "dc" => Action::Clean {
            phys: PhysAddr(w.number()?),
            size: w.number()?,
        },
        "ic" => Action::Instructions(match w.0.next() {
            Some(word) => Some((PhysAddr(number(word)?), w.number()?)),
            None => None,
        }),
        "allocate" => Action::Allocate(TableAddress(w.number()?)),
        "free" => Action::Free(TableAddress(w.number()?)),
        "walk" => w.one_of(&[("begin", Action::BeginWalk), ("end", Action::EndWalk)])?,
        "ref" => {
            let table = TableAddress(w.number()?);
            let change = w
                .word()?
                .parse()
                .map_err(|_| "using no number where one is needed")?;
            Action::References(table, change)
        }
        "lock" => Action::Note(Note::Lock {
            exclusive: w.one_of(&[("exclusive", true), ("shared", false)])?,
        }),
        "unlock" => Action::Note(Note::Unlock),
        "top-up" => Action::Note(Note::TopUp),
        "empty" => Action::Note(Note::Empty),
        "look-up" => Action::Note(Note::LookUp),
        "sequence" => Action::Note(Note::Sequence),
        "mark-dirty" => Action::Note(Note::MarkDirty {
            ipa: Ipa(w.number()?),
            size: w.number()?,
        }),
        "write" => Action::HostWrite {
            phys: PhysAddr(w.number()?),
            size: w.number()?,
        },
        "add-memory" => Action::AddMemory {
            ipa: Ipa(w.number()?),
            phys: PhysAddr(w.number()?),
            size: w.number()?,
            device: w.0.next() == Some("device"),
        },
        "remove-memory" => Action::RemoveMemory {
            ipa: Ipa(w.number()?),
            size: w.number()?,
        },
        "logging" => Action::Logging {
            ipa: Ipa(w.number()?),
            size: w.number()?,
            on: w.one_of(&[("on", true), ("off", false)])?,
        },
        "read-log" => Action::ReadLog {
            ipa: Ipa(w.number()?),
            size: w.number()?,
        },
        "access" => Action::Access {
            ipa: Ipa(w.number()?),
            access: w.one_of(&ACCESSES)?,
            uncached: w.one_of(&CACHING)?,
        },
        "resume" => Action::Resume {
            ipa: Ipa(w.number()?),
            access: w.one_of(&ACCESSES)?,
            status: w.one_of(&STATUSES)?,
            level: w
                .number()?
                .try_into()
                .ok()
                .and_then(Level::new)
                .ok_or("naming no level")?,
        },
        _ => return Err("using an unknown event"),
    };
    match w.0.next() {
        None => Ok(Event { cpu, action }),
        Some(_) => Err("too long"),
    }
}

fn parse_tlbi(w: &mut Words<'_>) -> Result<Tlbi, &'static str> {
    let word = w.word()?;
    let (kind, scope) = match word.strip_suffix("is") {
        Some(kind) => (kind, Scope::Broadcast),
        None => (word, Scope::Local),
    };
    match kind {
        "ipas2e1" | "ipas2le1" => Ok(Tlbi::Ipa {
            ipa: Ipa(w.number()?),
            leaf_only: kind == "ipas2le1",
            ttl: w.hint()?,
            scope,
        }),
        "ripas2e1" => Ok(Tlbi::Range {
            ipa: Ipa(w.number()?),
            size: w.number()?,
            ttl: w.hint()?,
            scope,
        }),
        "vmalle1" => Ok(Tlbi::Stage1 { scope }),
        "vmalls12e1" => Ok(Tlbi::All { scope }),
        _ => Err("using an unknown invalidation"),
    }
}
