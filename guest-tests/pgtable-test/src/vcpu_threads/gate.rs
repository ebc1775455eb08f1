// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The gate at which all vCPU threads wait before a phase.
//!
//! The gate is a generation number and a futex. A thread waits while the number is that of its
//! task. When all threads wait, the harness increments the number and wakes them with one call.
//! Leaving takes no lock, so no vCPU waits for another. No thread spins, so waiting costs no CPU
//! time where vCPUs outnumber CPUs.
//!
//! A seed delays starts. Under deterministic emulation one run is one schedule of the vCPUs, and
//! another binary or initramfs yields another schedule, so a difference between two single runs has
//! little meaning. A seed changes two things at each start, both by iterations of a busy loop:
//!
//! - the harness delays the opening of the gate by up to about one tick of the host's timer, which
//!   shifts the ticks that interrupt guests against their accesses;
//! - every vCPU delays its guest entry by up to about the cost of a guest abort, which changes the
//!   order in which the vCPUs arrive.
//!
//! The loop makes no system call, so under `-icount` it takes the same virtual time everywhere.
//! Seed 0 delays nothing.

use std::{
    hint::black_box,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
};

use rustix::thread::futex;

use granule_types::mix;

/// Exclusive limit of a vCPU's delay, in loop iterations of a few instructions. The phase's time
/// contains the delay, which is far below the cost of a phase.
const VCPU_LIMIT: u64 = 2048;

/// Exclusive limit of the delay before the gate opens: about 4 ms, one tick at 250 Hz. No measured
/// time contains it.
const GATE_LIMIT: u64 = 1 << 20;

/// Returns the delay before the gate opens for `generation`, in loop iterations.
pub(super) fn gate_delay(seed: u64, generation: u32) -> u64 {
    match seed {
        0 => 0,
        _ => mix(mix(!seed) ^ u64::from(generation)) % GATE_LIMIT,
    }
}

/// Returns the delay of one vCPU for `generation`, in loop iterations.
pub(super) fn vcpu_delay(seed: u64, generation: u32, vcpu: usize) -> u64 {
    match seed {
        0 => 0,
        _ => mix(mix(seed) ^ (u64::from(generation) << 32) ^ vcpu as u64) % VCPU_LIMIT,
    }
}

/// Spins for that many loop iterations.
pub(super) fn spin(iterations: u64) {
    for iteration in 0..iterations {
        black_box(iteration);
    }
}

/// A gate that opens once for each generation.
#[derive(Debug, Default)]
pub(super) struct Gate {
    generation: AtomicU32,
    closed: AtomicBool,
}

impl Gate {
    /// Returns the current generation, which ends when the gate opens.
    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// Waits until the gate opens for `generation`. Returns `false` when the gate is closed
    /// permanently and the thread has to end.
    pub(super) fn pass(&self, generation: u32) -> bool {
        while self.generation() == generation {
            // The loop's condition handles spurious and interrupted waits.
            let _ = futex::wait(&self.generation, futex::Flags::PRIVATE, generation, None);
        }
        !self.closed.load(Ordering::Acquire)
    }

    /// Opens the gate for the current generation.
    pub(super) fn open(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        // The call fails for invalid arguments only.
        let _ = futex::wake(&self.generation, futex::Flags::PRIVATE, i32::MAX.unsigned_abs());
    }

    /// Closes the gate permanently: threads that wait, or wait later, end.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
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
        let of = |seed, generation| -> Vec<u64> {
            (0..16).map(|v| vcpu_delay(seed, generation, v)).collect()
        };

        assert_eq!((of(0, 3), gate_delay(0, 3)), (vec![0; 16], 0));
        assert_eq!(of(7, 1), of(7, 1));
        assert_ne!(of(7, 1), of(8, 1));
        assert_ne!(of(7, 1), of(7, 2));
        assert!(of(7, 1).iter().all(|delay| *delay < VCPU_LIMIT));
        assert_ne!(gate_delay(7, 1), gate_delay(8, 1));
        assert_ne!(gate_delay(7, 1), gate_delay(7, 2));
    }
}
