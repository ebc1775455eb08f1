// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rules for the host: adding and removing memory, the dirty bitmap, resuming a vCPU.

use alloc::format;

use crate::{
    address::{Ipa, PhysAddr},
    check::{
        checker::{Checker, MemslotModel},
        event::{Cause, guest_address, physical_address},
        rule::Rule,
        stale_entry::{EntryChange, StaleEntry},
    },
    engine::Access,
    geometry::Level,
};

impl Checker {
    pub(crate) fn add_memory(&mut self, ipa: Ipa, phys: PhysAddr, size: u64, is_device: bool) {
        let slot = MemslotModel { phys, size, is_device };
        self.memslots.insert(ipa, slot);
        if !is_device {
            self.caches.add_memory(phys, size);
        }
    }

    pub(crate) fn remove_memory(&mut self, ipa: Ipa, size: u64) {
        let Some(slot) = self.memslots.remove(&ipa) else {
            let detail = format!("no memslot at {}", guest_address(ipa));
            return self.report(Rule::OutsideSlot, detail);
        };
        if slot.size != size {
            let detail = format!("{}: {:#x} bytes, not {size:#x}", guest_address(ipa), slot.size);
            self.report(Rule::OutsideSlot, detail);
        }
        let is_stale = |stale: &StaleEntry| stale.maps_memory(slot.phys, size);
        let is_held = self.tlbs.removed_or_restricted().any(is_stale);
        if is_held || self.caches.is_mapped(slot.phys, size) {
            self.report(Rule::ReusedWhileReachable, physical_address(slot.phys));
        }
        if !slot.is_device
            && !self.setup.features.fwb
            && let Some(at) = self.caches.first_exposed_address(slot.phys, size)
        {
            self.report(Rule::ReturnedUnclean, physical_address(at));
        }
    }

    /// Adds a writable leaf to the ranges that must be marked dirty.
    pub(crate) fn note_writable(&mut self, ipa: Ipa, size: u64) {
        let page = self.setup.geometry.granule().size();
        for (at, len) in self.logged_ranges.overlaps(ipa, size) {
            if size > page {
                let detail = format!("{}: writable, {size:#x} bytes", guest_address(ipa));
                self.report(Rule::NotMarkedDirty, detail);
            }
            self.writable_unmarked_ranges.add(at, len);
            for (at, len) in self.marked_ranges.overlaps(at, len) {
                self.writable_unmarked_ranges.remove(at, len);
            }
        }
    }

    pub(crate) fn set_logging(&mut self, ipa: Ipa, size: u64, on: bool) {
        self.logged_ranges.remove(ipa, size);
        self.marked_ranges.remove(ipa, size);
        self.writable_unmarked_ranges.remove(ipa, size);
        if on {
            self.logged_ranges.add(ipa, size);
            self.check_write_protected(ipa, size);
        }
    }

    pub(crate) fn read_log(&mut self, ipa: Ipa, size: u64) {
        if let Some(at) = self.writable_unmarked_ranges.first_in(ipa, size) {
            self.report(Rule::NotMarkedDirty, format!("{} is writable", guest_address(at)));
        }
        self.check_write_protected(ipa, size);
        self.marked_ranges.remove(ipa, size);
    }

    /// Checks that no CPU can write the range without a fault.
    fn check_write_protected(&mut self, ipa: Ipa, size: u64) {
        if let Some(at) = self.tables.first_writable_leaf(self.setup.root, ipa, size) {
            self.report(Rule::LogReadTooEarly, format!("{} is writable", guest_address(at)));
        }
        let is_writable = |stale: &&StaleEntry| {
            let entry = &stale.entry;
            entry.table.is_none() && entry.old.attributes().write
        };
        let held = self.tlbs.overlapping(ipa, size).find(is_writable);
        if let Some(at) = held.map(|stale| stale.entry.position.ipa) {
            let detail = format!("a TLB may hold {} writable", guest_address(at));
            self.report(Rule::LogReadTooEarly, detail);
        }
    }

    pub(crate) fn resume(&mut self, cpu: usize, ipa: Ipa, access: Access, level: Level) {
        let refaults = |stale: &StaleEntry| {
            let entry = &stale.entry;
            entry.change == EntryChange::Relaxed
                && entry.position.level == level
                // The next fault handles a later change.
                && stale.changed_at < self.cpus[cpu].lock_released_at
                && stale.is_held_by(cpu)
                && !entry.old.attributes().permits(access)
                && !self.tlbs.is_removed_later(stale)
        };
        if self.tlbs.overlapping(ipa, 1).any(refaults) {
            let detail = format!("{}: {access:?} may fault for ever", guest_address(ipa));
            self.report(Rule::NoProgress, detail);
        }
    }

    /// Checks that a fault that has relaxed the leaf at this address by a store, and resumes the guest
    /// on CPU `cpu`, has invalidated the old leaf. If its thread has changed the CPU after the
    /// invalidation, the guest may fault once more, and the handler invalidates there.
    pub(in crate::check) fn check_progress(&mut self, store: Cause, cpu: usize, ipa: Ipa) {
        let changed_by = usize::from(store.cpu);
        let refaults = |stale: &StaleEntry| {
            stale.entry.change == EntryChange::Relaxed
                && stale.is_changed_by(changed_by)
                && stale.entry.position.ipa == ipa
                && stale.is_held_by(changed_by)
                && stale.is_held_by(cpu)
                && !self.tlbs.is_removed_later(stale)
        };
        if self.tlbs.overlapping(ipa, 1).any(refaults) {
            let detail = format!("{}: the same access may fault for ever", guest_address(ipa));
            self.report_caused(Rule::NoProgress, detail, Some(store));
        }
    }
}
