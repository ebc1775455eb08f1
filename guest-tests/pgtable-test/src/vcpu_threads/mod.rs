// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The crew: one thread for each vCPU, all released at once, all watched.
//!
//! A round goes like this:
//!
//! 1. [`Crew::muster`] gives every vCPU its own start token (its task). Each thread takes its token
//!    and stops behind the gate. `muster` returns when all stand there and the seed's wait is over, so
//!    waking up threads is in no time that is measured.
//! 2. [`Muster::release`] opens the gate, which wakes all with one call. Each vCPU waits its seeded
//!    turns, takes the time, runs its task, takes the time again and hands in its own end token.
//!    Only the last one, or one that failed, wakes the harness.
//! 3. `release` returns the round's time, from the opening of the gate to the last vCPU's end, and
//!    each vCPU's own, without its seeded wait.
//!
//! So no vCPU can do another's work or its own twice, as it can where tokens are of one heap. When
//! a vCPU fails, or the deadline passes, those still in the guest are kicked out, and the error has
//! the first failure, or where every late vCPU was. A crew that failed takes no more orders.
//!
//! [`Muster::open`] opens the gate alone, so that the harness can work while the vCPUs do; `release`
//! then waits for them.
//!
//! Dropping the crew ends and joins every thread. The one exception is a vCPU that does not come out
//! when kicked: joining it would hang for ever, so its thread is left behind and the error says so.

pub mod clock;
mod error;
mod gate;
pub(crate) mod stagger;
#[cfg(test)]
mod tests;
mod thread;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread::{Builder, JoinHandle},
    time::{Duration, Instant},
};

pub use error::{CrewError, Late};

use crate::machine::{Kick, Task, Vcpu};
use granule_types::units::Nanoseconds;
use thread::{Ended, Failure, Order, Ring, Shared, serve};

/// How long a vCPU that was kicked is waited for.
const GRACE: Duration = Duration::from_secs(10);

/// The times of one round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoundTimes {
    /// From the opening of the gate to the end of the last vCPU.
    pub total: Nanoseconds,
    /// Each vCPU's own, from before its entry into the guest to after its exit.
    pub vcpus: Vec<Nanoseconds>,
}

/// The vCPU threads.
pub struct Crew {
    members: Vec<Member>,
    shared: Arc<Shared>,
    bell: Receiver<Ring>,
    deadline: Duration,
    spent: bool,
}

struct Member {
    orders: Sender<Order>,
    kick: Box<dyn Kick>,
    /// `None` once it is lost.
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Crew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Crew")
            .field("vcpus", &self.members.len())
            .field("deadline", &self.deadline)
            .field("spent", &self.spent)
            .finish_non_exhaustive()
    }
}

impl Crew {
    /// Starts a thread named `vcpu N` for each vCPU and binds it there. Each round may take as long
    /// as `deadline` from the opening of the gate.
    ///
    /// # Errors
    /// A thread cannot be started or a vCPU not be bound; those before it are ended.
    pub fn start(vcpus: Vec<Box<dyn Vcpu>>, deadline: Duration) -> Result<Self, CrewError> {
        let shared = Arc::new(Shared::new(vcpus.len()));
        let (ring, bell) = mpsc::channel();
        let mut crew = Self {
            members: Vec::with_capacity(vcpus.len()),
            shared,
            bell,
            deadline,
            spent: false,
        };
        for (index, vcpu) in vcpus.into_iter().enumerate() {
            crew.members
                .push(Member::start(index, vcpu, &crew.shared, ring.clone())?);
        }
        Ok(crew)
    }

    /// How many vCPUs there are.
    pub fn vcpus(&self) -> usize {
        self.members.len()
    }

    /// Hands out one task for each vCPU, in order, and waits until all stand behind the gate.
    /// `seed` staggers their starts, 0 does not.
    ///
    /// # Errors
    /// The crew failed before, or a thread has gone.
    ///
    /// # Panics
    /// There are not as many tasks as vCPUs.
    pub fn muster(&mut self, tasks: &[Task], seed: u64) -> Result<Muster<'_>, CrewError> {
        assert_eq!(tasks.len(), self.members.len(), "one task for each vCPU");
        if self.spent {
            return Err(CrewError::Spent);
        }
        let round = self.shared.gate.round();
        let vcpus = self.members.len();
        self.shared.awaited.store(vcpus, Ordering::Release);
        self.shared.running.store(vcpus, Ordering::Release);
        let muster = Muster {
            crew: self,
            opened: None,
            over: false,
        };
        for (vcpu, (member, task)) in muster.crew.members.iter().zip(tasks).enumerate() {
            let order = Order {
                task: *task,
                round,
                turns: stagger::turns(seed, round, vcpu),
            };
            member.orders.send(order).map_err(|_| CrewError::Spent)?;
        }
        // Between its token and the gate a thread does nothing that could fail or take long.
        match muster.crew.bell.recv() {
            Ok(Ring::AllArrived) => {}
            _ => return Err(CrewError::Spent),
        }
        stagger::wait(stagger::lead_turns(seed, round));
        Ok(muster)
    }

    /// Waits until every end token is in, one vCPU fails, or the deadline passes; then, where that
    /// is not the end, kicks out who is still in the guest and waits for them.
    fn watch(&mut self, opened: Nanoseconds) -> Result<RoundTimes, CrewError> {
        let all = 0..self.members.len();
        let late = || -> Vec<usize> {
            all.clone()
                .filter(|vcpu| !self.shared.has_ended(*vcpu))
                .collect()
        };
        let cause = match self.wait(self.deadline) {
            Watch::AllEnded => return self.times(opened),
            Watch::Failed(vcpu) => Cause::Failed(vcpu),
            Watch::TimedOut => Cause::Late(late()),
        };
        self.spent = true;
        for vcpu in all.clone() {
            if !self.shared.has_ended(vcpu) {
                self.members[vcpu].kick.kick();
            }
        }
        let end = Instant::now() + GRACE;
        while let Watch::Failed(_) = self.wait(end.saturating_duration_since(Instant::now())) {}
        let lost: Vec<usize> = all
            .filter(|vcpu| !self.shared.has_ended(*vcpu))
            .inspect(|vcpu| drop(self.members[*vcpu].thread.take()))
            .collect();
        let error = self.error(cause);
        Err(if lost.is_empty() {
            error
        } else {
            CrewError::Lost {
                vcpus: lost,
                source: Box::new(error),
            }
        })
    }

    fn wait(&self, at_most: Duration) -> Watch {
        match self.bell.recv_timeout(at_most) {
            Ok(Ring::Failed(vcpu)) => Watch::Failed(vcpu),
            Ok(Ring::AllEnded | Ring::AllArrived) => Watch::AllEnded,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Watch::TimedOut,
        }
    }

    fn times(&mut self, opened: Nanoseconds) -> Result<RoundTimes, CrewError> {
        let ended: Vec<Ended> = (0..self.members.len())
            .filter_map(|vcpu| self.shared.take_ended(vcpu))
            .collect();
        let last = ended.iter().map(|e| e.at).max().unwrap_or(opened);
        Ok(RoundTimes {
            total: clock::between(opened, last),
            vcpus: ended
                .iter()
                .map(|e| clock::between(e.started, e.at))
                .collect(),
        })
    }

    fn error(&self, cause: Cause) -> CrewError {
        let failure = |vcpu: usize| self.shared.take_ended(vcpu).map(|ended| ended.result);
        match cause {
            Cause::Failed(vcpu) => match failure(vcpu) {
                Some(Err(Failure::Vcpu(failure))) => CrewError::Failed(Box::new(failure)),
                Some(Err(Failure::Panic(message))) => CrewError::Panicked { vcpu, message },
                Some(Ok(())) | None => CrewError::Spent,
            },
            Cause::Late(vcpus) => CrewError::Deadline {
                deadline: self.deadline,
                vcpus: self.members.len(),
                late: vcpus
                    .into_iter()
                    .map(|vcpu| Late {
                        vcpu,
                        failure: match failure(vcpu) {
                            Some(Err(Failure::Vcpu(failure))) => Some(failure),
                            _ => None,
                        },
                    })
                    .collect(),
            },
        }
    }
}

enum Watch {
    AllEnded,
    Failed(usize),
    TimedOut,
}

enum Cause {
    Failed(usize),
    Late(Vec<usize>),
}

impl Member {
    fn start(
        index: usize,
        vcpu: Box<dyn Vcpu>,
        shared: &Arc<Shared>,
        bell: Sender<Ring>,
    ) -> Result<Self, CrewError> {
        let (orders, taken) = mpsc::channel();
        let (bound, kick) = mpsc::channel();
        let shared = shared.clone();
        let thread = Builder::new()
            .name(format!("vcpu {index}"))
            .spawn(move || serve(index, vcpu, &shared, bound, taken, bell))
            .map_err(|source| CrewError::Spawn {
                vcpu: index,
                source,
            })?;
        match kick.recv() {
            Ok(Ok(kick)) => Ok(Self {
                orders,
                kick,
                thread: Some(thread),
            }),
            Ok(Err(source)) => Err(CrewError::Bind {
                vcpu: index,
                source,
            }),
            Err(_) => Err(CrewError::Panicked {
                vcpu: index,
                message: "while it was bound".to_owned(),
            }),
        }
    }
}

/// All vCPUs behind the gate. Dropping it without [`Muster::release`] sends them home for good, kicked
/// out of the guest where the gate is open.
#[derive(Debug)]
#[must_use = "the vCPUs wait behind the gate"]
pub struct Muster<'a> {
    crew: &'a mut Crew,
    opened: Option<Nanoseconds>,
    over: bool,
}

impl Muster<'_> {
    /// Opens the gate, unless it is open, and gives the time at which it was opened.
    pub fn open(&mut self) -> Nanoseconds {
        *self.opened.get_or_insert_with(|| {
            let now = clock::now();
            self.crew.shared.gate.open();
            now
        })
    }

    /// Opens the gate, unless it is open, and waits until every vCPU is done. The deadline is from
    /// here on.
    ///
    /// # Errors
    /// The first failure of a vCPU, or those that were not done by the deadline.
    pub fn release(mut self) -> Result<RoundTimes, CrewError> {
        let opened = self.open();
        self.over = true;
        self.crew.watch(opened)
    }
}

impl Drop for Muster<'_> {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        self.crew.spent = true;
        if self.opened.is_none() {
            self.crew.shared.gate.abandon();
        } else {
            self.crew.members.iter().for_each(|m| m.kick.kick());
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for member in self.members.drain(..) {
            drop(member.orders);
            if let Some(thread) = member.thread {
                // A thread's panic outside a task has been told on standard error.
                let _ = thread.join();
            }
        }
    }
}
