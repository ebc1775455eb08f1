// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The checker's copy of the tables: what memory holds, what is linked, and how it is counted.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec::Vec,
};

use super::Setup;
use crate::{
    address::{EntryAddress, Ipa, TableAddress},
    descriptor::{Descriptor, EntryKind},
    geometry::{Geometry, Level},
};

/// One table.
#[derive(Debug)]
pub(super) struct Table {
    /// Bytes: more than a granule for a root of several.
    pub(super) size: u64,
    pub(super) level: Option<Level>,
    pub(super) ipa: u64,
    pub(super) linked: bool,
    pub(super) unlinked_at: Option<u64>,
    pub(super) entries: BTreeMap<u64, Descriptor>,
    pub(super) count: i64,
    /// Who has written it without ordering that before what comes next.
    pub(super) writer: Option<usize>,
}

/// All tables by address.
#[derive(Debug)]
pub(super) struct TableModel {
    pub(super) all: BTreeMap<u64, Table>,
    pub(super) locked: BTreeMap<EntryAddress, usize>,
    /// Leaves that were broken and nothing made there since, while the lock is held.
    pub(super) broken: BTreeMap<EntryAddress, Descriptor>,
    pub(super) changed: BTreeSet<u64>,
    /// Whether entries are counted at all: somebody has.
    counted: bool,
    granule_size: u64,
}

impl TableModel {
    pub(super) fn new(setup: &Setup) -> Self {
        let g = &setup.geometry;
        let size = g.root_tables() * g.granule().size();
        let root = Table {
            size,
            level: Some(g.start()),
            ipa: 0,
            linked: true,
            unlinked_at: None,
            entries: BTreeMap::new(),
            count: i64::try_from(g.root_tables()).unwrap_or(1),
            writer: None,
        };
        Self {
            all: [(setup.root.0, root)].into(),
            locked: BTreeMap::new(),
            broken: BTreeMap::new(),
            changed: BTreeSet::new(),
            counted: false,
            granule_size: g.granule().size(),
        }
    }

    pub(super) fn holding(&mut self, entry: EntryAddress) -> Option<(u64, &mut Table)> {
        let (at, table) = self.all.range_mut(..=entry.0).next_back()?;
        (entry.0 < at + table.size).then_some((*at, table))
    }

    pub(super) fn allocated(&mut self, cpu: usize, table: TableAddress) {
        let fresh = Table {
            size: self.granule_size,
            level: None,
            ipa: 0,
            linked: false,
            unlinked_at: None,
            entries: BTreeMap::new(),
            count: 1,
            writer: Some(cpu),
        };
        self.all.insert(table.0, fresh);
    }

    pub(super) fn freed(&mut self, table: TableAddress) -> Option<i64> {
        self.changed.remove(&table.0);
        self.all.remove(&table.0).map(|table| table.count)
    }

    pub(super) fn is_linked(&self, table: TableAddress) -> bool {
        self.all.get(&table.0).is_some_and(|table| table.linked)
    }

    pub(super) fn unlinked_at(&self, table: TableAddress) -> Option<u64> {
        self.all.get(&table.0)?.unlinked_at
    }

    pub(super) fn published(&mut self, cpu: usize) {
        for table in self.all.values_mut() {
            if table.writer == Some(cpu) {
                table.writer = None;
            }
        }
    }

    pub(super) fn referenced(&mut self, table: TableAddress, change: i64) {
        self.counted = true;
        if let Some((at, table)) = self.holding(EntryAddress(table.0)) {
            table.count += change;
            self.changed.insert(at);
        }
    }

    pub(super) fn locked_by(&mut self, cpu: usize) -> Vec<EntryAddress> {
        let left: Vec<_> = self
            .locked
            .iter()
            .filter(|(_, owner)| **owner == cpu)
            .map(|(entry, _)| *entry)
            .collect();
        self.locked.retain(|_, owner| *owner != cpu);
        left
    }

    /// TableModel that have changed and whose count is not right: count and valid entries. None where
    /// nobody counts.
    pub(super) fn miscounted(&mut self) -> Vec<(TableAddress, i64, usize)> {
        let changed = core::mem::take(&mut self.changed);
        let counted = changed.into_iter().filter(|_| self.counted);
        counted
            .filter_map(|at| {
                let table = self.all.get(&at)?;
                let valid = table.entries.values().filter(|e| e.is_valid()).count();
                let own = table.size / self.granule_size;
                let right = i64::try_from(own + valid as u64) == Ok(table.count);
                (!right).then_some((TableAddress(at), table.count, valid))
            })
            .collect()
    }

    /// Leaves of linked tables that have changed whose contiguous run is not whole, or does not
    /// agree: guest address and entry.
    pub(super) fn uneven_runs(&self, geometry: &Geometry) -> Vec<(u64, Descriptor)> {
        let mut found = Vec::new();
        let tables = self.changed.iter().filter_map(|at| self.all.get(at));
        for table in tables.filter(|table| table.linked) {
            let Some(level) = table.level else { continue };
            let (count, span) = (level.contiguous(geometry.granule()), geometry.span(level));
            for (index, entry) in &table.entries {
                if !entry.is_leaf(level) || !entry.is_contiguous() {
                    continue;
                }
                let first = index & !(count - 1);
                let start = entry.address().align_down(count * span);
                let fits = |n: u64| {
                    table.entries.get(&(first + n)).is_some_and(|other| {
                        other.is_valid()
                            && other.agrees(*entry)
                            && other.address() == start + n * span
                    })
                };
                if count == 1 || !(0..count).all(fits) {
                    found.push((table.ipa + index * span, *entry));
                }
            }
        }
        found
    }

    /// Whether an entry of the contiguous run that this one was of has the hint still.
    pub(super) fn run_remains(
        &mut self,
        geometry: &Geometry,
        entry: EntryAddress,
        level: Level,
    ) -> bool {
        let count = level.contiguous(geometry.granule());
        let Some((at, table)) = self.holding(entry) else {
            return false;
        };
        let first = ((entry.0 - at) / 8) & !(count - 1);
        let run = table.entries.range(first..first + count);
        table.linked && run.into_iter().any(|(_, entry)| entry.is_contiguous())
    }

    /// Every leaf below a linked table: entry, descriptor, level, guest address.
    pub(super) fn leaves(
        &self,
        at: u64,
        out: &mut Vec<(EntryAddress, Descriptor, Level, u64)>,
        tables: &mut Vec<u64>,
        span: &impl Fn(Level) -> u64,
    ) {
        let Some(table) = self.all.get(&at) else {
            return;
        };
        let Some(level) = table.level else { return };
        tables.push(at);
        for (index, entry) in &table.entries {
            let ipa = table.ipa + index * span(level);
            match entry.kind(level) {
                EntryKind::Leaf(_) => out.push((EntryAddress(at + index * 8), *entry, level, ipa)),
                EntryKind::Table(child) => self.leaves(child.0, out, tables, span),
                _ => {}
            }
        }
    }

    /// The entry that an address's walk ends at, and its level.
    pub(super) fn find(&self, setup: &Setup, ipa: u64) -> Option<(Descriptor, Level)> {
        let mut at = setup.root.0;
        let mut level = setup.geometry.start();
        loop {
            let index = setup.geometry.index(Ipa(ipa), level);
            let entry = self
                .all
                .get(&at)?
                .entries
                .get(&index)
                .copied()
                .unwrap_or_default();
            match (entry.kind(level), level.down()) {
                (EntryKind::Table(child), Some(below)) => (at, level) = (child.0, below),
                _ => return Some((entry, level)),
            }
        }
    }

    /// Writable leaves of a range, by guest address.
    pub(super) fn writable_in(&self, setup: &Setup, ipa: u64, size: u64) -> Option<u64> {
        let (mut leaves, mut tables) = (Vec::new(), Vec::new());
        self.leaves(setup.root.0, &mut leaves, &mut tables, &|l| {
            setup.geometry.span(l)
        });
        leaves.into_iter().find_map(|(_, leaf, level, at)| {
            let overlaps = at < ipa + size && ipa < at + setup.geometry.span(level);
            (overlaps && leaf.attributes().write).then_some(at)
        })
    }
}
