// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state of the checker, which passes each event to the models and the rules.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    format,
    string::String,
    vec,
    vec::Vec,
};
use core::fmt;

use super::{
    cache_model::{AddressSet, CacheModel},
    entry::Invalidation,
    event::{Action, Cause, Event, MAX_CPUS, Setup},
    leaf_count::{LeafCount, LiveLeaves},
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
    /// The earlier event that caused the violation, if it is known.
    pub cause: Option<Cause>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rule, event, cpu, detail, .. } = self;
        let source = rule.source();
        write!(f, "event {event}, CPU {cpu}: {rule} ({source}): {detail}")
    }
}

/// Maximum number of violations that a checker keeps. Beyond it, a checker records only the rules.
const MAX_VIOLATIONS: usize = 1000;

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CpuModel {
    pub(super) vmid: Vmid,
    /// Flag set from a VMID switch until the next ISB.
    pub(super) needs_isb: bool,
    /// The last VMID switch.
    pub(super) switched_by: Option<Cause>,
    pub(super) lock: Option<HeldLock>,
    /// Depth of nested shared walks, and the event that began the outermost.
    walk_depth: u32,
    walking_since: u64,
    /// The event at which the CPU last released the lock.
    pub(super) lock_released_at: u64,
    /// The invalidation sequence at the last page lookup.
    pub(super) lookup_sequence: Option<u64>,
}

impl CpuModel {
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
    pub(super) cpus: Vec<CpuModel>,
    pub(super) tables: TableModel,
    pub(super) tlbs: TlbModel,
    pub(super) caches: CacheModel,
    pub(super) memslots: BTreeMap<Ipa, MemslotModel>,
    pub(super) logged_ranges: AddressSet<Ipa>,
    pub(super) marked_ranges: AddressSet<Ipa>,
    /// Ranges that the guest can write and that are not marked dirty.
    pub(super) writable_unmarked_ranges: AddressSet<Ipa>,
    pub(super) live_leaves: LiveLeaves,
    /// The number of mmu_notifier invalidations.
    pub(super) invalidation_sequence: u64,
    pub(super) event_index: u64,
    pub(super) effect: Effect,
    current: Cause,
    violations: Vec<Violation>,
    violated_rules: BTreeSet<Rule>,
    /// Indicates that an operation may end before its restrictions have reached all TLBs, until
    /// [`Checker::end_call`].
    pub(super) defers_restrictions: bool,
    /// Indicates that shared walkers may relax permissions by plain stores, and do nothing else.
    pub(super) shares_plain_relaxations: bool,
}

impl Checker {
    /// Creates a checker with an empty table. CPUs beyond [`MAX_CPUS`] do not exist.
    pub fn new(setup: Setup) -> Self {
        let cpus = usize::from(setup.cpus.min(MAX_CPUS));
        Self {
            tables: TableModel::of_stage2(&setup),
            tlbs: TlbModel::new(cpus),
            caches: CacheModel::new(cpus),
            cpus: vec![CpuModel::default(); cpus],
            live_leaves: LiveLeaves::new(setup.geometry.granule()),
            setup,
            memslots: BTreeMap::new(),
            logged_ranges: AddressSet::default(),
            marked_ranges: AddressSet::default(),
            writable_unmarked_ranges: AddressSet::default(),
            invalidation_sequence: 0,
            event_index: 0,
            effect: Effect::default(),
            current: Cause { cpu: 0, stack: None },
            violations: Vec::new(),
            violated_rules: BTreeSet::new(),
            defers_restrictions: false,
            shares_plain_relaxations: false,
        }
    }

    /// Returns up to 1,000 violations, in order of their events.
    pub fn violations(&self) -> &[Violation] {
        &self.violations
    }

    /// Removes and returns the violations. The checker then keeps up to 1,000 further ones.
    pub fn take_violations(&mut self) -> Vec<Violation> {
        core::mem::take(&mut self.violations)
    }

    /// Returns the violated rules.
    pub const fn violated_rules(&self) -> &BTreeSet<Rule> {
        &self.violated_rules
    }

    /// Returns the number of events checked.
    pub const fn event_count(&self) -> u64 {
        self.event_index
    }

    /// Returns the largest numbers of live leaves, and of TLB entries that contiguous runs saved.
    pub const fn most_leaves(&self) -> LeafCount {
        self.live_leaves.most()
    }

    /// Returns the effect of the last event: an event without effect may be omitted, and an event
    /// without strong effect may be weakened.
    pub const fn effect(&self) -> Effect {
        self.effect
    }

    /// Sets the CPU and the call stack of the event that is about to be checked.
    pub(super) const fn begin_event(&mut self, event: Cause) {
        self.current = event;
    }

    /// Returns the current event as the cause of violations at later ones.
    pub(super) const fn current(&self) -> Cause {
        self.current
    }

    pub(super) fn report(&mut self, rule: Rule, detail: impl Into<String>) {
        self.report_caused(rule, detail, None);
    }

    /// Reports a violation that an earlier event caused.
    pub(super) fn report_caused(
        &mut self,
        rule: Rule,
        detail: impl Into<String>,
        cause: Option<Cause>,
    ) {
        self.violated_rules.insert(rule);
        if self.violations.len() < MAX_VIOLATIONS {
            self.violations.push(Violation {
                rule,
                event: self.event_index,
                cpu: self.current.cpu,
                detail: detail.into(),
                cause,
            });
        }
    }

    /// Checks the next event.
    pub fn check(&mut self, event: &Event) {
        let cpu = usize::from(event.cpu);
        self.current.cpu = event.cpu;
        self.effect = Effect::default();
        if cpu < self.cpus.len() {
            self.dispatch(cpu, event.action);
        } else {
            self.report(Rule::LockDiscipline, format!("CPU {cpu} does not exist"));
        }
        self.event_index += 1;
    }

    fn dispatch(&mut self, cpu: usize, action: Action) {
        match action {
            Action::Store { entry, old, new, kind } => self.store(cpu, entry, (old, new), kind),
            Action::Dsb(kind) => self.barrier(cpu, kind, false),
            Action::Isb => {
                self.effect.exists = core::mem::take(&mut self.cpus[cpu].needs_isb);
            }
            Action::Tlbi(kind) => {
                self.check_encodable(kind);
                self.invalidate(cpu, Invalidation::of_stage2(kind));
            }
            Action::SwitchVmid(vmid) => self.switch_vmid(cpu, vmid),
            Action::CleanInvalidate { phys, size } => self.clean_invalidate(phys, size),
            Action::InvalidateICache(range) => {
                let is_coherent = self.setup.features.fwb;
                let cause = self.current;
                self.effect.exists = self.caches.invalidate_icache(cause, range, is_coherent);
            }
            Action::Allocate(table) => self.allocate(cpu, table),
            Action::Free(table) => self.free(table),
            Action::Walk { begins } => self.walk(cpu, begins),
            Action::ChangeReferences(table, change) => self.tables.change_references(table, change),
            Action::Note(note) => self.process_note(cpu, note),
            Action::HostWrite { phys, size } => self.caches.host_write(phys, size),
            Action::AddMemory { ipa, phys, size, is_device } => {
                self.add_memory(ipa, phys, size, is_device)
            }
            Action::RemoveMemory { ipa, size } => self.remove_memory(ipa, size),
            Action::SetLogging { ipa, size, is_enabled } => self.set_logging(ipa, size, is_enabled),
            Action::ReadLog { ipa, size } => self.read_log(ipa, size),
            Action::Resume { ipa, access, status: FaultStatus::Permission, level } => {
                self.resume(cpu, ipa, access, level)
            }
            Action::Resume { .. } => {}
        }
    }

    pub(super) fn barrier(&mut self, cpu: usize, kind: Dsb, is_nxs: bool) {
        self.effect = self.tlbs.barrier(cpu, kind, is_nxs);
        if matches!(kind, Dsb::Ish | Dsb::IshSt) {
            self.tables.publish_stores(cpu);
        }
        if kind == Dsb::Ish {
            let completed = self.caches.complete(cpu);
            self.effect.exists |= completed;
            self.effect.is_strong |= completed;
        }
    }

    fn walk(&mut self, cpu: usize, begins: bool) {
        let state = &mut self.cpus[cpu];
        if begins {
            if state.walk_depth == 0 {
                state.walking_since = self.event_index;
            }
            state.walk_depth += 1;
        } else {
            state.walk_depth = state.walk_depth.saturating_sub(1);
            self.check_end_of_walk(cpu);
        }
    }
}
