// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The CPUs that may hold the old value of an entry, and the TLB invalidations that are to remove it.

use alloc::vec::Vec;

/// The extent of a TLB invalidation or of a DSB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) is_broadcast: bool,
    /// Indicates the qualifier nXS (FEAT_XS), which leaves out accesses with the XS attribute. Stage 2
    /// clears this attribute for write-back memory, whatever stage 1 has, so TLBI nXS is enough for
    /// all leaves but those of devices and non-cacheable memory. DSB nXS completes TLBI nXS alone.
    pub(super) is_nxs: bool,
}

impl Extent {
    /// Returns whether a DSB of this extent completes an invalidation of another one.
    pub(super) const fn completes(self, invalidation: Self) -> bool {
        (self.is_broadcast || !invalidation.is_broadcast) && (!self.is_nxs || invalidation.is_nxs)
    }
}

/// Entries that an invalidation removes. A TLB entry of one stage alone counts as one of stage 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Removed {
    Stage2,
    /// Combined entries alone.
    Combined,
    /// Stage-2 and combined entries.
    Everything,
}

/// An invalidation that a CPU has issued and not completed.
#[derive(Debug, Clone, Copy)]
struct PendingInvalidation {
    issued_by: usize,
    extent: Extent,
    removes: Removed,
    /// The CPUs whose entries it removes.
    from: u64,
}

/// The CPUs that may hold the old value, as bits.
#[derive(Debug, Clone)]
pub(super) struct HeldEntries {
    /// CPUs with the stage-2 entry, and therefore with entries that combine it with stage 1.
    stage2: u64,
    /// CPUs with entries that combine stage 2 with stage 1 only.
    combined: u64,
    pending: Vec<PendingInvalidation>,
}

impl HeldEntries {
    /// Returns the state after a change: these CPUs, as bits, may hold the entry.
    pub(super) const fn of(cpus: u64) -> Self {
        Self { stage2: cpus, combined: 0, pending: Vec::new() }
    }

    /// Records an invalidation that reaches some CPUs. Returns those for which its issuer had none
    /// pending.
    pub(super) fn issue(
        &mut self,
        cpu: usize,
        removed: Removed,
        extent: Extent,
        reached: u64,
    ) -> u64 {
        let (removes, held) = match removed {
            Removed::Stage2 => (Removed::Stage2, self.stage2),
            // While a CPU holds the stage-2 entry, it can create combined entries again.
            Removed::Combined => (Removed::Everything, self.combined),
            Removed::Everything => (Removed::Everything, self.stage2 | self.combined),
        };
        let from = held & reached;
        let is_same = |pending: &&mut PendingInvalidation| {
            (pending.issued_by, pending.extent, pending.removes) == (cpu, extent, removes)
        };
        if let Some(pending) = self.pending.iter_mut().find(is_same) {
            let first = from & !pending.from;
            pending.from |= from;
            first
        } else {
            if from != 0 {
                self.pending.push(PendingInvalidation { issued_by: cpu, extent, removes, from });
            }
            from
        }
    }

    /// Completes the invalidations of a CPU at its DSB. Returns the CPUs that hold less since.
    pub(super) fn complete(&mut self, cpu: usize, dsb: Extent) -> u64 {
        let (mut stage2, mut everything) = (0, 0);
        self.pending.retain(|pending| {
            let is_completed = pending.issued_by == cpu && dsb.completes(pending.extent);
            if is_completed {
                match pending.removes {
                    Removed::Stage2 => stage2 |= pending.from,
                    Removed::Combined | Removed::Everything => everything |= pending.from,
                }
            }
            !is_completed
        });
        let before = (self.stage2, self.combined);
        self.stage2 &= !(stage2 | everything);
        self.combined = (before.1 | (before.0 & stage2)) & !everything;
        (before.0 ^ self.stage2) | (before.1 ^ self.combined)
    }

    /// Removes what a CPU holds.
    pub(super) fn forget(&mut self, cpu: usize) {
        self.stage2 &= !(1 << cpu);
        self.combined &= !(1 << cpu);
    }

    pub(super) const fn is_held_by(&self, cpu: usize) -> bool {
        (self.stage2 | self.combined) >> cpu & 1 != 0
    }

    pub(super) const fn is_held(&self) -> bool {
        self.stage2 | self.combined != 0
    }

    /// Returns whether a barrier, or an invalidation of stage 1, may remove entries.
    pub(super) const fn has_work(&self) -> bool {
        self.combined != 0 || !self.pending.is_empty()
    }

    /// Returns whether no CPU can hold more than combined entries.
    pub(super) fn holds_only_combined(&self) -> bool {
        let everything = self.pending.iter().filter(|one| one.removes == Removed::Everything);
        self.stage2 & !everything.fold(0, |cpus, one| cpus | one.from) == 0
    }
}
