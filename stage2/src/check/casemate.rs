// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Converts a trace to the format of casemate: S-expressions, one event a line (its manual, "Trace
//! format").
//!
//! casemate is an independent checker of break-before-make. It models neither caches nor FEAT_BBM nor
//! range invalidations nor shared locks, so some events are converted to stronger ones or omitted:
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

use alloc::{collections::BTreeMap, string::String};
use core::fmt::Write as _;

use super::{
    event::{Action, Setup, StoreKind},
    trace::Trace,
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
}

impl Writer {
    fn line(&mut self, cpu: u8, kind: &str, rest: core::fmt::Arguments<'_>) {
        // A String accepts every write.
        let _ = writeln!(self.out.text, "({kind} (id {}) (tid {cpu}) {rest})", self.id);
        self.id += 1;
    }

    fn omit(&mut self, what: &'static str) {
        *self.out.omitted.entry(what).or_default() += 1;
    }

    /// Returns an address for the lock, outside all tables.
    const fn lock(&self) -> u64 {
        self.setup.root.0 - 8
    }

    fn begin(&mut self) {
        let (root, geometry) = (self.setup.root.0, self.setup.geometry);
        let (lock, size) = (self.lock(), geometry.granule().size());
        for table in 0..geometry.root_tables() {
            let at = root + table * size;
            self.line(0, "mem-init", format_args!("(address {at:#x}) (size {size:#x})"));
        }
        self.line(
            0,
            "hint",
            format_args!("(kind set_root_lock) (location {root:#x}) (value {lock:#x})"),
        );
        for table in 1..geometry.root_tables() {
            self.owned(0, root + table * size);
        }
        for cpu in 0..self.setup.cpus {
            self.context(cpu);
        }
    }

    fn owned(&mut self, cpu: u8, table: u64) {
        let root = self.setup.root.0;
        self.line(
            cpu,
            "hint",
            format_args!("(kind set_owner_root) (location {table:#x}) (value {root:#x})"),
        );
    }

    fn context(&mut self, cpu: u8) {
        let value = u64::from(self.setup.vmid.0) << 48 | self.setup.root.0;
        self.line(cpu, "sysreg-write", format_args!("(sysreg vttbr_el2) (value {value:#x})"));
    }

    fn tlbi(&mut self, cpu: u8, kind: Tlbi) {
        let is = |scope| match scope {
            Scope::Broadcast => "is",
            Scope::Local => "",
        };
        match kind {
            Tlbi::Ipa { ipa, ttl, leaf_only, scope } => {
                let l = if leaf_only { "l" } else { "" };
                let value = operand(self.setup.geometry.granule(), ipa.0, ttl);
                self.line(cpu, "tlbi", format_args!("ipas2{l}e1{} (value {value:#x})", is(scope)));
            }
            Tlbi::Stage1 { scope } => self.line(cpu, "tlbi", format_args!("vmalle1{}", is(scope))),
            Tlbi::Range { scope, .. } | Tlbi::All { scope } => {
                self.line(cpu, "tlbi", format_args!("vmalls12e1{}", is(scope)));
            }
        }
    }

    fn note(&mut self, cpu: u8, note: Note, held: &mut BTreeMap<u8, bool>) {
        let lock = self.lock();
        match note {
            Note::Lock { exclusive } => {
                held.insert(cpu, exclusive);
                if exclusive {
                    self.line(cpu, "lock", format_args!("(address {lock:#x})"));
                } else {
                    self.omit("lock shared");
                }
            }
            Note::Unlock => {
                if held.remove(&cpu) == Some(true) {
                    self.line(cpu, "unlock", format_args!("(address {lock:#x})"));
                }
            }
            _ => self.omit("note"),
        }
    }
}

/// Returns the operand of `TLBI IPAS2E1` (Arm ARM C5.5): the address from bit 12 on, and the TTL hint
/// with the granule in bits 47:44.
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
        let mut writer = Writer {
            out: Casemate { text: String::new(), omitted: BTreeMap::new() },
            id: 0,
            setup: self.setup,
        };
        writer.begin();
        let mut held = BTreeMap::new();
        for event in &self.events {
            let cpu = event.cpu;
            match event.action {
                Action::Store { entry, new, kind, .. } => {
                    let order = match kind {
                        StoreKind::Plain => "plain",
                        StoreKind::Release | StoreKind::Swap => "release",
                    };
                    let (at, value) = (entry.0, new.0);
                    writer.line(
                        cpu,
                        "mem-write",
                        format_args!("(mem-order {order}) (address {at:#x}) (value {value:#x})"),
                    );
                }
                Action::Dsb(kind) => {
                    let kind = match kind {
                        Dsb::Ish => "ish",
                        Dsb::IshSt => "ishst",
                        Dsb::Nsh | Dsb::NshSt => "nsh",
                    };
                    writer.line(cpu, "barrier", format_args!("dsb (kind {kind})"));
                }
                Action::Isb => writer.line(cpu, "barrier", format_args!("isb")),
                Action::Tlbi(kind) => writer.tlbi(cpu, kind),
                Action::Vmid(vmid) if vmid == self.setup.vmid => writer.context(cpu),
                Action::Allocate(table) => {
                    let (at, size) = (table.0, self.setup.geometry.granule().size());
                    writer.line(
                        cpu,
                        "mem-init",
                        format_args!("(address {at:#x}) (size {size:#x})"),
                    );
                    writer.owned(cpu, at);
                }
                Action::Note(note) => writer.note(cpu, note, &mut held),
                Action::Vmid(_) => writer.omit("vmid"),
                Action::Clean { .. } => writer.omit("dc"),
                Action::Instructions(_) => writer.omit("ic"),
                Action::Free(_) => writer.omit("free"),
                Action::BeginWalk | Action::EndWalk => writer.omit("walk"),
                Action::References(..) => writer.omit("ref"),
                _ => writer.omit("host"),
            }
        }
        writer.out
    }
}
