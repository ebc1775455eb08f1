// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The search for the first bad commit in a list, oldest first.
//!
//! The commit before the list is good. The last commit is assumed to be bad until it is measured,
//! which happens only if no earlier one is bad, so the search saves its boot. Then the part that
//! may contain the last commit is made smaller than the other one: it costs one more measurement.
//! With the good commit, twelve commits take at most five boots.

use std::ops::RangeInclusive;

/// Verdict on a measured commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Good,
    Bad,
    /// The commit cannot be built, booted or measured.
    Skipped,
}

/// Next step of a search.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Measure the commit of this index.
    Measure(usize),
    /// The commit of this index is the first bad one.
    Found(usize),
    /// One of these commits is the first bad one; those between are skipped.
    Undecided(RangeInclusive<usize>),
    /// No commit is bad.
    NoneBad,
}

/// Verdicts on the commits of a list.
#[derive(Debug)]
pub struct Search {
    verdicts: Vec<Option<Verdict>>,
}

impl Search {
    /// Returns a search in a list of `count` commits, which is not empty.
    pub fn new(count: usize) -> Self {
        Self { verdicts: vec![None; count] }
    }

    pub fn record(&mut self, index: usize, verdict: Verdict) {
        self.verdicts[index] = Some(verdict);
    }

    pub fn next(&self) -> Step {
        let is = |verdict| move |found: &Option<Verdict>| *found == Some(verdict);
        let last = self.verdicts.len() - 1;
        let first = self.verdicts.iter().rposition(is(Verdict::Good)).map_or(0, |good| good + 1);
        if first > last {
            return Step::NoneBad;
        }
        let measured = self.verdicts.iter().position(is(Verdict::Bad));
        let top = measured.unwrap_or(last);
        if first == top {
            return match self.verdicts[top] {
                Some(Verdict::Bad) => Step::Found(top),
                Some(_) => Step::Undecided(first..=top),
                None => Step::Measure(top),
            };
        }
        let count = top - first + 1;
        let older = match measured {
            Some(_) => count / 2,
            None => power_of_two_up_to(2 * count / 3),
        };
        let middle = first + older - 1;
        // The nearest commit that is not skipped; the last one comes last.
        let unknown = (first..=top).filter(|index| self.verdicts[*index].is_none());
        let nearest = unknown.min_by_key(|index| (*index == top, index.abs_diff(middle)));
        nearest.map_or(Step::Undecided(first..=top), Step::Measure)
    }
}

/// Returns the largest number of measurements in a list of `count` commits.
pub fn max_measurements(count: usize) -> u32 {
    let with_bad_end = |count: usize| count.next_power_of_two().ilog2();
    match count {
        0 | 1 => 1,
        _ => {
            let older = power_of_two_up_to(2 * count / 3);
            1 + with_bad_end(older).max(max_measurements(count - older))
        }
    }
}

/// Returns the largest power of two that is at most `limit`, or 1.
fn power_of_two_up_to(limit: usize) -> usize {
    1 << limit.max(1).ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches for `culprit`; returns the result and the number of measurements.
    fn search(count: usize, culprit: usize, skipped: &[usize]) -> (Step, usize) {
        let mut search = Search::new(count);
        for measurements in 0.. {
            match search.next() {
                Step::Measure(index) if skipped.contains(&index) => {
                    search.record(index, Verdict::Skipped);
                }
                Step::Measure(index) => {
                    let verdict = if index < culprit { Verdict::Good } else { Verdict::Bad };
                    search.record(index, verdict);
                }
                result => return (result, measurements),
            }
        }
        unreachable!("the loop has no end")
    }

    #[test]
    fn every_culprit_is_found() {
        for count in 1..70 {
            for culprit in 0..count {
                let (result, measurements) = search(count, culprit, &[]);

                assert_eq!(result, Step::Found(culprit), "of {count}");
                assert!(measurements <= max_measurements(count) as usize, "{culprit} of {count}");
            }
        }
    }

    #[test]
    fn twelve_commits_take_at_most_four_measurements() {
        let most = (0..12).map(|culprit| search(12, culprit, &[]).1).max();

        assert_eq!(most, Some(4));
        assert_eq!(max_measurements(12), 4);
    }

    #[test]
    fn a_list_without_a_bad_commit_is_recognized() {
        assert_eq!(search(7, 7, &[]).0, Step::NoneBad);
    }

    #[test]
    fn skipped_commits_beside_the_culprit_are_undecided() {
        assert_eq!(search(12, 5, &[4]).0, Step::Undecided(4..=5));
        assert_eq!(search(12, 5, &[5, 6]).0, Step::Undecided(5..=7));
        assert_eq!(search(12, 5, &[1, 9]).0, Step::Found(5));
        assert_eq!(search(2, 1, &[1]).0, Step::Undecided(1..=1));
    }
}
