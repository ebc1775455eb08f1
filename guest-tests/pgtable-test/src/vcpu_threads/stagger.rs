// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Seeded differences between the vCPUs' starts.
//!
//! Under deterministic emulation one run is one interleaving of the vCPUs, and another binary or
//! initramfs gives another: no difference between two single runs means much. A seed changes two
//! things in every round, both by turns of a busy loop:
//!
//! - the harness waits before it opens the gate, up to about a tick of the host's timer: ticks
//!   interrupt guests, and at what point they do decides who meets whom;
//! - every vCPU waits for itself between the gate and the guest, up to about the cost of a guest
//!   abort: the vCPUs arrive in another order.
//!
//! The loop has no system call, so under `-icount` it takes the same virtual time wherever it runs.
//! Seed 0 waits nowhere.

use std::hint::black_box;

use granule_types::mix::mix;

/// The longest wait of a vCPU in turns of the loop (a few instructions each): all of it together
/// stays far below the cost of a phase, whose time it is in.
const MOST_TURNS: u64 = 2048;

/// The longest wait before the gate opens: about 4 ms, a tick at 250 Hz. It is in no time.
const MOST_LEAD_TURNS: u64 = 1 << 20;

/// Turns before the gate opens in one round.
pub(super) const fn lead_turns(seed: u64, round: u32) -> u64 {
    if seed == 0 {
        return 0;
    }
    mix(mix(!seed) ^ round as u64) % MOST_LEAD_TURNS
}

/// Turns for one vCPU in one round.
pub(super) const fn turns(seed: u64, round: u32, vcpu: usize) -> u64 {
    if seed == 0 {
        return 0;
    }
    mix(mix(seed) ^ ((round as u64) << 32) ^ vcpu as u64) % MOST_TURNS
}

/// Waits that many turns.
pub(super) fn wait(turns: u64) {
    for turn in 0..turns {
        black_box(turn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_zero_staggers_nothing() {
        assert!((0..100).all(|vcpu| turns(0, 3, vcpu) == 0));
        assert_eq!(lead_turns(0, 3), 0);
    }

    #[test]
    fn a_seed_gives_the_same_turns_again_and_another_seed_others() {
        let of = |seed, round| -> Vec<u64> { (0..16).map(|v| turns(seed, round, v)).collect() };

        assert_eq!(of(7, 1), of(7, 1));
        assert_ne!(of(7, 1), of(8, 1));
        assert_ne!(of(7, 1), of(7, 2));
        assert!(of(7, 1).iter().all(|turns| *turns < MOST_TURNS));
        assert_ne!(lead_turns(7, 1), lead_turns(8, 1));
        assert_ne!(lead_turns(7, 1), lead_turns(7, 2));
    }
}
