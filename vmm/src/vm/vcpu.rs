// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Loop of a vCPU thread, which calls `KVM_RUN` and handles its exits.
//!
//! If the guest exits or a vCPU cannot continue, its thread reports that to the main thread and
//! waits, because only the main thread stops a VM. The vCPU threads share the requested run state,
//! the number of paused vCPUs, exit counters, and the backpressure of the console.

use std::{
    io,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Instant,
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
    seccomp::{ThreadRole, confine_optionally},
};
use crate::{
    affinity::pin_thread,
    arch,
    devices::{Bus, console_output::ConsoleOutput},
    kvm::{
        dirty_ring::DirtyRings,
        ioctls::exit_name,
        kick::{KickTarget, Kicker},
    },
    stalls::StallHistogram,
};

/// Run state that is requested of all vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    Running,
    /// State in which the vCPUs stay out of the guest.
    Paused,
    /// State in which the vCPU threads end.
    Stopped,
}

/// Exits to user space by reason. Exits that the kernel handles are not included.
#[derive(Debug, Default)]
pub struct ExitCounters {
    /// Loads from device registers.
    pub mmio_reads: AtomicU64,
    /// Stores to device registers that no ioeventfd handles.
    pub mmio_writes: AtomicU64,
    /// Time of these loads and stores.
    pub mmio_stalls: StallHistogram,
    /// Exits caused by a signal.
    pub interruptions: AtomicU64,
    pub other_exits: AtomicU64,
}

/// Requested run state and number of paused vCPUs.
#[derive(Debug)]
pub struct RunControl {
    state: Mutex<ControlState>,
    state_changed: Condvar,
    vcpu_count: usize,
}

#[derive(Debug)]
struct ControlState {
    requested_state: RunState,
    paused_vcpus: usize,
    /// Set when a vCPU has ended, which counts as paused.
    has_ended: bool,
}

impl RunControl {
    /// Returns the run control of `vcpu_count` vCPUs, with a pause requested.
    pub const fn new(vcpu_count: usize) -> Self {
        Self {
            state: Mutex::new(ControlState {
                requested_state: RunState::Paused,
                paused_vcpus: 0,
                has_ended: false,
            }),
            state_changed: Condvar::new(),
            vcpu_count,
        }
    }

    pub fn requested_state(&self) -> RunState {
        self.state.lock().requested_state
    }

    /// Requests a run state. Returns `false` if a stop was requested before.
    pub(super) fn request(&self, requested: RunState) -> bool {
        let mut state = self.state.lock();
        if state.requested_state == RunState::Stopped {
            return false;
        }
        state.requested_state = requested;
        drop(state);
        self.state_changed.notify_all();
        true
    }

    /// Returns whether a vCPU has ended, so that the guest cannot continue.
    pub(super) fn has_ended(&self) -> bool {
        self.state.lock().has_ended
    }

    /// Waits until all vCPUs have paused, or another state is requested.
    pub(super) fn wait_until_paused(&self) {
        let mut state = self.state.lock();
        self.state_changed.wait_while(&mut state, |state| {
            state.requested_state == RunState::Paused && state.paused_vcpus < self.vcpu_count
        });
    }

    /// Blocks a vCPU thread while a pause is requested. Returns the requested state afterwards.
    pub(super) fn wait_while_paused(&self) -> RunState {
        let mut state = self.state.lock();
        if state.requested_state == RunState::Paused {
            self.count_paused(&mut state);
            self.state_changed
                .wait_while(&mut state, |state| state.requested_state == RunState::Paused);
            state.paused_vcpus -= 1;
        }
        state.requested_state
    }

    /// Blocks the thread of a vCPU that has ended until a stop is requested.
    pub(super) fn wait_until_stopped(&self) {
        let mut state = self.state.lock();
        state.has_ended = true;
        self.count_paused(&mut state);
        self.state_changed
            .wait_while(&mut state, |state| state.requested_state != RunState::Stopped);
    }

    fn count_paused(&self, state: &mut MutexGuard<'_, ControlState>) {
        state.paused_vcpus += 1;
        self.state_changed.notify_all();
    }
}

/// State that the vCPU threads of a VM share.
#[derive(Debug)]
pub struct VcpuContext {
    pub control: RunControl,
    pub bus: Arc<Bus>,
    /// Dirty rings, all harvested when one is full.
    pub rings: Option<Arc<DirtyRings>>,
    pub serial_registers: Range<GuestAddress>,
    /// Destination of the serial port's output.
    pub console_output: ConsoleOutput,
    pub exits: Arc<ExitCounters>,
    /// Event signalled when the guest's exit is reported.
    pub guest_exit: EventFd,
}

impl VcpuContext {
    /// Waits after a store to the serial port until the console has space, or a pause or stop is
    /// requested.
    pub(super) fn wait_for_console(&self, address: GuestAddress) {
        if self.serial_registers.contains(&address) {
            let paused = || self.control.requested_state() != RunState::Running;
            self.console_output.wait_for_space(paused);
        }
    }
}

/// Reports the guest's exit, or a panic of the thread, to the main thread. After a panic the thread
/// waits until a stop is requested.
pub(super) struct GuestExitReporter {
    pub(super) index: usize,
    pub(super) context: Arc<VcpuContext>,
    pub(super) exit_sender: mpsc::Sender<VmOutcome>,
}

impl GuestExitReporter {
    fn report(&self, exit: VmOutcome) {
        // The main thread joins the vCPU threads, so the receiver exists.
        let _ = self.exit_sender.send(exit);
        let _ = self.context.guest_exit.write(1);
    }
}

impl Drop for GuestExitReporter {
    fn drop(&mut self) {
        if thread::panicking() {
            let reason = format!("vCPU {}: its thread panicked", self.index);
            self.report(VmOutcome::Failed(reason));
            self.context.control.wait_until_stopped();
        }
    }
}

/// A vCPU with the state of its thread.
pub(super) struct VcpuRunner {
    // The field precedes `fd` in drop order, because a late kick must not access the vCPU.
    pub(super) kick_target: KickTarget,
    /// The vCPU, which this thread locks except while it is paused.
    pub(super) fd: Arc<Mutex<VcpuFd>>,
    /// The only CPU of the host on which the thread runs; all of them by default.
    pub(super) cpu: Option<usize>,
    pub(super) reporter: GuestExitReporter,
}

impl VcpuRunner {
    /// Runs the thread. `ready` receives the kicker, or a setup error, before the first `KVM_RUN`.
    pub(super) fn run(&mut self, ready: &mpsc::SyncSender<io::Result<Kicker>>, confine: bool) {
        let fd = Arc::clone(&self.fd);
        let kicker = self.kick_target.bind(&mut fd.lock());
        let result = kicker.and_then(|kicker| {
            self.cpu.map_or(Ok(()), pin_thread)?;
            confine_optionally(confine, ThreadRole::Vcpu)?;
            Ok(kicker)
        });
        let failed = result.is_err();
        if ready.send(result).is_err() || failed {
            return;
        }
        loop {
            if self.reporter.context.control.wait_while_paused() == RunState::Stopped {
                return;
            }
            let exit = self.run_until_paused(&mut fd.lock());
            if let Some(exit) = exit {
                self.reporter.report(exit);
                self.reporter.context.control.wait_until_stopped();
                return;
            }
        }
    }

    /// Runs the guest until a pause or stop is requested, with no access to a device pending. Returns
    /// the outcome if the guest ended.
    fn run_until_paused(&self, fd: &mut VcpuFd) -> Option<VmOutcome> {
        loop {
            self.kick_target.clear_kicks();
            match self.reporter.context.control.requested_state() {
                RunState::Running => {}
                RunState::Paused => return self.complete_access(fd),
                RunState::Stopped => return None,
            }
            if let Some(exit) = self.enter_guest(fd) {
                return Some(exit);
            }
        }
    }

    /// Completes the last access to a device without entering the guest: until then, the registers
    /// are not those of the next instruction (`KVM_RUN` in Documentation/virt/kvm/api.rst).
    fn complete_access(&self, fd: &mut VcpuFd) -> Option<VmOutcome> {
        self.kick_target.set_immediate_exit();
        let failure = match fd.run() {
            Err(error) if error.errno() == libc::EINTR => return None,
            Err(error) => error.to_string(),
            Ok(exit) => format!("unexpected exit {exit:?}"),
        };
        Some(self.failure_outcome(fd, &format!("KVM_RUN with immediate_exit: {failure}")))
    }

    /// Calls `KVM_RUN` once and handles the exit. Returns the outcome if the guest ended.
    fn enter_guest(&self, fd: &mut VcpuFd) -> Option<VmOutcome> {
        let context = &self.reporter.context;
        let exits = &context.exits;
        let count = |counter: &AtomicU64| {
            counter.fetch_add(1, Ordering::Relaxed);
        };
        let failure = match fd.run() {
            Ok(VcpuExit::MmioRead(address, data)) => {
                count(&exits.mmio_reads);
                let start = Instant::now();
                context.bus.read(GuestAddress(address), data);
                exits.mmio_stalls.record(start.elapsed());
                return None;
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                let address = GuestAddress(address);
                count(&exits.mmio_writes);
                let start = Instant::now();
                context.bus.write(address, data);
                context.wait_for_console(address);
                exits.mmio_stalls.record(start.elapsed());
                return None;
            }
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) if context.rings.is_some() => {
                count(&exits.other_exits);
                let rings = context.rings.as_ref();
                let drained = rings.map_or(Ok(()), |rings| rings.harvest());
                return drained.err().map(|error| self.failure_outcome(fd, &error.to_string()));
            }
            Ok(VcpuExit::SystemEvent(event, _)) => {
                count(&exits.other_exits);
                return Some(match event {
                    KVM_SYSTEM_EVENT_SHUTDOWN => VmOutcome::PowerOff,
                    KVM_SYSTEM_EVENT_RESET => VmOutcome::Reset,
                    KVM_SYSTEM_EVENT_CRASH => VmOutcome::Failed("the guest crashed".to_owned()),
                    other => {
                        self.failure_outcome(fd, &format!("KVM_EXIT_SYSTEM_EVENT of type {other}"))
                    }
                });
            }
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                count(&exits.interruptions);
                return None;
            }
            Ok(VcpuExit::Unsupported(KVM_EXIT_ARM_NISV)) => {
                // SAFETY: the exit reason selects this field of the union.
                let abort = unsafe { fd.get_kvm_run().__bindgen_anon_1.arm_nisv };
                format!(
                    "the guest accessed the device register at {:#x} with an instruction that KVM \
                     cannot emulate (KVM_EXIT_ARM_NISV)",
                    abort.fault_ipa
                )
            }
            Ok(other) => format!("unexpected exit {other:?}"),
            Err(error) if error.errno() == libc::EFAULT => {
                "the host cannot provide a page of guest memory (KVM_RUN: bad address): check \
                 whether its memory or hugetlb pool is exhausted, and whether a mapped file \
                 (memory=map) became shorter or cannot be read"
                    .to_owned()
            }
            Err(error) => {
                let reason = exit_name(fd.get_kvm_run().exit_reason);
                format!("KVM_RUN: {error} (last exit: {reason})")
            }
        };
        count(&exits.other_exits);
        Some(self.failure_outcome(fd, &failure))
    }

    fn failure_outcome(&self, fd: &VcpuFd, failure: &str) -> VmOutcome {
        let pc = arch::vm::program_counter(fd)
            .map_or_else(String::new, |pc| format!(", program counter {pc:#x}"));
        VmOutcome::Failed(format!("vCPU {}: {failure}{pc}", self.reporter.index))
    }
}
