// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A read-write lock in virtual time, first come, first served like the kernel's queued locks;
//! readers that are adjacent in the queue enter together.
//!
//! Taking a free lock costs an atomic operation on a cache line that another CPU probably wrote
//! last; handing the lock on costs the transfer of the line to the next holder. [`set_costs`] sets
//! both for the thread, because the engine constructs its lock without arguments.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
};

use parking_lot::lock_api::{GuardNoSend, RawRwLock};

use super::virtual_time::{self, Picoseconds};

thread_local! {
    static COSTS: Cell<(Picoseconds, Picoseconds)> = const { Cell::new((0, 0)) };
}

/// Sets the costs of taking a free lock and of a handoff on this thread.
pub(super) fn set_costs(take: Picoseconds, handoff: Picoseconds) {
    COSTS.set((take, handoff));
}

/// A read-write lock in virtual time.
#[derive(Debug)]
pub struct VirtualLock {
    writer: Cell<bool>,
    readers: Cell<usize>,
    /// Waiting processes, each with whether it writes.
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
        virtual_time::spend(take);
        if !self.try_take(writes) {
            let me = virtual_time::running();
            self.waiting.borrow_mut().push_back((me, writes));
            // The process that wakes this one has granted the lock to it.
            virtual_time::sleep();
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
            virtual_time::wake(process, virtual_time::now() + handoff);
        }
    }
}

// SAFETY: a writer is granted the lock only while no process holds it, a reader only while no
// writer does. All users are on one thread, as the value is neither Send nor Sync, and a waiting
// process continues only after the lock has been granted to it.
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
        virtual_time::spend(0);
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
        virtual_time::spend(0);
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
    fn writers_enter_one_by_one_and_readers_together() {
        set_costs(1, 5);
        let lock = Rc::new(RwLock::<VirtualLock, u32>::new(0));
        let process = |delay, hold: fn(&RwLock<VirtualLock, u32>)| {
            let lock = Rc::clone(&lock);
            (delay, Box::new(move || hold(&lock)) as Box<dyn FnOnce()>)
        };
        let write = |lock: &RwLock<VirtualLock, u32>| {
            let mut held = lock.write();
            *held += 1;
            virtual_time::spend(100);
        };
        let read = |lock: &RwLock<VirtualLock, u32>| {
            let _held = lock.read();
            virtual_time::spend(100);
        };

        let processes =
            vec![process(0, write), process(1, write), process(2, read), process(3, read)];
        let times = virtual_time::run(0, processes, Duration::from_secs(60)).unwrap();

        // 1 to take the lock, 100 to hold it, 5 to hand it on; then both readers at once.
        let ends: Vec<_> = times.iter().map(|time| time.1).collect();
        assert_eq!(ends, [101, 206, 311, 311]);
        assert_eq!(*lock.try_read().unwrap(), 2);
    }
}
