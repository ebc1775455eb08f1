// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What each CPU may still hold of entries that have changed.
//!
//! A CPU may fetch any valid entry at any time, whether it is used or not (Arm ARM D8.13.1). So from
//! the store that changes a valid entry on, every CPU is taken to hold the old one: in its stage-2
//! TLB and walk cache, and combined with stage 1. An [`Old`] entry is followed until no CPU can:
//!
//! ```text
//!            DSB (all CPUs see the store)      TLBI IPAS2…     DSB         TLBI VMALLE1…    DSB
//!  Held ── not before this does a TLBI count ── Stage2(i) ── Combined ── CombinedGone(i) ── gone
//!                                              └──────── TLBI VMALLS12E1… ─ All(i) ─ DSB ──┘
//! ```
//!
//! `i` is the CPU that issued: only its own DSB completes it.

use alloc::{vec, vec::Vec};

use crate::{
    descriptor::Descriptor,
    geometry::Level,
    operations::{Dsb, EntryAddress, Scope, TableAddress, Tlbi},
};

/// How far one CPU is from losing an old entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Held,
    /// Stage 2 is being invalidated by this CPU; broadcast or not.
    Stage2(usize, bool),
    /// Only what was combined with stage 1 is left.
    Combined,
    /// The rest is being invalidated by this CPU; broadcast or not.
    Last(usize, bool),
    Gone,
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
pub(super) struct Old {
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
    /// Who wrote the entry last: once that store is seen, so is every one before it.
    writer: usize,
    /// CPUs that have executed a DSB since: one that has found the new entry has it seen by its own
    /// walker then.
    seen_by: u64,
    seen_by_all: bool,
    phases: Vec<Phase>,
}

impl Old {
    pub(super) fn overlaps(&self, ipa: u64, size: u64) -> bool {
        self.ipa < ipa + size && ipa < self.ipa + self.size
    }

    pub(super) fn held_by(&self, cpu: usize) -> bool {
        self.phases[cpu] != Phase::Gone
    }

    /// Whether all that is left is what is combined with stage 1.
    pub(super) fn only_combined(&self) -> bool {
        self.phases
            .iter()
            .all(|phase| matches!(phase, Phase::Combined | Phase::Gone | Phase::Last(..)))
    }
}

/// All that is old.
#[derive(Debug)]
pub(super) struct Tlbs {
    pub old: Vec<Old>,
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
            old.writer = by;
        }
    }

    pub(super) fn changed(&mut self, by: usize, c: Changed) {
        self.rewritten(by, c.entry);
        self.old.push(Old {
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
            writer: by,
            seen_by: 0,
            seen_by_all: false,
            phases: vec![Phase::Held; self.cpus],
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
            let visible = old.seen_by_all || (!broadcast && old.seen_by >> cpu & 1 != 0);
            let next = match kind {
                Tlbi::Stage1 { .. } => Phase::Last(cpu, broadcast),
                Tlbi::All { .. } => Phase::Last(cpu, broadcast),
                Tlbi::Ipa { .. } | Tlbi::Range { .. } => Phase::Stage2(cpu, broadcast),
            };
            let covers = match kind {
                Tlbi::Stage1 { .. } | Tlbi::All { .. } => true,
                Tlbi::Ipa {
                    ipa,
                    ttl,
                    leaf_only,
                    ..
                } => {
                    let here = old.overlaps(ipa, 1);
                    let fits = level_fits(old, ttl, leaf_only);
                    if here && old.table.is_none() {
                        met |= fits;
                        mismatched |= !fits;
                    }
                    here && fits
                }
                Tlbi::Range { ipa, size, ttl, .. } => {
                    old.overlaps(ipa, size) && level_fits(old, ttl, false)
                }
            };
            if !covers || !visible {
                continue;
            }
            for (at, phase) in old.phases.iter_mut().enumerate() {
                if !broadcast && at != cpu {
                    continue;
                }
                let counts = match kind {
                    Tlbi::Stage1 { .. } => *phase == Phase::Combined,
                    Tlbi::All { .. } => *phase != Phase::Gone,
                    _ => *phase == Phase::Held,
                };
                if counts {
                    let needed = old.change != Change::Widened;
                    self.work.any |= needed || at == cpu;
                    self.work.strong |= needed && at != cpu;
                    *phase = next;
                }
            }
        }
        mismatched && !met
    }

    /// A DSB of a CPU.
    pub(super) fn dsb(&mut self, cpu: usize, kind: Dsb) {
        let all = matches!(kind, Dsb::Ish | Dsb::IshSt);
        let completes = |broadcast: bool| match kind {
            Dsb::Ish => true,
            Dsb::Nsh => !broadcast,
            Dsb::IshSt | Dsb::NshSt => false,
        };
        for old in &mut self.old {
            self.work.any |= old.writer == cpu && old.seen_by >> cpu & 1 == 0;
            self.work.strong |= all && old.writer == cpu && !old.seen_by_all;
            old.seen_by |= 1 << cpu;
            old.seen_by_all |= all && old.writer == cpu;
            for (at, phase) in old.phases.iter_mut().enumerate() {
                let needed = old.change != Change::Widened || at == cpu;
                match *phase {
                    Phase::Stage2(issuer, broadcast) if issuer == cpu && completes(broadcast) => {
                        self.work.any |= needed;
                        self.work.strong |= needed;
                        *phase = Phase::Combined;
                    }
                    Phase::Last(issuer, broadcast) if issuer == cpu && completes(broadcast) => {
                        self.work.any |= needed;
                        self.work.strong |= needed;
                        *phase = Phase::Gone;
                    }
                    _ => {}
                }
            }
        }
        self.old
            .retain(|old| old.phases.iter().any(|phase| *phase != Phase::Gone));
    }
}

/// Whether an invalidation with this hint reaches an entry: one that names another level need not.
fn level_fits(old: &Old, ttl: Option<Level>, leaf_only: bool) -> bool {
    match old.table {
        Some(_) => !leaf_only && ttl.is_none(),
        None => ttl.is_none_or(|level| level == old.level),
    }
}
