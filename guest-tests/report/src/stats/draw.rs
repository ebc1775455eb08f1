// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Seeded samples for simulations.

use std::f64::consts::TAU;

use granule_types::seed::mix;

/// A stream of normal values.
pub struct Normal(u64);

impl Normal {
    pub fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    /// Between 0 and 1, neither of them.
    fn share(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        ((mix(self.0) >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    }

    /// One value by Box and Muller.
    fn next(&mut self) -> f64 {
        (-2.0 * self.share().ln()).sqrt() * (TAU * self.share()).cos()
    }

    /// Runs about a centre, each off by a factor whose logarithm has this standard deviation.
    pub fn sample(&mut self, runs: usize, centre: f64, deviation: f64) -> Vec<f64> {
        (0..runs)
            .map(|_| centre * (deviation * self.next()).exp())
            .collect()
    }
}
