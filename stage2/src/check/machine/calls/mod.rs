// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Calls of the hypervisor's functions, which have [`Role`]s for the checker.
//!
//! | roles | state | rules |
//! |---|---|---|
//! | `Abort`, `LookUp`, `ReadSequence`, `ChangeSequence`, `MarkDirty` | `faults` | `not-marked-dirty`, `stale-look-up`, `no-progress` |
//! | `PrepareMemory`, `CommitMemory` | `logging` | `not-marked-dirty`, for blocks |
//! | `Allocate`, `GetTable`, `PutTable` and their variants | `references` | `wrong-references` |
//! | `Call` | threads in such calls | restrictions may be incomplete until all calls have returned |
//! | `FreePage` | none | `freed-while-walked`, `freed-in-grace-period` |

mod faults;
mod logging;
mod references;

use alloc::collections::{BTreeMap, BTreeSet};

use self::{faults::Faults, logging::LoggedMemory, references::References};
use super::{
    guest::Guest,
    hypervisor::{Hypervisor, Role},
    pages::Pages,
    step::{MadeEntry, Step, Thread},
};
use crate::{
    address::{EntryAddress, PhysAddr, TableAddress},
    check::Cause,
    geometry::Granule,
};

/// The state of calls that have not returned, and the effects of those that have.
#[derive(Debug)]
pub(super) struct Calls {
    /// Threads in calls in which the hypervisor may delay the invalidation of restricted entries.
    by_user_space: BTreeSet<Thread>,
    /// Calls whose end is missing, and ends without a call.
    unbalanced: u64,
    faults: Faults,
    logged: LoggedMemory,
    references: References,
    granule: Granule,
}

impl Calls {
    pub(super) fn new(hypervisor: &Hypervisor) -> Self {
        Self {
            by_user_space: BTreeSet::new(),
            unbalanced: 0,
            faults: Faults::new(hypervisor.has(Role::ReadSequence)),
            logged: LoggedMemory::default(),
            references: References::default(),
            granule: hypervisor.granule,
        }
    }

    /// Sets the size of a page and of a table.
    pub(super) const fn set_granule(&mut self, granule: Granule) {
        self.granule = granule;
    }

    /// Returns the number of calls whose end is missing, and of ends without a call.
    pub(super) const fn unbalanced(&self) -> u64 {
        self.unbalanced
    }

    /// Processes the entry of a function with these arguments, on a CPU that holds a lock or not.
    pub(super) fn enter(
        &mut self,
        step: Step,
        holds_lock: bool,
        role: Role,
        arguments: [u64; 4],
        guests: &mut BTreeMap<usize, Guest>,
    ) {
        let Step { cause, thread, .. } = step;
        match role {
            // Both are not recursive: an earlier call of the thread has ended.
            Role::Call => self.unbalanced += u64::from(!self.by_user_space.insert(thread)),
            Role::Abort => self.unbalanced += u64::from(self.faults.begin(step)),
            Role::MarkDirty { argument } => {
                let page = arguments.get(usize::from(argument)).copied().unwrap_or(0);
                self.faults.mark_dirty(thread, page);
            }
            Role::LookUp => self.faults.begin_look_up(step),
            Role::ReadSequence if holds_lock => self.faults.compare_sequence(thread),
            Role::ReadSequence => {}
            Role::ChangeSequence => self.faults.change_sequence(step, guests),
            Role::Allocate { has_size } => {
                let size = if has_size { arguments[0] } else { self.granule.size() };
                self.references.begin_allocation(thread, size);
            }
            Role::GetTable => self.change_references(cause, arguments[0], 1, guests),
            Role::PutTable => self.change_references(cause, arguments[0], -1, guests),
            Role::GetTableReferences | Role::PutTableReferences => {
                // The number is an unsigned int, whose register has an unspecified upper half.
                let number = (arguments[1] & u64::from(u32::MAX)).cast_signed();
                let change = if role == Role::GetTableReferences { number } else { -number };
                self.change_references(cause, arguments[0], change, guests);
            }
            // The kernel's own tables are checked apart.
            Role::ChangeKernel => {}
            Role::FreePage => free_table(TableAddress(arguments[0]), guests),
            Role::PrepareMemory => self.logged.begin_change(arguments, self.granule),
            Role::CommitMemory => self.logged.end_change(arguments, self.granule),
        }
    }

    /// Processes the return from a function.
    pub(super) fn leave(
        &mut self,
        step: Step,
        role: Role,
        result: u64,
        guests: &mut BTreeMap<usize, Guest>,
    ) {
        let thread = step.thread;
        match role {
            Role::Call => {
                self.unbalanced += u64::from(!self.by_user_space.remove(&thread));
                if self.by_user_space.is_empty() {
                    guests.values_mut().for_each(|guest| guest.checker.end_call());
                }
            }
            Role::Abort => self.unbalanced += u64::from(!self.faults.end(step, guests)),
            Role::LookUp => self.faults.end_look_up(thread),
            Role::Allocate { .. } if result != 0 => {
                self.references.end_allocation(thread, PhysAddr(result), self.granule);
            }
            _ => {}
        }
    }

    /// Changes the references to the table that contains a physical address.
    fn change_references(
        &mut self,
        call: Cause,
        address: u64,
        change: i64,
        guests: &mut BTreeMap<usize, Guest>,
    ) {
        let table = self.granule.table_containing(EntryAddress(address));
        if self.references.change(call, table, change) {
            free_table(table, guests);
        }
    }

    /// Returns whether a thread handles an abort.
    pub(super) fn handles_abort(&self, thread: Thread) -> bool {
        self.faults.is_active(thread)
    }

    /// Records that a CPU has entered a guest.
    pub(super) fn enter_guest(&mut self, cpu: u8) {
        self.faults.enter_guest(cpu);
    }

    /// Records that a store has linked a table.
    pub(super) fn link_table(&mut self, store: Cause, table: TableAddress) {
        self.references.record_store(store, table);
        self.faults.age_by_table(table);
    }

    /// Processes an entry that a thread has changed in the table of a guest.
    pub(super) fn make_entry(&mut self, thread: Thread, guest: &mut Guest, made: &MadeEntry) {
        self.references.record_store(made.store, self.granule.table_containing(made.entry));
        self.faults.make_entry(thread, guest, made, &self.logged);
        self.faults.age_by_entry(made.entry);
    }

    /// Compares the references to changed tables of a guest with their entries. No CPU holds the lock.
    pub(super) fn compare_references(&mut self, guest: &mut Guest, pages: &Pages) {
        self.references.compare(guest, pages);
    }

    /// Forgets the memory of guests with this lock.
    pub(super) fn forget_memory(&mut self, lock: PhysAddr) {
        self.logged.forget(lock);
    }

    /// Forgets a guest with these tables.
    pub(super) fn forget_guest(&mut self, number: usize, tables: &[TableAddress]) {
        self.references.forget(tables);
        self.faults.forget_guest(number, tables, self.granule);
    }
}

/// Frees a table of any guest.
fn free_table(table: TableAddress, guests: &mut BTreeMap<usize, Guest>) {
    guests.values_mut().for_each(|guest| guest.checker.free_known_table(table));
}
