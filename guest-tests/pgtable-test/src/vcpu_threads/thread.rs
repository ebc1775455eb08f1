// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One vCPU's thread: bind, then for each round arrive, pass the gate, run, hand in the end token.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, Sender},
    },
};

use super::{clock, gate::Gate, stagger};
use crate::machine::{Kick, MachineError, Task, Vcpu, VcpuFailure};
use granule_types::units::Nanoseconds;

/// A start token: what one vCPU does in one round.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) task: Task,
    pub(super) round: u32,
    pub(super) turns: u64,
}

/// An end token.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) started: Nanoseconds,
    pub(super) at: Nanoseconds,
    pub(super) result: Result<(), Failure>,
}

#[derive(Debug)]
pub(super) enum Failure {
    Vcpu(VcpuFailure),
    Panic(String),
}

/// What the harness is woken for: it sleeps while vCPUs merely come and go.
#[derive(Debug)]
pub(super) enum Ring {
    /// The last vCPU stands behind the gate.
    AllArrived,
    /// The last end token is in.
    AllEnded,
    /// This vCPU failed.
    Failed(usize),
}

/// What threads and harness share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) gate: Gate,
    /// vCPUs still to arrive in this round.
    pub(super) awaited: AtomicUsize,
    /// End tokens still out in this round.
    pub(super) running: AtomicUsize,
    /// The end token of each vCPU.
    pub(super) ended: Vec<Mutex<Option<Ended>>>,
}

impl Shared {
    pub(super) fn new(vcpus: usize) -> Self {
        Self {
            gate: Gate::default(),
            awaited: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            ended: (0..vcpus).map(|_| Mutex::new(None)).collect(),
        }
    }

    /// Takes an end token, if it is in.
    pub(super) fn take_ended(&self, vcpu: usize) -> Option<Ended> {
        self.ended[vcpu]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    /// Whether an end token is in.
    pub(super) fn has_ended(&self, vcpu: usize) -> bool {
        self.ended[vcpu]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }
}

/// The life of a vCPU's thread; it ends when no more orders can come or the gate is abandoned.
///
/// A `send` that fails has nobody to hear it: the crew is gone, and the next `recv` ends the thread.
pub(super) fn serve(
    index: usize,
    mut vcpu: Box<dyn Vcpu>,
    shared: &Shared,
    bound: Sender<Result<Box<dyn Kick>, MachineError>>,
    orders: Receiver<Order>,
    bell: Sender<Ring>,
) {
    let kick = vcpu.bind();
    let usable = kick.is_ok();
    let _ = bound.send(kick);
    drop(bound);
    if !usable {
        return;
    }
    while let Ok(order) = orders.recv() {
        if shared.awaited.fetch_sub(1, Ordering::AcqRel) == 1 {
            let _ = bell.send(Ring::AllArrived);
        }
        if !shared.gate.pass(order.round) {
            return;
        }
        stagger::wait(order.turns);
        let started = clock::now();
        let result = catch_unwind(AssertUnwindSafe(|| vcpu.run(&order.task)));
        let at = clock::now();
        let result = match result {
            Ok(result) => result.map_err(Failure::Vcpu),
            Err(panic) => Err(Failure::Panic(message_of(panic.as_ref()))),
        };
        let failed = result.is_err();
        *shared.ended[index]
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(Ended {
            started,
            at,
            result,
        });
        if failed {
            let _ = bell.send(Ring::Failed(index));
        }
        if shared.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            let _ = bell.send(Ring::AllEnded);
        }
    }
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "without a message".to_owned())
}
