// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The checker's state, and the dispatch of events to the models and the rules.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    format,
    string::String,
    vec,
    vec::Vec,
};
use core::fmt;

use super::{
    cache_model::{CacheModel, Ranges},
    event::{Action, Event, Setup},
    rule::Rule,
    stale_entry::Effect,
    table_model::TableModel,
    tlb_model::TlbModel,
};
use crate::{
    address::{Ipa, PhysAddr},
    engine::FaultStatus,
    operations::{Dsb, Vmid},
};

/// A violation of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The violated rule.
    pub rule: Rule,
    /// The number of the violating event, counted from 0.
    pub event: u64,
    /// The CPU that caused the event.
    pub cpu: u8,
    /// The addresses and values of the violation.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rule, event, cpu, detail } = self;
        let source = rule.source();
        write!(f, "event {event}, CPU {cpu}: {rule} ({source}): {detail}")
    }
}

/// Number of reported violations after which a checker records only which rules are violated.
const MAX_VIOLATIONS: usize = 1000;

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CpuState {
    pub(super) vmid: Vmid,
    /// Set from a VMID switch until the next ISB.
    pub(super) needs_isb: bool,
    pub(super) lock: Option<HeldLock>,
    /// Depth of nested shared walks, and the event at which the outermost began.
    walk_depth: u32,
    walking_since: u64,
    /// The event at which the CPU last released the lock.
    pub(super) released: u64,
    /// The invalidation sequence at the last page lookup.
    pub(super) looked_up: Option<u64>,
}

impl CpuState {
    /// Returns whether the CPU is in a shared walk that began at or before `event`.
    pub(super) const fn walks_since(&self, event: u64) -> bool {
        self.walk_depth > 0 && self.walking_since <= event
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct HeldLock {
    pub(super) is_exclusive: bool,
    /// The current VMID when the lock was taken.
    pub(super) vmid: Vmid,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct MemslotModel {
    pub(super) phys: PhysAddr,
    pub(super) size: u64,
    pub(super) is_device: bool,
}

/// Checks a stream of events.
#[derive(Debug)]
pub struct Checker {
    pub(super) setup: Setup,
    pub(super) cpus: Vec<CpuState>,
    pub(super) tables: TableModel,
    pub(super) tlbs: TlbModel,
    pub(super) caches: CacheModel,
    pub(super) memslots: BTreeMap<Ipa, MemslotModel>,
    pub(super) logged: Ranges<Ipa>,
    pub(super) marked: Ranges<Ipa>,
    /// Ranges that are writable and not marked dirty.
    pub(super) unmarked: Ranges<Ipa>,
    /// The number of mmu_notifier invalidations.
    pub(super) sequence: u64,
    pub(super) now: u64,
    pub(super) effect: Effect,
    cpu_now: u8,
    violations: Vec<Violation>,
    violated: BTreeSet<Rule>,
}

impl Checker {
    /// Creates a checker with an empty table.
    pub fn new(setup: Setup) -> Self {
        let cpus = usize::from(setup.cpus);
        Self {
            tables: TableModel::new(&setup),
            tlbs: TlbModel::new(cpus),
            caches: CacheModel::new(cpus),
            cpus: vec![CpuState::default(); cpus],
            setup,
            memslots: BTreeMap::new(),
            logged: Ranges::default(),
            marked: Ranges::default(),
            unmarked: Ranges::default(),
            sequence: 0,
            now: 0,
            effect: Effect::default(),
            cpu_now: 0,
            violations: Vec::new(),
            violated: BTreeSet::new(),
        }
    }

    /// Returns up to 1,000 violations, in order of their events.
    pub fn violations(&self) -> &[Violation] {
        &self.violations
    }

    /// Returns the violated rules.
    pub const fn violated(&self) -> &BTreeSet<Rule> {
        &self.violated
    }

    /// Returns the number of events checked.
    pub const fn events(&self) -> u64 {
        self.now
    }

    /// Returns the effect of the last event: an event without effect may be omitted, and an event
    /// without strong effect may be weakened.
    pub const fn effect(&self) -> Effect {
        self.effect
    }

    pub(super) fn report(&mut self, rule: Rule, detail: impl Into<String>) {
        self.violated.insert(rule);
        if self.violations.len() < MAX_VIOLATIONS {
            self.violations.push(Violation {
                rule,
                event: self.now,
                cpu: self.cpu_now,
                detail: detail.into(),
            });
        }
    }

    /// Checks the next event.
    pub fn check(&mut self, event: &Event) {
        let cpu = usize::from(event.cpu);
        self.cpu_now = event.cpu;
        self.effect = Effect::default();
        if cpu < self.cpus.len() {
            self.act(cpu, event.action);
        } else {
            self.report(Rule::LockDiscipline, format!("CPU {cpu} does not exist"));
        }
        self.now += 1;
    }

    fn act(&mut self, cpu: usize, action: Action) {
        match action {
            Action::Store { entry, old, new, kind } => self.store(cpu, entry, (old, new), kind),
            Action::Dsb(kind) => self.barrier(cpu, kind),
            Action::Isb => {
                self.effect.any = core::mem::take(&mut self.cpus[cpu].needs_isb);
            }
            Action::Tlbi(kind) => self.invalidate(cpu, kind),
            Action::Vmid(vmid) => self.switch_vmid(cpu, vmid),
            Action::Clean { phys, size } => self.clean(cpu, phys, size),
            Action::Instructions(range) => {
                let is_coherent = self.setup.features.fwb;
                self.effect.any = self.caches.invalidate_instructions(cpu, range, is_coherent);
            }
            Action::Allocate(table) => self.allocate(cpu, table),
            Action::Free(table) => self.free(table),
            Action::Walk { begins } => self.walk(cpu, begins),
            Action::References(table, change) => self.tables.change_references(table, change),
            Action::Note(note) => self.note(cpu, note),
            Action::HostWrite { phys, size } => self.caches.host_write(phys, size),
            Action::AddMemory { ipa, phys, size, device } => {
                self.add_memory(ipa, phys, size, device)
            }
            Action::RemoveMemory { ipa, size } => self.remove_memory(ipa, size),
            Action::Logging { ipa, size, on } => self.set_logging(ipa, size, on),
            Action::ReadLog { ipa, size } => self.read_log(ipa, size),
            Action::Resume { ipa, access, status: FaultStatus::Permission, level } => {
                self.resume(cpu, ipa, access, level)
            }
            Action::Resume { .. } => {}
        }
    }

    fn barrier(&mut self, cpu: usize, kind: Dsb) {
        self.effect = self.tlbs.barrier(cpu, kind);
        self.tables.publish(cpu);
        if kind == Dsb::Ish {
            let completed = self.caches.complete(cpu);
            self.effect.any |= completed;
            self.effect.strong |= completed;
        }
    }

    fn walk(&mut self, cpu: usize, begins: bool) {
        let state = &mut self.cpus[cpu];
        if begins {
            if state.walk_depth == 0 {
                state.walking_since = self.now;
            }
            state.walk_depth += 1;
        } else {
            state.walk_depth = state.walk_depth.saturating_sub(1);
            self.check_end_of_walk(cpu);
        }
    }
}
