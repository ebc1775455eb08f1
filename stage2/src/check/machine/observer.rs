// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Translates the events of a machine to those of one checker for each guest.
//!
//! An event changes what the observer knows of the machine (registers, contents of tables, locks, threads)
//! and reaches the checkers in this order:
//!
//! | file | events |
//! |---|---|
//! | `kernel_events` | those that concern the kernel's own tables |
//! | `roots` | VTTBR_EL2, VTCR_EL2 and HCR_EL2 select a guest, perhaps a new one; a page becomes a table |
//! | `table_stores` | a store to a table of a guest, or to the word of a lock |
//! | `maintenance` | barriers, TLB invalidations and CMOs |
//! | `calls` | calls of the hypervisor's functions |
//!
//! Then `violations` moves the violations that the event reveals to the findings.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec,
    vec::Vec,
};

use super::{
    calls::Calls,
    event::{MachineAction, MachineEvent},
    findings::{Finding, Findings},
    guest::Guest,
    hypervisor::Hypervisor,
    kernel::Kernel,
    lock::Lock,
    pages::{Pages, TablePage},
    registers::{self, Registers},
    step::{Step, Thread},
    vmids::Vmids,
};
use crate::{
    address::{PhysAddr, TableAddress},
    check::{Action, LeafCount, MAX_CPUS, Rule, cache_model::AddressSet},
    descriptor::Descriptor,
    engine::{BbmLevel, Features},
};

/// Events after which the state of tables that no CPU can reach is removed, so that the memory of
/// long runs is bounded.
const EVENTS_BETWEEN_COLLECTIONS: u64 = 1 << 16;

/// Configuration of an observed machine.
#[derive(Debug, Clone)]
pub struct Machine {
    /// The number of CPUs, at most [`MAX_CPUS`](crate::check::MAX_CPUS).
    pub cpus: u8,
    /// First address and bytes of the memory, which is dirty until it is cleaned.
    pub memory: (PhysAddr, u64),
    /// The hypervisor.
    pub hypervisor: Hypervisor,
    /// Rules that are not applied.
    pub disabled_rules: BTreeSet<Rule>,
    /// The level of FEAT_BBM of all CPUs, unless it is that of ID_AA64MMFR2_EL1.
    pub bbm: Option<BbmLevel>,
}

/// Numbers that describe what an observer has seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Events.
    pub events: u64,
    /// Stage-2 tables of guests that were checked.
    pub guests: u64,
    /// Stage-2 tables that cannot be checked: reserved geometry.
    pub unsupported: u64,
    /// Stage-2 tables of the host itself (VMID 0), as with protected KVM, which are not checked.
    pub host: u64,
    /// Stage-2 tables under the lock of another one, as for nested guests, whose findings are dropped.
    pub shadows: u64,
    /// The largest numbers of live leaves of a guest, and of TLB entries that its runs saved.
    pub most_leaves: LeafCount,
    /// Stores to linked tables.
    pub stores: u64,
    /// Linked tables whose contents are not in the trace.
    pub unknown_tables: u64,
    /// Stores that replace another value than the known one: the trace is incomplete.
    pub unexpected_values: u64,
    /// Stores to linked tables of the kernel's own.
    pub kernel_stores: u64,
    /// Roots of the kernel's own tables that cannot be checked.
    pub unsupported_kernel_roots: u64,
    /// Calls whose end is not in the trace, and ends without a call.
    pub unbalanced_calls: u64,
}

/// Checks the events of a machine.
#[derive(Debug)]
pub struct Observer {
    pub(super) machine: Machine,
    pub(super) features: Features,
    pub(super) registers: Vec<Registers>,
    pub(super) vmids: Vmids,
    /// The guests that run, by their numbers in the order of their first events.
    pub(super) guests: BTreeMap<usize, Guest>,
    pub(super) by_root: BTreeMap<TableAddress, usize>,
    pub(super) unsupported_roots: BTreeSet<TableAddress>,
    /// Roots that no CPU has selected with another VMID than 0.
    pub(super) host_roots: BTreeSet<TableAddress>,
    pub(super) pages: Option<Pages>,
    pub(super) locks: BTreeMap<PhysAddr, Lock>,
    /// The thread that each CPU executes.
    pub(super) threads: Vec<Thread>,
    pub(super) stacks: BTreeMap<u32, Vec<u64>>,
    pub(super) clean_ranges: AddressSet<PhysAddr>,
    pub(super) calls: Calls,
    pub(super) kernel: Kernel,
    pub(super) findings: Findings,
    pub(super) totals: Totals,
}

impl Observer {
    /// Creates an observer of a machine whose memory contains no table yet. Until the trace shows an
    /// identification register, the machine has no feature of it. CPUs beyond
    /// [`MAX_CPUS`](crate::check::MAX_CPUS) do not exist.
    pub fn new(machine: Machine) -> Self {
        let machine = Machine { cpus: machine.cpus.min(MAX_CPUS), ..machine };
        Self {
            features: Features::default(),
            registers: vec![Registers::default(); usize::from(machine.cpus)],
            vmids: Vmids::new(machine.cpus),
            guests: BTreeMap::new(),
            by_root: BTreeMap::new(),
            unsupported_roots: BTreeSet::new(),
            host_roots: BTreeSet::new(),
            pages: None,
            locks: BTreeMap::new(),
            threads: (0..machine.cpus).map(Thread::of_cpu).collect(),
            stacks: BTreeMap::new(),
            clean_ranges: AddressSet::default(),
            calls: Calls::new(&machine.hypervisor),
            kernel: Kernel::new(machine.cpus),
            findings: Findings::default(),
            totals: Totals::default(),
            machine,
        }
    }

    /// Returns the findings in the order of their first events.
    pub fn findings(&self) -> Vec<&Finding> {
        self.findings.in_order()
    }

    /// Returns the features of the machine's CPUs, without FEAT_S2FWB.
    pub fn features(&self) -> Features {
        Features { bbm: self.machine.bbm.unwrap_or(self.features.bbm), ..self.features }
    }

    /// Returns what has been seen.
    pub fn totals(&self) -> Totals {
        let of_guests = self.guests.values().map(|guest| guest.checker.most_leaves());
        Totals {
            most_leaves: of_guests.fold(self.totals.most_leaves, LeafCount::larger),
            host: self.host_roots.len() as u64,
            unbalanced_calls: self.calls.unbalanced(),
            kernel_stores: self.kernel.stores,
            unsupported_kernel_roots: self.kernel.unsupported_roots,
            unknown_tables: self.totals.unknown_tables + self.kernel.unknown_tables(),
            ..self.totals
        }
    }

    /// Checks the next event. An event of a CPU that does not exist is ignored.
    pub fn observe(&mut self, event: &MachineEvent) {
        let index = self.totals.events;
        self.totals.events += 1;
        self.findings.remember(index, event);
        if usize::from(event.cpu) >= self.registers.len() {
            return;
        }
        let guests = self.guests.values_mut();
        guests.for_each(|guest| guest.checker.begin_event(event.cause()));
        self.kernel.begin_event(index, event.cause());
        self.observe_kernel(event);
        self.dispatch(event);
        self.collect(index, event);
        self.collect_kernel(index, event);
        if index.is_multiple_of(EVENTS_BETWEEN_COLLECTIONS) {
            self.guests.values_mut().for_each(|guest| guest.checker.forget_unlinked_tables());
            self.kernel.forget_unlinked_tables();
        }
    }

    fn dispatch(&mut self, event: &MachineEvent) {
        let cpu = event.cpu;
        let normalize = |value| self.machine.hypervisor.normalize(value);
        match &event.action {
            MachineAction::Stack(number, addresses) => {
                self.stacks.insert(*number, addresses.clone());
            }
            MachineAction::Identify(name, value) => {
                registers::identify(&mut self.features, name, *value);
            }
            MachineAction::SetVtcr(value) => self.set_vtcr(cpu, *value),
            MachineAction::SetVttbr(value) => self.set_vttbr(event.cause(), *value),
            MachineAction::SetHcr(value) => self.set_hcr(cpu, *value),
            MachineAction::Table { table, level, unordered_writer, entries } => {
                let (level, unordered_writer) = (*level, *unordered_writer);
                let entries = entries.iter().map(|(index, value)| (*index, normalize(*value)));
                let entries = entries.collect();
                let page = TablePage { level, entries, unordered_writer, guest: None };
                self.add_table(cpu, *table, page);
            }
            MachineAction::Store { entry, old, new, kind } => {
                let (old, new) = (Descriptor(normalize(*old)), Descriptor(normalize(*new)));
                self.store(event.cause(), *entry, (old, new), *kind);
            }
            MachineAction::Dsb(accesses, domain) => {
                self.order_stores(cpu, *accesses, *domain);
                self.complete(cpu, *accesses, *domain);
            }
            MachineAction::Dmb(accesses, domain) => self.order_stores(cpu, *accesses, *domain),
            MachineAction::Isb => {
                self.registers[usize::from(cpu)].needs_isb = false;
                self.check_all(cpu, Action::Isb);
            }
            MachineAction::Tlbi(name, operand) => self.invalidate(cpu, name, *operand),
            MachineAction::Dc(name, phys, size) => self.maintain_caches(cpu, name, *phys, *size),
            MachineAction::Ic(scope) => self.invalidate_icache(cpu, *scope),
            MachineAction::HostWrite(page) => self.write_page(cpu, *page),
            MachineAction::Word { word, old, new } => self.change_lock(cpu, *word, *old, *new),
            MachineAction::Thread(thread) => {
                self.threads[usize::from(cpu)] = Thread::of_event(cpu, *thread);
            }
            MachineAction::Enter(number, arguments) => self.enter(event, *number, *arguments),
            MachineAction::Leave(number, result) => self.leave(event, *number, *result),
            MachineAction::Free(root) => self.free(*root),
            _ => {} // the kernel's own tables
        }
    }

    /// Returns the step of a CPU in the current event.
    fn step(&self, event: &MachineEvent) -> Step {
        let thread = self.threads[usize::from(event.cpu)];
        Step { cause: event.cause(), thread, event: self.totals.events }
    }

    pub(super) fn check_all(&mut self, cpu: u8, action: Action) {
        self.guests.values_mut().for_each(|guest| guest.check(cpu, action));
    }

    fn enter(&mut self, event: &MachineEvent, number: u16, arguments: [u64; 4]) {
        let Some(role) = self.machine.hypervisor.role(number) else { return };
        let mut locks = self.locks.values();
        let holds_lock = locks.any(|lock| lock.hold(usize::from(event.cpu)).is_some());
        let step = self.step(event);
        self.calls.enter(step, holds_lock, role, arguments, &mut self.guests);
    }

    fn leave(&mut self, event: &MachineEvent, number: u16, result: u64) {
        if let Some(role) = self.machine.hypervisor.role(number) {
            let step = self.step(event);
            self.calls.leave(step, role, result, &mut self.guests);
        }
    }
}
