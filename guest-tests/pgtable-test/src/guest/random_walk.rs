// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The pseudo-random sequence of pages that
//! [`Access::WriteAtRandom`](crate::task::Access::WriteAtRandom) writes.
//!
//! Guest and host compute the same sequence, so the host knows afterwards which pages a vCPU wrote
//! and in which order. A 64-bit xorshift generator (Marsaglia 2003, shifts 13, 7, 17) yields one
//! number for each write; the page is the upper half of that number times the number of pages. The
//! guest programs contain the same instructions, so this generator must not be replaced alone.

/// Iterator over page numbers, from 0 to `count - 1`; it never ends.
#[derive(Debug, Clone)]
pub struct RandomWalk {
    state: u64,
    count: u64,
}

impl RandomWalk {
    /// Returns the sequence of a seed over `count` pages.
    pub const fn new(seed: u64, count: u64) -> Self {
        Self {
            state: first_state(seed),
            count,
        }
    }
}

/// Returns the generator's first state: any number but 0, which would repeat for ever.
pub const fn first_state(seed: u64) -> u64 {
    if seed == 0 { 1 } else { seed }
}

impl Iterator for RandomWalk {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        let product = u128::from(self.state) * u128::from(self.count);
        u64::try_from(product >> 64).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pages_are_visited_about_equally_often() {
        let mut visits = [0; 48];

        for page in RandomWalk::new(0, 48).take(48_000) {
            visits[usize::try_from(page).unwrap()] += 1;
        }

        assert!(visits.iter().all(|n| (800..1200).contains(n)), "{visits:?}");
    }

    #[test]
    fn a_sequence_repeats_for_its_seed_and_differs_between_seeds() {
        let of = |seed| -> Vec<u64> { RandomWalk::new(seed, 1000).take(20).collect() };

        assert_eq!(of(7), of(7));
        assert_ne!(of(7), of(8));
    }
}
