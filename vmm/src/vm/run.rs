// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs VMs on the main thread, from the opened files to the guest's exit.

use std::{
    io, mem,
    path::{Path, PathBuf},
    process,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use granule_types::{host::FactsError, record::Host};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

use super::{
    api::Api,
    builder::{self, BuildError, Vm, VmConnections},
    config::{RunOptions, VmConfig},
    console_io::{self, ConsoleChannels, MatchCallback},
    control::VmController,
    event_loop::{EventLoop, LoopEnd},
    landlock::restrict_files,
    open_files::{OpenError, OpenFiles},
    privileges::PrivilegeError,
    sandbox::SandboxError,
    seccomp::{ThreadRole, confine_if},
    signals::Signals,
    socket::BoundSocket,
    stats::{HostCounters, StatsReader, refreshed_stage2_table_bytes},
    stats_file::StatsFile,
    terminal::Terminal,
    vcpu_control::{GuestExit, RunState},
};
use crate::{
    arch::guest::{self, GuestError},
    devices::{BootTimer, console_input::PipeSink, console_output::ConsoleOutput},
    kvm::stats::Statistics,
    scoped_thread::ScopedThread,
};

/// Error returned when a VM cannot be run.
#[derive(Debug, Error)]
pub enum RunError {
    /// Linux guests are not supported on this architecture.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// A file or device cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The VM cannot be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The process cannot be confined.
    #[error("the process cannot be confined")]
    Sandbox(#[from] SandboxError),
    /// The privileges cannot be dropped.
    #[error("privileges cannot be dropped")]
    Privileges(#[from] PrivilegeError),
    /// An operation of the main thread failed.
    #[error("{operation} failed")]
    Io {
        /// The operation.
        operation: &'static str,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// A file or socket that an option names cannot be used.
    #[error("{option} {path}", path = path.display())]
    File {
        /// The option.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// The host's description cannot be read.
    #[error(transparent)]
    Facts(#[from] FactsError),
}

fn io_error(operation: &'static str) -> impl Fn(io::Error) -> RunError {
    move |source| RunError::Io { operation, source }
}

fn file_error<'a>(option: &'static str, path: &'a Path) -> impl Fn(io::Error) -> RunError + 'a {
    move |source| RunError::File {
        option,
        path: path.to_owned(),
        source,
    }
}

/// The outcome of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmOutcome {
    /// The guest powered itself off.
    PowerOff,
    /// The guest reset itself, and the VM is not rebooted.
    Reset,
    /// A signal, the escape key or a client stopped the VM.
    Stopped(&'static str),
    /// The guest crashed or a vCPU cannot continue.
    Failed(String),
}

impl VmOutcome {
    /// Returns the name in the statistics file.
    const fn name(&self) -> &'static str {
        match self {
            Self::PowerOff => "off",
            Self::Reset => "reset",
            Self::Stopped(_) => "stopped",
            Self::Failed(_) => "failed",
        }
    }
}

impl From<LoopEnd> for VmOutcome {
    fn from(end: LoopEnd) -> Self {
        match end {
            LoopEnd::Guest(GuestExit::PowerOff) => Self::PowerOff,
            LoopEnd::Guest(GuestExit::Reset) => Self::Reset,
            LoopEnd::Guest(GuestExit::Crash) => Self::Failed("the guest crashed".to_owned()),
            LoopEnd::Guest(GuestExit::VcpuFailed(reason)) => Self::Failed(reason),
            LoopEnd::Stopped(by) => Self::Stopped(by),
        }
    }
}

/// Runs a VM, and builds it again after each reset if `options` request that.
///
/// # Errors
/// [`RunError`].
pub fn run(config: &VmConfig, options: &RunOptions) -> Result<VmOutcome, RunError> {
    guest::check_supported()?;
    raise_file_limit();
    let signals = Signals::block().map_err(io_error("blocking signals (signalfd)"))?;
    let mut stats_file = options.stats.as_deref().map(open_stats_file).transpose()?;
    let files = OpenFiles::new(config)?;
    let socket_path = options.api_socket.as_deref();
    let socket = socket_path
        .map(|path| BoundSocket::new(path).map_err(file_error("--api-socket", path)))
        .transpose()?;
    let counted = stats_file.is_some() || socket.is_some();
    // Opening kernel events needs privileges that are dropped below.
    let mut counters = counted.then(HostCounters::open);
    if stats_file.is_some() && counters.as_ref().is_some_and(HostCounters::is_empty) {
        log::warn!(
            "--stats: kernel events are not counted, so stage-2 aborts and exits are missing: run as \
             root (--user drops its privileges later) with a tracefs at /sys/kernel/tracing"
        );
    }
    let api = confine_process(options, socket)?;
    let output =
        console_io::stdout(options.sandbox).map_err(io_error("opening the console output"))?;
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
    // A signal terminates the process from here on, even if its standard error is blocked.
    signals.release();
    if unwritten > 0 {
        log::warn!("the last {unwritten} bytes of console output were not read");
    }
    outcome
}

/// Raises the limit of open files to its maximum: each vCPU needs several.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        log::debug!("the limit of open files is not raised: {error}");
    }
}

fn open_stats_file(path: &Path) -> Result<StatsFile, RunError> {
    let host = Host::of_this_machine()?;
    StatsFile::open(path, host).map_err(file_error("--stats", path))
}

/// Applies Landlock, user and seccomp filter to the process, and serves the control socket.
fn confine_process(
    options: &RunOptions,
    socket: Option<BoundSocket>,
) -> Result<Option<Api>, RunError> {
    let confine = options.sandbox;
    let path = options.api_socket.as_deref().unwrap_or(Path::new(""));
    if confine {
        let folder = socket.as_ref().map(|_| {
            let folder = path.parent();
            folder
                .filter(|folder| !folder.as_os_str().is_empty())
                .unwrap_or(Path::new("."))
        });
        restrict_files(folder)?;
    }
    if let Some(identity) = options.identity {
        if let Some(socket) = &socket {
            socket
                .set_owner(identity)
                .map_err(file_error("--api-socket", path))?;
        }
        identity.assume()?;
    }
    let setup = move || confine_if(confine, ThreadRole::Api);
    let api = socket
        .map(|socket| Api::serve(socket, setup).map_err(file_error("--api-socket", path)))
        .transpose()?;
    if confine {
        ThreadRole::Main.confine()?;
    }
    Ok(api)
}

/// Everything that is kept across reboots.
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
            return Err(file_error("--stats", &file.path)(error));
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
    event
        .try_clone()
        .map_err(io_error("duplicating an eventfd"))
}
