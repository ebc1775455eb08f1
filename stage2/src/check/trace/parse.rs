// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The parser of traces.

use alloc::{string::String, vec::Vec};
use core::str::SplitWhitespace;

use super::{
    ParseTraceError, Trace,
    words::{ACCESSES, CACHING, DSBS, LOCKS, STATUSES, STORE_KINDS, SWITCH, Words},
};
use crate::{
    address::{EntryAddress, Ipa, PhysAddr, TableAddress},
    check::event::{Action, Event, Setup},
    descriptor::Descriptor,
    engine::Features,
    geometry::{Geometry, Granule, Level},
    operations::{Note, Scope, Tlbi, Vmid},
};

/// A parsed value, or the error in the line.
type Parsed<T> = Result<T, &'static str>;

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
            let error = |what| ParseTraceError { line: index + 1, text: line.into(), what };
            match setup {
                None => setup = Some(parse_setup(content).map_err(error)?),
                Some(_) => events.push(parse_event(content).map_err(error)?),
            }
        }
        let setup = setup.ok_or(ParseTraceError {
            line: 1,
            text: String::new(),
            what: "the first line is missing",
        })?;
        Ok(Self { setup, events })
    }
}

fn parse_setup(line: &str) -> Parsed<Setup> {
    let rest =
        line.strip_prefix("granule-trace 1 ").ok_or("expected 'granule-trace 1' and the setup")?;
    let field = |name: &str| {
        let found = rest.split_whitespace().find_map(|word| {
            let (key, value) = word.split_once('=')?;
            (key == name).then_some(value)
        });
        number(found.ok_or("a field is missing")?)
    };
    let small = |name: &str| in_range::<u8>(field(name)?);
    let granule = Granule::of_size(field("granule")?).ok_or("expected a granule size")?;
    let bits = small("ipa-bits")?;
    Ok(Setup {
        geometry: Geometry::new(granule, bits.into()).map_err(|_| "the IPA width is not valid")?,
        features: Features {
            fwb: field("fwb")? != 0,
            dic: field("dic")? != 0,
            tlb_range: field("tlbrange")? != 0,
            bbm: small("bbm")?,
        },
        vmid: Vmid(in_range(field("vmid")?)?),
        root: TableAddress(field("root")?),
        cpus: small("cpus")?,
    })
}

fn parse_event(line: &str) -> Parsed<Event> {
    let mut arguments = Arguments(line.split_whitespace());
    let cpu = in_range(arguments.number()?)?;
    let name = arguments.word()?;
    let action = match parse_note(name, &mut arguments)? {
        Some(note) => Action::Note(note),
        None => parse_action(name, &mut arguments)?,
    };
    match arguments.0.next() {
        None => Ok(Event { cpu, action }),
        Some(_) => Err("an argument is in excess"),
    }
}

fn parse_note(name: &str, a: &mut Arguments<'_>) -> Parsed<Option<Note>> {
    Ok(Some(match name {
        "lock" => Note::Lock { exclusive: a.one_of(LOCKS)? },
        "unlock" => Note::Unlock,
        "top-up" => Note::TopUp,
        "empty" => Note::Empty,
        "look-up" => Note::LookUp,
        "sequence" => Note::Sequence,
        "mark-dirty" => Note::MarkDirty { ipa: a.ipa()?, size: a.number()? },
        _ => return Ok(None),
    }))
}

fn parse_action(name: &str, a: &mut Arguments<'_>) -> Parsed<Action> {
    Ok(match name {
        "store" => Action::Store {
            entry: EntryAddress(a.number()?),
            old: Descriptor(a.number()?),
            new: Descriptor(a.number()?),
            kind: a.one_of(STORE_KINDS)?,
        },
        "dsb" => Action::Dsb(a.one_of(DSBS)?),
        "isb" => Action::Isb,
        "tlbi" => Action::Tlbi(parse_tlbi(a)?),
        "vmid" => Action::Vmid(Vmid(in_range(a.number()?)?)),
        "dc" => Action::Clean { phys: a.phys()?, size: a.number()? },
        "ic" => Action::Instructions(match a.0.next() {
            Some(word) => Some((PhysAddr(number(word)?), a.number()?)),
            None => None,
        }),
        "allocate" => Action::Allocate(TableAddress(a.number()?)),
        "free" => Action::Free(TableAddress(a.number()?)),
        "walk" => a.one_of(&[("begin", Action::BeginWalk), ("end", Action::EndWalk)])?,
        "ref" => {
            let table = TableAddress(a.number()?);
            let change = a.word()?.parse().map_err(|_| "expected a number")?;
            Action::References(table, change)
        }
        "write" => Action::HostWrite { phys: a.phys()?, size: a.number()? },
        "add-memory" => Action::AddMemory {
            ipa: a.ipa()?,
            phys: a.phys()?,
            size: a.number()?,
            device: match a.0.next() {
                None => false,
                Some("device") => true,
                Some(_) => return Err("expected 'device' or nothing"),
            },
        },
        "remove-memory" => Action::RemoveMemory { ipa: a.ipa()?, size: a.number()? },
        "logging" => Action::Logging { ipa: a.ipa()?, size: a.number()?, on: a.one_of(SWITCH)? },
        "read-log" => Action::ReadLog { ipa: a.ipa()?, size: a.number()? },
        "access" => Action::Access {
            ipa: a.ipa()?,
            access: a.one_of(ACCESSES)?,
            uncached: a.one_of(CACHING)?,
        },
        "resume" => Action::Resume {
            ipa: a.ipa()?,
            access: a.one_of(ACCESSES)?,
            status: a.one_of(STATUSES)?,
            level: level(a.word()?)?,
        },
        _ => return Err("the event is unknown"),
    })
}

fn parse_tlbi(a: &mut Arguments<'_>) -> Parsed<Tlbi> {
    let word = a.word()?;
    let (kind, scope) = match word.strip_suffix("is") {
        Some(kind) => (kind, Scope::Broadcast),
        None => (word, Scope::Local),
    };
    match kind {
        "ipas2e1" | "ipas2le1" => {
            Ok(Tlbi::Ipa { ipa: a.ipa()?, leaf_only: kind == "ipas2le1", ttl: a.hint()?, scope })
        }
        "ripas2e1" => Ok(Tlbi::Range { ipa: a.ipa()?, size: a.number()?, ttl: a.hint()?, scope }),
        "vmalle1" => Ok(Tlbi::Stage1 { scope }),
        "vmalls12e1" => Ok(Tlbi::All { scope }),
        _ => Err("the TLB invalidation is unknown"),
    }
}

/// The words of a line that are not parsed yet.
struct Arguments<'a>(SplitWhitespace<'a>);

impl<'a> Arguments<'a> {
    fn word(&mut self) -> Parsed<&'a str> {
        self.0.next().ok_or("an argument is missing")
    }

    fn number(&mut self) -> Parsed<u64> {
        number(self.word()?)
    }

    fn ipa(&mut self) -> Parsed<Ipa> {
        self.number().map(Ipa)
    }

    fn phys(&mut self) -> Parsed<PhysAddr> {
        self.number().map(PhysAddr)
    }

    fn one_of<T: Copy>(&mut self, words: &Words<T>) -> Parsed<T> {
        let word = self.word()?;
        let found = words.iter().find(|(name, _)| *name == word);
        found.map(|(_, value)| *value).ok_or("a word is unknown")
    }

    fn hint(&mut self) -> Parsed<Option<Level>> {
        let Some(word) = self.0.next() else {
            return Ok(None);
        };
        let hint = word.strip_prefix("ttl=").ok_or("expected 'ttl='")?;
        level(hint).map(Some)
    }
}

fn number(word: &str) -> Parsed<u64> {
    match word.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => word.parse(),
    }
    .map_err(|_| "expected a number")
}

fn in_range<T: TryFrom<u64>>(number: u64) -> Parsed<T> {
    number.try_into().map_err(|_| "a number is too large")
}

fn level(word: &str) -> Parsed<Level> {
    let level = in_range(number(word)?)?;
    Level::new(level).ok_or("expected a level")
}
