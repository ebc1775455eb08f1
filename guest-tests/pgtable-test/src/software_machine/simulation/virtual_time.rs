// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Virtual time: coroutines as processes, each with its own clock, one of them running.
//!
//! A process runs only while no other process's clock is behind its own. [`spend`] advances the
//! clock of the running process; if another clock is then behind, the process is queued and the
//! other one runs. So processes access shared state in the order of their clocks, as parallel CPUs
//! would. Processes with equal clocks run in the order in which they were queued, and only the
//! deadline depends on real time, so a simulation repeats exactly.
//!
//! The clock belongs to the thread, so code in a process needs no handle: a [lock](VirtualLock) deep
//! in the engine can suspend its caller.

use std::{
    cell::{Cell, RefCell},
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    ptr,
    time::{Duration, Instant},
};

use corosensei::{Coroutine, CoroutineResult, Yielder};
use parking_lot::lock_api::{GuardNoSend, RawRwLock};
use thiserror::Error;

/// A point in virtual time, or a duration, in picoseconds.
pub(super) type Picoseconds = u64;

type Process = Coroutine<(), (), ()>;
type Queue = BinaryHeap<Reverse<(Picoseconds, u64, usize)>>;

/// Number of process switches between two checks of the deadline.
const SWITCHES_PER_CHECK: u32 = 1 << 16;

/// Error of a simulation that does not end.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum ClockError {
    /// The deadline passed.
    #[error("the simulation exceeds {} s of real time; use a longer --deadline", .0.as_secs())]
    Deadline(Duration),
    /// The processes wait for each other, which is a defect.
    #[error("processes {0:?} are deadlocked")]
    Deadlock(Vec<usize>),
}

struct VirtualClock {
    now: Cell<Picoseconds>,
    /// Clock of the first queued process.
    next: Cell<Picoseconds>,
    running: Cell<usize>,
    order: Cell<u64>,
    queue: RefCell<Queue>,
    /// Yielder of each process.
    yielders: RefCell<Vec<*const Yielder<(), ()>>>,
}

thread_local! {
    static CLOCK: VirtualClock = const {
        VirtualClock {
            now: Cell::new(0),
            next: Cell::new(Picoseconds::MAX),
            running: Cell::new(usize::MAX),
            order: Cell::new(0),
            queue: RefCell::new(BinaryHeap::new()),
            yielders: RefCell::new(Vec::new()),
        }
    };
}

impl VirtualClock {
    fn queue(&self, process: usize, at: Picoseconds) {
        let order = self.order.get();
        self.order.set(order + 1);
        self.queue.borrow_mut().push(Reverse((at, order, process)));
        self.next.set(self.next.get().min(at));
    }

    /// Removes the first process from the queue and sets the time to its clock.
    fn next_process(&self) -> Option<usize> {
        let mut queue = self.queue.borrow_mut();
        let Reverse((at, _, process)) = queue.pop()?;
        let next = queue.peek().map_or(Picoseconds::MAX, |first| first.0.0);
        self.next.set(next);
        self.now.set(at);
        self.running.set(process);
        Some(process)
    }

    /// Suspends the running process.
    fn suspend(&self) {
        let yielder = self.yielders.borrow()[self.running.get()];
        debug_assert!(!yielder.is_null(), "only a process can be suspended");
        // SAFETY: the running process stored the address of its yielder when it started. The
        // yielder is on the process's stack for as long as the process exists, and this thread is
        // the only user.
        let yielder = unsafe { &*yielder };
        yielder.suspend(());
    }
}

/// Returns the clock of the running process.
pub(super) fn now() -> Picoseconds {
    CLOCK.with(|clock| clock.now.get())
}

/// Sets the clock, outside a process.
pub(super) fn set(at: Picoseconds) {
    CLOCK.with(|clock| clock.now.set(at));
}

/// Returns the running process.
pub(super) fn running() -> usize {
    CLOCK.with(|clock| clock.running.get())
}

/// Advances the clock for an operation without effect on other processes. They run at the next
/// [`spend`], which must precede the next operation with such an effect.
pub(super) fn charge(time: Picoseconds) {
    CLOCK.with(|clock| clock.now.set(clock.now.get() + time));
}

/// Advances the clock and runs the processes whose clocks are behind. Outside a process it only
/// advances the clock.
pub(super) fn spend(time: Picoseconds) {
    CLOCK.with(|clock| {
        let now = clock.now.get() + time;
        clock.now.set(now);
        if now > clock.next.get() {
            clock.queue(clock.running.get(), now);
            clock.suspend();
        }
    });
}

/// Advances the clock to a point in time, unless it has passed.
pub(super) fn spend_until(at: Picoseconds) {
    spend(at.saturating_sub(now()));
}

/// Suspends the running process until another calls [`wake`].
pub(super) fn sleep() {
    CLOCK.with(VirtualClock::suspend);
}

/// Resumes a suspended process at a point in time, or at once if it has passed.
pub(super) fn wake(process: usize, at: Picoseconds) {
    CLOCK.with(|clock| clock.queue(process, at.max(clock.now.get())));
}

/// Runs processes to their ends and returns the start and end of each. Every process starts at its
/// own delay after `start`.
pub(super) fn run(
    start: Picoseconds,
    processes: Vec<(Picoseconds, Box<dyn FnOnce()>)>,
    deadline: Duration,
) -> Result<Vec<(Picoseconds, Picoseconds)>, ClockError> {
    let real = Instant::now();
    let count = processes.len();
    CLOCK.with(|clock| {
        clock.queue.borrow_mut().clear();
        clock.next.set(Picoseconds::MAX);
        clock.order.set(0);
        *clock.yielders.borrow_mut() = vec![ptr::null(); count];
        let mut times = vec![(0, 0); count];
        let mut stacks: Vec<Option<Process>> = Vec::with_capacity(count);
        for (index, (delay, body)) in processes.into_iter().enumerate() {
            times[index].0 = start + delay;
            clock.queue(index, start + delay);
            stacks.push(Some(Coroutine::new(move |yielder: &Yielder<(), ()>, ()| {
                CLOCK.with(|clock| clock.yielders.borrow_mut()[index] = ptr::from_ref(yielder));
                body();
            })));
        }
        let mut switches = 0_u32;
        let mut left = count;
        let ended = loop {
            let Some(process) = clock.next_process() else {
                break Ok(());
            };
            if let Some(stack) = &mut stacks[process]
                && let CoroutineResult::Return(()) = stack.resume(())
            {
                stacks[process] = None;
                times[process].1 = clock.now.get();
                left -= 1;
            }
            switches = switches.wrapping_add(1);
            if switches.is_multiple_of(SWITCHES_PER_CHECK) && real.elapsed() > deadline {
                break Err(ClockError::Deadline(deadline));
            }
        };
        let waiting = || (0..count).filter(|at| stacks[*at].is_some()).collect();
        let result = match ended {
            Ok(()) if left > 0 => Err(ClockError::Deadlock(waiting())),
            Ok(()) => Ok(times),
            Err(error) => Err(error),
        };
        clock.running.set(usize::MAX);
        clock.next.set(Picoseconds::MAX);
        result
    })
}

thread_local! {
    static LOCK_COSTS: Cell<(Picoseconds, Picoseconds)> = const { Cell::new((0, 0)) };
}

/// Sets the costs of taking a free lock and of a handoff on this thread, because the
/// engine constructs its lock without arguments.
pub(super) fn set_lock_costs(take: Picoseconds, handoff: Picoseconds) {
    LOCK_COSTS.set((take, handoff));
}

/// A read-write lock in virtual time, first come, first served like the kernel's queued locks;
/// readers that are adjacent in the queue enter together.
///
/// Taking a free lock costs an atomic operation on a cache line that another CPU probably wrote
/// last; handing the lock on costs the transfer of the line to the next holder.
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

    fn enter(&self, writes: bool) {
        if writes {
            self.writer.set(true);
        } else {
            self.readers.set(self.readers.get() + 1);
        }
    }

    fn try_take(&self, writes: bool) -> bool {
        let free = self.waiting.borrow().is_empty() && self.is_free_for(writes);
        if free {
            self.enter(writes);
        }
        free
    }

    fn take(&self, writes: bool) {
        let (take, _) = LOCK_COSTS.get();
        spend(take);
        if !self.try_take(writes) {
            let me = running();
            self.waiting.borrow_mut().push_back((me, writes));
            // The process that wakes this one has taken the lock for it.
            sleep();
        }
    }

    fn wake_waiters(&self) {
        let (_, handoff) = LOCK_COSTS.get();
        let mut waiting = self.waiting.borrow_mut();
        while let Some(&(process, writes)) = waiting.front() {
            if !self.is_free_for(writes) {
                break;
            }
            waiting.pop_front();
            self.enter(writes);
            wake(process, now() + handoff);
        }
    }
}

// SAFETY: a writer enters only while no process holds the lock, a reader only while no writer does.
// All users are on one thread, as the value is neither Send nor Sync, and a waiting process
// continues only after it has been entered.
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
        spend(0);
        self.readers.set(self.readers.get() - 1);
        self.wake_waiters();
    }

    fn lock_exclusive(&self) {
        self.take(true);
    }

    fn try_lock_exclusive(&self) -> bool {
        self.try_take(true)
    }

    unsafe fn unlock_exclusive(&self) {
        spend(0);
        self.writer.set(false);
        self.wake_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use parking_lot::lock_api::RwLock;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn processes_run_in_the_order_of_their_clocks() {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let process = |name: char, times: [u64; 2]| {
            let seen = Rc::clone(&seen);
            let body = move || {
                for time in times {
                    spend(time);
                    seen.borrow_mut().push((name, now()));
                }
            };
            (0, Box::new(body) as Box<dyn FnOnce()>)
        };

        let times = run(100, vec![process('a', [30, 30]), process('b', [20, 25])], LONG);

        assert_eq!(times, Ok(vec![(100, 160), (100, 145)]));
        let expected = [('b', 120), ('a', 130), ('b', 145), ('a', 160)];
        assert_eq!(*seen.borrow(), expected);
    }

    #[test]
    fn a_process_that_is_never_woken_is_a_deadlock() {
        let body: Box<dyn FnOnce()> = Box::new(sleep);

        assert_eq!(run(0, vec![(0, body)], LONG), Err(ClockError::Deadlock(vec![0])));
    }

    #[test]
    fn a_suspended_process_resumes_when_woken() {
        let sleeper: Box<dyn FnOnce()> = Box::new(sleep);
        let other: Box<dyn FnOnce()> = Box::new(|| {
            spend(10);
            wake(0, now() + 5);
        });

        let times = run(0, vec![(0, sleeper), (0, other)], LONG);

        assert_eq!(times, Ok(vec![(0, 15), (0, 10)]));
    }

    #[test]
    fn writers_enter_one_by_one_and_readers_together() {
        set_lock_costs(1, 5);
        let lock = Rc::new(RwLock::<VirtualLock, u32>::new(0));
        let process = |delay, hold: fn(&RwLock<VirtualLock, u32>)| {
            let lock = Rc::clone(&lock);
            (delay, Box::new(move || hold(&lock)) as Box<dyn FnOnce()>)
        };
        let write = |lock: &RwLock<VirtualLock, u32>| {
            let mut held = lock.write();
            *held += 1;
            spend(100);
        };
        let read = |lock: &RwLock<VirtualLock, u32>| {
            let _held = lock.read();
            spend(100);
        };

        let processes =
            vec![process(0, write), process(1, write), process(2, read), process(3, read)];
        let times = run(0, processes, LONG).unwrap();

        // 1 to take the lock, 100 to hold it, 5 to hand it on; then both readers at once.
        let ends: Vec<_> = times.iter().map(|time| time.1).collect();
        assert_eq!(ends, [101, 206, 311, 311]);
        assert_eq!(*lock.try_read().unwrap(), 2);
    }
}
