// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The gate behind which all vCPUs gather before a phase.
//!
//! It is a number and a futex. A vCPU waits until the number is no longer that of its round; the
//! harness, which knows that all have arrived, changes the number and wakes all with one call. No
//! lock is taken on the way out, so no vCPU waits for another to get through, and nobody spins, so
//! waiting costs no work where there are more vCPUs than CPUs.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rustix::thread::futex;

/// A gate that opens once for each round.
#[derive(Debug, Default)]
pub(super) struct Gate {
    round: AtomicU32,
    abandoned: AtomicBool,
}

impl Gate {
    /// The round now gathering; it is over when the gate opens.
    pub(super) fn round(&self) -> u32 {
        self.round.load(Ordering::Acquire)
    }

    /// Waits until the gate opens for `round`; `false`: for nothing, go home.
    pub(super) fn pass(&self, round: u32) -> bool {
        while self.round() == round {
            // An interrupted or needless wait is seen by the loop's condition.
            let _ = futex::wait(&self.round, futex::Flags::PRIVATE, round, None);
        }
        !self.abandoned.load(Ordering::Acquire)
    }

    /// Lets everyone through and ends the round.
    pub(super) fn open(&self) {
        self.round.fetch_add(1, Ordering::AcqRel);
        // Nobody waiting is no error, and there is no other.
        let _ = futex::wake(&self.round, futex::Flags::PRIVATE, i32::MAX.unsigned_abs());
    }

    /// Sends everyone home, now and in every round to come.
    pub(super) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
        self.open();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::Arc, thread};

    #[test]
    fn everyone_passes_an_opened_gate_and_nobody_a_closed_one() {
        let gate = Arc::new(Gate::default());
        let passed = Arc::new(AtomicU32::new(0));
        let round = gate.round();
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let (gate, passed) = (gate.clone(), passed.clone());
                thread::spawn(move || {
                    assert!(gate.pass(round));
                    passed.fetch_add(1, Ordering::Relaxed);
                })
            })
            .collect();
        thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(passed.load(Ordering::Relaxed), 0);

        gate.open();

        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(passed.load(Ordering::Relaxed), 4);
        assert_eq!(gate.round(), round + 1);
    }

    #[test]
    fn an_abandoned_gate_sends_everyone_home() {
        let gate = Gate::default();
        let round = gate.round();
        gate.abandon();

        assert!(!gate.pass(round));
    }
}
