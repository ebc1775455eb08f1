// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rules of the lock, of the engine's notes, and of the end of an operation or walk.

use alloc::{format, vec::Vec};

use crate::{
    check::{
        checker::{Checker, CpuState, HeldLock},
        rule::Rule,
        stale_entry::{Change, StaleEntry},
    },
    operations::Note,
};

impl Checker {
    pub(in crate::check) fn note(&mut self, cpu: usize, note: Note) {
        match note {
            Note::Lock { exclusive } => self.lock(cpu, exclusive),
            Note::Unlock => self.unlock(cpu),
            Note::TopUp => {
                if self.cpus[cpu].lock.is_some() {
                    self.report(Rule::SleepUnderLock, "the memcache is topped up");
                }
            }
            Note::Empty => self.report(Rule::EmptyMemcache, "a table is missing"),
            Note::MarkDirty { ipa, size } => {
                self.marked.add(ipa, size);
                self.unmarked.remove(ipa, size);
            }
            Note::LookUp => self.cpus[cpu].looked_up = Some(self.sequence),
            Note::Sequence => self.sequence += 1,
        }
    }

    fn lock(&mut self, cpu: usize, is_exclusive: bool) {
        let excludes = |other: &CpuState| {
            let lock = other.lock;
            lock.is_some_and(|lock| lock.is_exclusive || is_exclusive)
        };
        if self.cpus[cpu].lock.is_some() || self.cpus.iter().any(excludes) {
            self.report(Rule::LockDiscipline, "taken while it is held");
        }
        let vmid = self.cpus[cpu].vmid;
        self.cpus[cpu].lock = Some(HeldLock { is_exclusive, vmid });
    }

    /// Ends an operation, which must have completed everything that it began.
    fn unlock(&mut self, cpu: usize) {
        let Some(lock) = self.cpus[cpu].lock.take() else {
            return self.report(Rule::LockDiscipline, "released while it is not held");
        };
        let vmid = self.cpus[cpu].vmid;
        if vmid != lock.vmid || self.cpus[cpu].needs_isb {
            self.report(Rule::VmidNotRestored, format!("VMID {} at the end", vmid.0));
        }
        self.cpus[cpu].looked_up = None;
        self.cpus[cpu].released = self.now;
        self.check_maintenance_complete(cpu);
        self.check_end_of_walk(cpu);
        if lock.is_exclusive {
            self.check_tables();
        }
        // With a shared lock, others may be between break and make.
        if self.cpus.iter().all(|cpu| cpu.lock.is_none()) {
            self.tables.broken.clear();
            for (at, size) in self.caches.end_operation() {
                if !self.setup.features.fwb {
                    self.report(Rule::ReturnedUnclean, format!("{at:#x}, {size:#x} bytes"));
                }
            }
        }
    }

    fn check_tables(&mut self) {
        for (ipa, entry) in self.tables.uneven_runs() {
            self.report(Rule::ContiguousRun, format!("{ipa:#x}: {entry:?}"));
        }
        for (table, count, valid) in self.tables.take_miscounted() {
            let table = table.0;
            let detail = format!("table {table:#x}: count {count}, {valid} valid entries");
            self.report(Rule::WrongReferences, detail);
        }
    }

    /// Checks the end of a walk: the CPU has unlocked its entries and completed the invalidation of
    /// entries that it removed or restricted. Each violation is reported once.
    pub(in crate::check) fn check_end_of_walk(&mut self, cpu: usize) {
        for entry in self.tables.take_locked_by(cpu) {
            let detail = format!("entry {:#x} is left locked", entry.0);
            self.report(Rule::LockedEntry, detail);
        }
        let is_left =
            |stale: &mut StaleEntry| stale.by == cpu && stale.entry.change != Change::Relaxed;
        let left: Vec<_> = self.tlbs.stale.extract_if(.., is_left).collect();
        for stale in left {
            let entry = &stale.entry;
            let rule = if stale.only_combined() {
                Rule::CombinedNotInvalidated
            } else if entry.table.is_some() || entry.below_table {
                Rule::TableRemovalSpan
            } else {
                Rule::ReductionNotComplete
            };
            let (ipa, size, was) = (entry.place.ipa, entry.size, entry.was);
            self.report(rule, format!("{ipa:#x}, {size:#x} bytes: {was:?} may be held"));
        }
    }
}
