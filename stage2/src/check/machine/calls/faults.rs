// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Faults: what a thread does while it handles an abort of a guest.
//!
//! ```text
//! guest → abort → begin → look-up → lock, sequence compared → stores, pages marked → unlock → end → guest
//!                           └ an mmu_notifier may change entries in the same thread
//! ```
//!
//! - The fault marks each page dirty that it makes writable.
//! - A leaf of memory that was not mapped comes from a look-up that is still valid: the invalidation
//!   sequence has not changed since, and the thread has compared it under the lock.
//! - A leaf that is changed in place is invalidated on the CPU that resumes the guest, as the guest would
//!   take the same fault for ever. This does not apply to a leaf that is younger than the guest's entry,
//!   which need not have caused the fault: if another CPU holds it, the next fault handles that.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    format,
    vec::Vec,
};

use super::logging::LoggedMemory;
use crate::{
    address::{EntryAddress, Ipa, TableAddress},
    check::{
        Cause, Rule,
        event::guest_address,
        machine::{
            guest::Guest,
            pages::child,
            step::{MadeEntry, Step, Thread},
        },
        table_model::EntryPosition,
    },
    geometry::Granule,
};

/// The changes of tables since a CPU began to run a guest. A fault may be older than these changes, as
/// the trace does not have the time of the guest's exit: between the exception and the write of
/// HCR_EL2, another CPU may change entries, of which this one caches none (Arm ARM R_SQBCS, R_FXGNQ: at
/// EL2, a TLB may cache no entry of the guest's regime).
#[derive(Debug, Default)]
struct Changes {
    entries: BTreeSet<EntryAddress>,
    linked_tables: BTreeSet<TableAddress>,
}

impl Changes {
    /// Returns whether an entry has changed, or its table has been linked.
    fn contain(&self, entry: EntryAddress, granule: Granule) -> bool {
        self.entries.contains(&entry)
            || self.linked_tables.contains(&granule.table_containing(entry))
    }

    /// Removes the changes of tables that have been freed.
    fn forget(&mut self, tables: &[TableAddress], granule: Granule) {
        for table in tables {
            self.linked_tables.remove(table);
            let entries = table.entry(0)..table.entry(granule.entries());
            self.entries.extract_if(entries, |_| true).for_each(drop);
        }
    }
}

/// A thread's last look-up of the host's page in a fault.
#[derive(Debug, Clone, Copy, Default)]
enum LookUp {
    #[default]
    None,
    InProgress {
        /// The event of its start.
        since: u64,
    },
    Done {
        since: u64,
        /// Indicates that the thread has read the invalidation sequence under the lock since.
        is_compared: bool,
    },
}

/// A leaf that a fault has made or changed.
#[derive(Debug, Clone, Copy)]
struct MadeLeaf {
    guest: usize,
    ipa: Ipa,
    size: u64,
    store: Cause,
}

/// The steps of a thread since it began to handle a guest's abort.
#[derive(Debug, Default)]
struct Fault {
    /// Leaves that have become writable, of memory that is logged, or may be.
    writable: Vec<MadeLeaf>,
    /// Leaves that were changed in place and are older than the guest's entry.
    changed: Vec<MadeLeaf>,
    /// Changes by any CPU since the guest's entry.
    since_entry: Changes,
    /// Numbers of the pages that have been marked dirty.
    marked: Vec<u64>,
    look_up: LookUp,
}

impl Fault {
    /// Returns why the look-up does not allow a leaf of memory that was not mapped, if so.
    fn stale_look_up(&self, changed_at: Option<u64>, reads_sequence: bool) -> Option<&'static str> {
        let LookUp::Done { since, is_compared } = self.look_up else { return None };
        if changed_at.is_some_and(|changed_at| since < changed_at) {
            Some("the invalidation sequence has changed since the look-up")
        } else if reads_sequence && !is_compared {
            Some("the invalidation sequence is not compared under the lock")
        } else {
            None
        }
    }

    /// Returns whether a page of a leaf is marked dirty.
    fn marks(&self, leaf: &MadeLeaf, granule: Granule) -> bool {
        let page = |number: &u64| Ipa(number << granule.shift());
        self.marked.iter().map(page).any(|page| leaf.ipa <= page && page < leaf.ipa + leaf.size)
    }
}

/// The faults of all guests.
#[derive(Debug)]
pub(super) struct Faults {
    by_thread: BTreeMap<Thread, Fault>,
    /// Changes since each CPU began to run a guest, unless it has begun a fault since.
    since_entry: BTreeMap<u8, Changes>,
    /// Indicates that the trace has the reads of the invalidation sequence.
    reads_sequence: bool,
    /// The event of each guest's last change of the invalidation sequence, by the guest's number.
    sequence_changed_at: BTreeMap<usize, u64>,
}

impl Faults {
    pub(super) const fn new(reads_sequence: bool) -> Self {
        Self {
            by_thread: BTreeMap::new(),
            since_entry: BTreeMap::new(),
            reads_sequence,
            sequence_changed_at: BTreeMap::new(),
        }
    }

    /// Begins a fault. Returns whether the thread has an earlier one.
    pub(super) fn begin(&mut self, Step { cause, thread, .. }: Step) -> bool {
        let since_entry = self.since_entry.remove(&cause.cpu).unwrap_or_default();
        let fault = Fault { since_entry, ..Fault::default() };
        self.by_thread.insert(thread, fault).is_some()
    }

    /// Ends a fault: checks the pages that it has marked, and that the guest makes progress on this CPU.
    /// Returns whether the thread has a fault.
    pub(super) fn end(
        &mut self,
        Step { cause, thread, .. }: Step,
        guests: &mut BTreeMap<usize, Guest>,
    ) -> bool {
        let Some(fault) = self.by_thread.remove(&thread) else { return false };
        for leaf in &fault.writable {
            let Some(guest) = guests.get_mut(&leaf.guest) else { continue };
            if !fault.marks(leaf, guest.checker.granule()) {
                let (ipa, size) = (guest_address(leaf.ipa), leaf.size);
                let detail = format!("{ipa}, {size:#x} bytes: the fault marks no page of it");
                guest.checker.report_caused(Rule::NotMarkedDirty, detail, Some(leaf.store));
            }
        }
        for MadeLeaf { guest, ipa, store, .. } in fault.changed {
            if let Some(guest) = guests.get_mut(&guest) {
                guest.checker.check_progress(store, usize::from(cause.cpu), ipa);
            }
        }
        true
    }

    /// Returns whether a thread handles an abort.
    pub(super) fn is_active(&self, thread: Thread) -> bool {
        self.by_thread.contains_key(&thread)
    }

    /// Marks the page with this number dirty.
    pub(super) fn mark_dirty(&mut self, thread: Thread, page: u64) {
        if let Some(fault) = self.by_thread.get_mut(&thread) {
            fault.marked.push(page);
        }
    }

    pub(super) fn begin_look_up(&mut self, Step { thread, event, .. }: Step) {
        if let Some(fault) = self.by_thread.get_mut(&thread) {
            fault.look_up = LookUp::InProgress { since: event };
        }
    }

    pub(super) fn end_look_up(&mut self, thread: Thread) {
        if let Some(fault) = self.by_thread.get_mut(&thread)
            && let LookUp::InProgress { since } = fault.look_up
        {
            fault.look_up = LookUp::Done { since, is_compared: false };
        }
    }

    /// Processes a read of the invalidation sequence by a thread that holds a lock.
    pub(super) fn compare_sequence(&mut self, thread: Thread) {
        if let Some(fault) = self.by_thread.get_mut(&thread)
            && let LookUp::Done { is_compared, .. } = &mut fault.look_up
        {
            *is_compared = true;
        }
    }

    /// Processes a change of the invalidation sequence of the guests whose lock the CPU holds.
    pub(super) fn change_sequence(
        &mut self,
        Step { cause, event, .. }: Step,
        guests: &BTreeMap<usize, Guest>,
    ) {
        let holders = guests.values().filter(|guest| guest.holds_lock(cause.cpu));
        self.sequence_changed_at.extend(holders.map(|guest| (guest.number, event)));
    }

    /// Processes an entry that a thread has changed in the table of a guest.
    pub(super) fn make_entry(
        &mut self,
        thread: Thread,
        guest: &mut Guest,
        made: &MadeEntry,
        logged: &LoggedMemory,
    ) {
        let MadeEntry { entry, level, old, broken, new, store } = *made;
        let Some(fault) = self.by_thread.get_mut(&thread) else { return };
        if matches!(fault.look_up, LookUp::InProgress { .. }) {
            return;
        }
        let Some((ipa, size)) = guest.checker.range_of(entry) else { return };
        let leaves = match child(new, level) {
            Some(table) if child(old, level).is_none() => guest.checker.leaves_of(table),
            None if new.is_leaf(level) => Vec::from([(EntryPosition { entry, level, ipa }, new)]),
            _ => return,
        };
        let (number, granule) = (guest.number, guest.checker.granule());
        let is_changed = old.is_leaf(level) && new.is_leaf(level);
        if is_changed && !fault.since_entry.contain(entry, granule) {
            fault.changed.push(MadeLeaf { guest: number, ipa, size, store });
        }
        let before = Some(old).filter(|old| old.is_leaf(level)).or(broken);
        let changed_at = self.sequence_changed_at.get(&number).copied();
        for (position, leaf) in leaves {
            let size = size.min(position.level.span(granule));
            let made = MadeLeaf { guest: number, ipa: position.ipa, size, store };
            let was_writable = before.is_some_and(|leaf| leaf.attributes().write);
            if leaf.attributes().write && !was_writable {
                let log = guest.lock.and_then(|lock| logged.of_guest(lock));
                let is_logged = log.map(|log| log.first_in(made.ipa, made.size).is_some());
                if is_logged.unwrap_or(true) {
                    fault.writable.push(made);
                }
                if is_logged == Some(true) {
                    check_size_under_logging(guest, &made);
                }
            }
            // Memory that stays mapped needs no look-up.
            if before.is_none()
                && let Some(reason) = fault.stale_look_up(changed_at, self.reads_sequence)
            {
                let detail = format!("{}: {reason}", guest_address(made.ipa));
                guest.checker.report(Rule::StaleLookUp, detail);
            }
        }
    }

    /// Records that a CPU has entered a guest.
    pub(super) fn enter_guest(&mut self, cpu: u8) {
        self.since_entry.insert(cpu, Changes::default());
    }

    /// Records that an entry has changed.
    pub(super) fn age_by_entry(&mut self, entry: EntryAddress) {
        self.changes().for_each(|changes| changes.entries.extend([entry]));
    }

    /// Records that a table has been linked.
    pub(super) fn age_by_table(&mut self, table: TableAddress) {
        self.changes().for_each(|changes| changes.linked_tables.extend([table]));
    }

    /// Forgets a guest with these tables.
    pub(super) fn forget_guest(
        &mut self,
        number: usize,
        tables: &[TableAddress],
        granule: Granule,
    ) {
        self.sequence_changed_at.remove(&number);
        self.changes().for_each(|changes| changes.forget(tables, granule));
    }

    /// Returns the changes of the faults in progress, and of the CPUs since they began to run a guest.
    fn changes(&mut self) -> impl Iterator<Item = &mut Changes> {
        let faults = self.by_thread.values_mut().map(|fault| &mut fault.since_entry);
        faults.chain(self.since_entry.values_mut())
    }
}

/// Checks that only a page becomes writable while dirty pages are logged.
fn check_size_under_logging(guest: &mut Guest, leaf: &MadeLeaf) {
    let MadeLeaf { ipa, size, .. } = *leaf;
    if size > guest.checker.granule().size() {
        let detail =
            format!("{}: {size:#x} bytes become writable under logging", guest_address(ipa));
        guest.checker.report(Rule::NotMarkedDirty, detail);
    }
}
