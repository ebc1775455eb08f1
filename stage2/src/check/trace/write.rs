// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The writer of traces.

use core::fmt;

use super::{
    Trace,
    words::{ACCESSES, CACHING, DSBS, LOCKS, STATUSES, STORE_KINDS, SWITCH, word},
};
use crate::{
    check::event::{Action, Event, Setup},
    operations::{Note, Scope, Tlbi},
};

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setup { geometry: g, features: x, vmid, root, cpus } = &self.setup;
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
        self.events.iter().try_for_each(|event| writeln!(f, "{event}"))
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.cpu)?;
        match self.action {
            Action::Store { entry, old, new, kind } => {
                let (entry, old, new) = (entry.0, old.0, new.0);
                let kind = word(STORE_KINDS, kind);
                write!(f, "store {entry:#x} {old:#x} {new:#x} {kind}")
            }
            Action::Dsb(kind) => write!(f, "dsb {}", word(DSBS, kind)),
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
            Action::AddMemory { ipa, phys, size, device } => {
                let device = if device { " device" } else { "" };
                write!(f, "add-memory {ipa:#x} {phys:#x} {size:#x}{device}")
            }
            Action::RemoveMemory { ipa, size } => write!(f, "remove-memory {ipa:#x} {size:#x}"),
            Action::Logging { ipa, size, on } => {
                write!(f, "logging {ipa:#x} {size:#x} {}", word(SWITCH, on))
            }
            Action::ReadLog { ipa, size } => write!(f, "read-log {ipa:#x} {size:#x}"),
            Action::Access { ipa, access, uncached } => {
                let (access, caching) = (word(ACCESSES, access), word(CACHING, uncached));
                write!(f, "access {ipa:#x} {access} {caching}")
            }
            Action::Resume { ipa, access, status, level } => {
                let (access, status) = (word(ACCESSES, access), word(STATUSES, status));
                write!(f, "resume {ipa:#x} {access} {status} {level}")
            }
        }
    }
}

fn write_tlbi(f: &mut fmt::Formatter<'_>, kind: Tlbi) -> fmt::Result {
    let is = |scope| if scope == Scope::Broadcast { "is" } else { "" };
    let ttl = match kind {
        Tlbi::Ipa { ipa, leaf_only, scope, ttl } => {
            let leaf = if leaf_only { "l" } else { "" };
            write!(f, "tlbi ipas2{leaf}e1{} {ipa:#x}", is(scope))?;
            ttl
        }
        Tlbi::Range { ipa, size, scope, ttl } => {
            write!(f, "tlbi ripas2e1{} {ipa:#x} {size:#x}", is(scope))?;
            ttl
        }
        Tlbi::Stage1 { scope } => return write!(f, "tlbi vmalle1{}", is(scope)),
        Tlbi::All { scope } => return write!(f, "tlbi vmalls12e1{}", is(scope)),
    };
    ttl.map_or(Ok(()), |level| write!(f, " ttl={level}"))
}

fn write_note(f: &mut fmt::Formatter<'_>, note: Note) -> fmt::Result {
    match note {
        Note::Lock { exclusive } => write!(f, "lock {}", word(LOCKS, exclusive)),
        Note::Unlock => f.write_str("unlock"),
        Note::TopUp => f.write_str("top-up"),
        Note::Empty => f.write_str("empty"),
        Note::MarkDirty { ipa, size } => write!(f, "mark-dirty {ipa:#x} {size:#x}"),
        Note::LookUp => f.write_str("look-up"),
        Note::Sequence => f.write_str("sequence"),
    }
}
