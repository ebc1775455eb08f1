// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The loop of a vCPU thread: `KVM_RUN`, and the handling of its exits.
//!
//! When the guest exits or its vCPU cannot continue, a thread reports that to the main thread and
//! waits: only the main thread stops a VM. All these threads share the requested run state, the
//! number of paused vCPUs, exit counters, and backpressure of the console.

use std::{
    io,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
};

use granule_types::units::GuestAddress;
use kvm_bindings::{
    KVM_EXIT_ARM_NISV, KVM_EXIT_DIRTY_RING_FULL, KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET,
    KVM_SYSTEM_EVENT_SHUTDOWN,
};
use kvm_ioctls::{VcpuExit, VcpuFd};
use parking_lot::{Condvar, Mutex, MutexGuard};
use vmm_sys_util::eventfd::EventFd;

use super::{
    outcome::VmOutcome,
    seccomp::{ThreadRole, confine_if},
};
use crate::{
    arch,
    devices::{Bus, console_output::ConsoleOutput},
    kvm::{
        dirty_ring::DirtyRings,
        ioctls::exit_name,
        kick::{KickTarget, Kicker},
    },
};

/// Run state requested of all vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    Running,
    /// Stay out of the guest.
    Paused,
    /// End the vCPU threads.
    Stopped,
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
    pub other: AtomicU64,
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
    /// Returns the run control of `vcpus` vCPUs, with a pause requested.
    pub const fn new(vcpus: usize) -> Self {
        Self {
            state: Mutex::new(ControlState { requested: RunState::Paused, paused_vcpus: 0 }),
            changed: Condvar::new(),
            vcpus,
        }
    }

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
        self.changed.wait_while(&mut state, |state| {
            state.requested == RunState::Paused && state.paused_vcpus < self.vcpus
        });
    }

    /// Blocks a vCPU thread while a pause is requested; returns the next requested state.
    pub(super) fn wait_while_paused(&self) -> RunState {
        let mut state = self.state.lock();
        if state.requested == RunState::Paused {
            self.count_paused(&mut state);
            self.changed.wait_while(&mut state, |state| state.requested == RunState::Paused);
            state.paused_vcpus -= 1;
        }
        state.requested
    }

    /// Blocks the thread of a vCPU that cannot enter the guest again until a stop is requested.
    pub(super) fn wait_until_stopped(&self) {
        let mut state = self.state.lock();
        self.count_paused(&mut state);
        self.changed.wait_while(&mut state, |state| state.requested != RunState::Stopped);
    }

    fn count_paused(&self, state: &mut MutexGuard<'_, ControlState>) {
        state.paused_vcpus += 1;
        self.changed.notify_all();
    }
}

/// State that the vCPU threads of a VM share.
#[derive(Debug)]
pub struct VcpuContext {
    pub control: RunControl,
    pub bus: Arc<Bus>,
    /// Dirty rings, all drained when one is full.
    pub rings: Option<Arc<DirtyRings>>,
    pub serial_registers: Range<GuestAddress>,
    /// Destination of the serial port's output.
    pub console_output: ConsoleOutput,
    pub exits: Arc<ExitCounters>,
    /// Event that is signalled when the guest's exit is reported.
    pub guest_exit: EventFd,
}

impl VcpuContext {
    /// Waits after a store to the serial port until the console has space, or a pause or stop is
    /// requested.
    pub(super) fn wait_for_console(&self, address: GuestAddress) {
        if self.serial_registers.contains(&address) {
            let paused = || self.control.requested() != RunState::Running;
            self.console_output.wait_for_space(paused);
        }
    }
}

/// Reports the guest's exit, or a panic of the thread, to the main thread. After a panic the thread
/// waits until a stop is requested.
pub(super) struct ExitReporter {
    pub(super) index: usize,
    pub(super) context: Arc<VcpuContext>,
    pub(super) exits: mpsc::Sender<VmOutcome>,
}

impl ExitReporter {
    fn report(&self, exit: VmOutcome) {
        // The main thread joins the vCPU threads, so the receiver exists.
        let _ = self.exits.send(exit);
        let _ = self.context.guest_exit.write(1);
    }
}

impl Drop for ExitReporter {
    fn drop(&mut self) {
        if thread::panicking() {
            let reason = format!("vCPU {}: its thread panicked", self.index);
            self.report(VmOutcome::Failed(reason));
            self.context.control.wait_until_stopped();
        }
    }
}

/// A vCPU in its thread.
pub(super) struct Vcpu {
    // Dropped before `fd`: a late kick must not access the vCPU.
    pub(super) kick_target: KickTarget,
    pub(super) fd: VcpuFd,
    pub(super) reporter: ExitReporter,
}

impl Vcpu {
    /// Runs the thread. `ready` receives the kicker, or the error of its setup, before the first
    /// `KVM_RUN`.
    pub(super) fn run(&mut self, ready: &mpsc::SyncSender<io::Result<Kicker>>, confine: bool) {
        let kicker = self.kick_target.bind(&mut self.fd);
        let result = kicker.and_then(|kicker| {
            confine_if(confine, ThreadRole::Vcpu)?;
            Ok(kicker)
        });
        let failed = result.is_err();
        if ready.send(result).is_err() || failed {
            return;
        }
        loop {
            self.kick_target.clear_kicks();
            let control = &self.reporter.context.control;
            if control.wait_while_paused() == RunState::Stopped {
                return;
            }
            if let Some(exit) = self.enter_guest() {
                self.reporter.report(exit);
                self.reporter.context.control.wait_until_stopped();
                return;
            }
        }
    }

    /// Calls `KVM_RUN` once and handles the exit. Returns the outcome if the guest ended.
    fn enter_guest(&mut self) -> Option<VmOutcome> {
        let context = &self.reporter.context;
        let exits = &context.exits;
        let count = |counter: &AtomicU64| {
            counter.fetch_add(1, Ordering::Relaxed);
        };
        let failure = match self.fd.run() {
            Ok(VcpuExit::MmioRead(address, data)) => {
                count(&exits.mmio_reads);
                context.bus.read(GuestAddress(address), data);
                return None;
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                let address = GuestAddress(address);
                count(&exits.mmio_writes);
                context.bus.write(address, data);
                context.wait_for_console(address);
                return None;
            }
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) if context.rings.is_some() => {
                count(&exits.other);
                let rings = context.rings.as_ref();
                let drained = rings.map_or(Ok(()), |rings| rings.drain());
                return drained.err().map(|error| self.failed(&error.to_string()));
            }
            Ok(VcpuExit::SystemEvent(event, _)) => {
                count(&exits.other);
                return Some(match event {
                    KVM_SYSTEM_EVENT_SHUTDOWN => VmOutcome::PowerOff,
                    KVM_SYSTEM_EVENT_RESET => VmOutcome::Reset,
                    KVM_SYSTEM_EVENT_CRASH => VmOutcome::Failed("the guest crashed".to_owned()),
                    other => self.failed(&format!("KVM_EXIT_SYSTEM_EVENT of type {other}")),
                });
            }
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                count(&exits.interrupted);
                return None;
            }
            Ok(VcpuExit::Unsupported(KVM_EXIT_ARM_NISV)) => {
                // SAFETY: the exit reason selects this field of the union.
                let abort = unsafe { self.fd.get_kvm_run().__bindgen_anon_1.arm_nisv };
                format!(
                    "the guest accessed the device register at {:#x} with an instruction that KVM \
                     cannot emulate (KVM_EXIT_ARM_NISV)",
                    abort.fault_ipa
                )
            }
            Ok(other) => format!("unexpected exit {other:?}"),
            Err(error) if error.errno() == libc::EFAULT => {
                "the host cannot provide a page of guest memory (KVM_RUN: bad address): check \
                 whether its memory or hugetlb pool is exhausted"
                    .to_owned()
            }
            Err(error) => {
                let reason = exit_name(self.fd.get_kvm_run().exit_reason);
                format!("KVM_RUN: {error} (last exit: {reason})")
            }
        };
        count(&exits.other);
        Some(self.failed(&failure))
    }

    fn failed(&self, failure: &str) -> VmOutcome {
        let pc = arch::vm::program_counter(&self.fd)
            .map_or_else(String::new, |pc| format!(", program counter {pc:#x}"));
        VmOutcome::Failed(format!("vCPU {}: {failure}{pc}", self.reporter.index))
    }
}
