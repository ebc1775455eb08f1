// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state that the main thread and the vCPU threads share: the requested run state, the number of
//! paused vCPUs, exit counters, and backpressure of the console.

use std::{ops::Range, sync::atomic::AtomicU64};

use granule_types::units::GuestAddress;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::devices::console_output::ConsoleOutput;

/// The run state that is requested of all vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    /// Run the guest.
    Running,
    /// Stay out of the guest.
    Paused,
    /// End the vCPU threads.
    Stopped,
}

/// The reason why the guest no longer runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestExit {
    /// The guest powered itself off.
    PowerOff,
    /// The guest reset itself.
    Reset,
    /// The guest reported a crash.
    Crash,
    /// A vCPU cannot continue.
    VcpuFailed(String),
}

/// Exits to user space by reason. Exits that the kernel handles are not included.
#[derive(Debug, Default)]
pub struct ExitCounters {
    /// Loads from devices.
    pub mmio_reads: AtomicU64,
    /// Stores to devices that no ioeventfd handles.
    pub mmio_writes: AtomicU64,
    /// Exits by a signal.
    pub interrupted: AtomicU64,
    /// Other exits.
    pub other: AtomicU64,
}

/// Backpressure on vCPUs that write to the serial port faster than the console output is read.
#[derive(Debug)]
pub struct ConsoleBackpressure {
    /// Registers of the serial port.
    pub registers: Range<GuestAddress>,
    /// Destination of its output.
    pub output: ConsoleOutput,
}

/// The requested run state, and the vCPUs that have paused.
#[derive(Debug)]
pub struct RunControl {
    state: Mutex<ControlState>,
    changed: Condvar,
    vcpus: usize,
}

#[derive(Debug)]
struct ControlState {
    requested: RunState,
    paused_vcpus: usize,
}

impl RunControl {
    /// Returns the control of `vcpus` vCPUs, which are requested to pause.
    pub const fn new(vcpus: usize) -> Self {
        Self {
            state: Mutex::new(ControlState { requested: RunState::Paused, paused_vcpus: 0 }),
            changed: Condvar::new(),
            vcpus,
        }
    }

    /// Returns the requested run state.
    pub fn requested(&self) -> RunState {
        self.state.lock().requested
    }

    /// Requests a run state; returns `false` if the vCPUs are stopped already.
    pub(super) fn request(&self, requested: RunState) -> bool {
        let mut state = self.state.lock();
        if state.requested == RunState::Stopped {
            return false;
        }
        state.requested = requested;
        drop(state);
        self.changed.notify_all();
        true
    }

    /// Waits until all vCPUs have paused, or another state is requested.
    pub(super) fn wait_until_paused(&self) {
        let mut state = self.state.lock();
        while state.requested == RunState::Paused && state.paused_vcpus < self.vcpus {
            self.changed.wait(&mut state);
        }
    }

    /// Waits in a vCPU thread while a pause is requested; returns the state that is requested then.
    pub(super) fn wait_while_paused(&self) -> RunState {
        let mut state = self.state.lock();
        if state.requested == RunState::Paused {
            self.count_paused(&mut state);
            while state.requested == RunState::Paused {
                self.changed.wait(&mut state);
            }
            state.paused_vcpus -= 1;
        }
        state.requested
    }

    /// Waits until a stop is requested, in the thread of a vCPU that never enters the guest again.
    pub(super) fn wait_until_stopped(&self) {
        let mut state = self.state.lock();
        self.count_paused(&mut state);
        while state.requested != RunState::Stopped {
            self.changed.wait(&mut state);
        }
    }

    /// Counts a vCPU as paused for good.
    pub(super) fn mark_paused(&self) {
        self.count_paused(&mut self.state.lock());
    }

    fn count_paused(&self, state: &mut MutexGuard<'_, ControlState>) {
        state.paused_vcpus += 1;
        self.changed.notify_all();
    }
}
