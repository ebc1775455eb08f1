// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sets of addresses, kept as ranges ([`rangemap::RangeSet`]), with the parts of a range that are in
//! a set or missing from it.

use alloc::vec::Vec;
use core::ops::{Add, Range, Sub};

use rangemap::RangeSet;

/// A set of addresses of one address space.
#[derive(Debug)]
pub(super) struct Ranges<A: Clone + Ord>(RangeSet<A>);

impl<A: Clone + Ord> Default for Ranges<A> {
    fn default() -> Self {
        Self(RangeSet::new())
    }
}

impl<A: Copy + Ord + Add<u64, Output = A> + Sub<Output = u64>> Ranges<A> {
    pub(super) fn add(&mut self, start: A, size: u64) {
        // The set panics on an empty range.
        if size > 0 {
            self.0.insert(start..start + size);
        }
    }

    pub(super) fn remove(&mut self, start: A, size: u64) {
        if size > 0 {
            self.0.remove(start..start + size);
        }
    }

    /// Returns the parts of a range that are in the set, by address and size.
    pub(super) fn overlaps(&self, start: A, size: u64) -> Vec<(A, u64)> {
        let end = start + size;
        let found = self.0.overlapping(start..end);
        found.map(|range| with_size(range.start.max(start)..range.end.min(end))).collect()
    }

    /// Returns the parts of a range that are missing from the set, by address and size.
    pub(super) fn gaps(&self, start: A, size: u64) -> Vec<(A, u64)> {
        let range = start..start + size;
        self.0.gaps(&range).map(with_size).collect()
    }

    /// Returns the first address of a range that is in the set.
    pub(super) fn first_in(&self, start: A, size: u64) -> Option<A> {
        let mut found = self.0.overlapping(start..start + size);
        found.next().map(|range| range.start.max(start))
    }

    /// Returns all ranges of the set, by address and size.
    pub(super) fn iter(&self) -> impl Iterator<Item = (A, u64)> + '_ {
        self.0.iter().cloned().map(with_size)
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

fn with_size<A: Copy + Sub<Output = u64>>(range: Range<A>) -> (A, u64) {
    (range.start, range.end - range.start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_hold_what_was_added_and_not_removed(
            steps in prop::collection::vec((any::<bool>(), 0u64..200, 0u64..60), 1..60)
        ) {
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
