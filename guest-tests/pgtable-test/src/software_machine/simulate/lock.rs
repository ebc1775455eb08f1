// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A read-write lock in virtual time, fair as the kernel's queued locks are: who comes first goes
//! first, readers that stand side by side go together.
//!
//! A free lock costs the taker an atomic operation on a line that most likely another CPU wrote last.
//! A lock that is handed on costs the next one the way of the line from the CPU that had it. The
//! costs are the thread's, set by [`set_costs`], as the engine makes its lock out of nothing.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
};

use parking_lot::lock_api::{GuardNoSend, RawRwLock};

use super::clock::{self, Picoseconds};

thread_local! {
    static COSTS: Cell<(Picoseconds, Picoseconds)> = const { Cell::new((0, 0)) };
}

/// What taking a free lock and being handed one cost on this thread from now on.
pub(super) fn set_costs(take: Picoseconds, handoff: Picoseconds) {
    COSTS.set((take, handoff));
}

/// The lock.
#[derive(Debug)]
pub(super) struct VirtualLock {
    writer: Cell<bool>,
    readers: Cell<usize>,
    /// Who waits, and whether to write.
    waiting: RefCell<VecDeque<(usize, bool)>>,
}

impl VirtualLock {
    fn is_free_for(&self, writes: bool) -> bool {
        !self.writer.get() && (!writes || self.readers.get() == 0)
    }

    fn grant(&self, writes: bool) {
        if writes {
            self.writer.set(true);
        } else {
            self.readers.set(self.readers.get() + 1);
        }
    }

    fn try_take(&self, writes: bool) -> bool {
        let free = self.waiting.borrow().is_empty() && self.is_free_for(writes);
        if free {
            self.grant(writes);
        }
        free
    }

    fn take(&self, writes: bool) {
        let (take, _) = COSTS.get();
        clock::spend(take);
        if !self.try_take(writes) {
            let me = clock::running();
            self.waiting.borrow_mut().push_back((me, writes));
            // Whoever wakes has granted it.
            clock::sleep();
        }
    }

    fn hand_on(&self) {
        let (_, handoff) = COSTS.get();
        let mut waiting = self.waiting.borrow_mut();
        while let Some(&(process, writes)) = waiting.front() {
            if !self.is_free_for(writes) {
                break;
            }
            waiting.pop_front();
            self.grant(writes);
            clock::wake(process, clock::now() + handoff);
        }
    }
}

// SAFETY: a writer is let in only when nobody is, a reader only when no writer is. All users are on
// one thread, as the value is neither Send nor Sync, and a process is left only in `sleep`, behind
// which the lock has been granted to it.
unsafe impl RawRwLock for VirtualLock {
    const INIT: Self = Self {
        writer: Cell::new(false),
        readers: Cell::new(0),
        waiting: RefCell::new(VecDeque::new()),
    };

    type GuardMarker = GuardNoSend;

    fn lock_shared(&self) {
        self.take(false);
    }

    fn try_lock_shared(&self) -> bool {
        self.try_take(false)
    }

    unsafe fn unlock_shared(&self) {
        clock::spend(0);
        self.readers.set(self.readers.get() - 1);
        self.hand_on();
    }

    fn lock_exclusive(&self) {
        self.take(true);
    }

    fn try_lock_exclusive(&self) -> bool {
        self.try_take(true)
    }

    unsafe fn unlock_exclusive(&self) {
        clock::spend(0);
        self.writer.set(false);
        self.hand_on();
    }
}

#[cfg(test)]
mod tests {
    use std::{rc::Rc, time::Duration};

    use parking_lot::lock_api::RwLock;

    use super::*;

    #[test]
    fn writers_go_one_after_the_other_and_readers_together() {
        set_costs(1, 5);
        let lock = Rc::new(RwLock::<VirtualLock, u32>::new(0));
        let writer = |delay| {
            let lock = Rc::clone(&lock);
            let body = move || {
                let mut held = lock.write();
                *held += 1;
                clock::spend(100);
            };
            (delay, Box::new(body) as Box<dyn FnOnce()>)
        };
        let reader = |delay| {
            let lock = Rc::clone(&lock);
            let body = move || {
                let _held = lock.read();
                clock::spend(100);
            };
            (delay, Box::new(body) as Box<dyn FnOnce()>)
        };

        let crew = vec![writer(0), writer(1), reader(2), reader(3)];
        let times = clock::run(0, crew, Duration::from_secs(60)).unwrap();

        // 1 to take it; 100 held, 5 to hand it on; then both readers at once.
        let ends: Vec<_> = times.iter().map(|time| time.1).collect();
        assert_eq!(ends, [101, 206, 311, 311]);
        assert_eq!(*lock.try_read().unwrap(), 2);
    }
}
