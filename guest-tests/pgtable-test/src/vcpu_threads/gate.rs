// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The gate at which all vCPU threads wait before a phase.
//!
//! It is a generation number and a futex. A thread waits while the number is that of its task. When
//! all threads wait, the harness increments the number and wakes them with one call. Leaving takes
//! no lock, so no vCPU waits for another, and no thread spins, so waiting costs no work where there
//! are more vCPUs than CPUs.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rustix::thread::futex;

/// A gate that opens once for each generation.
#[derive(Debug, Default)]
pub(super) struct Gate {
    generation: AtomicU32,
    closed: AtomicBool,
}

impl Gate {
    /// Returns the generation that waits now; it ends when the gate opens.
    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// Waits until the gate opens for `generation`. Returns `false` when the gate is closed for
    /// good and the thread has to end.
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
        // The call fails only for arguments that it is not given here.
        let _ = futex::wake(
            &self.generation,
            futex::Flags::PRIVATE,
            i32::MAX.unsigned_abs(),
        );
    }

    /// Closes the gate for good: threads that wait or will wait end.
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
}
