// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The model of the TLBs: all [stale entries](StaleEntry) of a run, and the effect of invalidations
//! and barriers on them.

use alloc::vec::Vec;

use super::stale_entry::{ChangedEntry, Coverage, Effect, StaleEntry};
use crate::{
    address::EntryAddress,
    operations::{Dsb, Tlbi},
};

#[derive(Debug)]
pub(super) struct TlbModel {
    pub(super) stale: Vec<StaleEntry>,
    cpus: usize,
}

impl TlbModel {
    pub(super) fn new(cpus: usize) -> Self {
        Self { stale: Vec::new(), cpus }
    }

    /// Notes a store to an entry by any CPU.
    pub(super) fn note_store(&mut self, cpu: usize, entry: EntryAddress) {
        let of_entry = |stale: &&mut StaleEntry| stale.entry.position.entry == entry;
        let stale = self.stale.iter_mut().filter(of_entry);
        stale.for_each(|stale| stale.note_writer(cpu));
    }

    /// Adds an entry that a CPU has changed in the event `now`.
    pub(super) fn add(&mut self, cpu: usize, now: u64, entry: ChangedEntry) {
        self.note_store(cpu, entry.position.entry);
        let stale = StaleEntry::new(entry, now, cpu, self.cpus);
        self.stale.push(stale);
    }

    /// Issues an invalidation. Returns its effect, and whether its TTL hint is wrong for every leaf
    /// that it covers.
    pub(super) fn invalidate(&mut self, cpu: usize, kind: Tlbi) -> (Effect, bool) {
        let mut effect = Effect::default();
        let (mut covers_leaf, mut excludes_leaf) = (false, false);
        let is_by_address = matches!(kind, Tlbi::Ipa { .. } | Tlbi::Range { .. });
        for stale in &mut self.stale {
            let coverage = stale.coverage(kind);
            if stale.entry.table.is_none() && is_by_address {
                covers_leaf |= coverage == Coverage::Covered;
                excludes_leaf |= coverage == Coverage::Excluded;
            }
            if coverage == Coverage::Covered {
                effect.add(stale.invalidate(cpu, kind));
            }
        }
        (effect, excludes_leaf && !covers_leaf)
    }

    /// Executes a DSB and returns its effect.
    pub(super) fn barrier(&mut self, cpu: usize, kind: Dsb) -> Effect {
        let mut effect = Effect::default();
        for stale in &mut self.stale {
            effect.add(stale.barrier(cpu, kind));
        }
        self.stale.retain(StaleEntry::is_held);
        effect
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        address::Ipa,
        check::{stale_entry::EntryChange, table_model::EntryPosition},
        descriptor::Descriptor,
        geometry::Level,
        operations::Scope,
    };

    const STAGE1: Tlbi = Tlbi::Stage1 { scope: Scope::Broadcast };
    const ALL: Tlbi = Tlbi::All { scope: Scope::Broadcast };

    fn page(ipa: u64, change: EntryChange) -> ChangedEntry {
        let entry = EntryAddress(0x8000_0000 + ipa);
        ChangedEntry {
            position: EntryPosition { entry, level: Level::PAGE, ipa: Ipa(ipa) },
            was: Descriptor(0x1_0000_0003 + ipa),
            size: 0x1000,
            change,
            table: None,
            below_table: false,
        }
    }

    /// Returns one removed page of each of two CPUs, with the invalidation of stage 2 issued.
    fn two_removed_pages() -> TlbModel {
        let mut tlbs = TlbModel::new(2);
        for (cpu, ipa) in [(0, 0), (1, 1 << 21)] {
            tlbs.add(cpu, 0, page(ipa, EntryChange::Removed));
            tlbs.barrier(cpu, Dsb::IshSt);
            let (ttl, leaf_only, scope) = (None, false, Scope::Broadcast);
            tlbs.invalidate(cpu, Tlbi::Ipa { ipa: Ipa(ipa), ttl, leaf_only, scope });
        }
        tlbs
    }

    fn is_held(tlbs: &TlbModel, by: usize) -> bool {
        tlbs.stale.iter().any(|stale| stale.by == by)
    }

    /// A step of a CPU: a DSB, or an invalidation.
    enum Step {
        Dsb,
        Tlbi(Tlbi),
    }

    #[test]
    fn each_cpu_completes_its_own_invalidations() {
        use Step::{Dsb as Barrier, Tlbi as Invalidate};
        for (name, steps, held) in [
            (
                "CPU 0 completes its own, not stage 1 of CPU 1",
                &[(0, Barrier), (1, Invalidate(STAGE1)), (0, Invalidate(STAGE1)), (0, Barrier)][..],
                [false, true],
            ),
            (
                "CPU 0 completes its own, not both stages of CPU 1",
                &[(0, Barrier), (1, Invalidate(ALL)), (0, Invalidate(STAGE1)), (0, Barrier)],
                [false, true],
            ),
            (
                "an invalidation of both stages covers the page of another CPU",
                &[(0, Invalidate(ALL)), (1, Barrier), (1, Invalidate(STAGE1)), (0, Barrier)],
                [false, false],
            ),
        ] {
            let mut tlbs = two_removed_pages();
            for (cpu, step) in steps {
                match step {
                    Barrier => drop(tlbs.barrier(*cpu, Dsb::Ish)),
                    Invalidate(kind) => drop(tlbs.invalidate(*cpu, *kind)),
                }
            }
            assert_eq!([0, 1].map(|cpu| is_held(&tlbs, cpu)), held, "{name}");
        }
    }

    #[test]
    fn combined_entries_return_until_stage_2_is_invalidated() {
        let mut tlbs = two_removed_pages();
        tlbs.invalidate(1, STAGE1);
        tlbs.barrier(0, Dsb::Ish);
        tlbs.barrier(1, Dsb::Ish);

        let left: Vec<_> = tlbs.stale.iter().map(StaleEntry::only_combined).collect();

        assert_eq!(left, [true, true]);
    }

    #[test]
    fn an_invalidation_before_all_cpus_observe_the_store_does_not_count() {
        for (change, is_early_enough) in
            [(EntryChange::Removed, false), (EntryChange::Relaxed, true)]
        {
            let mut tlbs = TlbModel::new(2);
            tlbs.add(0, 0, page(0, change));

            tlbs.barrier(1, Dsb::IshSt);
            tlbs.invalidate(1, ALL);
            tlbs.barrier(1, Dsb::Ish);

            let held = tlbs.stale.iter().any(|stale| stale.is_held_by(1));
            assert_eq!(held, !is_early_enough, "{change:?}");
        }
    }

    #[test]
    fn a_dsb_publishes_a_store_that_another_cpu_has_overwritten() {
        let mut tlbs = TlbModel::new(2);
        let entry = page(0, EntryChange::Removed);
        let address = entry.position.entry;
        tlbs.add(0, 0, entry);
        tlbs.note_store(1, address);

        tlbs.barrier(0, Dsb::IshSt);
        tlbs.invalidate(0, ALL);
        tlbs.barrier(0, Dsb::Ish);

        assert!(!is_held(&tlbs, 0));
    }
}
