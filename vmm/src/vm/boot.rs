// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One boot of a VM, from building it to the guest's exit.

use std::{
    mem, process,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use vmm_sys_util::eventfd::EventFd;

use super::{
    api::Api,
    builder::{self, Vm, VmConnections},
    config::{RunOptions, VmConfig},
    console_io::{self, ConsoleChannels, MatchCallback},
    control::VmController,
    event_loop::EventLoop,
    open_files::{OpenError, OpenFiles},
    outcome::{RunError, VmOutcome, io_error},
    seccomp::{ThreadRole, confine_if},
    signals::Signals,
    stats::{HostCounters, StatsReader, refreshed_stage2_table_bytes},
    stats_file::StatsFile,
    terminal::Terminal,
    vcpu_control::RunState,
};
use crate::{
    devices::{BootTimer, console_input::PipeSink, console_output::ConsoleOutput},
    kvm::stats::Statistics,
    scoped_thread::ScopedThread,
};

/// Everything that is kept across reboots.
pub(super) struct RunContext<'a> {
    pub(super) config: &'a VmConfig,
    pub(super) options: &'a RunOptions,
    pub(super) files: &'a OpenFiles,
    pub(super) signals: &'a Signals,
    pub(super) api: Option<&'a Api>,
    pub(super) output: &'a ConsoleOutput,
    pub(super) counted: bool,
    pub(super) boot_count: u32,
}

impl RunContext<'_> {
    /// Builds and runs the VM once, from `started` to the guest's exit.
    pub(super) fn boot(
        &self,
        started: Instant,
        stats_file: Option<&mut StatsFile>,
        counters: Option<HostCounters>,
    ) -> Result<VmOutcome, RunError> {
        let (wake, quit) = (new_event()?, new_event()?);
        let counters = counters.unwrap_or_else(|| match self.counted {
            true => HostCounters::open(),
            false => HostCounters::none(),
        });
        let tables_before = self.counted.then(refreshed_stage2_table_bytes).flatten();
        let (sender, marks) = mpsc::channel();
        let (mut vm, console_input) = self.build(started, &wake, &sender)?;
        let terminal = Terminal::raw().map_err(io_error("setting the terminal to raw mode"))?;
        let input = console_io::forward_stdin(
            console_input,
            &vm.serial,
            terminal.as_ref(),
            clone_event(&quit)?,
            self.options.sandbox,
        )
        .map_err(io_error("opening the console input"))?;
        let reader = StatsReader {
            counters,
            statistics: mem::replace(&mut vm.statistics, Statistics::none()),
            exits: Arc::clone(vm.vcpus.exits()),
            zones: vm.memory.zones.clone(),
            tables_before,
        };
        let mut controller = VmController::new(self.config, &vm, reader, self.boot_count);
        granule_types::mark::guest();
        if self.counted {
            controller.end_phase("boot", started.elapsed());
        }
        vm.vcpus.request(RunState::Running);
        let event_loop = EventLoop {
            signals: self.signals,
            wake: &wake,
            quit: &quit,
            marks: &marks,
            started,
            counted: self.counted,
            terminal: terminal.as_ref(),
            api: self.api,
        };
        let end = event_loop.run(&mut controller);
        let outcome = VmOutcome::from(end.map_err(io_error("waiting for the guest"))?);
        self.finish_stats(&mut controller, &outcome, started, stats_file)?;
        drop(controller);
        drop(input);
        drop(vm);
        drop(terminal);
        Ok(outcome)
    }

    /// Builds the VM. A signal terminates the process meanwhile.
    fn build(
        &self,
        started: Instant,
        wake: &EventFd,
        marks: &mpsc::Sender<(u8, Duration)>,
    ) -> Result<(Vm, Option<PipeSink>), RunError> {
        let confine = self.options.sandbox;
        let pattern = match &self.options.init_text {
            None => None,
            Some(text) => {
                let on_mark = mark_sender(marks, wake)?;
                let on_match = move || on_mark(BootTimer::INIT, started.elapsed());
                Some((text.as_str(), Box::new(on_match) as MatchCallback))
            }
        };
        let console = self.config.devices.console;
        let channels = ConsoleChannels::new(self.output, console, pattern)
            .map_err(io_error("creating a pipe"))?;
        let _terminator = self.terminate_on_signal()?;
        let vm = builder::build(
            self.config,
            self.files,
            VmConnections {
                serial_output: channels.serial_output,
                console_output: self.output.clone(),
                console: channels.console,
                on_boot_mark: Box::new(mark_sender(marks, wake)?),
                started,
                guest_exit: clone_event(wake)?,
                vcpu_setup: Arc::new(move || confine_if(confine, ThreadRole::Vcpu)),
                statistics: self.counted,
            },
        )?;
        Ok((vm, channels.console_input))
    }

    /// Starts a thread that terminates the process at a signal and removes the control socket.
    fn terminate_on_signal(&self) -> Result<ScopedThread, RunError> {
        let socket = self.api.map(|api| api.file().clone());
        let terminate = move |signal: &'static str| {
            if let Some(socket) = socket {
                socket.remove();
            }
            eprintln!("granule: stopped by {signal} before the guest ran");
            process::exit(0)
        };
        let thread = self.signals.terminate_on_signal(terminate);
        thread.map_err(io_error("waiting for signals"))
    }

    /// Ends the last phase and writes the statistics of this boot.
    fn finish_stats(
        &self,
        controller: &mut VmController<'_>,
        outcome: &VmOutcome,
        started: Instant,
        stats_file: Option<&mut StatsFile>,
    ) -> Result<(), RunError> {
        if self.counted {
            controller.end_phase("end", started.elapsed());
        }
        for ram in &controller.vm.memory.zones {
            if let Err(error) = ram.obtained() {
                log::warn!("guest memory: {error}");
            }
        }
        let Some(file) = stats_file else {
            return Ok(());
        };
        let Err(error) = file.write(self.config, outcome.name(), &controller.boot) else {
            return Ok(());
        };
        if *outcome != VmOutcome::Reset || !self.options.reboot {
            return Err(OpenError::file("--stats", &file.path)(error).into());
        }
        // Losing statistics must not stop a guest that reboots.
        let path = file.path.display();
        log::error!("--stats {path}: the statistics of a boot are lost: {error}");
        Ok(())
    }
}

/// Returns a callback that sends a mark to the main thread and wakes it.
fn mark_sender(
    marks: &mpsc::Sender<(u8, Duration)>,
    wake: &EventFd,
) -> Result<impl Fn(u8, Duration) + Send + 'static, RunError> {
    let (marks, wake) = (marks.clone(), clone_event(wake)?);
    Ok(move |mark, time| {
        if mark == BootTimer::INIT {
            granule_types::mark::guest_init();
        }
        let _ = marks.send((mark, time));
        let _ = wake.write(1);
    })
}

fn new_event() -> Result<EventFd, RunError> {
    EventFd::new(libc::EFD_NONBLOCK).map_err(io_error("creating an eventfd"))
}

fn clone_event(event: &EventFd) -> Result<EventFd, RunError> {
    event.try_clone().map_err(io_error("duplicating an eventfd"))
}
