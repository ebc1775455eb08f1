// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What guests and the host see: the log, memory that returns, a vCPU that goes on, and an access.

use alloc::{collections::BTreeSet, format, vec::Vec};

use super::{
    Checker, Rule,
    tlb::{Change, StaleEntry},
};
use crate::{
    descriptor::{Descriptor, MemoryType},
    engine::Access,
    geometry::Level,
};

/// What an access may see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// What was last written there.
    RightData,
    /// What the host had not cleaned, or an older instruction.
    StaleData,
    /// What an entry leads to that is no longer there, or permits it no longer.
    StaleTranslation,
    /// Two entries for one address: a TLB conflict abort.
    ConflictAbort,
    /// A fault to the hypervisor.
    Fault,
}

/// Everything that an access may see; the architecture chooses.
pub type Outcomes = BTreeSet<Outcome>;

impl Checker {
    pub(super) fn check_logged(&mut self, ipa: u64, size: u64, write: bool) {
        if !write {
            return;
        }
        let page = self.setup.geometry.granule().size();
        for (from, to) in self.logged.overlaps(ipa, size) {
            if size > page {
                self.report(
                    Rule::NotMarkedDirty,
                    format!("{ipa:#x}: writable, {size:#x} bytes"),
                );
            }
            self.unmarked.add(from, to - from);
            for (start, end) in self.marked.overlaps(from, to - from) {
                self.unmarked.remove(start, end - start);
            }
        }
    }

    pub(super) fn logging(&mut self, ipa: u64, size: u64, on: bool) {
        self.logged.remove(ipa, size);
        self.marked.clear();
        self.unmarked.remove(ipa, size);
        if on {
            self.logged.add(ipa, size);
            self.check_protected(ipa, size);
        }
    }

    pub(super) fn read_log(&mut self, ipa: u64, size: u64) {
        if let Some(at) = self.unmarked.first_in(ipa, size) {
            self.report(Rule::NotMarkedDirty, format!("{at:#x} is writable"));
        }
        self.check_protected(ipa, size);
        self.marked.remove(ipa, size);
    }

    /// Nobody can write unseen from here on.
    fn check_protected(&mut self, ipa: u64, size: u64) {
        if let Some(at) = self.tables.writable_in(&self.setup, ipa, size) {
            self.report(Rule::LogReadTooEarly, format!("{at:#x} is writable"));
        }
        let held = self.tlbs.old.iter().find(|old| {
            old.overlaps(ipa, size) && old.table.is_none() && old.was.attributes().write
        });
        if let Some(at) = held.map(|old| old.ipa) {
            self.report(
                Rule::LogReadTooEarly,
                format!("{at:#x} may still be written"),
            );
        }
    }

    pub(super) fn taken_back(&mut self, ipa: u64, size: u64) {
        let Some((phys, bytes, device)) = self.slots.remove(&ipa) else {
            return self.report(Rule::OutsideSlot, format!("{ipa:#x} is not the guest's"));
        };
        if bytes != size {
            self.report(
                Rule::OutsideSlot,
                format!("{ipa:#x}: {bytes:#x} bytes, not {size:#x}"),
            );
        }
        let held = self.tlbs.old.iter().any(|old| {
            let at = old.was.address().0;
            old.table.is_none()
                && old.change == Change::Removed
                && at < phys + size
                && phys < at + old.size
        });
        if held || self.caches.is_mapped(phys, size) {
            self.report(Rule::ReusedWhileReachable, format!("{phys:#x}"));
        }
        if !device
            && !self.setup.features.fwb
            && let Some(at) = self.caches.touched(phys, size)
        {
            self.report(Rule::ReturnedUnclean, format!("{at:#x}"));
        }
    }

    pub(super) fn resumed(&mut self, cpu: usize, ipa: u64, access: Access, level: Level) {
        // Whoever takes an entry away that was widened before has every CPU lose it.
        let on_its_way = |widened: &StaleEntry| {
            self.tlbs.old.iter().any(|old| {
                old.entry == widened.entry
                    && old.change == Change::Removed
                    && old.since > widened.since
            })
        };
        let stuck = self.tlbs.old.iter().any(|old| {
            old.change == Change::Widened
                && !on_its_way(old)
                && old.level == level
                // What changed after the fault was handled is the next fault's.
                && old.since < self.cpus[cpu].released
                && old.held_by(cpu)
                && old.overlaps(ipa, 1)
                && !old.was.attributes().permit(access)
        });
        if stuck {
            self.report(
                Rule::NoProgress,
                format!("{ipa:#x}: {access:?} faults for ever"),
            );
        }
    }

    /// What an access of a CPU may see now. With `uncached` the guest goes around the caches.
    pub fn access(&self, cpu: usize, ipa: u64, access: Access, uncached: bool) -> Outcomes {
        let mut outcomes = Outcomes::new();
        let now = self.tables.find(&self.setup, ipa);
        let mut candidates: Vec<(Descriptor, u64, u64, bool)> = Vec::new();
        if let Some((entry, level)) = now
            && entry.is_leaf(level)
        {
            let span = self.setup.geometry.span(level);
            candidates.push((entry, ipa & !(span - 1), span, true));
        } else {
            outcomes.insert(Outcome::Fault);
        }
        for old in &self.tlbs.old {
            if old.table.is_none()
                && cpu < self.cpus.len()
                && old.held_by(cpu)
                && old.overlaps(ipa, 1)
            {
                candidates.push((old.was, old.ipa, old.size, false));
            }
        }
        let sizes: BTreeSet<_> = candidates.iter().map(|(_, _, size, _)| *size).collect();
        if sizes.len() > 1 {
            outcomes.insert(Outcome::ConflictAbort);
        }
        let right = candidates
            .first()
            .filter(|c| c.3)
            .map(|c| c.0.address() + (ipa - c.1));
        for (leaf, base, _, current) in candidates {
            let phys = leaf.address() + (ipa - base);
            if !leaf.attributes().permit(access) || !leaf.attributes().accessed {
                outcomes.insert(Outcome::Fault);
            } else if !current && (Some(phys) != right || access == Access::Write) {
                outcomes.insert(Outcome::StaleTranslation);
            } else {
                outcomes.insert(self.data(phys.0, leaf, access, uncached));
            }
        }
        outcomes
    }

    fn data(&self, phys: u64, leaf: Descriptor, access: Access, uncached: bool) -> Outcome {
        let around =
            uncached && !self.setup.features.fwb || leaf.attributes().memory != MemoryType::Normal;
        let unclean = around && self.caches.dirty(phys, 1).is_some();
        let stale = access == Access::Fetch
            && !self.setup.features.dic
            && self.caches.stale(phys, 1).is_some();
        if unclean || stale {
            Outcome::StaleData
        } else {
            Outcome::RightData
        }
    }
}
