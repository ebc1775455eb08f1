// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What each CPU may still hold of entries that have changed.
//!
//! A CPU may fetch any valid entry at any time, whether it is used or not (Arm ARM D8.13.1). So from
//! the store that changes a valid entry on, every CPU is taken to hold the old one: in its stage-2
//! TLB and walk cache, and combined with stage 1. An [`StaleEntry`] entry is followed until no CPU can:
//!
//! ```text
//!            DSB (all CPUs see the store)      TLBI IPAS2…   DSB      TLBI VMALLE1…   DSB
//!  Held ── not before this does a TLBI count ── issued(i) ── Combined ── issued(i) ── Gone
//!     └─────────────────────────────── TLBI VMALLS12E1… ─ issued(i) ────────── DSB ──┘
//! ```
//!
//! `i` is the CPU that issued: its own DSB completes it. Several CPUs may be at it at once, and each
//! gets there by its own instructions, whatever the others have issued and not completed: so what
//! is under way is noted for each of them.

use alloc::{vec, vec::Vec};

use crate::{
    address::{EntryAddress, TableAddress},
    descriptor::Descriptor,
    geometry::Level,
    operations::{Dsb, Scope, Tlbi},
};

/// What one CPU may still hold of an old entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Held,
    /// Only what was combined with stage 1 is left.
    Combined,
    Gone,
}

/// CPUs that have issued an invalidation and not completed it.
#[derive(Debug, Clone, Copy, Default)]
struct Issued {
    local: u64,
    broadcast: u64,
}

impl Issued {
    /// Gives whether it is news.
    fn issue(&mut self, cpu: usize, broadcast: bool) -> bool {
        let by = if broadcast {
            &mut self.broadcast
        } else {
            &mut self.local
        };
        let news = *by >> cpu & 1 == 0;
        *by |= 1 << cpu;
        news
    }

    /// Whether a DSB of a CPU, for broadcast ones or only for local ones, completes something.
    const fn completes(self, cpu: usize, broadcast: bool) -> bool {
        let by = self.local | if broadcast { self.broadcast } else { 0 };
        by >> cpu & 1 != 0
    }

    const fn is_any(self) -> bool {
        self.local | self.broadcast != 0
    }
}

/// How far one CPU is from losing an old entry.
#[derive(Debug, Clone, Copy)]
struct Phase {
    stage: Stage,
    /// Invalidations of stage 2 under way.
    stage2: Issued,
    /// Invalidations of all that is left under way.
    last: Issued,
}

impl Phase {
    const HELD: Self = Self {
        stage: Stage::Held,
        stage2: Issued {
            local: 0,
            broadcast: 0,
        },
        last: Issued {
            local: 0,
            broadcast: 0,
        },
    };

    /// An invalidation reaches it. Gives whether it counts.
    fn issue(&mut self, cpu: usize, kind: Tlbi, broadcast: bool) -> bool {
        match (kind, self.stage) {
            (Tlbi::Ipa { .. } | Tlbi::Range { .. }, Stage::Held) => {
                self.stage2.issue(cpu, broadcast)
            }
            // What is combined may come back as long as stage 2 is held.
            (Tlbi::Stage1 { .. }, Stage::Combined)
            | (Tlbi::All { .. }, Stage::Held | Stage::Combined) => self.last.issue(cpu, broadcast),
            _ => false,
        }
    }

    /// A DSB of a CPU. Gives whether it changes anything.
    fn complete(&mut self, cpu: usize, broadcast: bool) -> bool {
        let next = if self.last.completes(cpu, broadcast) {
            Stage::Gone
        } else if self.stage == Stage::Held && self.stage2.completes(cpu, broadcast) {
            Stage::Combined
        } else {
            return false;
        };
        let changed = self.stage != next;
        self.stage = next;
        changed
    }
}

/// Why an entry is old.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// It is no longer there.
    Removed,
    /// It allows less now.
    Reduced,
    /// It allows more now: whoever holds it takes a fault.
    Widened,
}

/// An entry that CPUs may still hold.
#[derive(Debug, Clone)]
pub(super) struct StaleEntry {
    pub entry: EntryAddress,
    pub was: Descriptor,
    pub level: Level,
    pub ipa: u64,
    pub size: u64,
    pub change: Change,
    /// A table's own entry.
    pub table: Option<TableAddress>,
    /// A leaf that went with the table above it.
    pub below_table: bool,
    /// The event that it became old by.
    pub since: u64,
    pub by: usize,
    /// Who has written the entry since: once any of these stores is seen, so is the one that made
    /// it old.
    writers: u64,
    /// Others of its contiguous run are still there.
    pub refilled: bool,
    /// CPUs that have executed a DSB since: one that has found the new entry has it seen by its own
    /// walker then.
    seen_by: u64,
    seen_by_all: bool,
    phases: Vec<Phase>,
}

impl StaleEntry {
    pub(super) fn overlaps(&self, ipa: u64, size: u64) -> bool {
        self.ipa < ipa + size && ipa < self.ipa + self.size
    }

    pub(super) fn held_by(&self, cpu: usize) -> bool {
        self.phases[cpu].stage != Stage::Gone
    }

    /// Whether all that is left is what is combined with stage 1.
    pub(super) fn only_combined(&self) -> bool {
        self.phases
            .iter()
            .all(|phase| phase.stage != Stage::Held || phase.last.is_any())
    }
}

/// All that is old.
#[derive(Debug)]
pub(super) struct Tlbs {
    pub old: Vec<StaleEntry>,
    cpus: usize,
    /// The event that is being looked at.
    pub now: u64,
    /// What the last event did.
    pub work: Work,
}

/// What would have been missing without the last event.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// It did something that counts.
    pub any: bool,
    /// A weaker one of its kind (local for broadcast, stores for all) would have done less.
    pub strong: bool,
}

/// What was said to have changed.
pub(super) struct Changed {
    pub entry: EntryAddress,
    pub was: Descriptor,
    pub level: Level,
    pub ipa: u64,
    pub size: u64,
    pub change: Change,
    pub table: Option<TableAddress>,
    pub below_table: bool,
}

impl Tlbs {
    pub(super) fn new(cpus: usize) -> Self {
        Self {
            old: Vec::new(),
            cpus,
            now: 0,
            work: Work::default(),
        }
    }

    /// An entry was written, whether it matters to TLBs or not.
    pub(super) fn rewritten(&mut self, by: usize, entry: EntryAddress) {
        for old in self.old.iter_mut().filter(|old| old.entry == entry) {
            old.writers |= 1 << by;
        }
    }

    pub(super) fn changed(&mut self, by: usize, c: Changed) {
        self.rewritten(by, c.entry);
        self.old.push(StaleEntry {
            entry: c.entry,
            was: c.was,
            level: c.level,
            ipa: c.ipa,
            size: c.size,
            change: c.change,
            table: c.table,
            below_table: c.below_table,
            since: self.now,
            by,
            writers: 1 << by,
            refilled: false,
            seen_by: 0,
            seen_by_all: false,
            phases: vec![Phase::HELD; self.cpus],
        });
    }

    /// Issues an invalidation. Gives whether a TTL hint was wrong for every entry it met.
    pub(super) fn tlbi(&mut self, cpu: usize, kind: Tlbi) -> bool {
        let (mut met, mut mismatched) = (false, false);
        for old in &mut self.old {
            let scope = match kind {
                Tlbi::Ipa { scope, .. }
                | Tlbi::Range { scope, .. }
                | Tlbi::Stage1 { scope }
                | Tlbi::All { scope } => scope,
            };
            let broadcast = scope == Scope::Broadcast;
            // What it has seen itself a CPU may invalidate for itself. By a broadcast only what has
            // grown: others have nothing to lose by that.
            let for_itself = !broadcast || old.change == Change::Widened;
            let seen = old.seen_by_all || (for_itself && old.seen_by >> cpu & 1 != 0);
            let covers = match kind {
                Tlbi::Stage1 { .. } | Tlbi::All { .. } => true,
                Tlbi::Ipa {
                    ipa,
                    ttl,
                    leaf_only,
                    ..
                } => {
                    let here = old.overlaps(ipa.0, 1);
                    let fits = level_fits(old, ttl, leaf_only);
                    if here && old.table.is_none() {
                        met |= fits;
                        mismatched |= !fits;
                    }
                    here && fits
                }
                Tlbi::Range { ipa, size, ttl, .. } => {
                    let here = old.overlaps(ipa.0, size);
                    let fits = level_fits(old, ttl, false);
                    if here && old.table.is_none() {
                        met |= fits;
                        mismatched |= !fits;
                    }
                    here && fits
                }
            };
            if !covers || !seen || old.refilled {
                continue;
            }
            let reaches_others = broadcast && old.seen_by_all;
            for (at, phase) in old.phases.iter_mut().enumerate() {
                if at != cpu && !reaches_others {
                    continue;
                }
                if phase.issue(cpu, kind, broadcast) {
                    let needed = old.change != Change::Widened;
                    self.work.any |= needed || at == cpu;
                    self.work.strong |= needed && at != cpu;
                }
            }
        }
        mismatched && !met
    }

    /// A DSB of a CPU.
    pub(super) fn dsb(&mut self, cpu: usize, kind: Dsb) {
        let all = matches!(kind, Dsb::Ish | Dsb::IshSt);
        for old in &mut self.old {
            let wrote = old.writers >> cpu & 1 != 0;
            self.work.any |= wrote && old.seen_by >> cpu & 1 == 0;
            self.work.strong |= all && wrote && !old.seen_by_all;
            old.seen_by |= 1 << cpu;
            old.seen_by_all |= all && wrote;
            if matches!(kind, Dsb::IshSt | Dsb::NshSt) {
                continue;
            }
            for (at, phase) in old.phases.iter_mut().enumerate() {
                if phase.complete(cpu, kind == Dsb::Ish) {
                    let needed = old.change != Change::Widened || at == cpu;
                    self.work.any |= needed;
                    self.work.strong |= needed;
                }
            }
        }
        self.old
            .retain(|old| old.phases.iter().any(|phase| phase.stage != Stage::Gone));
    }
}

/// Whether an invalidation with this hint reaches an entry: one that names another level need not.
fn level_fits(old: &StaleEntry, ttl: Option<Level>, leaf_only: bool) -> bool {
    match old.table {
        Some(_) => !leaf_only && ttl.is_none(),
        None => ttl.is_none_or(|level| level == old.level),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::Ipa;

    const BROADCAST: Scope = Scope::Broadcast;

    /// A page each of two CPUs, broken and seen to be, its stage 2 about to be invalidated.
    fn two_broken_pages() -> Tlbs {
        let mut tlbs = Tlbs::new(2);
        for cpu in [0, 1] {
            let ipa = u64::try_from(cpu).unwrap() << 21;
            let page = Changed {
                entry: EntryAddress(0x8000_0000 + ipa),
                was: Descriptor(0x1_0000_0003 + ipa),
                level: Level::PAGE,
                ipa,
                size: 0x1000,
                change: Change::Removed,
                table: None,
                below_table: false,
            };
            tlbs.changed(cpu, page);
            tlbs.dsb(cpu, Dsb::IshSt);
            let page = Tlbi::Ipa {
                ipa: Ipa(ipa),
                ttl: None,
                leaf_only: false,
                scope: BROADCAST,
            };
            tlbs.tlbi(cpu, page);
        }
        tlbs
    }

    fn is_held(tlbs: &Tlbs, by: usize) -> bool {
        tlbs.old.iter().any(|old| old.by == by)
    }

    #[test]
    fn a_cpu_completes_its_own_invalidation_whatever_another_has_under_way() {
        for last in [
            Tlbi::Stage1 { scope: BROADCAST },
            Tlbi::All { scope: BROADCAST },
        ] {
            let mut tlbs = two_broken_pages();
            tlbs.dsb(0, Dsb::Ish);
            tlbs.tlbi(1, last);
            tlbs.tlbi(0, Tlbi::Stage1 { scope: BROADCAST });

            tlbs.dsb(0, Dsb::Ish);

            assert!(!is_held(&tlbs, 0), "{last:?}");
        }
    }

    #[test]
    fn both_stages_at_once_are_no_less_for_another_cpu_that_is_half_way() {
        let mut tlbs = two_broken_pages();
        tlbs.tlbi(0, Tlbi::All { scope: BROADCAST });
        tlbs.dsb(1, Dsb::Ish);
        tlbs.tlbi(1, Tlbi::Stage1 { scope: BROADCAST });

        tlbs.dsb(0, Dsb::Ish);

        assert!(!is_held(&tlbs, 0) && !is_held(&tlbs, 1));
    }

    #[test]
    fn what_is_combined_comes_back_until_stage_2_is_gone() {
        let mut tlbs = two_broken_pages();
        tlbs.tlbi(1, Tlbi::Stage1 { scope: BROADCAST });
        tlbs.dsb(0, Dsb::Ish);
        tlbs.dsb(1, Dsb::Ish);

        let left: Vec<_> = tlbs.old.iter().map(StaleEntry::only_combined).collect();

        assert_eq!(left, [true, true]);
    }

    #[test]
    fn an_invalidation_before_the_store_is_seen_by_all_is_none_of_another_cpus_break() {
        for (change, early) in [(Change::Removed, false), (Change::Widened, true)] {
            let mut tlbs = Tlbs::new(2);
            let page = Changed {
                entry: EntryAddress(0x8000_0000),
                was: Descriptor(0x1_0000_0003),
                level: Level::PAGE,
                ipa: 0,
                size: 0x1000,
                change,
                table: None,
                below_table: false,
            };
            tlbs.changed(0, page);

            tlbs.dsb(1, Dsb::IshSt);
            tlbs.tlbi(1, Tlbi::All { scope: BROADCAST });
            tlbs.dsb(1, Dsb::Ish);

            let held = tlbs.old.iter().any(|old| old.held_by(1));
            assert_eq!(held, !early, "{change:?}");
        }
    }

    #[test]
    fn a_store_is_seen_by_all_though_another_cpu_has_written_since() {
        let mut tlbs = two_broken_pages();
        let entry = tlbs.old[0].entry;
        tlbs.old[0].seen_by_all = false;
        tlbs.rewritten(1, entry);

        tlbs.dsb(0, Dsb::IshSt);

        assert!(tlbs.old[0].seen_by_all);
    }
}
