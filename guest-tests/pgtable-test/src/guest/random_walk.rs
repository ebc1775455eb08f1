// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! RandomWalk at random, alike in the guest and in the host: what
//! [`Access::WriteAtRandom`](crate::machine::Access::WriteAtRandom) visits, so that the host knows
//! after the fact which page a guest wrote and when.
//!
//! A 64-bit xorshift (Marsaglia 2003, shifts 13, 7, 17) gives a number for each write; its place is
//! the upper half of the number multiplied by how many places there are. The guest programs have
//! the same few instructions.

/// The numbers of the places, from 0, without end.
#[derive(Debug, Clone)]
pub struct RandomWalk {
    state: u64,
    count: u64,
}

impl RandomWalk {
    /// `count` places in the order that belongs to a seed.
    pub const fn new(seed: u64, count: u64) -> Self {
        Self {
            state: first_state(seed),
            count,
        }
    }
}

/// What the generator begins with: any number but 0, which it never leaves.
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
    fn every_place_is_visited_about_as_often() {
        let mut visits = [0; 48];

        for place in RandomWalk::new(0, 48).take(48_000) {
            visits[usize::try_from(place).unwrap()] += 1;
        }

        assert!(visits.iter().all(|n| (800..1200).contains(n)), "{visits:?}");
    }

    #[test]
    fn a_seed_gives_the_same_places_again_and_another_seed_others() {
        let of = |seed| -> Vec<u64> { RandomWalk::new(seed, 1000).take(20).collect() };

        assert_eq!(of(7), of(7));
        assert_ne!(of(7), of(8));
    }
}
