// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The live leaves of a guest, and the TLB entries that contiguous runs save.
//!
//! A CPU may hold a contiguous run as one TLB entry, and needs one for each other leaf. The model counts
//! runs by their leaves, so a run of which leaves are missing counts in part; a sum is rounded up.

use crate::{
    descriptor::Descriptor,
    geometry::{Granule, Level},
};

/// Parts of a TLB entry, a multiple of the length of each run.
const PARTS: u64 = 128;

/// Largest numbers that a guest has had.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LeafCount {
    /// Valid leaves of linked tables at once.
    pub leaves: u64,
    /// TLB entries that contiguous runs save at once: leaves without the entries that they need.
    pub saved: u64,
}

impl LeafCount {
    /// Returns the larger number of each.
    #[must_use]
    pub fn larger(self, other: Self) -> Self {
        Self { leaves: self.leaves.max(other.leaves), saved: self.saved.max(other.saved) }
    }
}

/// Live leaves, and their largest numbers.
#[derive(Debug, Clone, Copy)]
pub(super) struct LiveLeaves {
    granule: Granule,
    leaves: u64,
    parts: u64,
    most: LeafCount,
}

impl LiveLeaves {
    pub(super) const fn new(granule: Granule) -> Self {
        let most = LeafCount { leaves: 0, saved: 0 };
        Self { granule, leaves: 0, parts: 0, most }
    }

    pub(super) fn add(&mut self, level: Level, leaf: Descriptor) {
        self.leaves += 1;
        self.parts += self.parts_of(level, leaf);
        let saved = self.leaves.saturating_sub(self.parts.div_ceil(PARTS));
        self.most = self.most.larger(LeafCount { leaves: self.leaves, saved });
    }

    pub(super) fn remove(&mut self, level: Level, leaf: Descriptor) {
        self.leaves = self.leaves.saturating_sub(1);
        self.parts = self.parts.saturating_sub(self.parts_of(level, leaf));
    }

    pub(super) const fn most(&self) -> LeafCount {
        self.most
    }

    const fn parts_of(&self, level: Level, leaf: Descriptor) -> u64 {
        if leaf.is_contiguous() { PARTS / level.contiguous_entries(self.granule) } else { PARTS }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_contiguous_run_needs_one_tlb_entry() {
        let page = Descriptor(0x1003);
        let mut live = LiveLeaves::new(Granule::K4);

        for _ in 0..16 {
            live.add(Level::PAGE, page.with_contiguous(true));
        }
        live.add(Level::PAGE, page);
        for _ in 0..16 {
            live.remove(Level::PAGE, page.with_contiguous(true));
            live.add(Level::PAGE, page);
        }

        assert_eq!(live.most(), LeafCount { leaves: 17, saved: 15 });
    }
}
