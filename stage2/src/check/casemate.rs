// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Converts a trace to the format of casemate: S-expressions, one event a line (its manual, "Trace
//! format").
//!
//! casemate is an independent checker of break-before-make. It models neither caches nor FEAT_BBM
//! nor range invalidations nor shared locks, so some events are converted to stronger ones or
//! omitted:
//!
//! | event | becomes |
//! |---|---|
//! | store, swap | `mem-write`, a swap as a release |
//! | `dsb nshst` | `dsb nsh`, the next stronger barrier |
//! | range invalidation | `vmalls12e1`, which covers more |
//! | allocation of a table | `mem-init`, and a hint that names its root |
//! | switch to the guest's VMID | `sysreg-write` of VTTBR_EL2; other VMIDs are omitted |
//! | lock | `lock`, if it is exclusive |
//! | others | omitted and counted |

use alloc::{
    collections::{BTreeMap, BTreeSet},
    format,
    string::String,
};
use core::fmt::Write as _;

use super::{
    event::{Action, Event, Setup, StoreKind},
    trace::{Trace, mnemonic},
};
use crate::{
    geometry::{Granule, Level},
    operations::{Dsb, Note, Scope, Tlbi},
};

/// A trace in casemate's format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Casemate {
    /// The events, one a line.
    pub text: String,
    /// The number of omitted events of each kind.
    pub omitted: BTreeMap<&'static str, u64>,
}

/// Writer of numbered lines.
struct Writer {
    out: Casemate,
    id: u64,
    setup: Setup,
    /// The CPUs that hold the lock exclusively.
    exclusive: BTreeSet<u8>,
}

impl Writer {
    fn line(&mut self, cpu: u8, kind: &str, rest: &str) {
        // A String accepts every write.
        let _ = writeln!(self.out.text, "({kind} (id {}) (tid {cpu}) {rest})", self.id);
        self.id += 1;
    }

    fn omit(&mut self, kind: &'static str) {
        *self.out.omitted.entry(kind).or_default() += 1;
    }

    /// Writes the root with its lock, which lies outside all tables, and the VMID of each CPU.
    fn begin(&mut self) {
        let (root, size) = (self.setup.root.0, self.setup.geometry.granule().size());
        let tables = (0..self.setup.geometry.root_tables()).map(|table| root + table * size);
        tables.clone().for_each(|table| self.init(0, table));
        let lock = format!("(kind set_root_lock) (location {root:#x}) (value {:#x})", root - 8);
        self.line(0, "hint", &lock);
        tables.skip(1).for_each(|table| self.own(0, table));
        (0..self.setup.cpus).for_each(|cpu| self.switch_to_guest(cpu));
    }

    fn init(&mut self, cpu: u8, table: u64) {
        let size = self.setup.geometry.granule().size();
        self.line(cpu, "mem-init", &format!("(address {table:#x}) (size {size:#x})"));
    }

    /// Names the root that a table belongs to.
    fn own(&mut self, cpu: u8, table: u64) {
        let root = self.setup.root.0;
        let owner = format!("(kind set_owner_root) (location {table:#x}) (value {root:#x})");
        self.line(cpu, "hint", &owner);
    }

    fn switch_to_guest(&mut self, cpu: u8) {
        let value = u64::from(self.setup.vmid.0) << 48 | self.setup.root.0;
        self.line(cpu, "sysreg-write", &format!("(sysreg vttbr_el2) (value {value:#x})"));
    }

    fn tlbi(&mut self, cpu: u8, kind: Tlbi) {
        let is = if kind.scope() == Scope::Broadcast { "is" } else { "" };
        let rest = match kind {
            Tlbi::Ipa { ipa, ttl, .. } => {
                let value = operand(self.setup.geometry.granule(), ipa.0, ttl);
                format!("{}{is} (value {value:#x})", mnemonic(kind))
            }
            Tlbi::Range { .. } => format!("vmalls12e1{is}"),
            Tlbi::Stage1 { .. } | Tlbi::All { .. } => format!("{}{is}", mnemonic(kind)),
        };
        self.line(cpu, "tlbi", &rest);
    }

    fn note(&mut self, cpu: u8, note: Note) {
        let lock = format!("(address {:#x})", self.setup.root.0 - 8);
        match note {
            Note::Lock { exclusive: true } => {
                self.exclusive.insert(cpu);
                self.line(cpu, "lock", &lock);
            }
            Note::Lock { exclusive: false } => self.omit("lock shared"),
            Note::Unlock if self.exclusive.remove(&cpu) => self.line(cpu, "unlock", &lock),
            Note::Unlock => {}
            _ => self.omit("note"),
        }
    }

    fn event(&mut self, Event { cpu, action }: Event) {
        match action {
            Action::Store { entry, new, kind, .. } => {
                let order = if kind == StoreKind::Plain { "plain" } else { "release" };
                let (at, value) = (entry.0, new.0);
                let rest = format!("(mem-order {order}) (address {at:#x}) (value {value:#x})");
                self.line(cpu, "mem-write", &rest);
            }
            Action::Dsb(kind) => {
                let kind = match kind {
                    Dsb::Ish => "ish",
                    Dsb::IshSt => "ishst",
                    Dsb::Nsh | Dsb::NshSt => "nsh",
                };
                self.line(cpu, "barrier", &format!("dsb (kind {kind})"));
            }
            Action::Isb => self.line(cpu, "barrier", "isb"),
            Action::Tlbi(kind) => self.tlbi(cpu, kind),
            Action::Vmid(vmid) if vmid == self.setup.vmid => self.switch_to_guest(cpu),
            Action::Allocate(table) => {
                self.init(cpu, table.0);
                self.own(cpu, table.0);
            }
            Action::Note(note) => self.note(cpu, note),
            Action::Vmid(_) => self.omit("vmid"),
            Action::Clean { .. } => self.omit("dc"),
            Action::Instructions(_) => self.omit("ic"),
            Action::Free(_) => self.omit("free"),
            Action::Walk { .. } => self.omit("walk"),
            Action::References(..) => self.omit("ref"),
            _ => self.omit("host"),
        }
    }
}

/// Returns the operand of `TLBI IPAS2E1` (Arm ARM C5.5): the address from bit 12 on, and the TTL
/// hint with the granule in bits 47:44.
const fn operand(granule: Granule, ipa: u64, ttl: Option<Level>) -> u64 {
    let hint = match ttl {
        None => 0,
        Some(level) => {
            let granule = match granule {
                Granule::K4 => 1,
                Granule::K16 => 2,
                Granule::K64 => 3,
            };
            granule << 2 | level.number() as u64
        }
    };
    hint << 44 | ipa >> 12
}

impl Trace {
    /// Converts the trace to casemate's format.
    pub fn casemate(&self) -> Casemate {
        let out = Casemate { text: String::new(), omitted: BTreeMap::new() };
        let mut writer = Writer { out, id: 0, setup: self.setup, exclusive: BTreeSet::new() };
        writer.begin();
        self.events.iter().for_each(|event| writer.event(*event));
        writer.out
    }
}
