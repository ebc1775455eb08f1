// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Translates the events of a machine to those of one checker for each guest.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec,
    vec::Vec,
};

use super::{
    calls::{Calls, MadeEntry, Step, Thread},
    event::{Domain, IcScope, MachineAction, MachineEvent, OrderedAccesses},
    findings::{CheckedTables, Finding, Findings, TableChange, TranslatedAddress},
    guest::Guest,
    hypervisor::Hypervisor,
    kernel::Kernel,
    lock::Lock,
    pages::{Pages, TablePage, child},
    registers::{self, Registers},
    tlbi::{self, InvalidatedVmids},
    vmids::Vmids,
};
use crate::{
    address::{EntryAddress, PhysAddr},
    check::{
        Action, Cause, LeafCount, MAX_CPUS, Rule, StoreKind, cache_model::AddressSet,
        held_entries::Removed,
    },
    descriptor::Descriptor,
    engine::Features,
    operations::Dsb,
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
    /// The level of FEAT_BBM of all CPUs, 0 to 3, unless it is that of ID_AA64MMFR2_EL1.
    pub bbm: Option<u8>,
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
    pub(super) by_root: BTreeMap<PhysAddr, usize>,
    pub(super) unsupported_roots: BTreeSet<PhysAddr>,
    /// Roots that no CPU has selected with another VMID than 0.
    pub(super) host_roots: BTreeSet<PhysAddr>,
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
            features: Features { fwb: false, dic: false, tlb_range: false, bbm: 0 },
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
        guests.for_each(|guest| guest.checker.begin_event(cause(event)));
        self.kernel.begin_event(index, cause(event));
        self.observe_kernel(event);
        self.dispatch(event);
        self.collect(index, event);
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
            MachineAction::SetVttbr(value) => {
                let registers = &mut self.registers[usize::from(cpu)];
                (registers.vttbr, registers.needs_isb) = (*value, true);
                registers.vttbr_stack = event.stack;
                self.select(cpu);
            }
            MachineAction::SetHcr(value) => {
                let registers = &mut self.registers[usize::from(cpu)];
                registers.hcr = *value;
                self.calls.set_running_guest(cpu, registers.runs_guest());
                self.select(cpu);
            }
            MachineAction::Table { table, level, unordered_writer, entries } => {
                let page = TablePage {
                    level: *level,
                    entries: entries
                        .iter()
                        .map(|(index, value)| (*index, normalize(*value)))
                        .collect(),
                    unordered_writer: *unordered_writer,
                    guest: None,
                };
                self.add_table(cpu, *table, page);
            }
            MachineAction::Store { entry, old, new, kind } => {
                let (old, new) = (Descriptor(normalize(*old)), Descriptor(normalize(*new)));
                self.store(cause(event), *entry, (old, new), *kind);
            }
            MachineAction::Dsb(accesses, domain) => {
                self.order_stores(cpu, *accesses, *domain);
                if let Some(kind) = dsb(*accesses, *domain) {
                    let is_nxs = *accesses == OrderedAccesses::NonXs;
                    self.complete(cpu, kind, is_nxs);
                }
            }
            MachineAction::Dmb(accesses, domain) => self.order_stores(cpu, *accesses, *domain),
            MachineAction::Isb => {
                self.registers[usize::from(cpu)].needs_isb = false;
                self.check_all(cpu, Action::Isb);
            }
            MachineAction::Tlbi(name, operand) => self.invalidate(cpu, name, *operand),
            MachineAction::Dc(name, phys, size) => self.maintain_caches(cpu, name, (*phys, *size)),
            MachineAction::Ic(scope) => {
                let range = match scope {
                    IcScope::Range(phys, size) => Some((*phys, *size)),
                    IcScope::AllCpus => None,
                    IcScope::ThisCpu => return,
                };
                self.check_all(cpu, Action::InvalidateICache(range));
            }
            MachineAction::HostWrite(page) => {
                let size = 0x1000;
                self.clean_ranges.remove(*page, size);
                self.check_all(cpu, Action::HostWrite { phys: *page, size });
            }
            MachineAction::Word { word, old, new } => self.change_lock(cpu, *word, *old, *new),
            MachineAction::Thread(thread) => {
                self.threads[usize::from(cpu)] = Thread::of_event(cpu, *thread);
            }
            MachineAction::Enter(number, arguments) => self.enter(event, *number, *arguments),
            MachineAction::Leave(number, result) => {
                if let Some(role) = self.machine.hypervisor.role(*number) {
                    let step = self.step(event);
                    self.calls.leave(step, role, *result, &mut self.guests);
                }
            }
            MachineAction::Free(root) => self.free(*root),
            _ => {} // the kernel's own tables
        }
    }

    /// Processes a data cache operation on a range. One to the PoU, or an invalidation without a clean,
    /// cleans nothing to the PoC.
    fn maintain_caches(&mut self, cpu: u8, name: &str, (phys, size): (PhysAddr, u64)) {
        match name {
            "civac" | "cigvac" | "cigdvac" => {
                self.clean_ranges.add(phys, size);
                self.check_all(cpu, Action::CleanInvalidate { phys, size });
            }
            "cvac" | "cvap" | "cvadp" | "cgvac" | "cgdvac" => {
                self.clean_ranges.add(phys, size);
                self.guests.values_mut().for_each(|guest| guest.checker.clean(phys, size));
            }
            _ => {}
        }
    }

    /// Orders the stores of a CPU to tables before its later stores, if a barrier does so.
    fn order_stores(&mut self, cpu: u8, accesses: OrderedAccesses, domain: Domain) {
        if !orders_stores(accesses, domain) {
            return;
        }
        for guest in self.guests.values_mut() {
            guest.checker.order_stores(usize::from(cpu));
        }
        if let Some(pages) = &mut self.pages {
            pages.order_stores(cpu);
        }
    }

    /// Processes a barrier that completes invalidations and CMOs.
    fn complete(&mut self, cpu: u8, kind: Dsb, is_nxs: bool) {
        self.complete_vmids(cpu, kind);
        match is_nxs {
            true => {
                let guests = self.guests.values_mut();
                guests.for_each(|guest| guest.checker.barrier(usize::from(cpu), kind, true));
            }
            false => self.check_all(cpu, Action::Dsb(kind)),
        }
    }

    /// Returns the step of a CPU in the current event.
    fn step(&self, event: &MachineEvent) -> Step {
        let thread = self.threads[usize::from(event.cpu)];
        Step { cause: cause(event), thread, event: self.totals.events }
    }

    fn check_all(&mut self, cpu: u8, action: Action) {
        self.guests.values_mut().for_each(|guest| guest.check(cpu, action));
    }

    /// Moves new violations to the findings.
    fn collect(&mut self, index: u64, event: &MachineEvent) {
        let vmid = self.registers[usize::from(event.cpu)].vmid();
        let handles_abort = self.calls.handles_abort(self.threads[usize::from(event.cpu)]);
        for guest in self.guests.values_mut() {
            // A CMO of a driver is no concern of the guest.
            let is_cmo_of_guest = handles_abort || guest.holds_lock(event.cpu);
            for mut violation in guest.checker.take_violations() {
                if guest.is_shadow
                    || (violation.rule == Rule::NeedlessCmo && !is_cmo_of_guest)
                    || self.machine.disabled_rules.contains(&violation.rule)
                    || (guest.lock.is_none() && violation.rule.requires_lock())
                {
                    continue;
                }
                let earlier = violation.cause.filter(|_| event.stack.is_none());
                let Cause { cpu, mut stack } = earlier.unwrap_or(cause(event));
                violation.cpu = cpu;
                let mut change = guest.last_changes[usize::from(violation.cpu)];
                // The last CPU that releases a shared lock reveals what another one has unmapped.
                if let (Rule::ReturnedUnclean, Some((cpu, unmapped_in, unmapped))) =
                    (violation.rule, guest.last_unmap)
                {
                    violation.cpu = cpu;
                    (stack, change) = (unmapped_in, Some(unmapped));
                }
                let stack = stack.and_then(|number| self.stacks.get(&number));
                let stack = stack.map_or(&[][..], Vec::as_slice);
                let tables = CheckedTables::Guest(guest.root, vmid);
                self.findings.add(violation, index, tables, (stack, change));
            }
        }
        self.collect_kernel(index, event);
    }

    fn store(
        &mut self,
        store: Cause,
        entry: PhysAddr,
        (old, new): (Descriptor, Descriptor),
        kind: StoreKind,
    ) {
        let cpu = store.cpu;
        let Some(pages) = &mut self.pages else { return };
        let Some((page, index)) = pages.of_entry(entry) else { return };
        let known = match new {
            Descriptor::EMPTY => page.entries.remove(&index),
            Descriptor(value) => page.entries.insert(index, value),
        };
        self.totals.unexpected_values += u64::from(Descriptor(known.unwrap_or(0)) != old);
        let level = page.level;
        let Some(number) = page.guest else {
            pages.set_writer(entry, cpu);
            return;
        };
        self.totals.stores += 1;
        self.associate_lock(cpu, number);
        let (Some(guest), Some(pages)) = (self.guests.get_mut(&number), &mut self.pages) else {
            return;
        };
        let at = EntryAddress(entry.0);
        if let Some((ipa, _)) = guest.checker.range_of(at) {
            let address = TranslatedAddress::Guest(ipa);
            let change = TableChange { address, level, old: old.0, new: new.0 };
            guest.last_changes[usize::from(cpu)] = Some(change);
            if old.is_leaf(level) && !new.is_leaf(level) {
                guest.last_unmap = Some((cpu, store.stack, change));
            }
        }
        let broken = guest.checker.broken_leaf(at);
        self.calls.change_entry(store, entry);
        let (before, after) = (child(old, level), child(new, level));
        if let Some(table) = after.filter(|_| before != after) {
            let tables = pages.assign(table, number);
            self.totals.unknown_tables += u64::from(tables.is_empty());
            for (at, page) in &tables {
                self.calls.change_entry(store, PhysAddr(at.0));
                self.calls.age_by_table(PhysAddr(at.0));
                guest.checker.adopt_table(*at, page.descriptors(), page.writer());
            }
            if tables.is_empty() {
                guest.checker.adopt_table(table, BTreeMap::new(), None);
            }
        }
        guest.check(cpu, Action::Store { entry: at, old, new, kind });
        self.calls.make_entry(
            self.threads[usize::from(cpu)],
            (number, guest),
            MadeEntry { entry: at, level, old, broken, new, store },
        );
        self.calls.age_by_entry(entry);
        if let Some(table) = before.filter(|_| before != after) {
            pages.forget(table);
        }
    }

    fn invalidate(&mut self, cpu: u8, name: &str, operand: u64) {
        let registers = self.registers[usize::from(cpu)];
        let own = registers.root().and_then(|root| self.by_root.get(&root)).copied();
        let Some(encoding) = registers.encoding() else { return };
        match tlbi::decode(name, operand, encoding) {
            Some((InvalidatedVmids::All, kind)) => {
                self.vmids.invalidate(cpu, None, kind.scope);
                for guest in self.guests.values_mut() {
                    guest.checker.invalidate_all_vmids(usize::from(cpu), kind);
                }
            }
            Some((InvalidatedVmids::Current, kind)) => {
                if kind.removed == Removed::Everything {
                    self.vmids.invalidate(cpu, Some(registers.vmid()), kind.scope);
                }
                if let Some(guest) = own.and_then(|number| self.guests.get_mut(&number)) {
                    guest.invalidate(cpu, kind, registers);
                }
            }
            None => {}
        }
    }

    fn change_lock(&mut self, cpu: u8, word: PhysAddr, old: u64, new: u64) {
        let cpus = usize::from(self.machine.cpus);
        let kind = self.machine.hypervisor.lock;
        let lock = self.locks.entry(word).or_insert_with(|| Lock::new(kind, cpus));
        lock.change(usize::from(cpu), old, new, self.totals.events);
        let users = self.guests.iter_mut().filter(|(_, guest)| guest.lock == Some(word));
        for (number, guest) in users {
            guest.update_lock(lock);
            if let Some(pages) = self.pages.as_ref().filter(|_| guest.is_unlocked()) {
                self.calls.compare_references(*number, guest, pages);
            }
        }
    }

    /// Finds the lock of a guest: the last one that the CPU has taken and holds while it writes the
    /// table.
    fn associate_lock(&mut self, cpu: u8, number: usize) {
        if self.guests.get(&number).is_none_or(|guest| guest.lock.is_some()) {
            return;
        }
        let held = self.locks.iter().filter(|(_, lock)| lock.hold(usize::from(cpu)).is_some());
        let Some((word, lock)) = held.max_by_key(|(_, lock)| lock.changed_at()) else { return };
        let (word, is_shadow) = (*word, self.has_lock(*word));
        self.totals.shadows += u64::from(is_shadow);
        if let Some(guest) = self.guests.get_mut(&number) {
            guest.lock = Some(word);
            guest.is_shadow = is_shadow;
            guest.update_lock(lock);
        }
    }

    fn enter(&mut self, event: &MachineEvent, number: u16, arguments: [u64; 4]) {
        let Some(role) = self.machine.hypervisor.role(number) else { return };
        let mut locks = self.locks.values();
        let holds_lock = locks.any(|lock| lock.hold(usize::from(event.cpu)).is_some());
        let step = self.step(event);
        self.calls.enter(step, holds_lock, role, arguments, &mut self.guests);
    }
}

/// Returns whether a barrier orders earlier stores to tables before later ones, for all walkers.
pub(super) fn orders_stores(accesses: OrderedAccesses, domain: Domain) -> bool {
    accesses != OrderedAccesses::Loads && domain != Domain::NonShareable
}

/// Returns an event as the cause of violations.
pub(super) const fn cause(event: &MachineEvent) -> Cause {
    Cause { cpu: event.cpu, stack: event.stack }
}

/// Returns the model's barrier that orders the same accesses of table walkers, if any.
pub(super) const fn dsb(accesses: OrderedAccesses, domain: Domain) -> Option<Dsb> {
    Some(match (accesses, domain) {
        (OrderedAccesses::All | OrderedAccesses::NonXs, Domain::NonShareable) => Dsb::Nsh,
        (OrderedAccesses::All | OrderedAccesses::NonXs, _) => Dsb::Ish,
        (OrderedAccesses::Stores, Domain::NonShareable) => Dsb::NshSt,
        (OrderedAccesses::Stores, _) => Dsb::IshSt,
        (OrderedAccesses::Loads, _) => return None,
    })
}
