// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What each store to a table means, and which rules it must keep.

use alloc::{format, vec::Vec};

use super::{
    Checker, How, Rule,
    tlb::{Change, Changed, StaleEntry},
};
use crate::{
    address::EntryAddress,
    descriptor::{Descriptor, EntryKind, MemoryType},
    geometry::Level,
};

impl Checker {
    pub(super) fn stored(
        &mut self,
        cpu: usize,
        entry: EntryAddress,
        (old, new): (Descriptor, Descriptor),
        how: How,
    ) {
        self.check_lock(cpu, entry, (old, new), how);
        let Some((at, table)) = self.tables.holding(entry) else {
            return self.report(
                Rule::TableNotOwned,
                format!("entry {:#x} is written", entry.0),
            );
        };
        let index = (entry.0 - at) / 8;
        if new == Descriptor::EMPTY {
            table.entries.remove(&index);
        } else {
            table.entries.insert(index, new);
        }
        if how == How::Plain {
            table.writer = Some(cpu);
        }
        let (linked, level, base) = (table.linked, table.level, table.ipa);
        self.tables.changed.insert(at);
        self.tlbs.rewritten(cpu, entry);
        let (true, Some(level)) = (linked, level) else {
            return;
        };
        let ipa = base + index * self.setup.geometry.span(level);
        let place = Place { entry, level, ipa };
        match (old.is_valid(), new.is_valid()) {
            (true, true) => self.exchanged(cpu, &place, old, new, how),
            (true, false) => self.removed(cpu, &place, old),
            (false, true) => {
                self.check_remains(&place, new);
                self.made(cpu, &place, new, how);
            }
            (false, false) => {}
        }
    }

    fn check_lock(
        &mut self,
        cpu: usize,
        entry: EntryAddress,
        (old, new): (Descriptor, Descriptor),
        how: How,
    ) {
        let owner = self.tables.locked.get(&entry).copied();
        if old.is_locked() && owner != Some(cpu) {
            self.report(
                Rule::LockedEntry,
                format!("entry {:#x} is another CPU's", entry.0),
            );
        }
        if new.is_locked() {
            self.tables.locked.insert(entry, cpu);
        } else {
            self.tables.locked.remove(&entry);
        }
        let linked = self
            .tables
            .holding(entry)
            .is_some_and(|(_, table)| table.linked);
        match self.cpus[cpu].lock {
            Some((false, _)) if linked && how != How::Swap && !old.is_locked() => {
                self.report(Rule::SharedStore, format!("entry {:#x}", entry.0));
            }
            None if linked => {
                self.report(
                    Rule::LockDiscipline,
                    format!("entry {:#x} without the lock", entry.0),
                );
            }
            _ => {}
        }
    }

    /// Valid to valid.
    fn exchanged(&mut self, cpu: usize, place: &Place, old: Descriptor, new: Descriptor, how: How) {
        let level = place.level;
        match (old.kind(level), new.kind(level)) {
            (EntryKind::Table(a), EntryKind::Table(b)) if a == b => {}
            (EntryKind::Leaf(_), EntryKind::Leaf(_))
                if !old.with_nt(false).needs_break(new.with_nt(false)) =>
            {
                self.changed_in_place(cpu, place, old, new);
            }
            (was, is) => {
                self.check_exchange(place, old, new, was, is);
                self.removed(cpu, place, old);
                self.made(cpu, place, new, how);
            }
        }
    }

    fn check_exchange(
        &mut self,
        place: &Place,
        old: Descriptor,
        new: Descriptor,
        was: EntryKind,
        is: EntryKind,
    ) {
        let detail = format!("{:#x}: {old:?} → {new:?}", place.ipa);
        let bbm = self.setup.features.bbm;
        let (quiet, table, block) = match (was, is) {
            (EntryKind::Leaf(_), EntryKind::Table(table)) => (old.has_nt(), table, old),
            (EntryKind::Table(table), EntryKind::Leaf(_)) => (new.has_nt(), table, new),
            _ => return self.report(Rule::BreakBeforeMake, detail),
        };
        // Whatever the level: the same memory, of the same type.
        let parts = self.setup.geometry;
        let differs = place.level.down().is_some_and(|below| {
            let part = |index| block.part(below, index * parts.span(below));
            let entries = self.tables.all.get(&table.0).map(|table| &table.entries);
            entries.into_iter().flatten().any(|(index, entry)| {
                entry.is_valid() && entry.contiguous(false).needs_break(part(*index))
            })
        });
        if bbm == 0 || differs {
            self.report(Rule::BreakBeforeMake, detail);
        } else if bbm < 3 && !quiet {
            self.report(Rule::BlockSizeChange, detail);
        }
    }

    /// Permissions, access flag, software bits.
    fn changed_in_place(&mut self, cpu: usize, place: &Place, old: Descriptor, new: Descriptor) {
        let old_leaf = old;
        let (a, b) = (old.attributes(), new.attributes());
        let less = (a.read && !b.read)
            || (a.write && !b.write)
            || (a.execute && !b.execute)
            || (new.has_nt() && !old.has_nt());
        let more = (!a.read && b.read) || (!a.write && b.write) || (!a.execute && b.execute);
        for (is, change) in [(less, Change::Reduced), (more, Change::Widened)] {
            // No CPU holds an entry that has no access flag, or nT.
            if is && a.accessed && !old.has_nt() {
                self.hold(cpu, place, old, change, false);
            }
        }
        // Ageing leaves CPUs what they hold: a later reduction has to reach it.
        let known = |old: &StaleEntry| old.entry == place.entry && old.was == old_leaf;
        if a.accessed && !b.accessed && !self.tlbs.old.iter().any(known) {
            self.hold(cpu, place, old, Change::Widened, false);
        }
        if more {
            self.check_leaf(place, new, a.execute);
        }
    }

    fn hold(
        &mut self,
        cpu: usize,
        place: &Place,
        was: Descriptor,
        change: Change,
        below_table: bool,
    ) {
        let size = self.setup.geometry.span(place.level);
        let table = match was.kind(place.level) {
            EntryKind::Table(child) => Some(child),
            _ => None,
        };
        self.tlbs.changed(
            cpu,
            Changed {
                entry: place.entry,
                was,
                level: place.level,
                ipa: place.ipa,
                size,
                change,
                table,
                below_table,
            },
        );
    }

    /// Valid to invalid, or the old half of an exchange.
    fn removed(&mut self, cpu: usize, place: &Place, old: Descriptor) {
        self.check_finished(cpu);
        if !old.has_nt() || !old.is_leaf(place.level) {
            self.hold(cpu, place, old, Change::Removed, false);
        }
        match old.kind(place.level) {
            EntryKind::Leaf(phys) => {
                self.tables.broken.insert(place.entry, old);
                let size = self.setup.geometry.span(place.level);
                self.caches.unmap(phys.0, size);
                self.unmarked.remove(place.ipa, size);
            }
            EntryKind::Table(child) => self.unlinked(cpu, child.0),
            _ => {}
        }
    }

    fn unlinked(&mut self, cpu: usize, child: u64) {
        let (mut leaves, mut tables) = (Vec::new(), Vec::new());
        let geometry = self.setup.geometry;
        self.tables
            .leaves(child, &mut leaves, &mut tables, &|l| geometry.span(l));
        for (entry, leaf, level, ipa) in leaves {
            self.hold(
                cpu,
                &Place { entry, level, ipa },
                leaf,
                Change::Removed,
                true,
            );
            self.caches.unmap(leaf.address().0, geometry.span(level));
            self.unmarked.remove(ipa, geometry.span(level));
        }
        for at in tables {
            if let Some(table) = self.tables.all.get_mut(&at) {
                table.linked = false;
                table.unlinked_at = Some(self.events);
            }
        }
    }

    /// Whether a CPU may still hold what was here before.
    fn check_remains(&mut self, place: &Place, new: Descriptor) {
        let size = self.setup.geometry.span(place.level);
        let remains = self.tlbs.old.iter().find(|old| {
            old.overlaps(place.ipa, size) && old.change == Change::Removed && {
                let same = old.table.is_none()
                    && old.level == place.level
                    && new.is_leaf(place.level)
                    && old.was == new;
                !same
            }
        });
        if let Some(old) = remains {
            let rule = if old.only_combined() {
                Rule::CombinedNotInvalidated
            } else {
                Rule::MakeBeforeInvalidated
            };
            let detail = format!("{:#x}: {:?} may be held, {new:?} is made", old.ipa, old.was);
            self.report(rule, detail);
        }
    }

    /// An entry has become valid.
    fn made(&mut self, cpu: usize, place: &Place, new: Descriptor, how: How) {
        if let Some(at) = self.cpus[cpu].looked_up
            && at != self.sequence
        {
            self.report(Rule::StaleLookUp, format!("{:#x}", place.ipa));
        }
        match new.kind(place.level) {
            EntryKind::Table(child) => self.linked(cpu, place, child.0, how),
            EntryKind::Leaf(_) => self.check_leaf(place, new, false),
            _ => {}
        }
    }

    fn linked(&mut self, cpu: usize, place: &Place, child: u64, how: How) {
        let Some(below) = place.level.down() else {
            return;
        };
        let Some(table) = self.tables.all.get_mut(&child) else {
            return self.report(Rule::TableNotOwned, format!("table {child:#x} is linked"));
        };
        self.tlbs.work.strong = table.writer.is_some();
        let unpublished = how == How::Plain && table.writer.is_some();
        table.level = Some(below);
        table.ipa = place.ipa;
        table.linked = true;
        table.unlinked_at = None;
        let entries: Vec<_> = table.entries.iter().map(|(i, e)| (*i, *e)).collect();
        if unpublished {
            self.report(Rule::TableNotPublished, format!("table {child:#x}"));
        }
        if let Some(block) = self.tables.broken.remove(&place.entry) {
            let may = block.attributes();
            let more = |leaf: &Descriptor| {
                leaf.is_leaf(below) && leaf.attributes().restricted(may) != leaf.attributes()
            };
            let wider = entries.iter().filter(|(_, leaf)| more(leaf)).count();
            // One is what the fault asked for.
            if wider > 1 {
                self.report(
                    Rule::SplitWidened,
                    format!("{:#x}: {wider} parts of {block:?}", place.ipa),
                );
            }
        }
        for (index, entry) in entries {
            let at = Place {
                entry: EntryAddress(child + index * 8),
                level: below,
                ipa: place.ipa + index * self.setup.geometry.span(below),
            };
            if entry.is_valid() {
                self.made(cpu, &at, entry, How::Release);
            }
        }
    }

    /// Everything that must hold for a leaf to be reachable; of the I-side only if it was not
    /// executable before.
    fn check_leaf(&mut self, place: &Place, leaf: Descriptor, was_executable: bool) {
        let (phys, size) = (leaf.address(), self.setup.geometry.span(place.level));
        let a = leaf.attributes();
        let what = |why: &str| format!("{:#x} → {phys:#x}, {size:#x} bytes: {why}", place.ipa);
        if !leaf.is_aligned(place.level, self.setup.geometry.granule())
            || place.ipa & (size - 1) != 0
        {
            self.report(Rule::Misaligned, what("not aligned"));
        }
        let inside =
            self.slots
                .range(..=place.ipa)
                .next_back()
                .is_some_and(|(ipa, (at, bytes, device))| {
                    place.ipa + size <= ipa + bytes
                        && phys.0 == at + (place.ipa - ipa)
                        && *device == (a.memory != MemoryType::Normal)
                });
        if !inside {
            self.report(Rule::OutsideSlot, what("not the guest's memory there"));
        }
        if a.memory == MemoryType::Normal {
            if !self.setup.features.fwb
                && let Some(at) = self.caches.dirty(phys.0, size)
            {
                self.report(
                    Rule::UncleanReachable,
                    what(&format!("{at:#x} is not clean")),
                );
            }
            if a.execute
                && !was_executable
                && !self.setup.features.dic
                && let Some(at) = self.caches.stale(phys.0, size)
            {
                self.report(
                    Rule::StaleInstructions,
                    what(&format!("{at:#x} may be stale")),
                );
            }
        }
        self.caches
            .map(phys.0, size, a.execute, a.memory == MemoryType::Normal);
        self.check_logged(place.ipa, size, a.write);
    }
}

/// Where an entry is.
struct Place {
    entry: EntryAddress,
    level: Level,
    ipa: u64,
}
