// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The gate at which all vCPU threads wait before a phase.
//!
//! The gate is a generation number and a futex. A thread waits while the number equals the
//! generation of its task. When all threads wait, the harness increments the number and wakes them
//! with one call. Passing the gate takes no lock, so no vCPU waits for another. No thread spins, so
//! waiting takes no CPU time if vCPUs outnumber CPUs.
//!
//! Under deterministic emulation one run shows one schedule of the vCPUs, and any change of a
//! binary or the initramfs yields another schedule, so the difference between two single runs has
//! little meaning. A seed selects the schedule by two delays, both by iterations of a busy loop:
//!
//! - the harness opens the gate up to about one timer tick of the host later, which shifts the
//!   ticks that interrupt guests relative to the guests' accesses;
//! - every vCPU enters the guest later, by up to about the cost of a stage-2 abort, which changes
//!   the order of the vCPUs.
//!
//! The loop makes no system call, so under `-icount` its virtual time is the same everywhere.
//! Seed 0 causes no delay.

use std::{
    hint::black_box,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
};

use rustix::thread::futex;

use granule_types::splitmix64;

/// Exclusive limit of a vCPU's delay, in loop iterations of a few instructions. The phase's time
/// includes the delay, which is negligible.
const VCPU_DELAY_LIMIT: u64 = 2048;

/// Exclusive limit of the delay before the gate opens, in loop iterations: about 4 ms, one tick at
/// 250 Hz. No measured time includes it.
const GATE_DELAY_LIMIT: u64 = 1 << 20;

/// Returns the delay before the gate opens for `generation`, in loop iterations.
pub(super) fn gate_delay(seed: u64, generation: u32) -> u64 {
    let delay = splitmix64(splitmix64(!seed) ^ u64::from(generation)) % GATE_DELAY_LIMIT;
    if seed == 0 { 0 } else { delay }
}

/// Returns the delay of one vCPU for `generation`, in loop iterations.
pub(super) fn vcpu_delay(seed: u64, generation: u32, vcpu: usize) -> u64 {
    let start = (u64::from(generation) << 32) ^ vcpu as u64;
    let delay = splitmix64(splitmix64(seed) ^ start) % VCPU_DELAY_LIMIT;
    if seed == 0 { 0 } else { delay }
}

/// Spins for a number of loop iterations.
pub(super) fn spin(iterations: u64) {
    for iteration in 0..iterations {
        black_box(iteration);
    }
}

/// A gate that opens once for each generation.
#[derive(Debug, Default)]
pub(super) struct Gate {
    generation: AtomicU32,
    is_closed: AtomicBool,
}

impl Gate {
    /// Returns the current generation, which opening the gate increments.
    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// Waits until the gate opens for `generation`. Returns `false` if the gate is closed
    /// permanently, so that the thread must end.
    pub(super) fn pass(&self, generation: u32) -> bool {
        while self.generation() == generation {
            // The loop handles spurious wake-ups and interruptions.
            let _ = futex::wait(&self.generation, futex::Flags::PRIVATE, generation, None);
        }
        !self.is_closed.load(Ordering::Acquire)
    }

    /// Opens the gate for the current generation.
    pub(super) fn open(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        // The call fails only for invalid arguments.
        let _ = futex::wake(&self.generation, futex::Flags::PRIVATE, i32::MAX.unsigned_abs());
    }

    /// Closes the gate permanently: threads that wait, or wait later, end.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.open();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::Arc, thread};

    #[test]
    fn threads_wait_until_the_gate_opens() {
        let gate = Arc::new(Gate::default());
        let passed = Arc::new(AtomicU32::new(0));
        let generation = gate.generation();
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let (gate, passed) = (gate.clone(), passed.clone());
                thread::spawn(move || {
                    assert!(gate.pass(generation));
                    passed.fetch_add(1, Ordering::Relaxed);
                })
            })
            .collect();
        thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(passed.load(Ordering::Relaxed), 0);

        gate.open();

        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(passed.load(Ordering::Relaxed), 4);
        assert_eq!(gate.generation(), generation + 1);
    }

    #[test]
    fn a_closed_gate_lets_no_thread_pass() {
        let gate = Gate::default();
        let generation = gate.generation();
        gate.close();

        assert!(!gate.pass(generation));
    }

    #[test]
    fn delays_depend_on_seed_and_generation_and_are_zero_for_seed_0() {
        let delays = |seed, generation| -> Vec<u64> {
            (0..16).map(|v| vcpu_delay(seed, generation, v)).collect()
        };

        assert_eq!((delays(0, 3), gate_delay(0, 3)), (vec![0; 16], 0));
        assert_eq!(delays(7, 1), delays(7, 1));
        assert_ne!(delays(7, 1), delays(8, 1));
        assert_ne!(delays(7, 1), delays(7, 2));
        assert!(delays(7, 1).iter().all(|delay| *delay < VCPU_DELAY_LIMIT));
        assert_ne!(gate_delay(7, 1), gate_delay(8, 1));
        assert_ne!(gate_delay(7, 1), gate_delay(7, 2));
    }
}
