// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The live leaves of a guest, and the TLB entries that a CPU needs to hold all of them.
//!
//! A CPU may hold a contiguous run as one TLB entry. The model counts runs by their leaves, so a run
//! of which leaves are missing counts in part; a sum is rounded up.

use crate::{descriptor::Descriptor, geometry::Granule, geometry::Level};

/// Parts of a TLB entry, a multiple of the length of each run.
const PARTS: u64 = 128;

/// Numbers of leaves and of the TLB entries for them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LeafCount {
    /// Valid leaves of linked tables.
    pub leaves: u64,
    /// TLB entries: one for each leaf without the contiguous hint, and for each run.
    pub tlb_entries: u64,
}

impl LeafCount {
    /// Returns the one with more leaves.
    #[must_use]
    pub const fn larger(self, other: Self) -> Self {
        if self.leaves < other.leaves { other } else { self }
    }
}

/// Live leaves, and their largest number.
#[derive(Debug, Clone, Copy)]
pub(super) struct LiveLeaves {
    granule: Granule,
    leaves: u64,
    parts: u64,
    most: LeafCount,
}

impl LiveLeaves {
    pub(super) const fn new(granule: Granule) -> Self {
        let most = LeafCount { leaves: 0, tlb_entries: 0 };
        Self { granule, leaves: 0, parts: 0, most }
    }

    pub(super) fn add(&mut self, level: Level, leaf: Descriptor) {
        self.leaves += 1;
        self.parts += self.parts_of(level, leaf);
        if self.leaves >= self.most.leaves {
            let tlb_entries = self.parts.div_ceil(PARTS);
            self.most = LeafCount { leaves: self.leaves, tlb_entries };
        }
    }

    pub(super) fn remove(&mut self, level: Level, leaf: Descriptor) {
        self.leaves = self.leaves.saturating_sub(1);
        self.parts = self.parts.saturating_sub(self.parts_of(level, leaf));
    }

    /// Returns the counts at the last time when the number of leaves was largest.
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
    fn a_contiguous_run_is_one_tlb_entry() {
        let page = Descriptor(0x1003);
        let mut live = LiveLeaves::new(Granule::K4);

        for _ in 0..16 {
            live.add(Level::PAGE, page.with_contiguous(true));
        }
        live.add(Level::PAGE, page);
        live.remove(Level::PAGE, page);

        assert_eq!(live.most(), LeafCount { leaves: 17, tlb_entries: 2 });
    }
}
