// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A set of bytes as ranges that neither touch nor overlap.

use alloc::{collections::BTreeMap, vec::Vec};

/// Bytes, by first and one behind the last.
#[derive(Debug, Clone, Default)]
pub(super) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    pub(super) fn add(&mut self, start: u64, size: u64) {
        if size == 0 {
            return;
        }
        let (mut start, mut end) = (start, start + size);
        while let Some((&from, &to)) = self.0.range(..=end).next_back() {
            if to < start {
                break;
            }
            self.0.remove(&from);
            start = start.min(from);
            end = end.max(to);
        }
        self.0.insert(start, end);
    }

    pub(super) fn remove(&mut self, start: u64, size: u64) {
        let end = start + size;
        for (from, to) in self.overlaps(start, size) {
            // `from..to` is already cut to the range.
            let Some((&whole, &whole_end)) = self.0.range(..=from).next_back() else {
                continue;
            };
            self.0.remove(&whole);
            if whole < from.max(start) {
                self.0.insert(whole, from);
            }
            if to.min(end) < whole_end {
                self.0.insert(to, whole_end);
            }
        }
    }

    /// What of a range is in the set.
    pub(super) fn overlaps(&self, start: u64, size: u64) -> Vec<(u64, u64)> {
        let end = start + size;
        let mut found: Vec<_> = self
            .0
            .range(..end)
            .rev()
            .take_while(|(_, to)| **to > start)
            .map(|(from, to)| ((*from).max(start), (*to).min(end)))
            .collect();
        found.reverse();
        found
    }

    pub(super) fn touches(&self, start: u64, size: u64) -> Option<u64> {
        self.overlaps(start, size).first().map(|(from, _)| *from)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().map(|(from, to)| (*from, *to))
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
        fn it_is_a_set(steps in prop::collection::vec((any::<bool>(), 0u64..200, 0u64..60), 1..60)) {
            let mut set = Ranges::default();
            let mut bytes = [false; 300];
            for (add, start, size) in steps {
                if add { set.add(start, size) } else { set.remove(start, size) }
                for at in start..start + size {
                    bytes[usize::try_from(at).unwrap()] = add;
                }
            }
            for (at, there) in (0u64..).zip(bytes) {
                prop_assert_eq!(set.touches(at, 1).is_some(), there, "{}", at);
            }
        }
    }
}
