// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs a VM on the main thread: opens files, confines the process, and boots the VM again after
//! each reset. One boot lasts from building the VM to the guest's exit.

use std::{
    mem,
    path::Path,
    process,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use granule_types::record::Host;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vmm_sys_util::eventfd::EventFd;

use super::{
    api::{Api, BoundSocket},
    boot_stats::StatsFile,
    builder::{self, Vm, VmConnections},
    config::{RunOptions, VmConfig},
    console_io::{self, ConsoleChannels, MatchCallback},
    control::VmController,
    event_loop::EventLoop,
    open_files::OpenFiles,
    outcome::{VmError, VmOutcome, failed},
    sandbox::restrict_files,
    seccomp::{ThreadRole, confine_if},
    signals::Signals,
    stats::{HostCounters, StatsReader, refreshed_stage2_table_bytes},
    terminal::Terminal,
    vcpu::RunState,
};
use crate::{
    arch::guest,
    devices::{BootTimer, console_input::PipeSink, console_output::ConsoleOutput},
    scoped_thread::ScopedThread,
};

/// Runs a VM, and builds it again after each reset if `options` request that.
///
/// # Errors
/// The VM cannot be built, or a vCPU or device fails.
pub fn run(config: &VmConfig, options: &RunOptions) -> Result<VmOutcome, VmError> {
    guest::check_supported()?;
    raise_file_limit();
    let signals = Signals::block().map_err(failed("blocking signals (signalfd) failed"))?;
    let mut stats_file = options.stats.as_deref().map(open_stats_file).transpose()?;
    let files = OpenFiles::new(config)?;
    let socket_path = options.api_socket.as_deref();
    let socket = socket_path
        .map(|path| BoundSocket::new(path).map_err(failed(named("--api-socket", path))))
        .transpose()?;
    let counted = stats_file.is_some() || socket.is_some();
    // Opening kernel events needs privileges that are dropped below.
    let mut counters = counted.then(HostCounters::open);
    if stats_file.is_some() && counters.as_ref().is_some_and(HostCounters::is_empty) {
        log::warn!(
            "--stats: kernel events are not counted, so stage-2 aborts and exits are missing: run \
             as root (--user drops its privileges later) with a tracefs at /sys/kernel/tracing"
        );
    }
    let api = confine_process(options, socket)?;
    let output =
        console_io::stdout(options.sandbox).map_err(failed("opening the console output failed"))?;
    let mut started = options.started;
    let mut boot_count = 1;
    let outcome = loop {
        let context = RunContext {
            config,
            options,
            files: &files,
            signals: &signals,
            api: api.as_ref(),
            output: &output,
            counted,
            boot_count,
        };
        let outcome = context.boot(started, stats_file.as_mut(), counters.take());
        if options.reboot && matches!(outcome, Ok(VmOutcome::Reset)) {
            started = Instant::now();
            boot_count += 1;
            continue;
        }
        break outcome;
    };
    let unwritten = output.finish();
    drop(api);
    // A signal can then terminate the process even if its standard error is blocked.
    signals.release();
    if unwritten > 0 {
        log::warn!("the last {unwritten} bytes of console output were not read");
    }
    outcome
}

/// Raises the limit of open files to its maximum: each vCPU needs several.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        log::debug!("the limit of open files is not raised: {error}");
    }
}

fn open_stats_file(path: &Path) -> Result<StatsFile, VmError> {
    let host = Host::of_this_machine()?;
    StatsFile::open(path, host).map_err(failed(named("--stats", path)))
}

/// Returns the name of a file in an error: its option and path.
fn named(option: &str, path: &Path) -> String {
    format!("{option} {}", path.display())
}

/// Applies Landlock, user and seccomp filter to the process, and serves the control socket.
fn confine_process(
    options: &RunOptions,
    socket: Option<BoundSocket>,
) -> Result<Option<Api>, VmError> {
    const CONFINING: &str = "the process cannot be confined";
    let confine = options.sandbox;
    let path = options.api_socket.as_deref().unwrap_or(Path::new(""));
    if confine {
        let folder = socket.as_ref().map(|_| {
            let folder = path.parent();
            folder.filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
        });
        restrict_files(folder).map_err(failed(CONFINING))?;
    }
    if let Some(identity) = options.identity {
        if let Some(socket) = &socket {
            socket.set_owner(identity).map_err(failed(named("--api-socket", path)))?;
        }
        identity.assume().map_err(failed("privileges cannot be dropped"))?;
    }
    let setup = move || confine_if(confine, ThreadRole::Api);
    let api = socket
        .map(|socket| Api::serve(socket, setup).map_err(failed(named("--api-socket", path))))
        .transpose()?;
    if confine {
        ThreadRole::Main.confine().map_err(failed(CONFINING))?;
    }
    Ok(api)
}

/// State that is kept across reboots.
struct RunContext<'a> {
    config: &'a VmConfig,
    options: &'a RunOptions,
    files: &'a OpenFiles,
    signals: &'a Signals,
    api: Option<&'a Api>,
    output: &'a ConsoleOutput,
    counted: bool,
    boot_count: u32,
}

impl RunContext<'_> {
    /// Builds and runs the VM once, from `started` to the guest's exit.
    fn boot(
        &self,
        started: Instant,
        stats_file: Option<&mut StatsFile>,
        counters: Option<HostCounters>,
    ) -> Result<VmOutcome, VmError> {
        let (wake, quit) = (new_event()?, new_event()?);
        let counters = counters.or_else(|| self.counted.then(HostCounters::open));
        let tables_before = self.counted.then(refreshed_stage2_table_bytes).flatten();
        let (sender, marks) = mpsc::channel();
        let (mut vm, console_input) = self.build(started, &wake, &sender)?;
        let terminal =
            Terminal::raw().map_err(failed("setting the terminal to raw mode failed"))?;
        let input = console_io::forward_stdin(
            console_input,
            &vm.serial,
            terminal.as_ref(),
            clone_event(&quit)?,
            self.options.sandbox,
        )
        .map_err(failed("opening the console input failed"))?;
        let reader = StatsReader {
            counters: counters.unwrap_or_default(),
            statistics: mem::take(&mut vm.statistics),
            exits: Arc::clone(vm.vcpus.exits()),
            zones: vm.memory.regions().to_vec(),
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
            terminal: terminal.as_ref(),
            api: self.api,
        };
        let outcome = event_loop.run(&mut controller);
        let outcome = outcome.map_err(failed("waiting for the guest failed"))?;
        self.finish_stats(&mut controller, &outcome, started, stats_file)?;
        drop(controller);
        drop(input);
        drop(vm);
        drop(terminal);
        Ok(outcome)
    }

    /// Builds the VM. A signal during the build terminates the process.
    fn build(
        &self,
        started: Instant,
        wake: &EventFd,
        marks: &mpsc::Sender<(u8, Duration)>,
    ) -> Result<(Vm, Option<PipeSink>), VmError> {
        let pattern = match &self.options.init_text {
            None => None,
            Some(text) => {
                let on_mark = mark_sender(started, marks, wake)?;
                let on_match = move || on_mark(BootTimer::INIT);
                Some((text.as_str(), Box::new(on_match) as MatchCallback))
            }
        };
        let console = self.config.devices.console;
        let channels = ConsoleChannels::new(self.output, console, pattern)
            .map_err(failed("creating a pipe failed"))?;
        let _terminator = self.terminate_on_signal()?;
        let vm = builder::build(
            self.config,
            self.files,
            VmConnections {
                serial_output: channels.serial_output,
                console_output: self.output.clone(),
                console: channels.console,
                boot_timer: BootTimer::new(Box::new(mark_sender(started, marks, wake)?)),
                guest_exit: clone_event(wake)?,
                confine_vcpus: self.options.sandbox,
                statistics: self.counted,
            },
        )?;
        Ok((vm, channels.console_input))
    }

    /// Starts a thread that on a signal removes the control socket and ends the process.
    fn terminate_on_signal(&self) -> Result<ScopedThread, VmError> {
        let socket = self.api.map(|api| Arc::clone(&api.file));
        let terminate = move |signal: &'static str| {
            if let Some(socket) = socket {
                socket.remove();
            }
            eprintln!("granule: stopped by {signal} before the guest ran");
            process::exit(0)
        };
        let thread = self.signals.terminate_on_signal(terminate);
        thread.map_err(failed("waiting for signals failed"))
    }

    /// Ends the last phase and writes the statistics of this boot.
    fn finish_stats(
        &self,
        controller: &mut VmController<'_>,
        outcome: &VmOutcome,
        started: Instant,
        stats_file: Option<&mut StatsFile>,
    ) -> Result<(), VmError> {
        if self.counted {
            controller.end_phase("end", started.elapsed());
        }
        for ram in controller.vm.memory.regions() {
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
            return Err(failed(named("--stats", &file.path))(error));
        }
        // A failed write of statistics must not stop a guest that reboots.
        let path = file.path.display();
        log::error!("--stats {path}: the statistics of a boot are lost: {error}");
        Ok(())
    }
}

/// Returns a callback that sends a mark, with the time since `started`, to the main thread and wakes
/// it.
fn mark_sender(
    started: Instant,
    marks: &mpsc::Sender<(u8, Duration)>,
    wake: &EventFd,
) -> Result<impl Fn(u8) + Send + 'static, VmError> {
    let (marks, wake) = (marks.clone(), clone_event(wake)?);
    Ok(move |mark| {
        let time = started.elapsed();
        if mark == BootTimer::INIT {
            granule_types::mark::guest_init();
        }
        let _ = marks.send((mark, time));
        let _ = wake.write(1);
    })
}

fn new_event() -> Result<EventFd, VmError> {
    EventFd::new(libc::EFD_NONBLOCK).map_err(failed("creating an eventfd failed"))
}

fn clone_event(event: &EventFd) -> Result<EventFd, VmError> {
    event.try_clone().map_err(failed("duplicating an eventfd failed"))
}
