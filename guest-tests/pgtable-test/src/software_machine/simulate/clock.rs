// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Virtual time: processes on stacks of their own, each with its own clock, one of them running.
//!
//! The rule that makes it a simulation of parallel machines: a process goes on only while no other's
//! clock is behind its own. [`spend`] moves the clock of the process that runs; if another is then
//! behind, the process waits in the queue and that one runs. So whatever processes do to what they
//! share happens in the order of their clocks, as it would on CPUs that run side by side, and the
//! same every time: equal clocks go in the order in which they were queued, and nothing here looks at
//! a real clock but the deadline.
//!
//! Code that runs in a process needs no handle: the clock belongs to the thread, so that a lock deep
//! in the engine ([`super::lock`]) can put its caller to sleep.

use std::{
    cell::{Cell, RefCell},
    cmp::Reverse,
    collections::BinaryHeap,
    ptr,
    time::{Duration, Instant},
};

use corosensei::{Coroutine, CoroutineResult, Yielder};
use thiserror::Error;

/// A point in virtual time or a span of it, in picoseconds.
pub(super) type Picoseconds = u64;

type Process = Coroutine<(), (), ()>;
type Queue = BinaryHeap<Reverse<(Picoseconds, u64, usize)>>;

/// Turns between two looks at the real clock.
const TURNS_A_LOOK: u32 = 1 << 16;

/// Why a simulation came to no end.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum ClockError {
    /// Real time ran out.
    #[error("{} s of real time were not enough; allow more with --deadline", .0.as_secs())]
    Deadline(Duration),
    /// Everybody waits for somebody: a defect.
    #[error("processes {0:?} wait for ever")]
    Deadlock(Vec<usize>),
}

struct Clock {
    now: Cell<Picoseconds>,
    /// When the first in the queue wants to go on.
    next: Cell<Picoseconds>,
    running: Cell<usize>,
    order: Cell<u64>,
    queue: RefCell<Queue>,
    /// The way out of each process.
    yielders: RefCell<Vec<*const Yielder<(), ()>>>,
}

thread_local! {
    static CLOCK: Clock = const {
        Clock {
            now: Cell::new(0),
            next: Cell::new(Picoseconds::MAX),
            running: Cell::new(usize::MAX),
            order: Cell::new(0),
            queue: RefCell::new(BinaryHeap::new()),
            yielders: RefCell::new(Vec::new()),
        }
    };
}

impl Clock {
    fn queue(&self, process: usize, at: Picoseconds) {
        let order = self.order.get();
        self.order.set(order + 1);
        self.queue.borrow_mut().push(Reverse((at, order, process)));
        self.next.set(self.next.get().min(at));
    }

    /// Takes the first out of the queue and lets time be its own.
    fn step(&self) -> Option<usize> {
        let mut queue = self.queue.borrow_mut();
        let Reverse((at, _, process)) = queue.pop()?;
        let next = queue.peek().map_or(Picoseconds::MAX, |first| first.0.0);
        self.next.set(next);
        self.now.set(at);
        self.running.set(process);
        Some(process)
    }

    /// Leaves the process that runs.
    fn suspend(&self) {
        let yielder = self.yielders.borrow()[self.running.get()];
        debug_assert!(!yielder.is_null(), "only a process can wait");
        // SAFETY: the process that runs noted the address of its yielder when it began; the yielder
        // lives on its stack for as long as the process does, and only its own thread comes here.
        let yielder = unsafe { &*yielder };
        yielder.suspend(());
    }
}

/// The time of the process that runs.
pub(super) fn now() -> Picoseconds {
    CLOCK.with(|clock| clock.now.get())
}

/// Sets the clock, outside of a simulation.
pub(super) fn set(at: Picoseconds) {
    CLOCK.with(|clock| clock.now.set(at));
}

/// The process that runs.
pub(super) fn running() -> usize {
    CLOCK.with(|clock| clock.running.get())
}

/// Takes time for something that nobody else can see: others' turn comes with the next [`spend`],
/// which must come before the next thing that they can see.
pub(super) fn charge(time: Picoseconds) {
    CLOCK.with(|clock| clock.now.set(clock.now.get() + time));
}

/// Takes time, and lets those go first whose clocks are behind. Outside of a simulation it only
/// moves the clock.
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

/// Takes time until a point that may have passed.
pub(super) fn spend_until(at: Picoseconds) {
    spend(at.saturating_sub(now()));
}

/// Waits until somebody calls [`wake`].
pub(super) fn sleep() {
    CLOCK.with(Clock::suspend);
}

/// Has a process that sleeps go on at a time, not before now.
pub(super) fn wake(process: usize, at: Picoseconds) {
    CLOCK.with(|clock| clock.queue(process, at.max(clock.now.get())));
}

/// Runs processes from a common start to their ends and gives each one's begin and end. Every
/// process begins at its own `delay` behind the start.
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
            stacks.push(Some(Coroutine::new(
                move |yielder: &Yielder<(), ()>, ()| {
                    CLOCK.with(|clock| clock.yielders.borrow_mut()[index] = ptr::from_ref(yielder));
                    body();
                },
            )));
        }
        let mut turns = 0_u32;
        let mut left = count;
        let ended = loop {
            let Some(process) = clock.step() else {
                break Ok(());
            };
            if let Some(stack) = &mut stacks[process]
                && let CoroutineResult::Return(()) = stack.resume(())
            {
                stacks[process] = None;
                times[process].1 = clock.now.get();
                left -= 1;
            }
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(TURNS_A_LOOK) && real.elapsed() > deadline {
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

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_processes_do_happens_in_the_order_of_their_clocks() {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let process = |name: char, steps: [u64; 2]| {
            let seen = Rc::clone(&seen);
            let body = move || {
                for step in steps {
                    spend(step);
                    seen.borrow_mut().push((name, now()));
                }
            };
            (0, Box::new(body) as Box<dyn FnOnce()>)
        };

        let times = run(
            100,
            vec![process('a', [30, 30]), process('b', [20, 25])],
            LONG,
        );

        assert_eq!(times, Ok(vec![(100, 160), (100, 145)]));
        let wanted = [('b', 120), ('a', 130), ('b', 145), ('a', 160)];
        assert_eq!(*seen.borrow(), wanted);
    }

    #[test]
    fn who_is_never_woken_is_found() {
        let body: Box<dyn FnOnce()> = Box::new(sleep);

        assert_eq!(
            run(0, vec![(0, body)], LONG),
            Err(ClockError::Deadlock(vec![0]))
        );
    }

    #[test]
    fn who_sleeps_goes_on_when_woken() {
        let sleeper: Box<dyn FnOnce()> = Box::new(sleep);
        let other: Box<dyn FnOnce()> = Box::new(|| {
            spend(10);
            wake(0, now() + 5);
        });

        let times = run(0, vec![(0, sleeper), (0, other)], LONG);

        assert_eq!(times, Ok(vec![(0, 15), (0, 10)]));
    }
}
