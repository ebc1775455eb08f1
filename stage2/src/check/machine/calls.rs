// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Calls of the hypervisor's functions, and the rules for them.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    format,
    vec::Vec,
};

use super::{
    guest::Guest,
    hypervisor::{Hypervisor, LOGS_DIRTY_PAGES, Role},
    pages::{Pages, child},
};
use crate::{
    address::{EntryAddress, Ipa, PhysAddr, TableAddress},
    check::{
        Cause, Rule, cache_model::AddressSet, event::guest_address, table_model::EntryPosition,
    },
    descriptor::Descriptor,
    geometry::Level,
};

/// A thread of the hypervisor. In a trace without threads, each CPU executes its own one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Thread {
    OfCpu(u8),
    Number(u64),
}

impl Thread {
    pub(super) const fn of_cpu(cpu: u8) -> Self {
        Self::OfCpu(cpu)
    }

    /// Returns the thread of an event, whose number 0 is no thread of the hypervisor.
    pub(super) const fn of_event(cpu: u8, number: u64) -> Self {
        if number == 0 { Self::OfCpu(cpu) } else { Self::Number(number) }
    }
}

/// A step of a CPU that executes a thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    /// The current event.
    pub(super) cause: Cause,
    pub(super) thread: Thread,
    /// The number of the event.
    pub(super) event: u64,
}

/// A leaf that a fault has changed in place.
#[derive(Debug)]
struct ChangedLeaf {
    guest: usize,
    ipa: Ipa,
    store: Cause,
}

/// The changes of tables since a CPU began to run a guest. A fault may be older than these changes, as
/// the trace does not have the time of the guest's exit: between the exception and the write of
/// HCR_EL2, another CPU may change entries, of which this one caches none (Arm ARM R_SQBCS, R_FXGNQ: at
/// EL2, a TLB may cache no entry of the guest's regime).
#[derive(Debug, Default)]
struct Changes {
    entries: BTreeSet<PhysAddr>,
    linked_tables: BTreeSet<PhysAddr>,
}

impl Changes {
    /// Returns whether an entry has changed, or its table has been linked.
    fn contain(&self, entry: PhysAddr, page_size: u64) -> bool {
        self.entries.contains(&entry) || self.linked_tables.contains(&entry.align_down(page_size))
    }

    /// Removes the changes of tables that have been freed.
    fn forget(&mut self, tables: &[PhysAddr], page_size: u64) {
        for table in tables {
            self.linked_tables.remove(table);
            self.entries.extract_if(*table..*table + page_size, |_| true).for_each(drop);
        }
    }
}

/// Steps of a thread since it began to handle a guest's abort. The thread may change the CPU.
#[derive(Debug, Default)]
struct Fault {
    /// Leaves that have become writable: the guest's number, first address, bytes and store.
    writable: Vec<(usize, Ipa, u64, Cause)>,
    /// Leaves that were changed in place. A leaf that is younger than the guest's entry need not have
    /// caused the fault: if another CPU holds it that resumes the guest, the next fault handles that.
    changed: Vec<ChangedLeaf>,
    /// Changes by any CPU since the guest's entry.
    since_entry: Changes,
    /// Pages that have been marked dirty.
    marked: Vec<Ipa>,
    /// The event that began the look-up in progress, in which an mmu_notifier may change entries.
    looks_up_since: Option<u64>,
    look_up: Option<LookUp>,
}

/// A look-up of the host's page.
#[derive(Debug, Clone, Copy)]
struct LookUp {
    event: u64,
    /// Indicates that the thread has read the invalidation sequence under the lock since.
    is_compared: bool,
}

/// An entry that a CPU has changed.
#[derive(Debug, Clone, Copy)]
pub(super) struct MadeEntry {
    pub(super) entry: EntryAddress,
    pub(super) level: Level,
    pub(super) old: Descriptor,
    /// The leaf that was broken before, if any.
    pub(super) broken: Option<Descriptor>,
    pub(super) new: Descriptor,
    /// The store.
    pub(super) store: Cause,
}

/// The state of calls that have not returned.
#[derive(Debug)]
pub(super) struct Calls {
    /// Threads in calls in which the hypervisor may delay the invalidation of restricted entries.
    by_user_space: BTreeSet<Thread>,
    faults: BTreeMap<Thread, Fault>,
    /// Changes since each CPU began to run a guest, unless it has begun a fault since.
    since_entry: BTreeMap<u8, Changes>,
    /// Calls whose end is missing, and ends without a call.
    unbalanced: u64,
    /// Indicates that the trace has the reads of the invalidation sequence.
    reads_sequence: bool,
    /// Addresses whose dirty pages are logged, by the address of the guest's lock.
    logged: BTreeMap<PhysAddr, AddressSet<Ipa>>,
    /// The bytes that threads allocate.
    allocated: BTreeMap<Thread, u64>,
    /// Size of a page and of a table in bytes.
    page_size: u64,
    /// References to the pages of tables, since their allocation.
    references: BTreeMap<PhysAddr, i64>,
    /// The event of each guest's last change of the invalidation sequence, by the guest's number.
    sequence_changed_at: BTreeMap<usize, u64>,
    /// Tables whose entries or references have changed since they were last compared, with the last
    /// change.
    changed: BTreeMap<PhysAddr, Cause>,
}

impl Calls {
    pub(super) fn new(hypervisor: &Hypervisor) -> Self {
        Self {
            by_user_space: BTreeSet::new(),
            faults: BTreeMap::new(),
            since_entry: BTreeMap::new(),
            unbalanced: 0,
            reads_sequence: hypervisor.has(Role::ReadSequence),
            logged: BTreeMap::new(),
            allocated: BTreeMap::new(),
            page_size: hypervisor.granule.size(),
            references: BTreeMap::new(),
            sequence_changed_at: BTreeMap::new(),
            changed: BTreeMap::new(),
        }
    }

    /// Sets the size of a page and of a table in bytes.
    pub(super) const fn set_page_size(&mut self, size: u64) {
        self.page_size = size;
    }

    /// Returns the number of calls whose end is missing, and of ends without a call.
    pub(super) const fn unbalanced(&self) -> u64 {
        self.unbalanced
    }

    /// Processes the entry of a function with these arguments, on a CPU that holds a lock or not.
    pub(super) fn enter(
        &mut self,
        Step { cause, thread, event }: Step,
        holds_lock: bool,
        role: Role,
        arguments: [u64; 4],
        guests: &mut BTreeMap<usize, Guest>,
    ) {
        let mut fault = self.faults.get_mut(&thread);
        match role {
            // Both are not recursive: an earlier call of the thread has ended.
            Role::Call => self.unbalanced += u64::from(!self.by_user_space.insert(thread)),
            Role::Abort => {
                let since_entry = self.since_entry.remove(&cause.cpu).unwrap_or_default();
                let fault = Fault { since_entry, ..Fault::default() };
                let earlier = self.faults.insert(thread, fault);
                self.unbalanced += u64::from(earlier.is_some());
            }
            Role::MarkDirty { argument } => {
                let frame = arguments.get(usize::from(argument)).copied().unwrap_or(0);
                fault.iter_mut().for_each(|fault| fault.marked.push(Ipa(frame)));
            }
            Role::LookUp => {
                if let Some(fault) = fault {
                    (fault.looks_up_since, fault.look_up) = (Some(event), None);
                }
            }
            Role::ReadSequence => {
                if let Some(look_up) = fault.and_then(|fault| fault.look_up.as_mut()) {
                    look_up.is_compared |= holds_lock;
                }
            }
            Role::ChangeSequence => {
                let holders = guests.iter().filter(|(_, guest)| guest.holds_lock(cause.cpu));
                self.sequence_changed_at.extend(holders.map(|(number, _)| (*number, event)));
            }
            Role::Allocate { has_size } => {
                let size = if has_size { arguments[0] } else { self.page_size };
                self.allocated.insert(thread, size);
            }
            Role::GetTable => self.change_references(cause, PhysAddr(arguments[0]), 1, guests),
            Role::PutTable => self.change_references(cause, PhysAddr(arguments[0]), -1, guests),
            Role::GetTableReferences | Role::PutTableReferences => {
                // The number is an unsigned int, whose register has an unspecified upper half.
                let number = (arguments[1] & u64::from(u32::MAX)).cast_signed();
                let change = if role == Role::GetTableReferences { number } else { -number };
                self.change_references(cause, PhysAddr(arguments[0]), change, guests);
            }
            // The kernel's own tables are checked apart.
            Role::ChangeKernel => {}
            Role::FreePage => {
                let table = TableAddress(arguments[0]);
                guests.values_mut().for_each(|guest| guest.checker.free_known_table(table));
            }
            Role::PrepareMemory => self.change_logging(arguments, false),
            Role::CommitMemory => self.change_logging(arguments, true),
        }
    }

    /// Changes which addresses are logged. Faults may not yet observe memory that is about to be
    /// logged, and already observe memory that is about to be no longer logged.
    fn change_logging(&mut self, arguments: [u64; 4], is_complete: bool) {
        let [lock, frame, pages, flags] = arguments;
        // The registers of a call may contain any number.
        let start = frame.saturating_mul(self.page_size);
        let size = pages.saturating_mul(self.page_size).min(u64::MAX - start);
        let start = Ipa(start);
        let logged = self.logged.entry(PhysAddr(lock)).or_default();
        match flags & LOGS_DIRTY_PAGES != 0 {
            true if is_complete => logged.add(start, size),
            true => {}
            false => logged.remove(start, size),
        }
    }

    /// Forgets the memory of guests with this lock.
    pub(super) fn forget_memory(&mut self, lock: PhysAddr) {
        self.logged.remove(&lock);
    }

    /// Forgets a guest whose tables were in these pages.
    pub(super) fn forget_guest(&mut self, number: usize, pages: &[PhysAddr]) {
        self.sequence_changed_at.remove(&number);
        for page in pages {
            self.references.remove(page);
            self.changed.remove(page);
        }
        let page_size = self.page_size;
        self.changes().for_each(|changes| changes.forget(pages, page_size));
    }

    /// Returns whether a thread handles an abort.
    pub(super) fn handles_abort(&self, thread: Thread) -> bool {
        self.faults.contains_key(&thread)
    }

    /// Processes the return from a function.
    pub(super) fn leave(
        &mut self,
        Step { cause, thread, .. }: Step,
        role: Role,
        result: u64,
        guests: &mut BTreeMap<usize, Guest>,
    ) {
        match role {
            Role::Call => {
                self.unbalanced += u64::from(!self.by_user_space.remove(&thread));
                if self.by_user_space.is_empty() {
                    guests.values_mut().for_each(|guest| guest.checker.end_call());
                }
            }
            Role::Abort => match self.faults.remove(&thread) {
                Some(fault) => Self::end_fault(cause.cpu, fault, guests),
                None => self.unbalanced += 1,
            },
            Role::LookUp => {
                if let Some(fault) = self.faults.get_mut(&thread)
                    && let Some(event) = fault.looks_up_since.take()
                {
                    fault.look_up = Some(LookUp { event, is_compared: false });
                }
            }
            Role::Allocate { .. } if result != 0 => {
                let pages = self.allocated.remove(&thread).unwrap_or(0) / self.page_size;
                let address = |page| PhysAddr(result) + page * self.page_size;
                self.references.extend((0..pages).map(|page| (address(page), 1)));
            }
            _ => {}
        }
    }

    /// Checks that the pages that a fault has made writable are marked dirty.
    fn end_fault(cpu: u8, fault: Fault, guests: &mut BTreeMap<usize, Guest>) {
        for (number, ipa, size, store) in fault.writable {
            let Some(guest) = guests.get_mut(&number) else { continue };
            let frame = |page: &Ipa| Ipa(page.0 << guest.checker.granule().shift());
            if !fault.marked.iter().map(frame).any(|page| ipa <= page && page < ipa + size) {
                let detail = format!(
                    "{}, {size:#x} bytes: the fault marks no page of it",
                    guest_address(ipa)
                );
                guest.checker.report_caused(Rule::NotMarkedDirty, detail, Some(store));
            }
        }
        for ChangedLeaf { guest, ipa, store } in fault.changed {
            if let Some(guest) = guests.get_mut(&guest) {
                guest.checker.check_progress(store, usize::from(cpu), ipa);
            }
        }
    }

    /// Processes an entry that a thread has changed, in the table of a guest.
    pub(super) fn make_entry(
        &mut self,
        thread: Thread,
        guest: (usize, &mut Guest),
        made: MadeEntry,
    ) {
        let MadeEntry { entry, level, old, broken, new, store } = made;
        let fault = self.faults.get(&thread);
        if fault.is_none_or(|fault| fault.looks_up_since.is_some()) {
            return;
        }
        let (number, guest) = guest;
        let Some((ipa, size)) = guest.checker.range_of(entry) else { return };
        let before = Some(old).filter(|old| old.is_leaf(level)).or(broken);
        let leaves = match child(new, level) {
            Some(table) if child(old, level).is_none() => guest.checker.leaves_of(table),
            Some(_) => return,
            None if new.is_leaf(level) => Vec::from([(EntryPosition { entry, level, ipa }, new)]),
            None => return,
        };
        if old.is_leaf(level)
            && new.is_leaf(level)
            && let Some(fault) = self.faults.get_mut(&thread)
            && !fault.since_entry.contain(PhysAddr(entry.0), self.page_size)
        {
            let leaf = ChangedLeaf { guest: number, ipa, store };
            fault.changed.push(leaf);
        }
        for (position, leaf) in leaves {
            let size = size.min(position.level.span(guest.checker.granule()));
            self.make_leaf((thread, store), (number, guest), (position.ipa, size), before, leaf);
        }
    }

    /// Processes a leaf that a thread has made at the addresses that another leaf translated before.
    fn make_leaf(
        &mut self,
        (thread, store): (Thread, Cause),
        (number, guest): (usize, &mut Guest),
        (ipa, size): (Ipa, u64),
        before: Option<Descriptor>,
        new: Descriptor,
    ) {
        let Some(fault) = self.faults.get_mut(&thread) else { return };
        if new.attributes().write && !before.is_some_and(|leaf| leaf.attributes().write) {
            fault.writable.push((number, ipa, size, store));
            let logged = guest.lock.and_then(|lock| self.logged.get(&lock));
            let is_logged = logged.is_some_and(|logged| !logged.overlaps(ipa, size).is_empty());
            if is_logged && size > self.page_size {
                let detail = format!(
                    "{}: {size:#x} bytes become writable under logging",
                    guest_address(ipa)
                );
                guest.checker.report(Rule::NotMarkedDirty, detail);
            }
        }
        // Memory that stays mapped needs no look-up.
        let Some(look_up) = fault.look_up.filter(|_| before.is_none()) else { return };
        let changed_at = self.sequence_changed_at.get(&number);
        let reason = if changed_at.is_some_and(|changed_at| look_up.event < *changed_at) {
            "the invalidation sequence has changed since the look-up"
        } else if self.reads_sequence && !look_up.is_compared {
            "the invalidation sequence is not compared under the lock"
        } else {
            return;
        };
        guest.checker.report(Rule::StaleLookUp, format!("{}: {reason}", guest_address(ipa)));
    }

    fn change_references(
        &mut self,
        cause: Cause,
        address: PhysAddr,
        change: i64,
        guests: &mut BTreeMap<usize, Guest>,
    ) {
        let page = address.align_down(self.page_size);
        let Some(count) = self.references.get_mut(&page) else { return };
        *count += change;
        self.changed.insert(page, cause);
        if *count == 0 {
            self.references.remove(&page);
            self.changed.remove(&page);
            for guest in guests.values_mut() {
                guest.checker.free_known_table(TableAddress(page.0));
            }
        }
    }

    /// Records that a store has changed an entry of a table, or linked the table.
    pub(super) fn change_entry(&mut self, store: Cause, entry: PhysAddr) {
        let page = entry.align_down(self.page_size);
        if self.references.contains_key(&page) {
            self.changed.insert(page, store);
        }
    }

    /// Records whether a CPU runs a guest; if so, it has entered the guest.
    pub(super) fn set_running_guest(&mut self, cpu: u8, runs_guest: bool) {
        if runs_guest {
            self.since_entry.insert(cpu, Changes::default());
        }
    }

    /// Records that an entry has changed.
    pub(super) fn age_by_entry(&mut self, entry: PhysAddr) {
        self.changes().for_each(|changes| changes.entries.extend([entry]));
    }

    /// Records that a table has been linked.
    pub(super) fn age_by_table(&mut self, table: PhysAddr) {
        self.changes().for_each(|changes| changes.linked_tables.extend([table]));
    }

    /// Returns the changes of the faults in progress, and of the CPUs since they began to run a guest.
    fn changes(&mut self) -> impl Iterator<Item = &mut Changes> {
        let faults = self.faults.values_mut().map(|fault| &mut fault.since_entry);
        faults.chain(self.since_entry.values_mut())
    }

    /// Compares the references of changed tables with their entries, when no CPU holds the lock of
    /// their guest: one of the allocation, and one for each entry that is not zero.
    pub(super) fn compare_references(&mut self, number: usize, guest: &mut Guest, pages: &Pages) {
        let references = &self.references;
        self.changed.retain(|at, cause| {
            // Of a table that is not linked the entries are unknown.
            let Some(page) = pages.get(*at) else { return false };
            if page.guest != Some(number) {
                return page.guest.is_some();
            }
            let entries = page.entries.len();
            let count = references.get(at).copied().unwrap_or(0);
            if i64::try_from(entries + 1) != Ok(count) {
                let detail = format!("table {:#x}: count {count}, {entries} entries", at.0);
                guest.checker.report_caused(Rule::WrongReferences, detail, Some(*cause));
            }
            false
        });
    }
}
