// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The loop of a vCPU thread: `KVM_RUN`, and the handling of its exits.
//!
//! A thread that finds the guest at its end, or cannot continue, reports that to the main thread and
//! waits: only the main thread stops a VM.

use std::{
    io,
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
use vmm_sys_util::eventfd::EventFd;

use super::vcpu_control::{ConsoleBackpressure, ExitCounters, GuestExit, RunControl, RunState};
use crate::{
    arch,
    devices::Bus,
    kvm::{
        dirty_ring::DirtyRings,
        exit,
        kick::{KickTarget, Kicker},
    },
};

/// Everything that the vCPU threads of a VM share.
#[derive(Debug)]
pub struct VcpuContext {
    /// Requested run state.
    pub control: RunControl,
    /// Devices.
    pub bus: Arc<Bus>,
    /// Dirty rings, which are drained when one is full.
    pub rings: Option<Arc<DirtyRings>>,
    /// Backpressure of the console, if there is any.
    pub backpressure: Option<ConsoleBackpressure>,
    /// Exit counters.
    pub exits: Arc<ExitCounters>,
    /// Event that is signalled when a [`GuestExit`] is reported.
    pub guest_exit: EventFd,
}

impl VcpuContext {
    /// Waits after a store to the serial port until the console has space or the vCPUs are not to run.
    pub(super) fn wait_for_console(&self, address: GuestAddress) {
        if let Some(backpressure) = &self.backpressure
            && backpressure.registers.contains(&address)
        {
            let paused = || self.control.requested() != RunState::Running;
            backpressure.output.wait_for_space(paused);
        }
    }
}

/// Reports the guest's exit, or a panic of the thread, to the main thread.
pub(super) struct ExitReporter {
    pub(super) index: usize,
    pub(super) context: Arc<VcpuContext>,
    pub(super) exits: mpsc::Sender<GuestExit>,
}

impl ExitReporter {
    fn report(&self, exit: GuestExit) {
        // The main thread joins the vCPU threads, so the receiver exists.
        let _ = self.exits.send(exit);
        let _ = self.context.guest_exit.write(1);
    }
}

impl Drop for ExitReporter {
    fn drop(&mut self) {
        if thread::panicking() {
            let reason = format!("vCPU {}: its thread panicked", self.index);
            self.report(GuestExit::VcpuFailed(reason));
            self.context.control.mark_paused();
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

/// The consequence of an exit to user space.
enum ExitAction {
    /// Enter the guest again.
    Resume,
    /// Report the guest's exit.
    Report(GuestExit),
}

impl Vcpu {
    /// Runs the thread. `ready` receives the kicker, or the error of `setup`, before the first
    /// `KVM_RUN`.
    pub(super) fn run(
        &mut self,
        ready: &mpsc::SyncSender<io::Result<Kicker>>,
        setup: &(dyn Fn() -> io::Result<()> + Send + Sync),
    ) {
        let kicker = self.kick_target.bind(&mut self.fd);
        let result = kicker.and_then(|kicker| setup().map(|()| kicker));
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
            if let ExitAction::Report(exit) = self.enter_guest() {
                self.reporter.report(exit);
                self.reporter.context.control.wait_until_stopped();
                return;
            }
        }
    }

    /// Calls `KVM_RUN` once and handles the exit.
    fn enter_guest(&mut self) -> ExitAction {
        let context = &self.reporter.context;
        let exits = &context.exits;
        let count = |counter: &AtomicU64| {
            counter.fetch_add(1, Ordering::Relaxed);
        };
        let failure = match self.fd.run() {
            Ok(VcpuExit::MmioRead(address, data)) => {
                count(&exits.mmio_reads);
                context.bus.read(GuestAddress(address), data);
                return ExitAction::Resume;
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                let address = GuestAddress(address);
                count(&exits.mmio_writes);
                context.bus.write(address, data);
                context.wait_for_console(address);
                return ExitAction::Resume;
            }
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) if context.rings.is_some() => {
                count(&exits.other);
                let rings = context.rings.as_ref();
                match rings.map_or(Ok(()), |rings| rings.drain()) {
                    Ok(()) => return ExitAction::Resume,
                    Err(error) => return ExitAction::Report(self.failed(&error.to_string())),
                }
            }
            Ok(VcpuExit::SystemEvent(event, _)) => {
                count(&exits.other);
                return ExitAction::Report(match event {
                    KVM_SYSTEM_EVENT_SHUTDOWN => GuestExit::PowerOff,
                    KVM_SYSTEM_EVENT_RESET => GuestExit::Reset,
                    KVM_SYSTEM_EVENT_CRASH => GuestExit::Crash,
                    other => self.failed(&format!("KVM_EXIT_SYSTEM_EVENT of type {other}")),
                });
            }
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                count(&exits.interrupted);
                return ExitAction::Resume;
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
                "the host cannot provide a page of guest memory (KVM_RUN: bad address): check whether \
                 its memory or hugetlb pool is exhausted"
                    .to_owned()
            }
            Err(error) => {
                let reason = exit::name(self.fd.get_kvm_run().exit_reason);
                format!("KVM_RUN: {error} (last exit: {reason})")
            }
        };
        count(&exits.other);
        ExitAction::Report(self.failed(&failure))
    }

    fn failed(&self, failure: &str) -> GuestExit {
        let pc = arch::vm::program_counter(&self.fd)
            .map_or_else(String::new, |pc| format!(", program counter {pc:#x}"));
        GuestExit::VcpuFailed(format!("vCPU {}: {failure}{pc}", self.reporter.index))
    }
}
