// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The checker: holds a stream of events against the rules of the architecture and of the protocol.
//!
//! Emulation has neither caches nor weak memory, so a missing clean or barrier never fails there. The
//! checker assumes the worst that the architecture allows: every CPU holds every entry that it may
//! hold (`tlb`), every byte that the host wrote is in a cache until it has been cleaned
//! (`caches`). It keeps its own copy of the tables (`table_model`, `tables`) and reports what breaks a
//! [`Rule`] at the event where it shows.
//!
//! Events come from a [`Recorder`] around the engine's operations, or from a [trace](mod@trace) of
//! whatever origin, which can be replayed, made [shorter](Trace::shrink) and given to
//! [casemate](Trace::casemate); `examples/trace.rs` does all three.
//!
//! What it does not model: stage 1 by itself, hardware's own updates of the access flag and the
//! dirty state, the re-ordering of plain stores other than by the rules above, more than one VMID's
//! tables at a time.

mod caches;
mod casemate;
mod event;
mod guest;
mod hooked;
mod ranges;
mod recorder;
mod rule;
mod shrink;
mod table_model;
mod tables;
mod tlb;
pub mod trace;

use alloc::{
    collections::{BTreeMap, BTreeSet},
    format,
    string::String,
    vec,
    vec::Vec,
};
use core::fmt;

pub use casemate::Casemate;
pub use event::{Action, Event, How, Setup};
pub use guest::{Outcome, Outcomes};
pub use hooked::{Call, Hook, Hooked, Reply};
pub use recorder::{Record, Recorder, Sink};
pub use rule::Rule;
pub use trace::{ParseTraceError, Trace};

use crate::{
    address::TableAddress,
    engine::FaultStatus,
    operations::{Dsb, Note, Tlbi, Vmid},
};
use caches::Caches;
use ranges::Ranges;
use table_model::TableModel;
pub use tlb::Work;
use tlb::{Change, Tlbs};

/// A broken rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Which.
    pub rule: Rule,
    /// At which event, counted from 0.
    pub event: u64,
    /// By which CPU.
    pub cpu: u8,
    /// What was found.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rule,
            event,
            cpu,
            detail,
        } = self;
        write!(
            f,
            "event {event}, CPU {cpu}: {rule} ({}): {detail}",
            rule.source()
        )
    }
}

/// What a CPU is doing.
#[derive(Debug, Clone, Copy, Default)]
struct Cpu {
    vmid: Vmid,
    /// The VMID was switched and no ISB followed.
    unsynchronized: bool,
    /// The lock is held: exclusively or not, and the VMID it was taken with.
    lock: Option<(bool, Vmid)>,
    /// Since which event shared walks run, and how many inside one another.
    walk: Option<(u64, u32)>,
    /// When the lock was last released.
    released: u64,
    /// The invalidation sequence at the page lookup.
    looked_up: Option<u64>,
}

/// Holds events against the rules.
#[derive(Debug)]
pub struct Checker {
    setup: Setup,
    cpus: Vec<Cpu>,
    tables: TableModel,
    tlbs: Tlbs,
    caches: Caches,
    /// What is the guest's, by guest address: host address, bytes, whether it is a device.
    slots: BTreeMap<u64, (u64, u64, bool)>,
    logged: Ranges,
    marked: Ranges,
    unmarked: Ranges,
    sequence: u64,
    events: u64,
    now: u8,
    violations: Vec<Violation>,
    seen: BTreeSet<Rule>,
    outcomes: BTreeMap<Outcome, u64>,
}

impl Sink for Checker {
    fn event(&mut self, event: Event) {
        self.check(&event);
    }
}

impl Checker {
    /// A checker of a table that is empty.
    pub fn new(setup: Setup) -> Self {
        let cpus = usize::from(setup.cpus);
        Self {
            tables: TableModel::new(&setup),
            tlbs: Tlbs::new(cpus),
            caches: Caches::new(cpus),
            cpus: vec![Cpu::default(); cpus],
            setup,
            slots: BTreeMap::new(),
            logged: Ranges::default(),
            marked: Ranges::default(),
            unmarked: Ranges::default(),
            sequence: 0,
            events: 0,
            now: 0,
            violations: Vec::new(),
            seen: BTreeSet::new(),
            outcomes: BTreeMap::new(),
        }
    }

    /// What was found, in order.
    pub fn violations(&self) -> &[Violation] {
        &self.violations
    }

    /// The rules that were broken.
    pub fn broken(&self) -> &BTreeSet<Rule> {
        &self.seen
    }

    /// What accesses may have seen, and in how many of them; an access may see several.
    pub const fn outcomes(&self) -> &BTreeMap<Outcome, u64> {
        &self.outcomes
    }

    /// Events so far.
    pub const fn events(&self) -> u64 {
        self.events
    }

    fn report(&mut self, rule: Rule, detail: String) {
        self.seen.insert(rule);
        // The first thousand tell enough.
        if self.violations.len() < 1000 {
            self.violations.push(Violation {
                rule,
                event: self.events,
                cpu: self.now,
                detail,
            });
        }
    }

    /// Takes the next event.
    pub fn check(&mut self, event: &Event) {
        let cpu = usize::from(event.cpu);
        self.now = event.cpu;
        if cpu < self.cpus.len() {
            self.act(cpu, event.action);
        } else {
            self.report(Rule::LockDiscipline, format!("there is no CPU {cpu}"));
        }
        self.events += 1;
    }

    /// What would have been missing without the last event: an event that did nothing may be left
    /// out, and one that a weaker one could have replaced may be weakened.
    pub const fn work(&self) -> Work {
        self.tlbs.work
    }

    fn act(&mut self, cpu: usize, action: Action) {
        self.tlbs.work = Work::default();
        self.tlbs.now = self.events;
        match action {
            Action::Store {
                entry,
                old,
                new,
                how,
            } => self.stored(cpu, entry, (old, new), how),
            Action::Dsb(kind) => {
                self.tlbs.dsb(cpu, kind);
                self.tables.published(cpu);
                if kind != Dsb::Ish {
                    return;
                }
                let completed = self.caches.complete(cpu);
                self.tlbs.work.any |= completed;
                self.tlbs.work.strong |= completed;
            }
            Action::Isb => {
                self.tlbs.work.any = self.cpus[cpu].unsynchronized;
                self.cpus[cpu].unsynchronized = false;
            }
            Action::Tlbi(kind) => self.tlbi(cpu, kind),
            Action::Vmid(vmid) => {
                if self.cpus[cpu].unsynchronized {
                    self.report(
                        Rule::VmidNotRestored,
                        String::from("switched twice without an ISB"),
                    );
                }
                self.cpus[cpu].vmid = vmid;
                self.cpus[cpu].unsynchronized = true;
            }
            Action::Clean { phys, size } => self.clean(cpu, phys.0, size),
            Action::Instructions(range) => {
                let coherent = self.setup.features.fwb;
                self.tlbs.work.any = self.caches.invalidate_instructions(
                    cpu,
                    range.map(|(phys, size)| (phys.0, size)),
                    coherent,
                );
            }
            Action::Allocate(table) => {
                if self.cpus[cpu].lock.is_some() {
                    self.report(Rule::SleepUnderLock, format!("table {:#x}", table.0));
                }
                self.tables.allocated(cpu, table);
            }
            Action::Free(table) => self.freed(table),
            Action::BeginWalk => {
                let (since, walks) = self.cpus[cpu].walk.unwrap_or((self.events, 0));
                self.cpus[cpu].walk = Some((since, walks + 1));
            }
            Action::EndWalk => {
                let outer = self.cpus[cpu].walk.filter(|(_, walks)| *walks > 1);
                self.cpus[cpu].walk = outer.map(|(since, walks)| (since, walks - 1));
                self.leave(cpu);
            }
            Action::References(table, change) => self.tables.referenced(table, change),
            Action::Note(note) => self.noted(cpu, note),
            Action::HostWrite { phys, size } => self.caches.host_write(phys.0, size),
            Action::Give {
                ipa,
                phys,
                size,
                device,
            } => {
                self.slots.insert(ipa.0, (phys.0, size, device));
                if !device {
                    self.caches.given(phys.0, size);
                }
            }
            Action::TakeBack { ipa, size } => self.taken_back(ipa.0, size),
            Action::Logging { ipa, size, on } => self.logging(ipa.0, size, on),
            Action::ReadLog { ipa, size } => self.read_log(ipa.0, size),
            Action::Access {
                ipa,
                access,
                uncached,
            } => {
                for outcome in self.access(cpu, ipa.0, access, uncached) {
                    *self.outcomes.entry(outcome).or_default() += 1;
                }
            }
            Action::Resume {
                ipa,
                access,
                status,
                level,
            } => {
                if status == FaultStatus::Permission {
                    self.resumed(cpu, ipa.0, access, level);
                }
            }
        }
    }

    fn tlbi(&mut self, cpu: usize, kind: Tlbi) {
        if self.cpus[cpu].unsynchronized || self.cpus[cpu].vmid != self.setup.vmid {
            let vmid = self.cpus[cpu].vmid.0;
            self.report(Rule::VmidNotCurrent, format!("VMID {vmid}: {kind:?}"));
            return;
        }
        if let Tlbi::Range { size, .. } = kind
            && !crate::range::is_encodable(size >> self.setup.geometry.granule().shift())
        {
            self.report(Rule::RangeNotEncodable, format!("{size:#x} bytes"));
        }
        // As long as an entry of a contiguous run is there, all of it may be fetched again. A TLB
        // need not hold the run as one, so each page is invalidated for itself.
        for old in &mut self.tlbs.old {
            old.refilled = old.change == Change::Removed
                && old.was.is_contiguous()
                && self
                    .tables
                    .run_remains(&self.setup.geometry, old.entry, old.level);
        }
        if self.tlbs.tlbi(cpu, kind) {
            self.report(Rule::WrongTtl, format!("{kind:?}"));
        }
    }

    fn clean(&mut self, cpu: usize, phys: u64, size: u64) {
        if self.setup.features.fwb {
            self.report(
                Rule::NeedlessMaintenance,
                format!("{phys:#x}, {size:#x} bytes"),
            );
        }
        let device = self
            .slots
            .values()
            .any(|(at, bytes, device)| *device && *at < phys + size && phys < *at + *bytes);
        if device {
            self.report(
                Rule::DeviceMaintained,
                format!("{phys:#x}, {size:#x} bytes"),
            );
        }
        let old = &self.tlbs.old;
        self.tlbs.work.any = self.caches.clean(cpu, phys, size, |phys, size| {
            old.iter().any(|old| {
                old.table.is_none()
                    && old.change == Change::Removed
                    && old.was.address().0 < phys + size
                    && phys < old.was.address().0 + old.size
            })
        });
    }

    fn noted(&mut self, cpu: usize, note: Note) {
        match note {
            Note::Lock { exclusive } => {
                let held = |c: &Cpu| c.lock.is_some_and(|(other, _)| other || exclusive);
                if self.cpus[cpu].lock.is_some() || self.cpus.iter().any(held) {
                    self.report(Rule::LockDiscipline, String::from("taken while it is held"));
                }
                self.cpus[cpu].lock = Some((exclusive, self.cpus[cpu].vmid));
            }
            Note::Unlock => self.unlocked(cpu),
            Note::TopUp if self.cpus[cpu].lock.is_some() => {
                self.report(
                    Rule::SleepUnderLock,
                    String::from("the memcache is topped up"),
                );
            }
            Note::TopUp => {}
            Note::Empty => self.report(Rule::EmptyMemcache, String::new()),
            Note::MarkDirty { ipa, size } => {
                self.marked.add(ipa.0, size);
                self.unmarked.remove(ipa.0, size);
            }
            Note::LookUp => self.cpus[cpu].looked_up = Some(self.sequence),
            Note::Sequence => self.sequence += 1,
        }
    }

    /// An operation is over: nothing may be left half done.
    fn unlocked(&mut self, cpu: usize) {
        let Some((exclusive, vmid)) = self.cpus[cpu].lock.take() else {
            return self.report(Rule::LockDiscipline, String::from("released, not held"));
        };
        if self.cpus[cpu].vmid != vmid || self.cpus[cpu].unsynchronized {
            self.report(
                Rule::VmidNotRestored,
                format!("VMID {} at the end", self.cpus[cpu].vmid.0),
            );
        }
        self.cpus[cpu].looked_up = None;
        self.cpus[cpu].released = self.events;
        self.check_finished(cpu);
        self.leave(cpu);
        if exclusive {
            for (ipa, entry) in self.tables.uneven_runs(&self.setup.geometry) {
                self.report(Rule::ContiguousRun, format!("{ipa:#x}: {entry:?}"));
            }
            for (table, held, valid) in self.tables.miscounted() {
                let table = table.0;
                self.report(
                    Rule::WrongReferences,
                    format!("table {table:#x}: {held} counted, {valid} valid entries"),
                );
            }
        }
        // Others may be between break and make.
        if self.cpus.iter().all(|cpu| cpu.lock.is_none()) {
            self.tables.broken.clear();
            for (from, to) in self.caches.settle() {
                if !self.setup.features.fwb {
                    self.report(Rule::ReturnedUnclean, format!("{from:#x} to {to:#x}"));
                }
            }
        }
    }

    /// Maintenance that was issued must be complete before an entry is broken or the lock released.
    pub(super) fn check_finished(&mut self, cpu: usize) {
        if self.caches.is_pending(cpu) {
            self.report(Rule::UnfinishedMaintenance, String::new());
        }
    }

    /// A walk is over: its locked entries and what it took away are done with.
    fn leave(&mut self, cpu: usize) {
        for entry in self.tables.locked_by(cpu) {
            self.report(
                Rule::LockedEntry,
                format!("entry {:#x} is left locked", entry.0),
            );
        }
        let left: Vec<_> = self
            .tlbs
            .old
            .iter()
            .filter(|old| old.by == cpu && old.change != Change::Widened)
            .map(|old| {
                let rule = if old.only_combined() {
                    Rule::CombinedNotInvalidated
                } else if old.table.is_some() || old.below_table {
                    Rule::TableRemovalSpan
                } else {
                    Rule::ReductionNotComplete
                };
                (
                    rule,
                    format!(
                        "{:#x}, {:#x} bytes: {:?} may be held",
                        old.ipa, old.size, old.was
                    ),
                )
            })
            .collect();
        for (rule, detail) in left {
            self.report(rule, detail);
        }
        // Told once.
        self.tlbs
            .old
            .retain(|old| old.by != cpu || old.change == Change::Widened);
    }

    fn freed(&mut self, table: TableAddress) {
        let address = table.0;
        let held = self.tlbs.old.iter().any(|old| {
            old.table == Some(table)
                || (old.entry.0 >= address
                    && old.entry.0 < address + self.setup.geometry.granule().size())
        });
        if held || self.tables.is_linked(table) {
            self.report(Rule::FreedWhileWalked, format!("table {address:#x}"));
        }
        let since = self.tables.unlinked_at(table);
        // The walk that frees it counts too: no grace period ends before it does.
        let walked = self.cpus.iter().any(|state| {
            state
                .walk
                .is_some_and(|(from, _)| since.is_some_and(|at| from <= at))
        });
        if walked {
            self.report(Rule::FreedInGracePeriod, format!("table {address:#x}"));
        }
        match self.tables.freed(table) {
            None => self.report(Rule::TableNotOwned, format!("table {address:#x} is freed")),
            Some(count) if count != 1 && since.is_some() => self.report(
                Rule::WrongReferences,
                format!("table {address:#x} is freed with a count of {count}"),
            ),
            Some(_) => {}
        }
    }
}
