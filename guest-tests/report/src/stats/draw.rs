// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Seeded samples for simulations.

use std::f64::consts::TAU;

use rand_core::{Rng, SeedableRng};
use rand_xoshiro::SplitMix64;

/// Stream of normal values.
pub struct Normal(SplitMix64);

impl Normal {
    pub fn new(seed: u64) -> Self {
        // Neighbouring seeds must not begin at neighbouring states.
        let spread = SplitMix64::seed_from_u64(seed).next_u64();
        let mut random = SplitMix64::seed_from_u64(spread);
        random.next_u64();
        Self(random)
    }

    /// Returns a value between 0 and 1, both excluded.
    fn share(&mut self) -> f64 {
        ((self.0.next_u64() >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    }

    /// Returns one standard normal value (Box and Muller).
    fn next(&mut self) -> f64 {
        (-2.0 * self.share().ln()).sqrt() * (TAU * self.share()).cos()
    }

    /// Returns log-normal runs about `centre`; `deviation` is that of their logarithms.
    pub fn sample(&mut self, runs: usize, centre: f64, deviation: f64) -> Vec<f64> {
        (0..runs).map(|_| centre * (deviation * self.next()).exp()).collect()
    }
}
