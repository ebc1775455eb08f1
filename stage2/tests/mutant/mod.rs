// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Operations of which one goes wrong.

use std::cell::{Cell, RefCell};

use granule_stage2::{
    EntryAddress, Ipa, Operations, PhysAddr, TableAddress,
    check::{Checker, Recorder, Work},
    descriptor::{Descriptor, Kind},
    geometry::Level,
    operations::{Dsb, Note, Order, Scope, Tlbi, Unlinked, Vmid},
};

use crate::support::{self, Cpu};

/// A way to get an operation wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum How {
    /// It is left out.
    Drop,
    /// Only this CPU, or only stores.
    Weaken,
    /// It covers too little.
    Shorten,
    /// It is about something else.
    Misplace,
    /// It comes behind the next operation.
    Late,
}

pub const HOWS: [How; 5] = [
    How::Drop,
    How::Weaken,
    How::Shorten,
    How::Misplace,
    How::Late,
];

/// What comes behind the next operation.
#[derive(Debug, Clone, Copy)]
pub enum Held {
    Dsb(Dsb),
    Tlbi(Tlbi),
    Clean(PhysAddr, u64),
    Instructions(Option<(PhysAddr, u64)>),
}

/// Operations of which the one at `target` goes wrong.
pub struct Mutant<'a, 'w> {
    pub inner: &'a Recorder<'w, Cpu<'w>, Checker>,
    /// Shared by all CPUs of the run.
    pub state: &'a State,
}

pub struct State {
    pub at: Cell<u64>,
    pub target: Option<(u64, How)>,
    pub held: RefCell<Option<Held>>,
    /// What each operation did when none was mutated.
    pub work: RefCell<Vec<Work>>,
    /// What the mutated operation was; `None` if it cannot go wrong in this way.
    pub hit: RefCell<Option<String>>,
}

impl Mutant<'_, '_> {
    /// Whether the operation that comes now goes wrong, and how.
    fn turn(&self) -> Option<How> {
        let at = self.state.at.get();
        self.state.at.set(at + 1);
        let (target, how) = self.state.target?;
        (target == at).then_some(how)
    }

    /// Notes what the operation that turned last did; `works` is how it can go wrong for sure.
    fn did(&self, all: bool) {
        if self.state.target.is_none() {
            let work = self.inner.sink().work();
            let all = Work {
                any: all,
                strong: all,
            };
            let mut noted = self.state.work.borrow_mut();
            noted.push(Work {
                any: work.any || all.any,
                strong: work.strong || all.strong,
            });
        }
    }

    fn hit(&self, name: impl Into<String>) {
        *self.state.hit.borrow_mut() = Some(name.into());
    }

    fn hold(&self, name: &str, held: Held) {
        self.hit(name);
        *self.state.held.borrow_mut() = Some(held);
    }

    /// Does what was held back.
    fn release(&self) {
        match self.state.held.borrow_mut().take() {
            None => {}
            Some(Held::Dsb(kind)) => self.inner.dsb(kind),
            Some(Held::Tlbi(kind)) => self.inner.tlbi(kind),
            Some(Held::Clean(phys, size)) => self.inner.clean_invalidate(phys, size),
            Some(Held::Instructions(range)) => self.inner.invalidate_instructions(range),
        }
    }
}

impl Operations for Mutant<'_, '_> {
    fn load(&self, entry: EntryAddress) -> Descriptor {
        self.inner.load(entry)
    }

    fn store(&self, entry: EntryAddress, new: Descriptor, mut order: Order) {
        let release = order == Order::Release;
        if release && self.turn() == Some(How::Weaken) {
            self.hit(
                if matches!(new.kind(Level::new(2).unwrap()), Kind::Table(_)) {
                    "release store of a table or page"
                } else {
                    "release store of a block"
                },
            );
            order = Order::Plain;
        }
        self.inner.store(entry, new, order);
        if release {
            self.did(false);
        }
        self.release();
    }

    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        let done = self.inner.compare_exchange(entry, old, new);
        self.release();
        done
    }

    fn allocate(&self) -> Option<TableAddress> {
        self.inner.allocate()
    }
    fn free(&self, table: TableAddress) {
        self.inner.free(table);
        self.release();
    }
    fn defer(&self, unlinked: Unlinked) {
        match self.turn() {
            Some(How::Misplace) => {
                self.hit("grace period");
                self.inner.free(unlinked.table);
            }
            _ => self.inner.defer(unlinked),
        }
        self.did(true);
    }
    fn begin_walk(&self) {
        self.inner.begin_walk();
    }
    fn end_walk(&self) {
        self.inner.end_walk();
    }
    fn take_references(&self, table: TableAddress, count: u32) {
        if self.turn() == Some(How::Drop) {
            return self.hit("reference taken");
        }
        self.inner.take_references(table, count);
        self.did(true);
    }
    fn drop_references(&self, table: TableAddress, count: u32) -> u32 {
        if self.turn() == Some(How::Drop) {
            self.hit("reference dropped");
            return self.inner.references(table);
        }
        let left = self.inner.drop_references(table, count);
        self.did(true);
        left
    }
    fn references(&self, table: TableAddress) -> u32 {
        self.inner.references(table)
    }

    fn dsb(&self, kind: Dsb) {
        let name = format!("{kind:?}");
        match self.turn() {
            Some(How::Drop) => self.hit(name),
            Some(How::Weaken) => {
                let weaker = match kind {
                    Dsb::Ish => Dsb::IshSt,
                    Dsb::IshSt => Dsb::NshSt,
                    Dsb::Nsh => Dsb::NshSt,
                    Dsb::NshSt => return self.inner.dsb(kind),
                };
                self.hit(name);
                self.inner.dsb(weaker);
            }
            Some(How::Late) => self.hold(&name, Held::Dsb(kind)),
            _ => {
                self.inner.dsb(kind);
                self.did(false);
                self.release();
            }
        }
    }

    fn isb(&self) {
        match self.turn() {
            Some(How::Drop) => self.hit("Isb"),
            _ => {
                self.inner.isb();
                self.did(false);
            }
        }
    }

    fn tlbi(&self, kind: Tlbi) {
        let name = match kind {
            Tlbi::Ipa { scope, .. } => format!("Tlbi Ipa {scope:?}"),
            Tlbi::Range { .. } => "Tlbi Range".to_owned(),
            Tlbi::Stage1 { scope } => format!("Tlbi Stage1 {scope:?}"),
            Tlbi::All { .. } => "Tlbi All".to_owned(),
        };
        let changed = match self.turn() {
            None => {
                self.inner.tlbi(kind);
                self.did(false);
                return self.release();
            }
            Some(How::Drop) => return self.hit(name),
            Some(How::Late) => return self.hold(&name, Held::Tlbi(kind)),
            Some(how) => mutate(kind, how),
        };
        match changed {
            Some(wrong) => {
                self.hit(name);
                self.inner.tlbi(wrong);
            }
            None => self.inner.tlbi(kind),
        }
    }

    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        match self.turn() {
            Some(How::Drop) => {
                self.hit("VMID switch");
                // As far as the engine can tell, all is well.
                Vmid(if vmid.0 == 0 { support::VMID.0 } else { 0 })
            }
            _ => {
                let before = self.inner.switch_vmid(vmid);
                self.did(true);
                before
            }
        }
    }

    fn clean_invalidate(&self, phys: PhysAddr, size: u64) {
        match self.turn() {
            Some(How::Drop) => self.hit("Clean"),
            Some(How::Late) => self.hold("Clean", Held::Clean(phys, size)),
            Some(How::Shorten) => {
                self.hit("Clean");
                self.inner.clean_invalidate(phys, size - 64);
            }
            Some(How::Misplace) => {
                self.hit("Clean");
                self.inner.clean_invalidate(phys + 64, size);
            }
            _ => {
                self.inner.clean_invalidate(phys, size);
                self.did(false);
                self.release();
            }
        }
    }

    fn invalidate_instructions(&self, range: Option<(PhysAddr, u64)>) {
        match (self.turn(), range) {
            (Some(How::Drop), _) => self.hit("Instructions"),
            (Some(How::Late), _) => self.hold("Instructions", Held::Instructions(range)),
            (Some(How::Shorten), Some((phys, size))) => {
                self.hit("Instructions");
                self.inner.invalidate_instructions(Some((phys, size - 64)));
            }
            _ => {
                self.inner.invalidate_instructions(range);
                self.did(false);
                self.release();
            }
        }
    }

    fn note(&self, note: Note) {
        self.inner.note(note);
    }
}

/// The same invalidation, wrong; `None` where this way of going wrong makes no sense.
pub fn mutate(kind: Tlbi, how: How) -> Option<Tlbi> {
    match (kind, how) {
        (
            Tlbi::Ipa {
                ipa,
                ttl,
                leaf_only,
                scope: Scope::Broadcast,
            },
            How::Weaken,
        ) => Some(Tlbi::Ipa {
            ipa,
            ttl,
            leaf_only,
            scope: Scope::Local,
        }),
        (
            Tlbi::Stage1 {
                scope: Scope::Broadcast,
            },
            How::Weaken,
        ) => Some(Tlbi::Stage1 {
            scope: Scope::Local,
        }),
        (Tlbi::All { .. }, How::Weaken) => Some(Tlbi::All {
            scope: Scope::Local,
        }),
        (Tlbi::Range { ipa, size, ttl, .. }, How::Weaken) => Some(Tlbi::Range {
            ipa,
            size,
            ttl,
            scope: Scope::Local,
        }),
        // Only stage 1: the wrong regime.
        (Tlbi::All { scope }, How::Shorten) => Some(Tlbi::Stage1 { scope }),
        (
            Tlbi::Range {
                ipa,
                size,
                ttl,
                scope,
            },
            How::Shorten,
        ) => Some(Tlbi::Range {
            ipa,
            size: size / 2,
            ttl,
            scope,
        }),
        // The level above the leaf's.
        (
            Tlbi::Ipa {
                ipa,
                ttl: Some(level),
                leaf_only,
                scope,
            },
            How::Shorten,
        ) => Some(Tlbi::Ipa {
            ipa,
            ttl: level.up(),
            leaf_only,
            scope,
        }),
        (
            Tlbi::Ipa {
                ipa,
                ttl: None,
                scope,
                ..
            },
            How::Shorten,
        ) => Some(Tlbi::Ipa {
            ipa,
            ttl: None,
            leaf_only: true,
            scope,
        }),
        (
            Tlbi::Ipa {
                ipa,
                ttl,
                leaf_only,
                scope,
            },
            How::Misplace,
        ) => Some(Tlbi::Ipa {
            ipa: Ipa(ipa.0 ^ (1 << 33)),
            ttl,
            leaf_only,
            scope,
        }),
        (
            Tlbi::Range {
                ipa,
                size,
                ttl,
                scope,
            },
            How::Misplace,
        ) => Some(Tlbi::Range {
            ipa: Ipa(ipa.0 ^ (1 << 33)),
            size,
            ttl,
            scope,
        }),
        _ => None,
    }
}
