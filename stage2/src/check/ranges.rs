// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sets of addresses, kept as ranges ([`rangemap::RangeSet`]), with the part of a range that is in a
//! set or missing from it.

use alloc::vec::Vec;

use rangemap::RangeSet;

/// A set of addresses.
#[derive(Debug, Clone, Default)]
pub(super) struct Ranges(RangeSet<u64>);

impl Ranges {
    pub(super) fn add(&mut self, start: u64, size: u64) {
        // An empty range is refused by the set.
        if size > 0 {
            self.0.insert(start..start + size);
        }
    }

    pub(super) fn remove(&mut self, start: u64, size: u64) {
        if size > 0 {
            self.0.remove(start..start + size);
        }
    }

    /// Returns the parts of a range that are in the set, by start and end.
    pub(super) fn overlaps(&self, start: u64, size: u64) -> Vec<(u64, u64)> {
        let end = start + size;
        let found = self.0.overlapping(start..end);
        found
            .map(|range| (range.start.max(start), range.end.min(end)))
            .collect()
    }

    /// Returns the parts of a range that are not in the set, by start and end.
    pub(super) fn gaps(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let outer = start..end;
        let gaps = self.0.gaps(&outer);
        gaps.map(|range| (range.start, range.end)).collect()
    }

    /// Returns the first address of a range that is in the set.
    pub(super) fn first_in(&self, start: u64, size: u64) -> Option<u64> {
        let mut found = self.0.overlapping(start..start + size);
        found.next().map(|range| range.start.max(start))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().map(|range| (range.start, range.end))
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_hold_what_was_added_and_not_removed(steps in prop::collection::vec((any::<bool>(), 0u64..200, 0u64..60), 1..60)) {
            let mut set = Ranges::default();
            let mut bytes = [false; 300];
            for (add, start, size) in steps {
                if add { set.add(start, size) } else { set.remove(start, size) }
                for at in start..start + size {
                    bytes[usize::try_from(at).unwrap()] = add;
                }
            }
            for (at, there) in (0u64..).zip(bytes) {
                prop_assert_eq!(set.first_in(at, 1).is_some(), there, "{}", at);
            }
        }
    }
}
