// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Seeded delays of the vCPUs' starts.
//!
//! Under deterministic emulation one run is one schedule of the vCPUs, and another binary or
//! initramfs yields another schedule, so a difference between two single runs has little meaning. A
//! seed changes two things at each start, both by iterations of a busy loop:
//!
//! - the harness delays the opening of the gate by up to about one tick of the host's timer, which
//!   shifts the ticks that interrupt guests against their accesses;
//! - every vCPU delays its guest entry by up to about the cost of a guest abort, which changes the
//!   order in which the vCPUs arrive.
//!
//! The loop makes no system call, so under `-icount` it takes the same virtual time everywhere.
//! Seed 0 delays nothing.

use std::hint::black_box;

use granule_types::seed::mix;

/// Exclusive limit of a vCPU's delay, in loop iterations of a few instructions. The phase's time
/// contains the delay, which is far below the cost of a phase.
const VCPU_LIMIT: u64 = 2048;

/// Exclusive limit of the delay before the gate opens: about 4 ms, one tick at 250 Hz. No measured
/// time contains it.
const GATE_LIMIT: u64 = 1 << 20;

/// Returns the delay before the gate opens for `generation`, in loop iterations.
pub(super) fn of_gate(seed: u64, generation: u32) -> u64 {
    if seed == 0 {
        return 0;
    }
    mix(mix(!seed) ^ u64::from(generation)) % GATE_LIMIT
}

/// Returns the delay of one vCPU for `generation`, in loop iterations.
pub(super) fn of_vcpu(seed: u64, generation: u32, vcpu: usize) -> u64 {
    if seed == 0 {
        return 0;
    }
    mix(mix(seed) ^ (u64::from(generation) << 32) ^ vcpu as u64) % VCPU_LIMIT
}

/// Spins for that many loop iterations.
pub(super) fn spin(iterations: u64) {
    for iteration in 0..iterations {
        black_box(iteration);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_zero_delays_nothing() {
        assert!((0..100).all(|vcpu| of_vcpu(0, 3, vcpu) == 0));
        assert_eq!(of_gate(0, 3), 0);
    }

    #[test]
    fn delays_repeat_for_a_seed_and_differ_between_seeds_and_generations() {
        let of = |seed, generation| -> Vec<u64> {
            (0..16).map(|v| of_vcpu(seed, generation, v)).collect()
        };

        assert_eq!(of(7, 1), of(7, 1));
        assert_ne!(of(7, 1), of(8, 1));
        assert_ne!(of(7, 1), of(7, 2));
        assert!(of(7, 1).iter().all(|delay| *delay < VCPU_LIMIT));
        assert_ne!(of_gate(7, 1), of_gate(8, 1));
        assert_ne!(of_gate(7, 1), of_gate(7, 2));
    }
}
