// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rules for the lock, the engine's notes, tables, TLB invalidations, CMOs, VMID switches, and the
//! end of an operation or walk.

use alloc::format;

use crate::{
    address::{Ipa, PhysAddr, TableAddress},
    check::{
        checker::{Checker, CpuModel, HeldLock},
        entry::Invalidation,
        event::{guest_address, physical_address},
        rule::Rule,
        stale_entry::{ChangedEntry, EntryChange, StaleEntry},
    },
    operations::{Note, Tlbi, Vmid},
};

impl Checker {
    pub(crate) fn process_note(&mut self, cpu: usize, note: Note) {
        match note {
            Note::Lock { is_exclusive } => self.lock(cpu, is_exclusive),
            Note::Unlock => self.unlock(cpu),
            Note::TopUp => {
                if self.cpus[cpu].lock.is_some() {
                    self.report(Rule::SleepUnderLock, "the memcache is topped up");
                }
            }
            Note::EmptyMemcache => self.report(Rule::EmptyMemcache, "a map needs a table"),
            Note::MarkDirty { ipa, size } => {
                self.marked_ranges.add(ipa, size);
                self.writable_unmarked_ranges.remove(ipa, size);
            }
            Note::LookUp => self.cpus[cpu].lookup_sequence = Some(self.invalidation_sequence),
            Note::InvalidationSequence => self.invalidation_sequence += 1,
        }
    }

    fn lock(&mut self, cpu: usize, is_exclusive: bool) {
        let excludes = |other: &CpuModel| {
            let lock = other.lock;
            lock.is_some_and(|lock| lock.is_exclusive || is_exclusive)
        };
        if self.cpus[cpu].lock.is_some() || self.cpus.iter().any(excludes) {
            self.report(Rule::LockDiscipline, "lock taken while it is held");
        }
        let vmid = self.cpus[cpu].vmid;
        self.cpus[cpu].lock = Some(HeldLock { is_exclusive, vmid });
    }

    /// Ends an operation, which must have completed all its invalidations and CMOs.
    fn unlock(&mut self, cpu: usize) {
        let Some(lock) = self.cpus[cpu].lock.take() else {
            return self.report(Rule::LockDiscipline, "lock released while it is not held");
        };
        let vmid = self.cpus[cpu].vmid;
        if vmid != lock.vmid || self.cpus[cpu].needs_isb {
            let detail = format!("VMID {} at the unlock", vmid.0);
            self.report_caused(Rule::VmidNotRestored, detail, self.cpus[cpu].switched_by);
        }
        self.cpus[cpu].lookup_sequence = None;
        self.cpus[cpu].lock_released_at = self.event_index;
        self.check_cmos_complete(cpu);
        self.check_end_of_walk(cpu);
        if lock.is_exclusive {
            self.check_tables();
        }
        // While another CPU holds the lock shared, it may be between break and make.
        if self.cpus.iter().all(|cpu| cpu.lock.is_none()) {
            self.tables.broken_leaves.clear();
            for (at, size) in self.caches.end_operation() {
                if !self.setup.features.fwb {
                    self.report(
                        Rule::ReturnedUnclean,
                        format!("{}, {size:#x} bytes", physical_address(at)),
                    );
                }
            }
        }
    }

    fn check_tables(&mut self) {
        for (ipa, entry) in self.tables.inconsistent_runs() {
            self.report(Rule::ContiguousRun, format!("{}: {entry:?}", guest_address(ipa)));
        }
        for (table, count, valid) in self.tables.take_miscounted() {
            let table = table.0;
            let detail = format!("table {table:#x}: count {count}, {valid} valid entries");
            self.report(Rule::WrongReferences, detail);
        }
    }

    /// Checks that a CPU ends a walk without locked entries, and that it has completed the
    /// invalidation of the entries that it removed or restricted. Reports each violation once.
    pub(crate) fn check_end_of_walk(&mut self, cpu: usize) {
        for (entry, cause) in self.tables.take_locked_by(cpu) {
            let detail = format!("entry {:#x} is left locked", entry.0);
            self.report_caused(Rule::LockedEntry, detail, Some(cause));
        }
        let defers = self.defers_restrictions;
        self.report_incomplete(|stale| {
            stale.is_changed_by(cpu)
                && match stale.entry.change {
                    EntryChange::Removed => true,
                    EntryChange::Restricted => !defers,
                    EntryChange::Relaxed => false,
                }
        });
    }

    /// Reports the selected entries that a CPU may still hold, and removes them.
    pub(in crate::check) fn report_incomplete(&mut self, selects: impl Fn(&StaleEntry) -> bool) {
        for stale in self.tlbs.take(selects) {
            let entry = &stale.entry;
            let rule = if stale.holds_only_combined() {
                Rule::CombinedNotInvalidated
            } else if entry.table.is_some() || entry.is_below_unlinked_table {
                Rule::TableRemovalSpan
            } else {
                Rule::ReductionNotComplete
            };
            let (ipa, size, was) = (entry.position.ipa, entry.size, entry.old);
            let detail = format!("{}, {size:#x} bytes: {was:?} may be held", guest_address(ipa));
            self.report_caused(rule, detail, Some(entry.cause));
        }
    }

    pub(crate) fn allocate(&mut self, cpu: usize, table: TableAddress) {
        if self.cpus[cpu].lock.is_some() {
            self.report(Rule::SleepUnderLock, format!("table {:#x}", table.0));
        }
        self.tables.allocate(cpu, table);
    }

    pub(crate) fn free(&mut self, table: TableAddress) {
        let detail = format!("table {:#x}", table.0);
        let entries = table.0..table.0 + self.setup.geometry.granule().size();
        // A leaf that was removed by itself keeps no CPU in the table: only the translation is held.
        let may_walk = |stale: &StaleEntry| {
            let entry = &stale.entry;
            entry.table == Some(table)
                || (entry.is_below_unlinked_table && entries.contains(&entry.position.entry.0))
        };
        if self.tlbs.removed_or_restricted().any(may_walk) || self.tables.is_linked(table) {
            self.report(Rule::FreedWhileWalked, detail.as_str());
        }
        let unlinked_at = self.tables.unlinked_at(table);
        // A walk of the freeing CPU counts too: the grace period does not end before that walk
        // ends.
        let may_be_inside = |cpu: &CpuModel| unlinked_at.is_some_and(|at| cpu.walks_since(at));
        if self.cpus.iter().any(may_be_inside) {
            self.report(Rule::FreedInGracePeriod, detail.as_str());
        }
        match self.tables.free(table) {
            None => self.report(Rule::TableNotOwned, format!("{detail} is freed")),
            Some(count) if count != 1 && unlinked_at.is_some() => {
                let detail = format!("{detail} is freed with count {count}");
                self.report(Rule::WrongReferences, detail);
            }
            Some(_) => {}
        }
    }

    pub(crate) fn switch_vmid(&mut self, cpu: usize, vmid: Vmid) {
        if self.cpus[cpu].needs_isb {
            let cause = self.cpus[cpu].switched_by;
            let detail = "VMID switched twice without an ISB";
            self.report_caused(Rule::VmidNotRestored, detail, cause);
        }
        self.cpus[cpu].switched_by = Some(self.current());
        self.cpus[cpu].vmid = vmid;
        self.cpus[cpu].needs_isb = true;
    }

    /// Checks that one instruction encodes a range.
    pub(in crate::check) fn check_encodable(&mut self, kind: Tlbi) {
        if let Tlbi::Range { size, .. } = kind
            && !Tlbi::is_encodable(self.setup.geometry.granule(), size)
        {
            self.report(Rule::RangeNotEncodable, format!("{size:#x} bytes"));
        }
    }

    pub(in crate::check) fn invalidate(&mut self, cpu: usize, kind: Invalidation<Ipa>) {
        let vmid = self.cpus[cpu].vmid;
        if self.cpus[cpu].needs_isb || vmid != self.setup.vmid {
            let detail = format!("VMID {}: {kind:?}", vmid.0);
            return self.report(Rule::VmidNotCurrent, detail);
        }
        self.invalidate_current(cpu, kind);
    }

    /// Processes an invalidation that applies to the guest's VMID.
    pub(in crate::check) fn invalidate_current(&mut self, cpu: usize, kind: Invalidation<Ipa>) {
        if self.invalidate_entries(cpu, kind) {
            self.report(Rule::WrongTtl, format!("{kind:?}"));
        }
    }

    /// Invalidates stale entries; returns whether the TTL hint is wrong for every leaf.
    pub(in crate::check) fn invalidate_entries(
        &mut self,
        cpu: usize,
        kind: Invalidation<Ipa>,
    ) -> bool {
        // A CPU may fetch a whole contiguous run again while one of its entries remains. A TLB may
        // also cache its pages separately, so each page needs its own invalidation.
        let tables = &mut self.tables;
        let run_remains = |entry: &ChangedEntry| {
            entry.change == EntryChange::Removed
                && entry.old.is_contiguous()
                && tables.run_remains(entry.position.entry, entry.position.level)
        };
        let (effect, is_wrong_level) = self.tlbs.invalidate(cpu, kind, run_remains);
        self.effect = effect;
        is_wrong_level
    }

    pub(crate) fn clean_invalidate(&mut self, phys: PhysAddr, size: u64) {
        let detail = format!("{}, {size:#x} bytes", physical_address(phys));
        let overlaps_device = self
            .memslots
            .values()
            .any(|slot| slot.is_device && slot.phys < phys + size && phys < slot.phys + slot.size);
        if overlaps_device {
            self.report(Rule::DeviceCmo, detail.as_str());
        }
        if self.setup.features.fwb {
            self.report(Rule::NeedlessCmo, detail);
        }
        let (cause, tlbs) = (self.current(), &self.tlbs);
        let is_reachable =
            |phys, size| tlbs.removed_or_restricted().any(|stale| stale.maps_memory(phys, size));
        self.effect.exists = self.caches.clean_invalidate(cause, phys, size, is_reachable);
    }

    /// Checks that a CPU has completed its CMOs: before it breaks an entry, which keeps the
    /// break-before-make window short, and before it releases the lock.
    pub(crate) fn check_cmos_complete(&mut self, cpu: usize) {
        if let Some(cmo) = self.caches.pending_cmo(cpu) {
            self.report_caused(Rule::UnfinishedCmo, "a DSB is missing", Some(cmo));
        }
    }
}
