// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The vCPU threads of a VM.
//!
//! Every thread reads the requested [`RunState`] before it enters the guest. A change is published
//! before all vCPUs are [kicked](crate::kvm::kick), and a thread clears kicks before it reads the
//! state, so it either sees the request or is forced out again.
//!
//! A vCPU that writes to the serial port waits until the console has space or a pause or stop is
//! requested. A stalled reader of the console thus blocks the guest but never the main thread.

use std::{
    io,
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
};

use kvm_ioctls::VcpuFd;
use parking_lot::{Mutex, MutexGuard};

use super::{
    outcome::VmOutcome,
    seccomp::{ThreadRole, run_in_thread},
    vcpu::{ExitCounters, GuestExitReporter, RunState, VcpuContext, VcpuRunner},
};
use crate::kvm::kick::{KickTarget, Kicker};

/// The vCPU threads of a VM. Dropping the value stops them.
#[derive(Debug)]
pub struct VcpuThreads {
    context: Arc<VcpuContext>,
    kickers: Vec<Kicker>,
    fds: Vec<Arc<Mutex<VcpuFd>>>,
    threads: Vec<JoinHandle<()>>,
    guest_exits: mpsc::Receiver<VmOutcome>,
}

impl VcpuThreads {
    /// Starts a thread for each vCPU. All wait until [`Self::request`] is called with
    /// [`RunState::Running`]. With `confine`, seccomp limits the threads. Each one runs on its CPU of `cpus`,
    /// and those without one run on all.
    pub fn start(
        vcpus: Vec<VcpuFd>,
        context: VcpuContext,
        cpus: &[usize],
        confine: bool,
    ) -> io::Result<Self> {
        let (exit_sender, guest_exits) = mpsc::channel();
        let mut threads = Self {
            context: Arc::new(context),
            kickers: Vec::new(),
            fds: Vec::new(),
            threads: Vec::new(),
            guest_exits,
        };
        let runners = vcpus.into_iter().enumerate().map(|(index, fd)| VcpuRunner {
            kick_target: KickTarget::default(),
            fd: Arc::new(Mutex::new(fd)),
            cpu: cpus.get(index).copied(),
            reporter: GuestExitReporter {
                index,
                context: Arc::clone(&threads.context),
                exit_sender: exit_sender.clone(),
            },
        });
        let runners: Vec<_> = runners.collect();
        threads.fds = runners.iter().map(|vcpu| Arc::clone(&vcpu.fd)).collect();
        if !confine || runners.len() == 1 {
            threads.start_all(runners, confine)?;
            return Ok(threads);
        }
        // The kernel compiles a filter each time that it is installed. Threads inherit the one of this
        // thread, which starts them all.
        run_in_thread(confine, ThreadRole::Vcpu, || threads.start_all(runners, false))?;
        Ok(threads)
    }

    /// Starts the threads. With `confine`, each one limits itself.
    fn start_all(&mut self, runners: Vec<VcpuRunner>, confine: bool) -> io::Result<()> {
        for mut vcpu in runners {
            let index = vcpu.reporter.index;
            let (ready, kicker) = mpsc::sync_channel(1);
            let thread = thread::Builder::new()
                .name(format!("vcpu-{index}"))
                .spawn(move || vcpu.run(&ready, confine))?;
            self.threads.push(thread);
            let kicker = kicker.recv().map_err(|_| {
                io::Error::other(format!("the thread of vCPU {index} ended during its setup"))
            })??;
            self.kickers.push(kicker);
        }
        Ok(())
    }

    pub fn request(&self, state: RunState) {
        if self.context.control.request(state) && state != RunState::Running {
            self.kickers.iter().for_each(Kicker::kick);
        }
    }

    pub fn requested_state(&self) -> RunState {
        self.context.control.requested_state()
    }

    /// Pauses all vCPUs and waits until they are out of the guest.
    pub fn pause(&self) {
        self.request(RunState::Paused);
        self.context.control.wait_until_paused();
    }

    /// Returns whether a vCPU has ended, so that the guest cannot continue.
    pub fn has_ended(&self) -> bool {
        self.context.control.has_ended()
    }

    /// Locks all vCPUs, which must be paused, in their order.
    pub fn lock(&self) -> Vec<MutexGuard<'_, VcpuFd>> {
        self.fds.iter().map(|fd| fd.lock()).collect()
    }

    /// Locks the first vCPU, which must be paused.
    pub fn lock_first(&self) -> Option<MutexGuard<'_, VcpuFd>> {
        self.fds.first().map(|fd| fd.lock())
    }

    /// Returns the guest's exit, if it was reported.
    pub fn guest_exit(&self) -> Option<VmOutcome> {
        self.guest_exits.try_recv().ok()
    }

    pub fn exit_counters(&self) -> &Arc<ExitCounters> {
        &self.context.exits
    }
}

impl Drop for VcpuThreads {
    fn drop(&mut self) {
        self.request(RunState::Stopped);
        for thread in self.threads.drain(..) {
            // The panic hook has reported a panic of the thread.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use granule_types::units::GuestAddress;
    use parking_lot::Mutex;
    use vmm_sys_util::eventfd::EventFd;

    use super::{super::vcpu::RunControl, *};
    use crate::devices::{
        Bus, REGISTER_RANGE_SIZE, Serial, console_output::ConsoleOutput, serial::SerialPort as _,
    };

    const SERIAL_PORT: GuestAddress = GuestAddress(0x1000);

    /// Returns [`VcpuThreads`] for one vCPU, whose thread the test starts. A serial port at
    /// [`SERIAL_PORT`] writes to `console_output`.
    fn one_vcpu(bus: Bus, console_output: ConsoleOutput) -> (VcpuThreads, GuestExitReporter) {
        let (exit_sender, guest_exits) = mpsc::channel();
        let context = Arc::new(VcpuContext {
            control: RunControl::new(1),
            bus: Arc::new(bus),
            rings: None,
            serial_registers: SERIAL_PORT..GuestAddress(SERIAL_PORT.0 + REGISTER_RANGE_SIZE),
            console_output,
            exits: Arc::default(),
            guest_exit: EventFd::new(libc::EFD_NONBLOCK).unwrap(),
        });
        let reporter = GuestExitReporter { index: 7, context: Arc::clone(&context), exit_sender };
        let threads = VcpuThreads {
            context,
            kickers: Vec::new(),
            fds: Vec::new(),
            threads: Vec::new(),
            guest_exits,
        };
        threads.request(RunState::Running);
        (threads, reporter)
    }

    #[test]
    fn a_panicking_vcpu_thread_is_reported_and_counts_as_paused() {
        let output = ConsoleOutput::new(io::pipe().unwrap().1, || Ok(())).unwrap();
        let (mut vcpus, reporter) = one_vcpu(Bus::default(), output);

        vcpus.threads.push(thread::spawn(move || {
            let _reporter = reporter;
            panic!("intended panic of this test");
        }));

        vcpus.pause();
        let reason = "vCPU 7: its thread panicked".to_owned();
        assert_eq!(vcpus.guest_exit(), Some(VmOutcome::Failed(reason)));
        assert_eq!(vcpus.context.guest_exit.read().unwrap(), 1);
    }

    #[test]
    fn a_stalled_console_blocks_the_guest_but_not_pause_and_stop() {
        let (_unread, to) = io::pipe().unwrap();
        let output = ConsoleOutput::new(to, || Ok(())).unwrap();
        let irq = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let serial = Serial::new(irq, Box::new(output.clone())).unwrap();
        let serial = Arc::new(Mutex::new(serial));
        let mut bus = Bus::default();
        bus.add(Serial::describe(SERIAL_PORT, 0), Arc::clone(&serial) as _).unwrap();
        let (mut vcpus, reporter) = one_vcpu(bus, output.clone());
        vcpus.threads.push(thread::spawn(move || {
            let context = &reporter.context;
            while context.control.wait_while_paused() == RunState::Running {
                context.bus.write(SERIAL_PORT, b"x");
                context.wait_for_console(SERIAL_PORT);
            }
        }));
        while output.wait_for_space(|| true) {
            thread::sleep(Duration::from_millis(1));
        }

        // The vCPU waits without the port's lock, so input is still accepted.
        assert_eq!(serial.lock().receive(b"key"), 3);
        vcpus.pause();
        assert_eq!(vcpus.requested_state(), RunState::Paused);
        vcpus.request(RunState::Running);
        drop(vcpus);

        assert!(output.finish() > 0);
    }
}
